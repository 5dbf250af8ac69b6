"""Records of a run merged into one row per case, and the tally with its exit code."""

import pytest

from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Check, Record, Status
from parbench.bench.results.stats import Grade
from parbench.reports.run_data import RunData
from tests.support.reports.report_rows import run_from_records, summarize_row
from tests.support.reports.reports_fixtures import (
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    out_of_budget_record,
    step_case,
)

CASE = collective_case(size_bytes=1024)


@pytest.mark.parametrize(
    ("name", "values", "mean"),
    [
        ("time", (1.0, 4.0), 2.0),
        ("time", (0.0, 1.0), 0.5),
        ("idle", (1.0, 4.0), 2.5),
        ("custom", (1.0, 4.0), 2.5),
        ("ect", (None, 2.0, 4.0), 3.0),
    ],
)
def test_mean_depends_on_the_kind_of_metric(
    name: str, values: tuple[float | None, ...], mean: float | None
) -> None:
    records = [
        ok_record(step_case(), repetition, metrics={name: MetricValue(value=value, unit="s")})
        for repetition, value in enumerate(values)
    ]
    assert summarize_row(*records).metrics[name].value == pytest.approx(mean)


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (("failed", "skipped"), "failed"),
        (("failed", "hang"), "hang"),
        (("wrong", "hang"), "wrong"),
    ],
)
def test_row_status_is_the_worst(statuses: tuple[Status, Status], worst: Status) -> None:
    first, second = statuses
    records = [failed_record(CASE, 0, first), failed_record(CASE, 1, second)]
    assert summarize_row(*records).status == worst


def test_row_ignores_repetitions_left_out() -> None:
    cut = out_of_budget_record(CASE, 1)
    row = summarize_row(ok_record(CASE, 0), cut, repetitions=2)
    assert row.status == "ok"
    assert row.repetitions == 1
    assert row.planned == 2
    assert summarize_row(cut).status == "skipped"


def test_row_of_a_wrong_result_has_no_metrics() -> None:
    check = Check(passed=False, wrong=2)
    row = summarize_row(ok_record(CASE, 0), failed_record(CASE, 1, "wrong", check=check))
    assert row.metrics == {}
    assert row.check == check


@pytest.mark.parametrize(
    ("seconds", "grade"),
    [
        pytest.param((1.0, 1.02, 0.99), "stable", id="repetitions-agree"),
        pytest.param((1.0, 1.0, 1.5), "noisy", id="repetitions-differ"),
        pytest.param((1.0, 2.0), None, id="two-are-too-few"),
        pytest.param((1.0,), "very noisy", id="grade-of-the-only-repetition"),
    ],
)
def test_row_grade_is_the_variation_of_repetitions(
    seconds: tuple[float, ...], grade: Grade | None
) -> None:
    records = [ok_record(CASE, i, value, grade="very noisy") for i, value in enumerate(seconds)]
    assert summarize_row(*records).noise == grade


def test_row_uses_the_last_record_of_a_repetition() -> None:
    row = summarize_row(failed_record(CASE, 0), ok_record(CASE, 0, 5e-3))
    assert row.status == "ok"
    assert row.seconds == 5e-3


def test_missing_records_are_counted_by_case() -> None:
    absent = collective_case("broadcast")
    plan = make_plan([CASE, absent], repetitions=3)
    data = RunData(make_run(plan, [ok_record(CASE, 0), ok_record(CASE, 1)]))
    assert [gap.repetitions for gap in data.missing] == [1, 3]
    assert data.num_missing == 4
    assert data.num_planned == 6
    assert data.exit_code == 4


def test_case_skipped_by_the_plan_is_counted_once() -> None:
    skipped = SkippedCase(case=collective_case(size_bytes=1001), reason="does not divide")
    plan = make_plan([CASE], skipped=[skipped])
    records = [ok_record(CASE), failed_record(skipped.case, 0, "skipped")]
    data = RunData(make_run(plan, records))
    assert data.results[0].case == CASE
    assert len(data.results) == 1
    assert data.exit_code == 0


OK = ok_record(step_case())
UNABLE = failed_record(CASE, 0, "skipped", "no float8")


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([OK], 0),
        ([OK, UNABLE], 0),
        ([UNABLE], 4),
        ([OK, failed_record(CASE)], 4),
        ([OK, hang_record(CASE)], 4),
        ([hang_record(CASE), failed_record(step_case(), 0, "wrong")], 1),
    ],
)
def test_exit_code_is_that_of_the_worst_case(records: list[Record], code: int) -> None:
    assert RunData(run_from_records(*records)).exit_code == code


def test_cut_run_needs_two_repetitions_per_case() -> None:
    first = ok_record(CASE, 0)
    second = ok_record(CASE, 1)
    second_cut = out_of_budget_record(CASE, 1)
    third_cut = out_of_budget_record(CASE, 2)
    complete = run_from_records(first, second, third_cut, repetitions=3)
    assert RunData(complete).exit_code == 0
    cut = run_from_records(first, second_cut, third_cut, repetitions=3)
    assert RunData(cut).exit_code == 4
