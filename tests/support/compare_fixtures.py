"""Runs to compare: the same cases in five launches, slower by a factor."""

from collections.abc import Iterable, Sequence
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.regression.compare import Comparison, Series, compare
from parbench.reports.regression.rule import Rule
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    make_plan,
    make_run,
    ok_record,
)

CASE = collective_case()
OTHER_CASE = collective_case("broadcast")
NOISE = (1.000, 1.010, 0.990, 1.005, 0.995)


def make_repetitions(
    case: Case = CASE, factor: float = 1.0, count: int = 5, **more: Any
) -> list[Record]:
    return [ok_record(case, i, 1e-3 * factor * NOISE[(3 * i) % 5], **more) for i in range(count)]


def run_from_records(
    records: Iterable[Record], environment: dict[str, Any] | None = None, **plan: Any
) -> Run:
    found = list(records)
    cases = list({record.case.id: record.case for record in found}.values())
    return make_run(
        make_plan(plan.pop("cases", cases), launches=5, **plan), found, environment or ENVIRONMENT
    )


def compare_records(base: Sequence[Record], new: Sequence[Record], **more: Any) -> Comparison:
    return compare(run_from_records(base), run_from_records(new), Rule(), **more)


def find_series(comparison: Comparison, case: Case = CASE) -> Series:
    [found] = [one for one in comparison.series if one.case == case]
    return found
