"""Two runs compared series by series, and several runs pooled into one."""

from typing import Any

import msgspec
import pytest

from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.records import Record, Status
from parbench.bench.results.runs import Run
from parbench.reports.compare.pool import pool_runs
from tests.support.reports.compare_fixtures import (
    CASE,
    OTHER_CASE,
    compare_records,
    compare_with_rule,
    find_series,
    make_curve,
    make_repetitions,
    run_from_records,
)
from tests.support.reports.reports_fixtures import (
    WORLD,
    failed_record,
    ok_record,
    out_of_budget_record,
)

BASE = make_repetitions()
BOTH_CASES = [*BASE, *make_repetitions(OTHER_CASE)]


@pytest.mark.parametrize(
    ("base", "new", "problem"),
    [
        (BASE, [*make_repetitions(count=4), out_of_budget_record(CASE, 4)], "NEW 4 "),
        ([*BASE, failed_record(CASE, 5, "wrong")], BASE, "BASE has 0"),
        ([failed_record(CASE)], BASE, "BASE has 0"),
    ],
)
def test_too_few_repetitions_are_not_compared(
    base: list[Record], new: list[Record], problem: str
) -> None:
    series = find_series(compare_records(base, new))
    assert series.verdict == "NOT ENOUGH DATA"
    assert problem in series.reason


@pytest.mark.parametrize(
    ("status", "verdict", "code"), [("wrong", "WRONG", 1), ("failed", "FAILED", 4)]
)
def test_bad_repetition_of_new_decides(status: Status, verdict: str, code: int) -> None:
    bad = failed_record(CASE, 4, status, "rank 1 reported it")
    comparison = compare_records(BASE, [*make_repetitions(count=4), bad])
    assert comparison.get_exit_code() == code
    series = find_series(comparison)
    assert series.verdict == verdict
    assert series.reason == "rank 1 reported it"
    assert series.effect is None


SKIPPED = SkippedCase(case=OTHER_CASE, reason="needs 4 ranks")
CUT = out_of_budget_record(OTHER_CASE, 0)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (run_from_records(BASE), "NEW has no result on"),
        (run_from_records(BASE, skipped=[SKIPPED]), "needs 4 ranks"),
        (run_from_records([*BASE, CUT]), CUT.reason),
    ],
)
def test_missing_case_has_its_reason(new: Run, reason: str) -> None:
    comparison = compare_with_rule(run_from_records(BOTH_CASES), new)
    assert comparison.get_exit_code() == 4
    series = find_series(comparison, OTHER_CASE)
    assert series.verdict == "MISSING"
    assert reason in series.reason


@pytest.mark.parametrize("change", [{"nodes": 2}, {"size": 2}])
def test_another_world_is_another_series(change: dict[str, Any]) -> None:
    world = msgspec.structs.replace(WORLD, **change)
    new = [*make_repetitions(world=world), *make_repetitions(OTHER_CASE)]
    comparison = compare_records(BOTH_CASES, new)
    assert comparison.verdicts == {"MISSING": 1, "NEW": 1, "NO CHANGE": 1}
    assert comparison.get_exit_code() == 4


def test_many_series_require_smaller_p_values() -> None:
    """A change that is significant in one series is not among 20 series without a change."""
    noisy = [1.0, 1.12, 0.9, 1.05, 0.95]
    base = [ok_record(CASE, i, seconds) for i, seconds in enumerate(noisy)]
    new = [ok_record(CASE, i, 1.25 * seconds) for i, seconds in enumerate(noisy)]
    assert find_series(compare_records(base, new)).verdict == "SLOWER"
    others = make_curve(*[1] * 21)[5:]  # without CASE
    series = find_series(compare_records([*base, *others], [*new, *others]))
    assert series.verdict == "UNDECIDED"
    assert "multiple comparisons" in series.reason


def test_pool_excludes_runs_on_other_nodes() -> None:
    run = run_from_records(BASE)
    world = msgspec.structs.replace(WORLD, nodes=2)
    pooled = pool_runs([run_from_records(make_repetitions(world=world)), run, run], "last:3")
    assert len(pooled.records) == 10
    [exclusion] = pooled.exclusions
    assert run.info.id in exclusion
