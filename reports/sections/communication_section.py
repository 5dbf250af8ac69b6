"""The report on collectives and point-to-point: bandwidth, latency, fits, loads, groups, pairs, lateness."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports import cells
from reports.analysis.findings import Findings
from reports.analysis.fits import Curve, fit_notes
from reports.analysis.group_kinds import kind_columns, largest, ratio_words
from reports.analysis.interference import TOGETHER, Pairs, contrasts, matrix_title
from reports.analysis.labels import operation, operation_without
from reports.analysis.rank_hosts import Nodes
from reports.analysis.summary import Row, common_details
from reports.analysis.timelines import Late
from reports.sections.columns import (
    Column,
    communication_columns,
    figure,
    fit_columns,
    headline,
    lifted,
    metric_column,
    mode_columns,
    size_column,
    slowed_columns,
    words,
)
from reports.sections.node_section import distance_words, distances, matrix_columns, matrix_ranks
from reports.sections.panels import Panel, Section, terms

MOST_RANKS = 16
_SAYS_IT = ("mode", "dtype")
_TRUST = "what the figures show, and how far to trust it"


def communication_section(found: Findings) -> Section | None:
    """Return the tables of operations, one for each mode and type, and their fits."""
    if not found.communication:
        return None
    panels = [
        Panel(
            id=f"communication-{i}",
            title=series_words(series),
            caption=_TRUST,
            # the title says what these two say
            columns=tuple(column for column in communication_columns(rows) if column.title not in _SAYS_IT),
            rows=rows,
            has_facts=True,
        )
        for i, (series, rows) in enumerate(series_of(found.communication).items(), start=1)
    ]
    fitted = ("fit", "knee", "off the curve") if found.curves else ()
    return Section(
        id="communication",
        title="Communication",
        panels=(*panels, *_fits(found)),
        terms=terms(("busbw", "blocking, pipelined", *fitted)),
    )


def contrast_section(found: Findings) -> Section | None:
    """Return what operations cost beside others."""
    told = contrasts(found.shown)
    panels = tuple(
        Panel(
            id=f"contrast-{i}",
            title=title,
            caption="1 is as fast as undisturbed",
            columns=slowed_columns(slowed, prefix),
            rows=slowed,
        )
        for i, (title, prefix, slowed) in enumerate(told, start=1)
    )
    if not panels:
        return None
    return Section(id="contrasts", title="Beside each other", panels=panels, terms=terms(("factor, beside",)))


def group_section(found: Findings) -> Section | None:
    """Return operations against the groups that ran them, within and across nodes first."""
    rows = grouped(found.communication)
    panels = _kinds(found)
    if rows:
        panel = Panel(
            id="operation-group",
            title="Operation x group",
            caption="bus bandwidth in GB/s of each group of ranks, alone and, where measured, all together",
            columns=grouped_columns(rows),
            rows=rows,
        )
        panels = (*panels, panel)
    return Section(id="groups", title="Groups", panels=panels, terms=terms(("busbw",))) if panels else None


def pair_section(found: Findings) -> Section | None:
    """Return the rank-by-rank matrices; node by node where ranks are on several."""
    panels = [
        panel for i, matrix in enumerate(found.matrices, start=1) for panel in _pair_panels(matrix, i, found.nodes)
    ]
    return Section(id="pairs", title="Rank to rank", panels=tuple(panels)) if panels else None


def arrival_section(found: Findings) -> Section | None:
    """Return who comes late to what, the operations and steps with the largest skew."""
    late = found.late
    if not late:
        return None
    panel = Panel(
        id="arrivals-table",
        title="Who comes late",
        caption=f"arrivals on one clock, the {len(late)} cases with the largest skew",
        columns=late_columns(late),
        rows=late,
        notes=_clocks(late),
    )
    return Section(id="arrivals", title="Arrivals", panels=(panel,), terms=terms(("late",)))


def series_of(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[Row, ...]]:
    """Return rows by mode and type: they are different series."""
    groups: dict[tuple[str, str], tuple[Row, ...]] = {}
    for row in rows:
        series = str(row.case.params.get("mode", cells.UNKNOWN)), str(row.case.params.get("dtype", cells.UNKNOWN))
        groups[series] = (*groups.get(series, ()), row)
    return groups


def series_words(series: tuple[str, str]) -> str:
    """Return a series as headings call it."""
    return ", ".join(word for word in series if word != cells.UNKNOWN) or "without mode or type"


def _kinds(found: Findings) -> tuple[Panel[Any], ...]:
    if not found.kinds:
        return ()
    panel = Panel(
        id="group-kinds",
        title="Within and across nodes",
        caption="bus bandwidth in GB/s by kind of group, the median of its groups",
        columns=kind_columns(found.kinds),
        rows=found.kinds,
        notes=tuple(ratio_words(one) for one in largest(found.kinds)),
    )
    return (panel,)


def _pair_panels(matrix: Pairs, number: int, nodes: Nodes | None) -> Iterator[Panel[Any]]:
    rows = tuple(matrix.rows.values())
    title, columns = matrix_title(matrix), communication_columns(rows)
    notes = distance_words(distances(matrix, nodes)) if nodes else ()
    yield Panel(
        id=f"pairs-{number}", title=title, caption=_TRUST, columns=columns, rows=rows, notes=notes, has_facts=True
    )
    if nodes is not None and len(matrix.ranks) <= MOST_RANKS:
        yield Panel(
            id=f"pairs-{number}-matrix",
            title=f"{title}, node by node",
            caption="a line for each sender, a column for each receiver, those of one node side by side",
            columns=matrix_columns(matrix, nodes),
            rows=matrix_ranks(matrix, nodes),
        )


def _fits(found: Findings) -> tuple[Panel[Curve], ...]:
    if not found.curves:
        return ()
    panel = Panel(
        id="fits",
        title="Fits: latency and bandwidth",
        caption="what explains their times, and how well",
        columns=fit_columns(found.curves),
        rows=found.curves,
        notes=fit_notes(found.curves, found.ceiling),
    )
    return (panel,)


def late_columns(late: Sequence[Late]) -> tuple[Column[Late], ...]:
    """Return the columns of who comes late, with each of the first ranks' lateness."""
    ranks = sorted({rank for one in late for rank in one.seconds_by_rank})
    return (
        words("case", lambda one: late_label(one.row), "what is done, its size and its mode"),
        *(
            lifted(column, lambda one: one.row)
            for column in (headline("time"), metric_column("skew"), metric_column("transfer"))
        ),
        _rank("late rank", lambda one: one.arrival.late_rank, "the rank that most often arrives last"),
        figure("in", lambda one: one.arrival.share, cells.percent, "the share of iterations in which it does"),
        _rank("last out", lambda one: one.arrival.last_out_rank, "the rank that most often leaves last"),
        *(_lateness(rank) for rank in ranks[:MOST_RANKS]),
    )


