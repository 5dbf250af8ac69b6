"""Runs to compare: the same cases in five launches, slower by a factor."""

from collections.abc import Iterable, Sequence
from typing import Any

from reports_fixtures import ENVIRONMENT, collective, make_plan, make_run, ok

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.regression.compare import Comparison, Series, compare
from parbench.reports.regression.rule import Rule

CASE = collective()
OTHER = collective("broadcast")
NOISE = (1.000, 1.010, 0.990, 1.005, 0.995)


def launches(case: Case = CASE, factor: float = 1.0, count: int = 5, **more: Any) -> list[Record]:
    return [ok(case, i, 1e-3 * factor * NOISE[(3 * i) % 5], **more) for i in range(count)]


def run_of(records: Iterable[Record], environment: dict[str, Any] | None = None, **plan: Any) -> Run:
    found = list(records)
    cases = list({record.case.id: record.case for record in found}.values())
    return make_run(make_plan(plan.pop("cases", cases), launches=5, **plan), found, environment or ENVIRONMENT)


def compared(base: Sequence[Record], new: Sequence[Record], **more: Any) -> Comparison:
    return compare(run_of(base), run_of(new), Rule(), **more)


def only(comparison: Comparison, case: Case = CASE) -> Series:
    [found] = [one for one in comparison.series if one.case == case]
    return found
