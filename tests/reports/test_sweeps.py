"""The folder of a sweep, and the runs that commands read from folders."""

from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.reports.sweeps import list_point_runs, load_runs, load_sweep
from tests.support.reports.nodes_fixtures import (
    make_sweep_point,
    scaling_run,
    write_sweep,
)

FIRST = make_sweep_point(1, "2 nodes x 1", distribution="cyclic")
SECOND = make_sweep_point(2, "4 nodes x 1")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep whose first point ran twice and whose second did not run."""
    points = [(FIRST, [scaling_run(2), scaling_run(2)]), (SECOND, [])]
    return write_sweep(tmp_path / "links", points)


def test_damaged_run_of_a_sweep_is_missing(sweep: Path) -> None:
    damaged = list_point_runs(sweep, load_sweep(sweep).points[0])[0]
    (damaged / "run.json").write_text('{"schema": 99}')
    runs, missing = load_runs([sweep])
    assert len(runs) == 1
    assert "schema 99" in missing[1]
    with pytest.raises(UserError, match="schema 99"):
        load_runs([damaged])
    runs, _ = load_runs([damaged, sweep], is_strict=False)
    assert len(runs) == 1


def test_sweep_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to report: Point 2 nodes x 1 has no run"):
        load_runs([write_sweep(tmp_path / "waiting", [(FIRST, [])])])


def test_damaged_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_bytes(b"{")
    with pytest.raises(UserError, match=r"sweep\.json is not what parbench wrote"):
        load_runs([tmp_path])
