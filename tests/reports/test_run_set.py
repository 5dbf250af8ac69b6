"""Several runs: their differences and their verdict."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.run_reports import make_report_of_runs
from parbench.reports.run_set import RunSet
from parbench.reports.sweeps import MeasuredPoint
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import failed_record, ok_record, step_case


def plan_run(
    *records: Record, environment: dict[str, Any] | None = None, **plan_fields: Any
) -> Run:
    run = run_from_records(*records, environment=environment)
    plan = replace(run.info.plan, **plan_fields)
    return replace(run, info=replace(run.info, plan=plan))


def join(
    *runs: Run, points: tuple[MeasuredPoint, ...] = (), missing: tuple[str, ...] = ()
) -> RunSet:
    return RunSet(list(zip(runs, points or [None] * len(runs), strict=True)), missing)


GOOD = plan_run(ok_record(step_case()))
FAILED = plan_run(failed_record(step_case()))
WRONG = plan_run(failed_record(step_case(), status="wrong"))


def test_differences_are_listed_by_run() -> None:
    first = plan_run(environment={"torch": {"version": "2.12"}, "a": 1}, nproc=2)
    second = plan_run(environment={"torch": {"version": "2.13"}}, nproc=4)
    run_set = join(first, second)
    assert run_set.differences == {
        "plan.nproc": ("2", "4"),
        "environment.torch.version": ("2.12", "2.13"),
        "environment.a": ("1", "-"),
    }
    assert run_set.describe_differences() == f"Runs differ in {', '.join(run_set.differences)}."


def test_circumstances_are_not_settings() -> None:
    first = {"slurm": {"nodelist": "n1"}, "host": {"boot_id": "a"}}
    second = {"slurm": {"nodelist": "n2"}, "host": {"boot_id": "b"}}
    run_set = join(plan_run(environment=first), plan_run(environment=second))
    assert run_set.differences == {}
    assert run_set.describe_differences() == "All runs have the same settings."


def test_parameter_that_varies_by_run_is_a_difference() -> None:
    small = plan_run(ok_record(step_case(bucket_mb=1)))
    large = plan_run(ok_record(step_case(bucket_mb=25)))
    assert join(small, large).differences == {"step.ddp bucket_mb": ("1", "25")}


@pytest.mark.parametrize(
    ("run_set", "code", "word"),
    [
        (join(GOOD, GOOD), 0, "PASSED"),
        (join(GOOD, FAILED), 4, "FAILED"),
        (join(FAILED, WRONG), 1, "FAILED"),
        (join(GOOD, GOOD, missing=("Point a has no run.",)), 4, "INCOMPLETE"),
    ],
)
def test_verdict_is_that_of_the_worst_run(run_set: RunSet, code: int, word: str) -> None:
    assert run_set.exit_code == code
    assert run_set.verdict.word == word


def test_report_without_a_measurement_names_problems() -> None:
    report = make_report_of_runs(join(FAILED, FAILED))
    assert [section.id for section in report.sections] == ["runs", "problems"]