def late_label(row: Row) -> str:
    """Return a row's operation with its size, mode and type, for a line that stands alone."""
    params = row.case.params
    size = cells.size(params["size_bytes"]) if "size_bytes" in params else ""
    return " ".join(word for word in (operation(row.case), size, *(str(params.get(n, "")) for n in _SAYS_IT)) if word)


def _lateness(rank: int) -> Column[Late]:
    help_text = f"how long after the first rank {rank} arrives, the median"
    return figure(f"rank {rank}", lambda one: one.seconds_by_rank.get(rank), cells.duration, help_text)


def _rank(title: str, rank_of: Callable[[Late], int | None], help_text: str) -> Column[Late]:
    def text(one: Late) -> str:
        rank = rank_of(one)
        return cells.UNKNOWN if rank is None else f"rank {rank}"

    return Column(title=title, text=text, sort=rank_of, help=help_text, number=False)


def _clocks(late: Sequence[Late]) -> tuple[str, ...]:
    methods = dict.fromkeys((one.arrival.method, one.arrival.uncertainty) for one in late)
    return tuple(f"Clocks: {method}, right within {cells.duration(seconds)}." for method, seconds in methods)


_OF_GROUP = ("group", "group_index", "concurrent")


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An operation of one size, mode and type, and its row for each group that ran it."""

    first: Row
    rows: Mapping[str, Row]

    @property
    def slowest(self) -> str | None:
        """The group with the least bus bandwidth of those that ran alone, None if fewer than two are known."""
        rates = {name: rate for name, row in self.rows.items() if (rate := row.value("busbw")) and not _together(row)}
        return min(rates, key=lambda name: rates[name]) if len(rates) > 1 else None


def grouped(rows: Sequence[Row]) -> tuple[Grouped, ...]:
    """Return each operation that several groups ran, or one both alone and beside all others."""
    found: dict[object, dict[str, Row]] = {}
    for row in rows:
        if "group" in row.case.params:
            found.setdefault(_identity(row), {})[group_name(row)] = row
    return tuple(Grouped(first=next(iter(of.values())), rows=of) for of in found.values() if len(of) > 1)


def group_name(row: Row) -> str:
    """Return a group as people call it: its kind, its ranks where they are known, and whether all ran at once."""
    params = row.case.params
    ranks = common_details(row).get("group_ranks")
    known = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    told = ",".join(map(str, ranks)) if known and ranks else f"member {params.get('group_index', 0)}"
    return f"{params['group']} {told}{f' {TOGETHER}' if _together(row) else ''}"


def grouped_columns(found: Sequence[Grouped]) -> tuple[Column[Grouped], ...]:
    """Return the columns: the operation, then each group's bus bandwidth, and which is slowest alone."""
    names = dict.fromkeys(name for one in found for name in one.rows)
    return (
        words("operation", lambda one: operation_without(one.first.case, _OF_GROUP), "what is done"),
        *mode_columns(lambda one: one.first),
        size_column(lambda one: one.first),
        *(_group(name) for name in names),
        words("slowest alone", lambda one: one.slowest or cells.UNKNOWN, "the group with the least bus bandwidth"),
    )


def _together(row: Row) -> bool:
    return bool(row.case.params.get("concurrent"))


def _identity(row: Row) -> object:
    kept = frozenset((name, value) for name, value in row.case.params.items() if name not in _OF_GROUP)
    return row.case.name, kept, row.world


def _group(name: str) -> Column[Grouped]:
    def rate(one: Grouped) -> float | None:
        return one.rows[name].value("busbw") if name in one.rows else None

    return figure(name, rate, cells.gigabytes, f"bus bandwidth of {name} in 1e9 B/s")
