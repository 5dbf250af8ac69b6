"""The check of a run against the history: verdicts, annotations, missing cases, counts."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.results.metrics import make_values
from parbench.bench.results.records import Record, Status
from parbench.reports.compare.rendering import render
from parbench.reports.history.check import HistoryCheck, SeriesCheck
from parbench.reports.history.check_report import build_report, summarize_check
from tests.support.reports.compare_fixtures import CASE, OTHER_CASE, make_repetitions
from tests.support.reports.history_fixtures import DailyRuns, make_daily_records
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    failed_record,
    ok_record,
    step_case,
    step_metrics,
)


def find_series(result: HistoryCheck, case: Case = CASE) -> SeriesCheck:
    [series] = [series for series in result.series if series.series.case == case]
    return series


def with_value(group: str, name: str, value: str) -> dict[str, Any]:
    environment: dict[str, Any] = {**ENVIRONMENT}
    environment[group] = {**environment[group], name: value}
    return environment


def test_check_needs_eight_runs(runs: DailyRuns) -> None:
    assert runs.check("run-007").verdicts == {"NO CHANGE": 2}
    result = runs.check("run-006")
    assert result.verdicts == {"NOT ENOUGH DATA": 2}
    assert result.compute_exit_code() == 0
    assert result.compute_exit_code(fail_on_undecided=True) == 3
    assert "6 of 7 required earlier runs" in find_series(result).reason


def test_check_reports_a_step_since_its_first_run(runs: DailyRuns) -> None:
    runs.add(2, 1.1)
    assert runs.check().verdicts == {"UNDECIDED": 2}  # two runs are not a level yet
    runs.add(2, 1.1)
    result = runs.check()
    assert result.compute_exit_code() == 1
    series = find_series(result)
    assert series.verdict == "SLOWER"
    assert series.first_run == "run-012"
    assert series.change is not None
    assert series.change.change == pytest.approx(0.1, abs=0.01)


def test_check_uses_earlier_runs_of_the_branch(runs: DailyRuns) -> None:
    result = runs.check()
    runs.add(3, 2.0, branch="topic")
    runs.add(3, 1.5)
    assert runs.check("run-011") == result
    series = find_series(runs.check())
    assert len(series.seconds) == 15


def test_check_starts_a_series_for_a_new_version(runs: DailyRuns) -> None:
    newer = with_value("torch", "version", "2.14.0")
    runs.add(1, 1.5, environment=newer)
    series = find_series(runs.check())
    assert series.verdict == "ENVIRONMENT CHANGED"
    assert series.reason == "torch.version: 2.13.0 -> 2.14.0 (0 of 7 required earlier runs)"


def test_check_names_changes_at_a_step(runs: DailyRuns) -> None:
    newer = with_value("host", "kernel", "6.99")
    runs.add(4, 1.1, environment=newer, commit="abc")
    series = find_series(runs.check())
    assert series.reason.endswith("commit: - -> abc, host.kernel: - -> 6.99")


def test_annotation_restarts_matching_series(runs: DailyRuns) -> None:
    runs.add(9, 1.1)
    runs.annotate("run-012", "*all_reduce*")
    result = runs.check()
    annotated = find_series(result)
    assert annotated.verdict == "NO CHANGE"
    assert len(annotated.seconds) == 9
    assert find_series(result, OTHER_CASE).verdict == "SLOWER"


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [("wrong", "WRONG", 1), ("failed", "FAILED", 4), ("hang", "FAILED", 4)],
)
def test_check_reports_a_bad_run(
    status: Status, verdict: str, code: int, runs: DailyRuns
) -> None:
    bad = failed_record(CASE, 0, status, "rank 1 reported it")
    result = runs.add_records([*make_repetitions(OTHER_CASE), bad])
    assert result.compute_exit_code() == code
    series = find_series(result)
    assert series.verdict == verdict
    assert series.reason == "rank 1 reported it"
    assert find_series(result, OTHER_CASE).verdict == "NO CHANGE"


def test_check_reports_a_case_of_the_previous_run_as_missing(runs: DailyRuns) -> None:
    runs.add(1, preset="smoke")
    result = runs.add_records(make_daily_records(0, cases=[OTHER_CASE]))
    assert find_series(result).verdict == "MISSING"
    assert result.compute_exit_code() == 4


OPERATIONS = [collective_case(f"op{i}") for i in range(60)]


def check_noisy_runs(
    runs: DailyRuns, factors: Sequence[Sequence[float]], noise: float
) -> HistoryCheck:
    """Check the last of some runs, whose operations are slower by one factor each."""
    generator = random.Random(0)
    for run_factors in factors:
        records = []
        for case, factor in zip(OPERATIONS, run_factors, strict=False):
            factor *= 1 + generator.uniform(-noise, noise)
            records += make_repetitions(case, factor, count=1, n=1)
        result = runs.add_records(records)
    return result


def test_check_reports_a_drift(no_runs: DailyRuns) -> None:
    factors = [[1.004**i] * 3 for i in range(24)]
    result = check_noisy_runs(no_runs, factors, noise=0.01)
    assert result.verdicts == {"DRIFT": 3}
    assert result.compute_exit_code() == 0
    assert result.compute_exit_code(fail_on_undecided=True) == 3
    [series, *_] = json.loads(render(build_report(result), "json"))["series"]
    assert series["change"]["change"] == pytest.approx(1.004**23 - 1, abs=0.02)


def test_folder_is_compared_with_the_newest_level(runs: DailyRuns) -> None:
    runs.add(2, 1.1)
    # 10 % slower is no change, because the branch is as slow already.
    for factor, verdict in ((0.8, "NO CHANGE"), (1.1, "NO CHANGE"), (1.3, "SLOWER")):
        assert runs.check_candidate(factor).verdicts == {verdict: 2}


def make_step(counts: dict[str, float]) -> list[Record]:
    metrics = {**step_metrics(0.02), **make_values(counts)}
    return [ok_record(step_case("ddp"), metrics=metrics)]


def make_calls(num_calls: float) -> list[Record]:
    """Return a DDP step with this number of all_reduce calls."""
    return make_step({"calls.dp.all_reduce": num_calls, "sent.dp.all_reduce": 8.0})


TWO_CALLS = make_calls(2.0)
FIVE_CALLS = make_calls(5.0)
TWO_TO_FIVE = "all_reduce on dp: 2 -> 5 calls a step"
FIVE_TO_TWO = "all_reduce on dp: 5 -> 2 calls a step"


def list_changes(result: HistoryCheck) -> list[str]:
    """Return each changed count, with the first run that has it if that is an earlier run."""
    return [message for series in result.series for message in series.count_changes]


def test_changed_count_fails_until_it_is_intended(no_runs: DailyRuns) -> None:
    assert no_runs.add_records(TWO_CALLS).series[0].num_counts == 0
    assert list_changes(no_runs.add_records(TWO_CALLS)) == []
    for text in (TWO_TO_FIVE, f"{TWO_TO_FIVE} (since run-002)"):
        result = no_runs.add_records(FIVE_CALLS)
        assert list_changes(result) == [text]
        assert result.compute_exit_code() == 1
    no_runs.annotate("run-002", "*ddp*")
    assert list_changes(no_runs.add_records(FIVE_CALLS)) == []
    result = no_runs.add_records(TWO_CALLS)
    assert list_changes(result) == [FIVE_TO_TWO]


def test_candidate_is_compared_with_the_newest_counts(no_runs: DailyRuns) -> None:
    no_runs.add_records(make_calls(9.0))
    no_runs.add_records(TWO_CALLS)
    result = no_runs.check_candidate(records=FIVE_CALLS)
    assert list_changes(result) == [TWO_TO_FIVE]
    assert summarize_check(result).startswith("FAIL: 1 COUNT CHANGED, compared")


def test_check_compares_the_median_of_several_series(no_runs: DailyRuns) -> None:
    assert check_noisy_runs(no_runs, [[1.0] * 10] * 12, noise=0.1).overall is None
    result = check_noisy_runs(no_runs, [[1.2] * 10] * 4, noise=0.1)
    assert result.overall_verdict == "SLOWER"
    assert result.compute_exit_code() == 1
    report = render(build_report(result), "text")
    assert "Overall: SLOWER, +" in report
    assert "for the median of 10 series" in report
