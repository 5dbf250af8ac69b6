"""A sweep's folder: its points read loosely, and the runs that measured each."""

from pathlib import Path

import pytest
from nodes_fixtures import point_of_sweep, scaling_run, write_sweep
from reports_fixtures import write_run

from bench.errors import UserError
from reports.nodes.sweep_folder import Point, is_sweep, load_sweep, point_of, runs_of

FIRST = point_of_sweep(1, "2 nodes x 1", placement="cyclic", environment="plain")
OTHER = point_of_sweep(2, "4 nodes x 1")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "links", [(FIRST, [scaling_run(2), scaling_run(2)]), (OTHER, [])])


def test_points_are_read_in_their_order_whatever_else_stands_there(sweep: Path) -> None:
    found = load_sweep(sweep)
    assert found.name == "links"
    assert found.points == (
        Point(id=FIRST["id"], label="2 nodes x 1", placement="cyclic", environment="plain"),
        Point(id=OTHER["id"], label="4 nodes x 1", placement="block"),
    )


def test_a_folder_is_a_sweeps_if_it_says_so(sweep: Path) -> None:
    assert is_sweep(sweep)
    assert not is_sweep(sweep / "runs")


def test_the_runs_of_a_point_are_those_in_its_folder(sweep: Path) -> None:
    first, other = load_sweep(sweep).points
    (sweep / "runs" / first.id / "half-made").mkdir()
    found = runs_of(sweep, first)
    assert len(found) == 2
    assert list(found) == sorted(found)
    assert runs_of(sweep, other) == ()


def test_a_run_knows_its_point_by_where_it_lies(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = load_sweep(sweep).points
    run = runs_of(sweep, first)[0]
    assert point_of(run) == first
    monkeypatch.chdir(run.parent)
    assert point_of(Path(run.name)) == first
    assert point_of(write_run(tmp_path / "elsewhere", scaling_run(2))) is None
    assert point_of(write_run(sweep / "runs" / "unknown", scaling_run(2))) is None
    assert point_of(Path("/")) is None


@pytest.mark.parametrize("content", [b"{", b'{"points": [{"label": "x"}]}', b"\xff"])
def test_a_damaged_sweep_is_the_users_error(sweep: Path, content: bytes) -> None:
    (sweep / "sweep.json").write_bytes(content)
    with pytest.raises(UserError, match=r"sweep\.json is not what parbench wrote"):
        load_sweep(sweep)


def test_a_point_without_a_label_is_called_by_its_id() -> None:
    assert Point(id="ab").name == "ab"
    assert Point(id="ab", label="x").name == "x"


def test_a_sweep_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        load_sweep(tmp_path)
