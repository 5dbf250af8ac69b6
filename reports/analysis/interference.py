"""What a row costs beside others: rows that differ in one thing alone, held against each other. Pure.

The ratio of two rows is that of their times, paired by launch, for the ranks were the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.results.metrics import MetricValue
from bench.results.stats import across_launches, ratio_within_launch
from bench.text import format_size
from reports.analysis.frame import group_rows
from reports.analysis.summary import Row, estimate_of

TOGETHER = "together"


@dataclass(frozen=True, kw_only=True)
class Slowed:
    """A row undisturbed, and by what factor each load beside it makes it slower."""

    base: Row
    factors: Mapping[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Point-to-point rows of one size and type between all ranks, by sender and receiver."""

    rows: Mapping[tuple[int, int], Row]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that send or receive."""
        return tuple(sorted({rank for pair in self.rows for rank in pair}))

    @property
    def first(self) -> Row:
        """A row, for what all share."""
        return next(iter(self.rows.values()))

    def rate(self, source: int, target: int) -> float | None:
        """Return bytes per second from one rank to another, None if unknown."""
        row = self.rows.get((source, target))
        return row.value("busbw") if row else None


def contrasts(rows: Sequence[Row]) -> tuple[tuple[str, str, tuple[Slowed, ...]], ...]:
    """Return all contrasts that there are: a title, what stands before a load's name, and the rows."""
    found = (
        ("Group contention: all groups at once against one alone", "factor ", interference(rows, "concurrent")),
        ("Interference: slow-down beside a load", "beside ", interference(rows)),
    )
    return tuple(one for one in found if one[2])


def matrix_title(matrix: Pairs) -> str:
    """Return what a rank-by-rank matrix shows."""
    params = matrix.first.case.params
    what = f"{format_size(int(params['size_bytes']))} {params['dtype']}, {params['mode']}"
    return f"Rank to rank: bus bandwidth in GB/s, {what}"


def interference(rows: Sequence[Row], param: str = "background") -> tuple[Slowed, ...]:
    """Return each row that also ran with the parameter, with the factor by which each value of it makes it slower.

    The values of ``background`` are loads; with ``concurrent`` all groups ran at once.
    """
    found = []
    for group in group_rows(rows, lambda row: row.case, without=(param,), by=lambda row: (row.world,)):
        base = next((row for row in group if param not in row.case.params), None)
        factors = {}
        for row in group:
            if base and param in row.case.params and (factor := slow_down(base, row)):
                factors[TOGETHER if param == "concurrent" else str(row.case.params[param])] = factor
        if base and factors:
            found.append(Slowed(base=base, factors=factors))
    return tuple(found)


def slow_down(base: Row, other: Row) -> MetricValue | None:
    """Return the other row's time over the base's, with its 95 % interval; None if no launch measured both."""
    times = ({one.launch: estimate_of(one.metrics.get(row.headline)) for one in row.measured} for row in (base, other))
    bases, others = ({launch: time for launch, time in of.items() if time} for of in times)
    both = [(others[launch], time) for launch, time in bases.items() if launch in others]
    if not both:
        return None
    ratios = [one.value / time.value for one, time in both]
    found = across_launches(ratios, "ratios") if len(both) > 1 else ratio_within_launch(*both[0])
    method = f"ratio of times, {found.method}"
    return MetricValue(value=found.value, unit="", better="lower", low=found.low, high=found.high, method=method)


def pairs(rows: Sequence[Row]) -> tuple[Pairs, ...]:
    """Return the rank-by-rank matrices, one for each size, type and mode; a single pair is none."""
    between = [row for row in rows if row.case.name == "p2p.matrix"]
    groups = group_rows(between, lambda row: row.case, without=("source", "target"), by=lambda row: (row.world,))
    found = ({(int(row.case.params["source"]), int(row.case.params["target"])): row for row in of} for of in groups)
    return tuple(Pairs(rows=of) for of in found if len(of) > 1)


def loads(slowed: Sequence[Slowed]) -> tuple[str, ...]:
    """Return every load of any row, in order of appearance."""
    return tuple(dict.fromkeys(name for one in slowed for name in one.factors))
