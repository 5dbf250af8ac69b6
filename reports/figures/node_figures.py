"""Figures of several nodes: a kind of group against size, and rates, times and efficiency against nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.text import format_size
from reports import cells
from reports.analysis.group_kinds import Kinds
from reports.analysis.interference import Pairs
from reports.analysis.rank_hosts import Nodes
from reports.figures.figures import (
    LEGEND,
    MAX_RANK_TICKS,
    in_legend,
    legend_inches,
    line_style,
    num_columns,
    size_ticks,
    tick_format,
)
from reports.figures.svg import INK, SERIES, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a label, and its values by number of nodes or by size
Line = tuple[str, dict[int, float]]
_FEWEST_DECADES = 100


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a figure's heights are: the axis' words and how numbers on it are written; ``whole`` begins at zero.

    ``level`` is where a line says what would be perfect.
    """

    words: str
    text: Callable[[float], str]
    whole: bool = False
    level: float | None = None


RATE = Scale(words="bus bandwidth (GB/s)", text=cells.significant)
TIME = Scale(words="step time", text=cells.duration)
EFFICIENCY = Scale(words="efficiency", text=lambda share: f"{100 * share:.0f} %", whole=True, level=1.0)


def draw_kinds(series: Sequence[Kinds]) -> Figure | None:
    """Return an operation's bus bandwidth against size, a line for each kind of group; None if nothing has a size."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    lines: dict[str, dict[int, float]] = {}
    for one in series:
        for kind in one.rows:
            rate = one.rate(kind)
            if one.size_bytes and rate:
                lines.setdefault(kind.label, {})[one.size_bytes] = rate / cells.GIGA
    if not lines:
        return None
    figure, axes = _drawn(list(lines.items()), RATE)
    with drawing():
        sizes = [size for points in lines.values() for size in points]
        axes.xaxis.set_major_locator(FixedLocator(size_ticks(min(sizes), max(sizes))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
        axes.set_xlabel("size (bytes, 1024-based)")
    return figure


def draw_against_nodes(lines: Sequence[Line], scale: Scale) -> Figure | None:
    """Return a quantity against the number of nodes, a line for each series; None if none has two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    known = [(label, points) for label, points in lines if len(points) > 1]
    if not known:
        return None
    figure, axes = _drawn(known, scale)
    with drawing():
        axes.xaxis.set_major_locator(FixedLocator(sorted({n for _, points in known for n in points})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: str(round(x))))
        axes.set_xlabel("nodes")
    return figure


def _drawn(lines: Sequence[Line], scale: Scale) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    with drawing():
        names = in_legend([label for label, _ in lines])
        figure = Figure(figsize=(5.2, 3.2 + legend_inches(names)), layout="constrained")
        axes = figure.add_subplot()
        drawn = []
        for i, (_, points) in enumerate(lines):
            places = sorted(points)
            drawn += axes.plot(places, [points[place] for place in places], **line_style(i))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        _scale_heights(axes, scale)
        figure.legend(drawn, names, loc=LEGEND, ncols=num_columns(names))
    return figure, axes


def _scale_heights(axes: Axes, scale: Scale) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_ylabel(scale.words)
    if scale.level is not None:
        axes.axhline(scale.level, color=INK, linewidth=0.8, linestyle=(0, (8, 3)))
    if scale.whole:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: scale.text(y)))
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _FEWEST_DECADES else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(tick_format(scale.text))
    axes.yaxis.set_minor_locator(NullLocator())


_MAX_NUMBERED = 10
_MAX_HOSTS, _HOST_LETTERS, _MAX_LEVEL = 16, 12, 4
_NODE_WIDTH, _SWITCH_WIDTH = 1.0, 2.2


def draw_pairs(matrix: Pairs, nodes: Nodes | None = None) -> Figure | None:
    """Return bus bandwidth from rank to rank as a heat map, with numbers if there is room; None if all is unknown.

    With ``nodes`` the ranks of a host stand side by side, with lines between hosts, and thick ones between switches.
    """
    from matplotlib.figure import Figure

    order = {rank: place for place, rank in enumerate(nodes.by_node)} if nodes else {}
    ranks = tuple(sorted(matrix.ranks, key=lambda rank: order.get(rank, len(order))))
    rates = [[matrix.rate(source, target) for target in ranks] for source in ranks]
    known = [rate for row in rates for rate in row if rate]
    if not known:
        return None
    n = len(ranks)
    with drawing():
        figure = Figure(figsize=(5.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False)
        axes.set(xlabel="to rank", ylabel="from rank", xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), aspect="equal")
        places = range(0, n, -(-n // MAX_RANK_TICKS))
        axes.set_xticks(places, [str(ranks[place]) for place in places])
        axes.set_yticks(places, [str(ranks[place]) for place in places])
        for i, row in enumerate(rates):
            for j, rate in enumerate(row):
                if rate:
                    _draw_cell(axes, (i, j), rate, max(known), with_number=n <= _MAX_NUMBERED)
        if nodes is not None:
            _draw_borders(axes, ranks, nodes)
            _name_hosts(axes, ranks, nodes)
    return figure


def _draw_cell(axes: Axes, place: tuple[int, int], rate: float, fastest: float, *, with_number: bool) -> None:
    """Draw a square, the fuller of colour the faster: the slowest link stands out as the palest."""
    from matplotlib.patches import Rectangle

    i, j = place
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=SERIES[0], alpha=0.1 + 0.6 * rate / fastest, linewidth=0))
    if with_number:
        axes.text(j, i, cells.gigabytes(rate), ha="center", va="center")


def _draw_borders(axes: Axes, ranks: tuple[int, ...], nodes: Nodes) -> None:
    """Draw a line wherever neighbours are on two hosts, a thick one where they are under two switches."""
    hosts = _hosts(ranks, nodes)
    for place, (one, other) in enumerate(pairwise(hosts)):
        if one == other:
            continue
        is_switch = nodes.switches.get(one) != nodes.switches.get(other)
        width = _SWITCH_WIDTH if is_switch else _NODE_WIDTH
        axes.axvline(place + 0.5, color=INK, linewidth=width)
        axes.axhline(place + 0.5, color=INK, linewidth=width)


def _name_hosts(axes: Axes, ranks: tuple[int, ...], nodes: Nodes) -> None:
    """Write each host above and beside its ranks, where there is room for all."""
    hosts = _hosts(ranks, nodes)
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


def _hosts(ranks: tuple[int, ...], nodes: Nodes) -> list[str]:
    return [nodes.hosts[rank] if rank < len(nodes.hosts) else "" for rank in ranks]
