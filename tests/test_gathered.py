"""Runs gathered from folders: a sweep stands for its runs, what it lacks is told, and damage hides nothing."""

from pathlib import Path

import pytest
from nodes_fixtures import lost_run, point_of_sweep, sample_sweep, scaling_run, write_sweep
from reports_fixtures import write_run

from bench.errors import UserError
from reports.nodes.gathered import gather
from reports.nodes.sweep_folder import load_sweep, runs_of


def test_a_sweep_stands_for_its_runs_in_the_order_of_its_points(tmp_path: Path) -> None:
    found = gather([sample_sweep(tmp_path / "links")])
    assert [one.point.label for one in found.runs if one.point][:3] == [
        "4 nodes x 2, block, plain",
        "4 nodes x 2, cyclic, plain",
        "2 nodes x 2, block, plain",
    ]
    assert len(found.runs) == 11
    assert found.lacking == ("Not run: 8 nodes x 1, block.",)
    assert (found.fine, found.code) == (False, 4)


def test_a_run_of_a_sweep_named_alone_has_its_label(tmp_path: Path) -> None:
    sweep = sample_sweep(tmp_path / "links")
    paths = [runs_of(sweep, point)[0] for point in load_sweep(sweep).points[:2]]
    found = gather([*paths, write_run(tmp_path / "runs", scaling_run(2))])
    assert [one.point.label if one.point else "" for one in found.runs] == [
        "4 nodes x 2, block, plain",
        "4 nodes x 2, cyclic, plain",
        "",
    ]
    assert found.lacking == ()


def test_a_damaged_run_of_a_sweep_is_told_and_hides_no_other(tmp_path: Path) -> None:
    point = point_of_sweep(1, "2 nodes")
    sweep = write_sweep(tmp_path / "links", [(point, [scaling_run(2), scaling_run(2)])])
    first, _ = sorted((sweep / "runs" / point["id"]).iterdir())
    (first / "run.json").write_text('{"schema": 99}')
    found = gather([sweep], whole=True)
    assert len(found.runs) == 1
    (told,) = found.lacking
    assert "schema 99 is newer" in told
    assert told.startswith("A run cannot be read: ")


def test_a_damaged_run_named_by_a_person_is_refused_or_told(tmp_path: Path) -> None:
    good, broken = (write_run(tmp_path, scaling_run(2)) for _ in range(2))
    (broken / "run.json").write_text("{")
    with pytest.raises(UserError, match="is not what parbench wrote"):
        gather([good, broken], whole=True)
    assert len(gather([good, broken]).runs) == 1
    with pytest.raises(UserError, match="cannot be read"):
        gather([broken])


def test_a_sweep_without_runs_says_how_many_points_wait(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "links", [(point_of_sweep(i, f"point {i}"), []) for i in range(3)])
    with pytest.raises(UserError, match=r"sweep\.json: none of its 3 points has a run yet"):
        gather([sweep])


def test_nothing_gives_nothing() -> None:
    with pytest.raises(UserError, match="no run was named"):
        gather([])


def test_a_lost_point_is_not_fine(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "links", [(point_of_sweep(1, "4 nodes"), [lost_run()])])
    found = gather([sweep])
    assert (found.lacking, found.fine, found.code) == ((), False, 4)
