"""Operations against the kinds of groups that ran them: within a node, across nodes, and over all ranks. Pure.

A kind has as many rows as it has groups; its rate is their median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.results.stats import median
from reports import cells
from reports.analysis.frame import group_rows
from reports.analysis.interference import TOGETHER
from reports.analysis.labels import operation
from reports.analysis.rank_hosts import WITHIN, Nodes
from reports.analysis.summary import Row, common_details

ACROSS, OVER = "across nodes", "over nodes"
"""One rank of each of several nodes; several ranks of some of them."""
OF_GROUP = ("group", "group_index", "concurrent")
# what the names of groups say of their reach; node and across stand for theirs where several kinds have it
_IMPLIED = {"node": WITHIN, "across": ACROSS, "world": OVER}


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
        reach = "" if _IMPLIED.get(self.group) == self.reach else self.reach
        return ", ".join(filter(None, (name, reach, TOGETHER * self.together)))


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """An operation of one size, mode and type, and its rows by the kind of group."""

    first: Row
    rows: Mapping[Kind, tuple[Row, ...]]

    @property
    def name(self) -> str:
        """The operation with its own parameters."""
        return operation(self.first.case, OF_GROUP)

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
                return next((one for one in known if one.group in ("node", "across")), known[0])
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
    told = ((_kind(row, nodes), row) for row in rows if row.is_communication and row.value("busbw"))
    known = [(kind, row) for kind, row in told if kind]
    found = []
    for group in group_rows(known, lambda one: one[1].case, without=OF_GROUP, by=lambda one: (one[1].world,)):
        of = {kind: tuple(row for other, row in group if other == kind) for kind, _ in group}
        found += [Kinds(first=group[0][1], rows=of)] if len(of) > 1 else []
    return tuple(found)


def series_of_kinds(found: Sequence[Kinds]) -> dict[tuple[str, str, str], tuple[Kinds, ...]]:
    """Return the operations by name, mode and type, the smallest size first."""
    names = [(one.name, _param(one, "mode"), _param(one, "dtype")) for one in found]
    series = {name: [one for one, other in zip(found, names, strict=True) if other == name] for name in names}
    return {name: tuple(sorted(of, key=lambda one: one.size_bytes or 0)) for name, of in series.items()}


def largest(found: Sequence[Kinds]) -> tuple[Kinds, ...]:
    """Return of each operation the largest size whose rates within and across nodes are both known."""
    known = ([one for one in of if one.ratio() is not None] for of in series_of_kinds(found).values())
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


def _param(one: Kinds, name: str) -> str:
    return str(one.first.case.params.get(name, cells.UNKNOWN))


def _kind(row: Row, nodes: Nodes) -> Kind | None:
    """Return the kind of group that ran the row; one that names no ranks has all of them if it is the first."""
    details, params = common_details(row), row.case.params
    ranks = details.get("group_ranks")
    if ranks is None and "group_size" not in details and not params.get("group_index"):
        ranks = list(range(len(nodes.hosts)))
    if not ranks or not _are_ranks(ranks) or not set(ranks) <= set(range(len(nodes.hosts))):
        return None
    hosts = {nodes.hosts[rank] for rank in ranks}
    reach = WITHIN if len(hosts) == 1 else ACROSS if len(hosts) == len(ranks) else OVER
    return Kind(group=str(params.get("group", "world")), together=bool(params.get("concurrent")), reach=reach)


def _are_ranks(told: object) -> bool:
    return isinstance(told, list) and all(isinstance(rank, int) for rank in told)


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """An operation of one size, mode and type, and its row for each group that ran it."""

    first: Row
    rows: Mapping[str, Row]

    @property
    def slowest(self) -> str | None:
        """The group with the least bus bandwidth of those that ran alone, None if fewer than two are known."""
        alone = [name for name, row in self.rows.items() if not row.case.params.get("concurrent")]
        rates = [(rate, name) for name in alone if (rate := self.rows[name].value("busbw"))]
        return min(rates, key=lambda one: one[0])[1] if len(rates) > 1 else None


def grouped(rows: Sequence[Row]) -> tuple[Grouped, ...]:
    """Return each operation that several groups ran, or one both alone and beside all others."""
    rows = [row for row in rows if "group" in row.case.params]
    groups = group_rows(rows, lambda row: row.case, without=OF_GROUP, by=lambda row: (row.world,))
    found = (Grouped(first=of[0], rows={group_name(row): row for row in of}) for of in groups)
    return tuple(one for one in found if len(one.rows) > 1)


def group_name(row: Row) -> str:
    """Return a group as people call it: its kind, its ranks where they are known, and whether all ran at once."""
    params, ranks = row.case.params, common_details(row).get("group_ranks")
    told = ",".join(map(str, ranks)) if ranks and _are_ranks(ranks) else f"member {params.get('group_index', 0)}"
    return f"{params['group']} {told}{f' {TOGETHER}' if params.get('concurrent') else ''}"
