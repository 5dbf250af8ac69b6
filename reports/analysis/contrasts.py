"""Communication held against its like: beside loads, in groups within and across nodes, from rank to rank. Pure.

The ratio of two rows is that of their times, paired by repetition, for the ranks were the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.stats import (
    Estimate,
    estimate_mean,
)
from parbench.reports.analysis.frame import group_rows, pivot_rows
from parbench.reports.analysis.statistics import estimate_ratio
from parbench.reports.analysis.summary import Alike, Row, common_details, estimate_of

T = TypeVar("T")
TOGETHER = "together"
ACROSS, OVER = (
    "across nodes",
    "over nodes",
)  # one rank of each of several nodes; several ranks of some of them
OF_GROUP = ("group", "group_index", "concurrent")


def _alike(rows: Iterable[Row], at: Callable[[Row], T], *without: str) -> list[dict[T, list[Row]]]:
    return pivot_rows(
        group_rows(rows, lambda row: row.case, without=without, by=lambda row: (row.world,)), at
    )


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """A row undisturbed, and by what factor each load beside it makes it slower."""

    base: Row
    factors: Mapping[str, MetricValue]


def contrasts(rows: Sequence[Row]) -> tuple[tuple[str, str, tuple[Slowdown, ...]], ...]:
    """Return a title, what stands before a load's name, and the rows of each contrast."""
    found = (
        (
            "Group contention: all groups at once against one alone",
            "factor ",
            interference(rows, "concurrent"),
        ),
        ("Interference: slow-down beside a load", "beside ", interference(rows)),
    )
    return tuple(one for one in found if one[2])


def interference(rows: Sequence[Row], param: str = "background") -> tuple[Slowdown, ...]:
    """Return each row that also ran with the parameter, and what each load, or all groups at once, slow it down by."""
    found = []
    for group in _alike(rows, lambda row: row.case.params.get(param), param):
        alone = group.pop(None, [])
        beside = {
            TOGETHER if param == "concurrent" else str(load): of[-1] for load, of in group.items()
        }
        factors = {
            load: one for load, row in beside.items() if alone and (one := slow_down(alone[0], row))
        }
        found += [Slowdown(base=alone[0], factors=factors)] if factors else []
    return tuple(found)


def slow_down(base: Row, other: Row) -> MetricValue | None:
    """Return the other row's time over the base's, with its 95 % interval; None if no repetition measured both."""
    both = _paired(base, other)
    if not both:
        return None
    ratios = [one.value / time.value for one, time in both]
    found = (
        estimate_mean(ratios, "repetition ratios", "amount")
        if len(both) > 1
        else estimate_ratio(*both[0])
    )
    method = f"ratio of times, {found.method}"
    return MetricValue(
        value=found.value,
        better="lower",
        low=found.low,
        high=found.high,
        method=method,
        is_within_repetition=len(both) == 1 and found.low is not None,
    )


def _paired(base: Row, other: Row) -> list[tuple[Estimate, Estimate]]:
    """Return the other row's time and the base's of each repetition that measured both."""
    times = (
        {one.repetition: estimate_of(one.metrics.get(row.headline)) for one in row.measured}
        for row in (base, other)
    )
    bases, others = ({repetition: time for repetition, time in of.items() if time} for of in times)
    return [
        (others[repetition], time) for repetition, time in bases.items() if repetition in others
    ]


class Pairs(Alike[tuple[int, int]]):
    """Point-to-point rows of one size and type between all ranks, by sender and receiver."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for pair in self.rows for rank in pair}))

    def rate(self, source: int, target: int) -> float | None:
        """Return bytes per second, None if unknown."""
        return row.value("busbw") if (row := self.rows.get((source, target))) else None


def pairs(rows: Sequence[Row]) -> tuple[Pairs, ...]:
    """Return the rank-by-rank matrices, one for each size, type and mode; a single pair is none."""
    found = _alike([row for row in rows if _ends(row)], _ends, "source", "target")
    return tuple(Pairs(rows={ends: of[-1] for ends, of in one.items() if ends}) for one in found)


def _ends(row: Row) -> tuple[int, int] | None:
    source, target = (row.case.params.get(name) for name in ("source", "target"))
    if row.case.name == "p2p.matrix" and isinstance(source, int) and isinstance(target, int):
        return source, target
    return None


class Grouped(Alike[str]):
    """An operation of one size, mode and type, and its row for each group that ran it."""

    @property
    def slowest(self) -> str | None:
        """The group with the least bus bandwidth of those that ran alone, None if fewer than two are known."""
        alone = [name for name, row in self.rows.items() if not row.case.params.get("concurrent")]
        rates = {name: rate for name in alone if (rate := self.rows[name].value("busbw"))}
        return min(rates, key=lambda name: rates[name]) if len(rates) > 1 else None


def grouped(rows: Sequence[Row]) -> tuple[Grouped, ...]:
    """Return each operation that several groups ran, or one both alone and beside all others."""
    found = _alike([row for row in rows if "group" in row.case.params], group_name, *OF_GROUP)
    return tuple(Grouped(rows={name: rows[-1] for name, rows in of.items()}) for of in found)


def group_name(row: Row) -> str:
    params, ranks = row.case.params, _group_ranks(row)
    told = ",".join(map(str, ranks)) if ranks else f"member {params.get('group_index', 0)}"
    return f"{params['group']} {told}{f' {TOGETHER}' if params.get('concurrent') else ''}"


def _group_ranks(row: Row) -> list[int]:
    return common_details(row).get("group_ranks") or []
