"""Runs to compare: the same cases in five repetitions, slower by a factor."""

from collections.abc import Iterable, Sequence
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.compare.compare import RunComparison, SeriesComparison, compare
from parbench.reports.compare.rule import Rule
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.run_data import RunData
from tests.support.reports.reports_fixtures import (
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
    case: Case = CASE, factor: float = 1.0, count: int = 5, **fields: Any
) -> list[Record]:
    """Return one record for each repetition, of 1 ms times ``factor`` with 1 % noise."""
    return [
        ok_record(case, i, 1e-3 * factor * NOISE[(3 * i) % 5], **fields) for i in range(count)
    ]


def make_curve(*factors: float) -> list[Record]:
    """Return repetitions at 1 KiB, 4 KiB, 16 KiB, ..., each slower by its factor."""
    records = []
    for i, factor in enumerate(factors):
        records += make_repetitions(collective_case(size_bytes=1024 * 4**i), factor)
    return records


def run_from_records(
    records: Iterable[Record], environment: dict[str, Any] | None = None, **plan: Any
) -> Run:
    """Return a run of these records; without ``cases`` its plan has the cases of the records."""
    records = list(records)
    cases = plan.pop("cases", {record.case.id: record.case for record in records}.values())
    return make_run(
        make_plan(cases, repetitions=5, **plan), records, environment or ENVIRONMENT
    )


def make_threshold(min_effect: float) -> Threshold:
    """Return a threshold as `parbench aa` measures it."""
    return Threshold(series="a case", min_effect=min_effect)


def compare_with_rule(base: Run, new: Run, **options: Any) -> RunComparison:
    return compare(RunData(base), RunData(new), Rule(), **options)


def compare_records(
    base: Sequence[Record], new: Sequence[Record], **options: Any
) -> RunComparison:
    return compare_with_rule(run_from_records(base), run_from_records(new), **options)


def find_series(comparison: RunComparison, case: Case = CASE) -> SeriesComparison:
    [series] = [series for series in comparison.series if series.case == case]
    return series
