"""Communication held against its like: beside loads, in groups within and across nodes, from rank to rank. Pure.

The ratio of two rows is that of their times, paired by repetition, for the ranks were the same.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import TypeVar

from parbench.bench.plan.params import Value
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_case_size,
    format_number,
    format_quantity,
    to_single_line,
)
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.stats import (
    CONFIDENCE,
    MIN_INTERVAL_REPETITIONS,
    Estimate,
    estimate_mean,
    median,
    t_quantile,
)
from parbench.bench.text import pluralize
from parbench.reports.analysis.fits import size_of
from parbench.reports.analysis.frame import group_rows, pivot_rows
from parbench.reports.analysis.labels import AXES, differences, operation
from parbench.reports.analysis.statistics import estimate_ratio
from parbench.reports.analysis.summary import Alike, Row, common_details, estimate_of
from parbench.reports.topology import WITHIN_NODE, Topology

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


_OWN_TABLES = (*AXES, *OF_GROUP, "background", "source", "target", "mesh")
_MOST_SETTINGS, _MOST_MORE, _POWER = 5, 50, 0.8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A case under another value of one parameter: its time over that under the default, paired by repetition, less 1.

    ``more`` repetitions would tell a difference as large as this one in four of five runs. It is None where
    too many are needed or no interval is known.
    """

    name: str
    repetitions: int
    change: float
    low: float | None
    high: float | None
    more: int | None

    @property
    def is_told(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def words(self) -> str:
        reach = (
            ""
            if self.low is None or self.high is None
            else f" [{100 * self.low:+.0f}, {100 * self.high:+.0f}]"
        )
        told = f"{self.name}: {100 * self.change:+.0f} %{reach} time"
        if self.is_told:
            return f"{told}, {'slower' if self.change > 0 else 'faster'}"
        if self.low is None:
            repetitions = pluralize(self.repetitions, "repetition")
            return f"{told}, not significant ({repetitions}; an interval takes {MIN_INTERVAL_REPETITIONS})"
        would = (
            f"about {pluralize(self.more, 'more repetition')} would"
            if self.more
            else f"{_MOST_MORE} repetitions would not"
        )
        return f"{told}, cannot tell; {would}"


def settings(rows: Sequence[Row]) -> tuple[Setting, ...]:
    """Return cases equal in all but one parameter against the default value, else the first one, told ones first.

    All comparisons of a run share an error of 5 % (Bonferroni), so that one of many is not told by chance.
    """
    pairs = list[tuple[str, list[float]]]()
    for name in dict.fromkeys(
        name for row in rows for name in row.case.params if name not in _OWN_TABLES
    ):
        others = differences(rows, [name, *_OWN_TABLES[3:]])
        for group in _alike(rows, partial(_value_of, name), name):
            alike = [of[0] for of in group.values()]
            base = next((row for row in alike if name in row.case.defaults), alike[0])
            for row in (row for row in alike if row is not base):
                told = f"{row.case.short_name} {others[row.case.id]}".strip()
                values = [to_single_line(str(_value_of(name, one))) for one in (row, base)]
                logs = [math.log(one.value / time.value) for one, time in _paired(base, row)]
                pairs += [(f"{told}: {name} {values[0]} against {values[1]}", logs)] if logs else []
    found = [_setting(name, logs, len(pairs)) for name, logs in pairs]
    return tuple(sorted(found, key=lambda one: (not one.is_told, -abs(one.change))))


def _value_of(name: str, row: Row) -> Value | None:
    return row.case.all_params.get(name)


def _setting(name: str, logs: Sequence[float], comparisons: int) -> Setting:
    n, mean = len(logs), fmean(logs)
    if n < MIN_INTERVAL_REPETITIONS:
        return Setting(
            name=name, repetitions=n, change=math.expm1(mean), low=None, high=None, more=None
        )
    level, error = 1 - (1 - CONFIDENCE) / 2 / comparisons, stdev(logs)
    reach = t_quantile(level, n - 1) * error / math.sqrt(n)
    wanted = (
        more
        for more in range(1, _MOST_MORE)
        if (t_quantile(level, n + more - 1) + t_quantile(_POWER, n + more - 1)) * error
        <= abs(mean) * math.sqrt(n + more)
    )
    # repetitions that disagree may reach further than a float
    change, low, high = (math.expm1(min(end, 700.0)) for end in (mean, mean - reach, mean + reach))
    return Setting(
        name=name, repetitions=n, change=change, low=low, high=high, more=next(wanted, None)
    )


def settings_words(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a sentence for each of the five settings that tell most, and how their intervals are meant."""
    found = settings(rows)
    meant = f"Repetitions are paired; the intervals hold for all {len(found)} comparisons at once (95 %, Bonferroni)."
    left = f"{len(found) - _MOST_SETTINGS} more comparisons tell less."
    return (
        *(one.words for one in found[:_MOST_SETTINGS]),
        *([left] if len(found) > _MOST_SETTINGS else []),
        *([meant] if len(found) > 1 and any(one.low is not None for one in found) else []),
    )


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


def over_sizes(rows: Sequence[Row]) -> tuple[Alike[int], ...]:
    """Return each operation of several sizes, and its row for each size, the smallest first."""
    found = _alike([row for row in rows if size_of(row)], size_of, "size_bytes")
    return tuple(Alike(rows={size: of[size][-1] for size in sorted(of)}) for of in found)


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Groups that are formed alike and reach as far; ``together`` if all of them ran at once."""

    group: str
    together: bool
    reach: str

    @property
    def label(self) -> str:
        """What a table calls it: ``across, together``; with its reach where the name does not say it."""
        mesh, _, axis = self.group.rpartition(":")
        name = f"{axis} of {mesh}" if "=" in mesh else self.group
        is_implied = {"node": WITHIN_NODE, "across": ACROSS, "world": OVER}.get(
            self.group
        ) == self.reach
        return ", ".join(
            filter(None, (name, "" if is_implied else self.reach, TOGETHER * self.together))
        )


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """An operation of one size, mode and type, and its rows by the kind of group: as many as there are groups."""

    first: Row
    rows: Mapping[Kind, Sequence[Row]]

    @property
    def name(self) -> str:
        return operation(self.first.case, OF_GROUP)

    @property
    def _type(self) -> tuple[str, str]:
        params = self.first.case.params
        return str(params.get("mode", UNKNOWN)), str(params.get("dtype", UNKNOWN))

    def rate(self, kind: Kind | None) -> float | None:
        """Return the median bus bandwidth of the kind's groups in B/s."""
        known = [
            rate
            for row in (self.rows.get(kind, ()) if kind else ())
            if (rate := row.value("busbw"))
        ]
        return median(known) if known else None

    def standing_for(self, *reaches: str, together: bool = False) -> Kind | None:
        """Return the kind that stands for the first of the reaches which any known one has."""
        known = [
            one
            for one in self.rows
            if one.together == together and one.reach in reaches and self.rate(one)
        ]
        return min(
            known,
            key=lambda one: (reaches.index(one.reach), one.group not in ("node", "across")),
            default=None,
        )

    def ratio(self, *, together: bool = False) -> float | None:
        """Return the bus bandwidth across nodes, or else over them, over that within a node."""
        far = self.rate(self.standing_for(ACROSS, OVER, together=together))
        near = self.rate(self.standing_for(WITHIN_NODE, together=together))
        return far / near if far and near else None


def kinds(rows: Sequence[Row], nodes: Topology | None) -> tuple[Kinds, ...]:
    """Return each operation that groups of two kinds ran, by size; nothing where all ranks are on one node."""
    known = [row for row in rows if nodes and row.is_communication and row.value("busbw")]
    groups = _alike(known, lambda row: _kind(row, nodes) if nodes else None, *OF_GROUP)
    found = [{kind: of for kind, of in group.items() if kind} for group in groups]
    return tuple(Kinds(first=next(iter(of.values()))[0], rows=of) for of in found if len(of) > 1)


def _kind(row: Row, nodes: Topology) -> Kind | None:
    """Return the kind of group that ran the row; one that names no ranks has all of them if it is the first."""
    params, all_ranks = row.case.params, range(len(nodes.hosts))
    is_whole = not common_details(row).keys() & {"group_ranks", "group_size"} and not params.get(
        "group_index"
    )
    ranks = list(all_ranks) if is_whole else _group_ranks(row)
    if not ranks or not set(ranks) <= set(all_ranks):
        return None
    hosts = {nodes.hosts[rank] for rank in ranks}
    reach = WITHIN_NODE if len(hosts) == 1 else ACROSS if len(hosts) == len(ranks) else OVER
    return Kind(
        group=str(params.get("group", "world")),
        together=bool(params.get("concurrent")),
        reach=reach,
    )


def series_of_kinds(found: Sequence[Kinds]) -> dict[tuple[str, str, str], list[Kinds]]:
    series: dict[tuple[str, str, str], list[Kinds]] = {(one.name, *one._type): [] for one in found}
    for one in sorted(found, key=lambda one: one.first.size_bytes or 0):
        series[one.name, *one._type].append(one)
    return series


def largest(found: Sequence[Kinds]) -> tuple[Kinds, ...]:
    """Return of each operation the largest size whose rates within and across nodes are both known."""
    known = (
        [one for one in of if one.ratio() is not None] for of in series_of_kinds(found).values()
    )
    return tuple(of[-1] for of in known if of)


def ratio_words(one: Kinds) -> str:
    far, near = one.standing_for(ACROSS, OVER), one.standing_for(WITHIN_NODE)
    assert far is not None
    assert near is not None
    told = ", ".join(
        f"{kind.group} {format_quantity(one.rate(kind), 'B/s')}" for kind in (far, near)
    )
    what = " ".join(word for word in one._type if word != UNKNOWN)
    times = format_number(one.ratio())
    size = format_case_size(one.first.size_bytes)
    return f"{one.name}, {what}: {far.reach} {size} runs at {times} of {near.reach} ({told})."
