"""The progress of a point, read from its run folder."""

from pathlib import Path

import pytest

from parbench.bench.results.records import Record
from parbench.slurm.sweep.progress import read_progress
from parbench.slurm.sweep.status import compute_exit_code
from tests.support.fakes import make_fake_case
from tests.support.reports.reports_fixtures import (
    failed_record,
    ok_record,
    out_of_budget_record,
)
from tests.support.slurm.sweeps import make_point, write_run

CASES = (make_fake_case(0), make_fake_case(1), make_fake_case(2))
POINT = make_point()
OK_0, OK_1, OK_2 = (ok_record(case) for case in CASES)
WRONG_2 = failed_record(CASES[2], status="wrong")
HANG_1 = failed_record(CASES[1], status="hang")


def test_point_without_a_run_is_absent(tmp_path: Path) -> None:
    progress = read_progress(tmp_path, POINT.id)
    assert progress.state == "absent"
    assert compute_exit_code([progress]) == 4


@pytest.mark.parametrize(
    ("records", "state", "reason", "code"),
    [
        ([OK_0], "partial", "2 of 3 measurements are missing", 4),
        ([OK_0, OK_1, OK_2], "complete", "", 0),
        ([OK_0, OK_1, out_of_budget_record(CASES[2])], "complete", "", 0),
        ([OK_0, HANG_1, OK_2], "complete", f"hang: {CASES[1].label}: it broke", 4),
        ([OK_0, HANG_1, WRONG_2], "complete", f"wrong: {CASES[2].label}: it broke", 1),
    ],
)
def test_records_decide_the_state(
    records: list[Record],
    state: str,
    reason: str,
    code: int,
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, POINT, *records, num_cases=3)
    progress = read_progress(tmp_path, POINT.id)
    assert progress.run == run
    assert progress.state == state
    assert progress.not_done_reason.startswith(reason)
    assert compute_exit_code([progress]) == code


def test_unreadable_run_is_a_problem_and_not_complete(tmp_path: Path) -> None:
    run = write_run(tmp_path, POINT)
    (run / "records.jsonl").unlink()
    progress = read_progress(tmp_path, POINT.id)
    assert not progress.is_complete
    assert "records.jsonl cannot be read" in progress.problem
