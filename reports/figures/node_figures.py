"""Figures of several nodes: a kind of group against size, and rates, times and efficiency against nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from reports import cells
from reports.analysis.group_kinds import Kinds
from reports.analysis.interference import Pairs
from reports.analysis.rank_hosts import Nodes
from reports.figures import plot
from reports.figures.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a label, and its values by number of nodes or by size
Line = tuple[str, dict[int, float]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a figure's heights are: the axis' words and how numbers on it are written.

    ``level`` is where a line says what would be perfect, on an axis from zero; others are log axes.
    """

    words: str
    text: Callable[[float], str]
    level: float | None = None


RATE = Scale(words="bus bandwidth (GB/s)", text=cells.significant)
TIME = Scale(words="step time", text=cells.duration)
EFFICIENCY = Scale(words="efficiency", text=lambda share: f"{100 * share:.0f} %", level=1.0)


def draw_kinds(series: Sequence[Kinds]) -> Figure | None:
    """Return an operation's bus bandwidth against size, a line for each kind of group; None if nothing has a size."""
    lines: dict[str, dict[int, float]] = {}
    for one in series:
        for kind in one.rows:
            rate = one.rate(kind)
            if one.size_bytes and rate:
                lines.setdefault(kind.label, {})[one.size_bytes] = rate / cells.GIGA
    return _draw_lines([*lines.items()], RATE, plot.scale_sizes)


def draw_against_nodes(lines: Sequence[Line], scale: Scale, against: str = "nodes") -> Figure | None:
    """Return a quantity against the number of nodes, or of ranks, a line for each series; None if none has two."""
    known = [(label, points) for label, points in lines if len(points) > 1]
    return _draw_lines(known, scale, lambda axes, places: plot.scale_places(axes, places, against))


def _draw_lines(
    lines: Sequence[Line], scale: Scale, scale_level: Callable[[Axes, Sequence[int]], None]
) -> Figure | None:
    if not lines:
        return None
    names, handles = [label for label, _ in lines], []
    with plot.canvas(5.2, 3.2 + plot.legend_inches(names)) as (figure, [axes]):
        for i, (_, points) in enumerate(lines):
            places = sorted(points)
            handles += axes.plot(places, [points[place] for place in places], **plot.line_style(i))
        scale_level(axes, sorted({place for _, points in lines for place in points}))
        axes.set_ylabel(scale.words)
        if scale.level is None:
            plot.log_heights(axes, scale.text)
        else:
            axes.axhline(scale.level, color=INK, linewidth=0.8, linestyle=(0, (8, 3)))
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda y, _: scale.text(y))
        plot.add_legend(figure, handles, names)
    return figure


_MAX_NUMBERED = 10
_MAX_HOSTS, _HOST_LETTERS, _MAX_LEVEL = 16, 12, 4
_NODE_WIDTH, _SWITCH_WIDTH = 1.0, 2.2


def draw_pairs(matrix: Pairs, nodes: Nodes | None = None) -> Figure | None:
    """Return bus bandwidth from rank to rank as a heat map, with numbers if there is room; None if all is unknown.

    With ``nodes`` the ranks of a host stand side by side, with lines between hosts, and thick ones between switches:
    the slowest link stands out as the palest.
    """
    ranks = nodes.ordered(matrix.ranks) if nodes else matrix.ranks
    rates = [[matrix.rate(source, target) for target in ranks] for source in ranks]
    fastest = max((rate or 0.0 for row in rates for rate in row), default=0.0)
    if not fastest:
        return None
    words = cells.gigabytes if len(ranks) <= _MAX_NUMBERED else lambda _: ""
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
            is_switch = nodes.switches.get(one) != nodes.switches.get(other)
            for draw in (axes.axvline, axes.axhline):
                draw(place + 0.5, color=INK, linewidth=_SWITCH_WIDTH if is_switch else _NODE_WIDTH)
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
