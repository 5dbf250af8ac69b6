"""The folder of a sweep, and the runs that commands read from folders."""

from pathlib import Path

import pytest

from parbench.bench.results.runs import list_runs
from parbench.bench.text import UserError
from parbench.reports.sweeps import load_runs
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


def test_newest_run_of_a_point_is_loaded(sweep: Path) -> None:
    runs, missing = load_runs([sweep])
    assert [point and point.id for _, point in runs] == [FIRST["id"]]
    assert missing == ["Point 4 nodes x 1 has no run."]
    [(newest, _)] = runs
    assert newest.path == list_runs(sweep / "runs" / FIRST["id"])[-1]


def test_damaged_run_is_missing(sweep: Path) -> None:
    damaged, newest = list_runs(sweep / "runs" / FIRST["id"])
    (damaged / "run.json").write_text('{"schema": 99}')
    runs, missing = load_runs([damaged, newest])
    assert [run.path for run, _ in runs] == [newest]
    assert "schema version 99" in missing[0]
    with pytest.raises(UserError, match="schema version 99"):
        load_runs([damaged])


def test_sweep_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to report: Point 2 nodes x 1 has no run"):
        load_runs([write_sweep(tmp_path / "waiting", [(FIRST, [])])])


def test_damaged_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_bytes(b"{")
    with pytest.raises(
        UserError, match=r"sweep\.json is damaged or was not written by parbench"
    ):
        load_runs([tmp_path])
