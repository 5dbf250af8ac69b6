"""What a row costs beside others: rows that differ in one thing alone, held against each other. Pure.

The ratio of two rows is that of their times, paired by launch, for the ranks were the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.plan.params import Value
from bench.results.metrics import MetricValue
from bench.results.stats import Estimate, across_launches, ratio_within_launch
from bench.text import format_size
from reports.analysis.summary import Row

ALONE, TOGETHER = "alone", "together"
PAIR = "p2p.matrix"

_Identity = tuple[str, frozenset[tuple[str, Value]], object]


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
        metric = row.metrics.get("busbw") if row is not None else None
        return metric.value if metric is not None else None


def contrasts(rows: Sequence[Row]) -> tuple[tuple[str, str, tuple[Slowed, ...]], ...]:
    """Return all contrasts that there are: a title, what stands before a load's name, and the rows."""
    found = (
        ("Group contention: all groups at once against one alone", "factor ", group_contention(rows)),
        ("Interference: slow-down beside a load", "beside ", interference(rows)),
    )
    return tuple(one for one in found if one[2])


def matrix_title(matrix: Pairs) -> str:
    """Return what a rank-by-rank matrix shows."""
    params = matrix.first.case.params
    what = f"{format_size(int(params['size_bytes']))} {params['dtype']}, {params['mode']}"
    return f"Rank to rank: bus bandwidth in GB/s, {what}"


def group_contention(rows: Sequence[Row]) -> tuple[Slowed, ...]:
    """Return each group's row alone with the factor by which all groups at once make it slower."""
    return _slowed(rows, "concurrent", lambda value: TOGETHER)


def interference(rows: Sequence[Row]) -> tuple[Slowed, ...]:
    """Return each row that also ran beside a load, with the factor by which each load makes it slower."""
    return _slowed(rows, "background", str)


def pairs(rows: Sequence[Row]) -> tuple[Pairs, ...]:
    """Return the rank-by-rank matrices, one for each size, type and mode; a single pair is none."""
    groups: dict[_Identity, dict[tuple[int, int], Row]] = {}
    for row in rows:
        if row.case.name == PAIR:
            ends = (int(row.case.params["source"]), int(row.case.params["target"]))
            groups.setdefault(_without(row, "source", "target"), {})[ends] = row
    return tuple(Pairs(rows=found) for found in groups.values() if len(found) > 1)


def loads(slowed: Sequence[Slowed]) -> tuple[str, ...]:
    """Return every load of any row, in order of appearance."""
    return tuple(dict.fromkeys(name for one in slowed for name in one.factors))


def _slowed(rows: Sequence[Row], param: str, name: Callable[[Value], str]) -> tuple[Slowed, ...]:
    """Pair rows without the parameter, which is left out at its default, with those that differ in it alone."""
    bases = {_without(row): row for row in rows if param not in row.case.params}
    found: dict[_Identity, dict[str, MetricValue]] = {}
    for row in rows:
        identity = _without(row, param)
        if param in row.case.params and identity in bases:
            factor = slow_down(bases[identity], row)
            if factor is not None:
                found.setdefault(identity, {})[name(row.case.params[param])] = factor
    return tuple(Slowed(base=bases[identity], factors=factors) for identity, factors in found.items())


def slow_down(base: Row, other: Row) -> MetricValue | None:
    """Return the other row's time over the base's, with its 95 % interval; None if no launch measured both."""
    bases, others = _by_launch(base), _by_launch(other)
    shared = [launch for launch in bases if launch in others]
    if not shared:
        return None
    if len(shared) > 1:
        found = across_launches([others[launch].value / bases[launch].value for launch in shared], "ratios")
    else:
        found = ratio_within_launch(others[shared[0]], bases[shared[0]])
    method = f"ratio of times, {found.method}"
    return MetricValue(value=found.value, unit="", better="lower", low=found.low, high=found.high, method=method)


def _by_launch(row: Row) -> dict[int, Estimate]:
    """Return the headline of each launch that knows it to be above zero."""
    found = {}
    for record in row.measured:
        metric = record.metrics.get(row.headline)
        if metric is not None and metric.value:
            found[record.launch] = Estimate(value=metric.value, low=metric.low, high=metric.high, method=metric.method)
    return found


def _without(row: Row, *params: str) -> _Identity:
    kept = frozenset((name, value) for name, value in row.case.params.items() if name not in params)
    return row.case.name, kept, row.world
