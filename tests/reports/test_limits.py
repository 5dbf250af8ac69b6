"""Limits that a run keeps, exceeds, or cannot answer, with a sentence and an exit code."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.plan.cases import make_case
from parbench.bench.results.limits import MetricLimit
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.limits import check_limits, describe_limits, get_limits_exit_code
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    collective_case,
    counted_metric,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
    training_metrics,
    write_run,
)

DDP = step_case("ddp")
LARGE = collective_case("all_reduce", 1 << 24)
SMALL = collective_case("all_reduce", 1024)


def make_limit(metric: str, operator: str, number: float, cases: str = "*") -> MetricLimit:
    text = f"{operator}{number:g}"
    return MetricLimit(cases=cases, metric=metric, text=text, operator=operator, number=number)


def check(run: Run, limit: MetricLimit) -> tuple[str, int]:
    """Return the worst sentence on a limit and the exit code."""
    results = check_limits(RunData(run), [limit])
    return results[0].message, get_limits_exit_code(results)


def train_record(**metrics: float | None) -> Record:
    values = training_metrics(0.010, axes=("dp", "tp"))
    values["bytes_ratio.tp"] = counted_metric(1.25, "")
    values |= {name: counted_metric(value, "") for name, value in metrics.items()}
    return ok_record(DDP, metrics=values)


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        (make_limit("exposed_fraction", "<", 0.1), "30.0 %"),
        (make_limit("bytes_ratio", "==", 1), "bytes_ratio.tp of step.ddp"),
        (make_limit("memory", "<", 2**21 + 1), "memory.activations of step.ddp"),
        (make_limit("step_time", "<", 0.001), "it is 10.0 ms"),
    ],
)
def test_exceeded_limit_names_case_limit_and_value(limit: MetricLimit, value: str) -> None:
    sentence, code = check(run_from_records(train_record()), limit)
    assert code == 1
    for fact in (limit.metric, "step.ddp", limit.text, value):
        assert fact in sentence


def test_limit_of_several_cases_names_each() -> None:
    run = run_from_records(ok_record(LARGE, seconds=1e-3), ok_record(SMALL, seconds=1e-3))
    limit = make_limit("busbw", ">", 1e9, "collective.*")
    results = check_limits(RunData(run), [limit])
    assert [result.verdict for result in results] == ["NOT MET", "MET"]
    assert "size_bytes=1024 " in results[0].message
    assert describe_limits(results) == [results[0].message]
    assert describe_limits(results[1:]) == ["Limits: all are met (values checked: 1)."]


def test_share_of_copy_uses_the_copy_of_the_run() -> None:
    copy = ok_record(make_case("memory.copy", "m:f", LARGE.params), seconds=1e-3)
    collective = ok_record(LARGE, seconds=1e-3)
    limit = make_limit("busbw_of_copy", ">", 1.6, "collective.*")
    sentence, code = check(run_from_records(collective, copy), limit)
    assert code == 1
    assert "150 %" in sentence
    assert check(run_from_records(collective), limit)[1] == 3


@pytest.mark.parametrize(
    "limit", [make_limit("overlap", ">", -1), make_limit("bubble_fraction", "<", 1)]
)
def test_unknown_metric_is_never_met(limit: MetricLimit) -> None:
    _, code = check(run_from_records(train_record(overlap=None)), limit)
    assert code == 3


def test_limit_of_a_bad_or_missing_case_gives_the_reason() -> None:
    limit = make_limit("mfu", ">", 0, "ddp")
    sentence, code = check(run_from_records(failed_record(DDP, 0, "wrong", "3 differ")), limit)
    assert code == 4
    assert "3 differ" in sentence
    sentence, code = check(make_run(make_plan([DDP]), []), limit)
    assert code == 4
    assert "no record" in sentence


MET = make_limit("mfu", ">", 0, "ddp")
NOT_MET = make_limit("mfu", ">", 1, "ddp")
UNKNOWN = make_limit("drop_rate", "<", 1, "ddp")
NOT_RUN = make_limit("time", "<", 1, "all_reduce")


@pytest.mark.parametrize(
    ("limits", "run_code", "code"),
    [
        ([MET], 0, 0),
        ([MET], 4, 4),
        ([MET, UNKNOWN], 0, 3),
        ([UNKNOWN, NOT_RUN], 0, 4),
        ([UNKNOWN, NOT_RUN, NOT_MET], 0, 1),
    ],
)
def test_exit_code_is_the_worst_of_limits_and_run(
    limits: list[MetricLimit], run_code: int, code: int
) -> None:
    run = run_from_records(train_record(), failed_record(LARGE))
    assert get_limits_exit_code(check_limits(RunData(run), limits), run_code) == code


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ('"step.ddp" = { mfu = "<40%" }', 0),
        ('"step.ddp" = { mfu = ">40%" }', 1),
        ('"step.fsdp" = { mfu = ">40%" }', 2),
    ],
)
def test_compare_checks_the_limits_of_new(tmp_path: Path, limits: str, code: int) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(limits)
    base = write_run(tmp_path, run_from_records(train_record(mfu=0.5)))
    new = write_run(tmp_path, run_from_records(train_record(mfu=0.1)))
    args = ["compare", str(base), str(new), "--limits", str(file)]
    assert CliRunner().invoke(cli.main, args).exit_code == code
