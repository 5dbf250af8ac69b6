"""Cases of several runs over numbers of nodes, in layouts of their ranks, and in environments side by side. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.results.stats import median
from reports.analysis.labels import row_label, short_labels
from reports.analysis.rank_hosts import ONE_EACH
from reports.analysis.several import Beside, One, Scaled, Several
from reports.analysis.summary import Row

_UNKNOWN = "placement unknown"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What parts series beside their case; ``placement`` is empty where there is nothing to place."""

    ranks_per_node: float
    placement: str
    environment: str


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """A case in one layout at several numbers of nodes; ``label`` tells it apart, ``repeats`` is the most of any."""

    label: str
    layout: Layout
    scaled: Scaled
    repeats: int

    def shown(self, nodes: int) -> float | None:
        """Return the bus bandwidth of an operation, the time of a step."""
        row = self.scaled.rows.get(nodes)
        return row.value("busbw" if row.is_communication else row.headline) if row else None


@dataclass(frozen=True, kw_only=True)
class Environments:
    """A case on as many nodes, in one layout, in several environments; ``beside`` holds their rows by ``names``."""

    label: str
    nodes: int
    names: tuple[str, ...]
    beside: Beside


@dataclass(frozen=True, kw_only=True)
class _Place:
    case_id: str
    layout: Layout
    nodes: int


def over_nodes(several: Several) -> tuple[OverNodes, ...]:
    """Return the cases that ran on two numbers of nodes or more; of repeats, the one with the median rate counts."""
    series: dict[tuple[str, Layout], dict[int, tuple[Row, ...]]] = {}
    for place, rows in _rows(several).items():
        series.setdefault((place.case_id, place.layout), {})[place.nodes] = rows
    cases = list(dict.fromkeys(case_id for case_id, _ in series))
    known = sorted(_with_bases(series).items(), key=lambda one: cases.index(one[0][0]))
    found = {key: of for key, of in known if len(of) > 1}
    labels = _labels([(next(iter(of.values()))[0], layout) for (_, layout), of in found.items()])
    return tuple(
        OverNodes(
            label=label,
            layout=layout,
            scaled=Scaled(rows={nodes: _median_row(rows) for nodes, rows in sorted(of.items())}),
            repeats=max(map(len, of.values())),
        )
        for label, ((_, layout), of) in zip(labels, found.items(), strict=True)
    )


def environments(several: Several) -> tuple[Environments, ...]:
    """Return the cases that ran in two environments of a sweep or more, all else alike."""
    names = tuple(dict.fromkeys(one.point.environment for one in several.runs if one.point and one.point.environment))
    found: dict[_Place, dict[int, Row]] = {}
    for place, rows in _rows(several).items():
        if place.layout.environment in names:
            alike = replace(place, layout=replace(place.layout, environment=""))
            found.setdefault(alike, {})[names.index(place.layout.environment)] = _median_row(rows)
    cases = list(dict.fromkeys(place.case_id for place in found))
    known = sorted(found.items(), key=lambda one: (cases.index(one[0].case_id), one[0].nodes))
    kept = {place: rows for place, rows in known if len(rows) > 1}
    labels = _labels([(next(iter(rows.values())), place.layout) for place, rows in kept.items()])
    return tuple(
        Environments(label=label, nodes=place.nodes, names=names, beside=Beside(rows=rows))
        for label, (place, rows) in zip(labels, kept.items(), strict=True)
    )


def row_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tables call a row: a communication by its size, a step by what tells it apart."""
    labels = short_labels([row for row in rows if not row.is_communication])
    return lambda row: row_label(row) if row.is_communication else labels[row.case.id]


def layout_of(one: One, row: Row) -> Layout:
    """Return in what layout a run measured a row."""
    found = one.nodes.placement if one.nodes else one.point.placement if one.point else ""
    each = row.world.size / row.world.nodes
    is_placed = row.world.nodes > 1 and each > 1 and found != ONE_EACH
    environment = one.point.environment if one.point else ""
    return Layout(ranks_per_node=each, placement=(found or _UNKNOWN) if is_placed else "", environment=environment)


def _rows(several: Several) -> dict[_Place, tuple[Row, ...]]:
    """Return the rows of each place, one for each repeat: of a point that ran twice, its last run counts.

    Rows of an unknown number of nodes, 0, which an imported file may not tell, have no place.
    """
    found: dict[_Place, dict[object, Row]] = {}
    for one in several.runs:
        for row in one.shown:
            if "group" not in row.case.params and row.world.nodes:
                place = _Place(case_id=row.case.id, layout=layout_of(one, row), nodes=row.world.nodes)
                found.setdefault(place, {})[one.point.id if one.point else one.number] = row
    return {place: tuple(of.values()) for place, of in found.items()}


def _with_bases(
    series: Mapping[tuple[str, Layout], Mapping[int, tuple[Row, ...]]],
) -> dict[tuple[str, Layout], dict[int, tuple[Row, ...]]]:
    """Give every placement's series the rows of what needs none, such as a single node."""
    return {
        (case, layout): {**series.get((case, replace(layout, placement="")), {}), **of}
        for (case, layout), of in series.items()
    }


def _median_row(rows: Sequence[Row]) -> Row:
    """Return the row whose time is the median, the upper one of two in the middle."""
    known = [row for row in rows if row.value(row.headline)]
    if not known:
        return rows[0]
    middle = median([_seconds(row) for row in known])
    return min((row for row in known if _seconds(row) >= middle), key=_seconds)


def _seconds(row: Row) -> float:
    return row.value(row.headline) or 0.0


def _labels(found: Sequence[tuple[Row, Layout]]) -> list[str]:
    """Return what tells series apart: their cases, then those parts of layouts in which any differ."""
    name = row_names([row for row, _ in found])
    parts = [(f"{layout.ranks_per_node:g} a node", layout.placement, layout.environment) for _, layout in found]
    differing = [len(set(texts)) > 1 for texts in zip(*parts, strict=True)]
    return [
        ", ".join([name(row), *(text for text, differs in zip(texts, differing, strict=True) if differs and text)])
        for (row, _), texts in zip(found, parts, strict=True)
    ]
