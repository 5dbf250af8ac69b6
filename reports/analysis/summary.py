"""Names of ``parbench.reports.case_results`` for modules that do not use ``RunData`` yet."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import Estimate
from parbench.reports.case_results import (
    WORST_FIRST,
    CaseResult,
    MissingCase,
    compute_exit_code,
    find_missing,
    is_conclusive,
    merge_records,
)

Row = CaseResult
Missing = MissingCase
T = TypeVar("T")
K = TypeVar("K")

__all__ = ["WORST_FIRST", "Alike", "Missing", "Row", "Summary", "Tally", "summarize"]


@dataclass(frozen=True, kw_only=True)
class Alike(Generic[K]):
    """Rows that differ in one thing, by that."""

    rows: Mapping[K, Row]

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The numbers of rows by status, of skipped cases and of measurements, and the exit code."""

    counts: Mapping[Status, int]
    skipped: int
    missing: int
    planned: int
    code: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a run."""

    rows: tuple[Row, ...]
    skipped: tuple[SkippedCase, ...]
    missing: tuple[Missing, ...]
    tally: Tally


def summarize(run: Run) -> Summary:
    """Return the results of a run."""
    plan = run.info.plan
    results = merge_records(run)
    statuses = [result.status for result in results]
    missing = find_missing(run)
    is_complete = not missing and is_conclusive(run, results)
    counts = {status: statuses.count(status) for status in reversed(WORST_FIRST)}
    tally = Tally(
        counts={status: count for status, count in counts.items() if count},
        skipped=len(plan.skipped),
        missing=sum(case.repetitions for case in missing),
        planned=len(plan.cases) * plan.repetitions,
        code=compute_exit_code(statuses, is_complete=is_complete),
    )
    return Summary(rows=results, skipped=plan.skipped, missing=missing, tally=tally)


def num_ranks(row: Row) -> int:
    return row.num_ranks


def common_details(row: Row) -> dict[str, Any]:
    return row.details


def estimate_of(metric: MetricValue | None) -> Estimate | None:
    """Return a metric that has a logarithm, None if it is unknown or not above zero."""
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    ends = [end for end in (metric.low, metric.high) if end and end > 0]
    low, high = ends if len(ends) == 2 else (None, None)
    return Estimate(value=metric.value, low=low, high=high, method=metric.method)


def readable(rows: Iterable[Row], read: Callable[[Row], T | str | None]) -> tuple[T, ...]:
    values = map(read, rows)
    return tuple(value for value in values if value is not None and not isinstance(value, str))


def unreadable(rows: Iterable[Row], read: Callable[[Row], object]) -> tuple[str, ...]:
    return tuple(value for value in map(read, rows) if isinstance(value, str))
