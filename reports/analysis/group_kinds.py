"""Operations against the kinds of groups that ran them: within a node, across nodes, and over all ranks. Pure.

A kind has as many rows as it has groups; its rate is their median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.results.stats import median
from reports import cells
from reports.analysis.interference import TOGETHER
from reports.analysis.labels import operation_without
from reports.analysis.rank_hosts import WITHIN, Nodes
from reports.analysis.summary import Row, common_details

ACROSS, OVER = "across nodes", "over nodes"
"""One rank of each of several nodes; several ranks of some of them."""
OF_GROUP = ("group", "group_index", "concurrent")
_IMPLIED = {"node": WITHIN, "across": ACROSS, "world": OVER}
# what stands for its reach where several kinds have it
_PREFERRED = ("node", "across")


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
        reach = [] if _IMPLIED.get(self.group) == self.reach else [self.reach]
        return ", ".join([name, *reach, *([TOGETHER] * self.together)])


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """An operation of one size, mode and type, and its rows by the kind of group."""

    first: Row
    rows: Mapping[Kind, tuple[Row, ...]]

    @property
    def name(self) -> str:
        """The operation with its own parameters."""
        return operation_without(self.first.case, OF_GROUP)

    @property
    def size_bytes(self) -> int | None:
        """The operation's size, None where it has none."""
        size = self.first.case.params.get("size_bytes")
        return size if isinstance(size, int) else None

    def rate(self, kind: Kind) -> float | None:
        """Return the median bus bandwidth of the kind's groups in B/s."""
        known = [rate for row in self.rows.get(kind, ()) if (rate := row.value("busbw"))]
        return median(known) if known else None

    def standing_for(self, *reaches: str, together: bool = False) -> Kind | None:
        """Return the kind that stands for the first of the reaches which any known one has."""
        for reach in reaches:
            known = [one for one in self.rows if one.reach == reach and one.together == together and self.rate(one)]
            if known:
                return next((one for one in known if one.group in _PREFERRED), known[0])
        return None

    def ratio(self, *, together: bool = False) -> float | None:
        """Return the bus bandwidth across nodes, or else over them, over that within a node."""
        far, near = self.standing_for(ACROSS, OVER, together=together), self.standing_for(WITHIN, together=together)
        ours, theirs = (self.rate(kind) if kind else None for kind in (far, near))
        return ours / theirs if ours and theirs else None


def kinds(rows: Sequence[Row], nodes: Nodes | None) -> tuple[Kinds, ...]:
    """Return each operation that groups of two kinds ran, by size; nothing where all ranks are on one node."""
    if nodes is None:
        return ()
    found: dict[object, dict[Kind, list[Row]]] = {}
    for row in rows:
        if row.is_communication and row.value("busbw") and (ranks := _group_ranks(row, nodes)):
            found.setdefault(_identity(row), {}).setdefault(_kind(row, ranks, nodes), []).append(row)
    several = (of for of in found.values() if len(of) > 1)
    made = (
        Kinds(first=next(iter(of.values()))[0], rows={kind: tuple(rows) for kind, rows in of.items()}) for of in several
    )
    return tuple(made)


def series_of_kinds(found: Sequence[Kinds]) -> dict[tuple[str, str, str], tuple[Kinds, ...]]:
    """Return the operations by name, mode and type, the smallest size first."""
    series: dict[tuple[str, str, str], list[Kinds]] = {}
    for one in found:
        series.setdefault((one.name, _param(one, "mode"), _param(one, "dtype")), []).append(one)
    return {name: tuple(sorted(of, key=lambda one: one.size_bytes or 0)) for name, of in series.items()}


def largest(found: Sequence[Kinds]) -> tuple[Kinds, ...]:
    """Return of each operation the largest size whose rates within and across nodes are both known."""
    known = (tuple(one for one in of if one.ratio() is not None) for of in series_of_kinds(found).values())
    return tuple(of[-1] for of in known if of)


def ratio_words(one: Kinds) -> str:
    """Return how fast the operation is across nodes beside within one: a sentence with its numbers."""
    far, near = one.standing_for(ACROSS, OVER), one.standing_for(WITHIN)
    assert far is not None
    assert near is not None
    told = ", ".join(f"{kind.group} {cells.quantity(one.rate(kind), 'B/s')}" for kind in (far, near))
    what = " ".join(word for word in (_param(one, "mode"), _param(one, "dtype")) if word != cells.UNKNOWN)
    times = cells.significant(one.ratio())
    return f"{one.name}, {what}: {far.reach} {cells.size(one.size_bytes)} runs at {times} of {near.reach} ({told})."


def _group_ranks(row: Row, nodes: Nodes) -> tuple[int, ...]:
    """Return the ranks that ran the row; all where it names none and is the first of its kind, else nothing."""
    details = common_details(row)
    listed = details.get("group_ranks")
    if listed is None and "group_size" not in details and not row.case.params.get("group_index"):
        return tuple(range(len(nodes.hosts)))
    if isinstance(listed, list) and all(isinstance(rank, int) and 0 <= rank < len(nodes.hosts) for rank in listed):
        return tuple(listed)
    return ()


def _kind(row: Row, ranks: Sequence[int], nodes: Nodes) -> Kind:
    hosts = [nodes.hosts[rank] for rank in ranks]
    reach = WITHIN if len(set(hosts)) == 1 else ACROSS if len(set(hosts)) == len(hosts) else OVER
    group = str(row.case.params.get("group", "world"))
    return Kind(group=group, together=bool(row.case.params.get("concurrent")), reach=reach)


def _identity(row: Row) -> object:
    kept = frozenset((name, value) for name, value in row.case.params.items() if name not in OF_GROUP)
    return row.case.name, kept, row.world


def _param(one: Kinds, name: str) -> str:
    return str(one.first.case.params.get(name, cells.UNKNOWN))


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An operation of one size, mode and type, and its row for each group that ran it."""

    first: Row
    rows: Mapping[str, Row]

    @property
    def slowest(self) -> str | None:
        """The group with the least bus bandwidth of those that ran alone, None if fewer than two are known."""
        rates = {
            name: rate
            for name, row in self.rows.items()
            if (rate := row.value("busbw")) and not row.case.params.get("concurrent")
        }
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
    return f"{params['group']} {told}{f' {TOGETHER}' if row.case.params.get('concurrent') else ''}"
