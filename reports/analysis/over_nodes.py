"""Cases of several runs over numbers of nodes, in layouts of their ranks, and in environments side by side. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parbench.reports.analysis.frame import group_rows, pivot_rows
from parbench.reports.analysis.labels import row_label, short_labels
from parbench.reports.analysis.several import MatchedCase, NumberedRun, RunSet, Scaled
from parbench.reports.analysis.summary import Row
from parbench.reports.topology import ONE_RANK_PER_NODE


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What parts series beside their case; ``distribution`` is empty where there is nothing to place."""

    ranks_per_node: float
    distribution: str
    environment: str


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """A case in one layout at several numbers of nodes; ``label`` tells it apart, ``repeats`` is the most of any."""

    label: str
    layout: Layout
    scaled: Scaled
    repeats: int

    def shown(self, nodes: int) -> float | None:
        row = self.scaled.rows.get(nodes)
        return row.value("busbw" if row.is_communication else row.headline) if row else None


@dataclass(frozen=True, kw_only=True)
class Environments:
    """A case on as many nodes, in one layout, in several environments; ``beside`` holds their rows by ``names``."""

    label: str
    nodes: int
    names: tuple[str, ...]
    beside: MatchedCase


def over_nodes(several: RunSet) -> tuple[OverNodes, ...]:
    """Return the cases that ran on two numbers of nodes or more; of repeats, the one with the median rate counts."""
    series = []
    for placed in group_rows(_placed(several), lambda one: one[0].case):
        for layout in dict.fromkeys(layout for _, layout in placed):
            # what needs no distribution, such as a single node, is in the series of each
            kept = [
                row for row, found in placed if found in (layout, replace(layout, distribution=""))
            ]
            series += [
                (layout, dict(sorted(of.items())))
                for of in pivot_rows([kept], lambda row: row.world.nodes)
            ]
    labels = _labels([(next(iter(of.values()))[0], layout) for layout, of in series])
    found = []
    for label, (layout, of) in zip(labels, series, strict=True):
        scaled = Scaled(rows={nodes: _median_row(rows) for nodes, rows in of.items()})
        found.append(
            OverNodes(label=label, layout=layout, scaled=scaled, repeats=max(map(len, of.values())))
        )
    return tuple(found)


def environments(several: RunSet) -> tuple[Environments, ...]:
    names = tuple(
        dict.fromkeys(
            one.point.environment for one in several.runs if one.point and one.point.environment
        )
    )
    placed = [(row, layout) for row, layout in _placed(several) if layout.environment in names]
    cases = [row.case.id for row, _ in placed]
    groups = group_rows(
        sorted(placed, key=lambda one: (cases.index(one[0].case.id), one[0].world.nodes)),
        lambda one: one[0].case,
        by=lambda one: (replace(one[1], environment=""), one[0].world.nodes),
    )
    alike = pivot_rows(groups, lambda one: names.index(one[1].environment))
    found = [
        MatchedCase(rows={i: _median_row([row for row, _ in of]) for i, of in sorted(one.items())})
        for one in alike
    ]
    layouts = [replace(next(iter(group.values()))[0][1], environment="") for group in alike]
    labels = _labels(
        [(beside.first, layout) for beside, layout in zip(found, layouts, strict=True)]
    )
    return tuple(
        Environments(label=label, nodes=beside.first.world.nodes, names=names, beside=beside)
        for label, beside in zip(labels, found, strict=True)
    )


def row_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what tables call a row: a communication by its size, a step by what tells it apart."""
    labels = short_labels([row for row in rows if not row.is_communication])
    return lambda row: row_label(row) if row.is_communication else labels[row.case.id]


def layout_of(one: NumberedRun, row: Row) -> Layout:
    found = one.nodes.distribution if one.nodes else one.point.distribution if one.point else ""
    each = row.world.size / row.world.nodes
    is_placed = row.world.nodes > 1 and each > 1 and found != ONE_RANK_PER_NODE
    environment = one.point.environment if one.point else ""
    distribution = (found or "distribution unknown") if is_placed else ""
    return Layout(ranks_per_node=each, distribution=distribution, environment=environment)


def _placed(several: RunSet) -> list[tuple[Row, Layout]]:
    """Return the rows of all runs in their layouts: of a point that ran twice, its last run counts."""
    found: dict[object, tuple[Row, Layout]] = {}
    for one in several.runs:
        for row in one.shown:
            # an imported file may not tell the nodes, which are 0 then
            if "group" not in row.case.params and row.world.nodes:
                layout, repeat = layout_of(one, row), one.point.id if one.point else one.number
                found[row.case.id, layout, row.world.nodes, repeat] = row, layout
    return list(found.values())


def _median_row(rows: Sequence[Row]) -> Row:
    """Return the row whose time is the median, the upper one of two in the middle."""
    known = sorted([row for row in rows if row.seconds], key=lambda row: row.seconds or 0.0)
    return known[len(known) // 2] if known else rows[0]


def _labels(found: Sequence[tuple[Row, Layout]]) -> list[str]:
    """Return what tells series apart: their cases, then those parts of layouts in which any differ."""
    name = row_names([row for row, _ in found])
    parts = [
        (f"{layout.ranks_per_node:g} a node", layout.distribution, layout.environment)
        for _, layout in found
    ]
    differing = [len(set(texts)) > 1 for texts in zip(*parts, strict=True)]
    return [
        ", ".join(
            [
                name(row),
                *(text for text, differs in zip(texts, differing, strict=True) if differs and text),
            ]
        )
        for (row, _), texts in zip(found, parts, strict=True)
    ]
