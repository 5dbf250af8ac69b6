"""Heat maps: rates from rank to rank, who comes late, routings by capacity, and experts' loads."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from reports import cells
from reports.analysis.contrasts import Pairs
from reports.analysis.experts import Atlas, Mixture, Place
from reports.analysis.labels import short_labels
from reports.analysis.rank_hosts import Nodes
from reports.figures import plot
from reports.figures.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PAIRS, _MOST_LATE, _MOST_EXPERTS, _MOST_STRIPS = 10, 8, 16, 40  # that are drawn, but for strips with numbers
_MAX_HOSTS, _HOST_LETTERS, _MAX_LEVEL = 16, 12, 4


def draw_pairs(matrix: Pairs, nodes: Nodes | None = None) -> Figure | None:
    """Return bus bandwidth from rank to rank, with ``nodes`` host by host; None if all is unknown."""
    ranks = nodes.ordered(matrix.ranks) if nodes else matrix.ranks
    rates = [[matrix.rate(source, target) for target in ranks] for source in ranks]
    fastest = max((rate or 0.0 for row in rates for rate in row), default=0.0)
    if not fastest:
        return None
    words = cells.gigabytes if len(ranks) <= _MOST_PAIRS else lambda _: ""
    with plot.canvas(5.2, 4.2) as (figure, [axes]):
        squares = [[(rate / fastest, words(rate)) if rate else (None, "") for rate in row] for row in rates]
        plot.heat_map(axes, squares, 0, fontsize=9.0)
        plot.name_ranks(axes.xaxis, ranks)
        plot.name_ranks(axes.yaxis, ranks)
        axes.set(xlabel="to rank", ylabel="from rank", aspect="equal")
        if nodes is not None:
            _part_hosts(axes, [nodes.hosts[rank] if rank < len(nodes.hosts) else "" for rank in ranks], nodes)
    return figure


def _part_hosts(axes: Axes, hosts: Sequence[str], nodes: Nodes) -> None:
    """Draw a line between hosts, a thick one between switches; name hosts above and beside if there is room for all."""
    for place, (one, other) in enumerate(pairwise(hosts)):
        if one != other:
            width = 1.0 if nodes.switches.get(one) == nodes.switches.get(other) else 2.2
            axes.axvline(place + 0.5, color=INK, linewidth=width)
            axes.axhline(place + 0.5, color=INK, linewidth=width)
    names = [host for host in nodes.names if host in hosts]
    if len(names) > _MAX_HOSTS:
        return
    places = [sum(i for i, host in enumerate(hosts) if host == name) / hosts.count(name) for name in names]
    short = [name if len(name) <= _HOST_LETTERS else f"{name[: _HOST_LETTERS - 1]}…" for name in names]
    above, beside = axes.secondary_xaxis("top"), axes.secondary_yaxis("right")
    above.set_xticks(places, short, rotation=0 if len(names) <= _MAX_LEVEL else 90)
    beside.set_yticks(places, short)
    for axis in (above, beside):
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)


def draw_arrivals(strips: Sequence[tuple[str, Mapping[int, float]]]) -> Figure | None:
    """Return a strip for each case, scaled by its own latest rank; None if no rank is known."""
    known = [(label, late) for label, late in strips if late]
    if not known:
        return None
    ranks = sorted({rank for _, late in known for rank in late})
    words = cells.duration if len(ranks) <= _MOST_LATE else lambda _: ""
    rows: list[list[plot.Square]] = []
    for _, late in known:
        latest = max(late.values()) or 1.0
        rows.append([(late[rank] / latest, words(late[rank])) if rank in late else (None, "") for rank in ranks])
    with plot.canvas(5.2, 1.0 + 0.26 * len(known)) as (figure, [axes]):
        plot.heat_map(axes, rows, 1, height=0.8)
        plot.name_ranks(axes.xaxis, ranks)
        axes.set_xlabel("rank")
        plot.name_rows(axes, [label for label, _ in known])
    return figure


def draw_atlas(atlas: Atlas) -> Figure | None:
    """Return step times and drop rates by routing and capacity, the fuller of colour the more; None without times."""
    if not any(atlas.value(*cell, "time") for cell in atlas.cells):
        return None
    panels = (("step time; over that of balanced routes, taken in turns", "time", 1), ("pairs dropped", "drop_rate", 3))
    with plot.canvas(10.0, 1.3 + 0.42 * len(atlas.routings), columns=2) as (figure, both):
        for axes, (title, name, series) in zip(both, panels, strict=True):
            most = max((atlas.value(*cell, name) or 0.0 for cell in atlas.cells), default=0.0) or 1.0
            rows = [[_cell(atlas, (one, place), name, most) for place in atlas.places] for one in atlas.routings]
            plot.heat_map(axes, rows, series)
            axes.set_title(title, fontsize=9)
            axes.set_yticks(range(len(atlas.routings)), [textwrap.shorten(one, 24) for one in atlas.routings])
            names = [atlas.name_of(place).replace(", ", "\n") for place in atlas.places]
            axes.set_xticks(range(len(names)), names, fontsize=8)
    return figure


def _cell(atlas: Atlas, cell: tuple[str, Place], name: str, most: float) -> plot.Square:
    value = atlas.value(*cell, name)
    words = cells.duration(value) if name == "time" else cells.percent(value)
    factor = atlas.metric(*cell, "imbalance_slowdown") if name == "time" else None
    if factor and factor.low is not None and factor.high is not None and not factor.low <= 1 <= factor.high:
        words += f"\n{factor.value:.2f}x in turns"  # not where it may be nothing
    return None if value is None else value / most, words


def draw_loads(found: Sequence[Mixture]) -> Figure | None:
    """Return a strip of experts for each step and layer, rank by rank: three times the mean share is full."""
    labels = short_labels([one.row for one in found])
    strips = [
        (f"{labels[one.row.case.id]}{f' layer {layer}' if len(one.layers) > 1 else ''}", one.ep, load)
        for one in found
        for layer in one.layers
        if sum(load := one.facts.expert_load[layer])
    ][:_MOST_STRIPS]
    if not strips:
        return None
    with plot.canvas(10.0, 1.0 + 0.3 * len(strips)) as (figure, [axes]):
        rows = []
        for place, (_, ranks, load) in enumerate(strips):
            full = 3 * sum(load) / len(load)
            rows.append([(min(1.0, n / full), str(n) if len(load) <= _MOST_EXPERTS else "") for n in load])
            edges = [rank * (len(load) // ranks) - 0.5 for rank in range(1, ranks)]
            axes.vlines(edges, place - 0.42, place + 0.42, color=INK, linewidth=1.4)
        plot.heat_map(axes, rows, 0, height=0.84)
        plot.name_ranks(axes.xaxis, range(max(map(len, rows))))
        axes.set_xlabel("expert")
        plot.name_rows(axes, [label for label, _, _ in strips])
    return figure
