"""A sweep's folder: its points and the runs of each, read loosely, and gathered with what is lacking told."""

from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.reports.analysis.several import Point, gather, is_sweep, load_sweep, point_of, runs_of
from tests.support.nodes_fixtures import (
    failed_node_run,
    make_sweep_point,
    sample_sweep,
    scaling_run,
    write_sweep,
)
from tests.support.reports_fixtures import write_run

FIRST = make_sweep_point(1, "2 nodes x 1", placement="cyclic", environment="plain")
OTHER = make_sweep_point(2, "4 nodes x 1")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "links", [(FIRST, [scaling_run(2), scaling_run(2)]), (OTHER, [])])


def test_points_are_read_in_their_order_with_the_runs_in_their_folders(sweep: Path) -> None:
    assert (is_sweep(sweep), is_sweep(sweep / "runs")) == (True, False)
    found = load_sweep(sweep)
    first, other = found.points
    assert found.name == "links"
    assert first == Point(
        id=FIRST["id"], label="2 nodes x 1", placement="cyclic", environment="plain"
    )
    assert other == Point(id=OTHER["id"], label="4 nodes x 1", placement="block")
    assert (Point(id="ab").name, Point(id="ab", label="x").name) == ("ab", "x")
    (sweep / "runs" / first.id / "half-made").mkdir()
    assert len(runs_of(sweep, first)) == 2
    assert runs_of(sweep, other) == ()
    for name in "41738265":
        (sweep / "runs" / other.id / name).mkdir(parents=True)
        (sweep / "runs" / other.id / name / "run.json").touch()
    assert [run.name for run in runs_of(sweep, other)] == list("12345678")


def test_a_run_knows_its_point_by_where_it_lies(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = load_sweep(sweep).points
    run, _ = runs_of(sweep, first)
    assert point_of(run) == first
    alone = write_run(tmp_path / "elsewhere", scaling_run(2))
    strangers = [
        write_run(sweep / place, scaling_run(2)) for place in ("runs/unknown", f"other/{first.id}")
    ]
    for path in (alone, *strangers, Path("/")):
        assert point_of(path) is None, path
    found = gather([run, alone])
    assert [one.point.label if one.point else "" for one in found.runs] == ["2 nodes x 1", ""]
    assert found.lacking == ()
    monkeypatch.chdir(run.parent)
    assert point_of(Path(run.name)) == first


def test_a_sweep_stands_for_its_runs_in_the_order_of_its_points(tmp_path: Path) -> None:
    found = gather([sample_sweep(tmp_path / "links")])
    assert [one.point.label for one in found.runs if one.point][:3] == [
        "4 nodes x 2, block, plain",
        "4 nodes x 2, cyclic, plain",
        "2 nodes x 2, block, plain",
    ]
    assert len(found.runs) == 11
    assert found.lacking == ("Not run: 8 nodes x 1, block.",)
    assert found.code == 4
    lost = gather(
        [write_sweep(tmp_path / "lost", [(make_sweep_point(1, "4 nodes"), [failed_node_run()])])]
    )
    assert (lost.lacking, lost.code) == ((), 4)


def test_a_damaged_run_is_told_and_hides_no_other_unless_a_person_named_it(
    sweep: Path, tmp_path: Path
) -> None:
    first, _ = runs_of(sweep, load_sweep(sweep).points[0])
    (first / "run.json").write_text('{"schema": 99}')
    found = gather([sweep], whole=True)
    assert len(found.runs) == 1
    lacking, told = found.lacking
    assert lacking == "Not run: 4 nodes x 1."
    assert told.startswith("A run cannot be read: ")
    assert "schema 99 is newer" in told
    good, broken = (write_run(tmp_path, scaling_run(2)) for _ in range(2))
    (broken / "run.json").write_text("{")
    with pytest.raises(UserError, match="is not what parbench wrote"):
        gather([good, broken], whole=True)
    assert len(gather([good, broken]).runs) == 1
    with pytest.raises(UserError, match="cannot be read"):
        gather([broken])


def test_a_damaged_sweep_or_one_without_runs_is_the_users_error(
    sweep: Path, tmp_path: Path
) -> None:
    waiting = write_sweep(
        tmp_path / "waiting", [(make_sweep_point(i, f"point {i}"), []) for i in range(3)]
    )
    with pytest.raises(UserError, match=r"sweep\.json: none of its 3 points has a run yet"):
        gather([waiting])
    with pytest.raises(UserError, match="no run was named"):
        gather([])
    twice = b'{"points": [{"id": "x"}, {"id": "y"}, {"id": "x"}]}'
    for content in (b"{", b'{"points": [{"label": "x"}]}', b"\xff", twice):
        (sweep / "sweep.json").write_bytes(content)
        with pytest.raises(UserError, match=r"sweep\.json is not what parbench wrote"):
            gather([sweep])
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        load_sweep(tmp_path)
