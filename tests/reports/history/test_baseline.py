"""The verdict on a new run against the history, which does not keep it."""

import shutil
from pathlib import Path

import pytest

from parbench.bench.results.metrics import make_values
from parbench.bench.results.records import Record
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.history.baseline import judge_by_history
from parbench.reports.history.database import open_history
from parbench.reports.run_data import RunData
from tests.support.reports.compare_fixtures import CASE
from tests.support.reports.history_fixtures import add_run, fill_history, write_history_run
from tests.support.reports.reports_fixtures import (
    failed_record,
    ok_record,
    step_case,
    step_metrics,
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `baseline` reads, which does not exist yet."""
    monkeypatch.setenv("PARBENCH_HISTORY", str(tmp_path / "h.sqlite"))
    return tmp_path / "h.sqlite"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_history_run(tmp_path / "new", 99)


def judge(path: Path) -> ReportVerdict:
    return judge_by_history(RunData.load(path))


@pytest.mark.parametrize(
    ("factor", "verdict", "level"), [(1.0, "NO CHANGE", "good"), (2.0, "SLOWER", "doubtful")]
)
def test_run_is_compared_and_not_kept(
    factor: float, verdict: str, level: str, file: Path, twelve_runs: Path, tmp_path: Path
) -> None:
    shutil.copy(twelve_runs, file)
    content = file.read_bytes()
    result = judge(write_history_run(tmp_path, 99, factor))
    assert result.word == verdict
    assert result.level == level
    assert f"2 {verdict}" in result.message
    assert "12 runs" in result.message
    assert file.read_bytes() == content


def test_run_without_a_time_has_no_judge(file: Path, twelve_runs: Path, tmp_path: Path) -> None:
    shutil.copy(twelve_runs, file)
    wrong = failed_record(CASE, 0, "wrong", "3 values differ")
    result = judge(write_history_run(tmp_path, 99, records=[wrong]))
    assert result.word == "NO BASELINE"
    assert "3 values differ" in result.message
    assert result.hint == ""


def test_young_history_is_no_judge(file: Path, path: Path, tmp_path: Path) -> None:
    assert judge(path).word == "NO BASELINE"
    with open_history(file, create=True) as history:
        add_run(history, tmp_path, 9, preset="smoke")
    assert "no run of preset node" in judge(path).message
    with open_history(file) as history:
        fill_history(history, tmp_path, [1.0] * 4)
    assert judge(path).message == "4 of 8 required earlier runs"
    other = write_history_run(tmp_path / "o ther", 99, records=[ok_record(step_case("ddp"))])
    result = judge(other)
    assert result.message == "0 of 8 required earlier runs"
    assert result.hint == f"Add this run: parbench history add '{other}'"


def make_step(num_calls: float) -> Record:
    counts = make_values({"calls.dp.all_reduce": num_calls})
    return ok_record(step_case("ddp"), metrics={**step_metrics(0.02), **counts})


def test_changed_count_is_reported(file: Path, tmp_path: Path) -> None:
    with open_history(file, create=True) as history:
        add_run(history, tmp_path, 0, records=[make_step(2.0)])
    result = judge(write_history_run(tmp_path, 1, records=[make_step(4.0)]))
    assert result.word == "COUNT CHANGED"
    assert "2 -> 4 calls" in result.message
