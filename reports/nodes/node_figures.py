"""Figures of several nodes: a kind of group against size, and rates, times and efficiency against nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from bench.text import format_size
from reports import cells
from reports.figures import LEGEND, in_legend, legend_inches, line_style, num_columns, size_ticks, tick_format
from reports.nodes.group_kinds import Kinds
from reports.svg import INK, drawing

Lines = Sequence[tuple[str, Mapping[int, float]]]
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


def draw_against_nodes(lines: Lines, scale: Scale) -> Figure | None:
    """Return a quantity against the number of nodes, a line for each series; None if none has two."""
    known = [(label, points) for label, points in lines if len(points) > 1]
    if not known:
        return None
    figure, axes = _drawn(known, scale)
    with drawing():
        axes.xaxis.set_major_locator(FixedLocator(sorted({n for _, points in known for n in points})))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: str(round(x))))
        axes.set_xlabel("nodes")
    return figure


def _drawn(lines: Lines, scale: Scale) -> tuple[Figure, Axes]:
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
