"""What figures share: canvases, legends, the looks of lines, axes with their ticks, and heat maps with numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.results.metrics import MetricValue
from bench.text import format_size
from reports import cells
from reports.figures.svg import SERIES, drawing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# of different lengths, so that series differ in all three long before any combination returns
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_MAX_TICKS, _MAX_RANK_TICKS, _MAX_SIZE_TICKS = 5, 16, 8
_LEGEND_LETTERS, _MOST_LETTERS, _LINE_LETTERS, _LEGEND_LINE_INCHES = 26, 72, 72, 0.18
_PALEST, _FULLEST = 0.08, 0.7
Square = tuple[float | None, str]


@contextmanager
def canvas(width: float, height: float, columns: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of so many inches with its panels."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend_inches(names: Sequence[str]) -> float:
    """Return the height of a legend of these names and one or two more."""
    return _LEGEND_LINE_INCHES * math.ceil((len(names) + 2) / _num_columns(_in_legend(names)))


def add_legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str], columns: int | None = None) -> None:
    shown = _in_legend(names) if columns is None else names
    figure.legend(handles, shown, loc="outside upper center", ncols=columns or _num_columns(shown))


def _in_legend(names: Sequence[str]) -> list[str]:
    """Return names short enough for two columns, or whole where short ones could not be told apart."""
    short = [name if len(name) <= _LEGEND_LETTERS else f"{name[: _LEGEND_LETTERS - 3]}..." for name in names]
    return short if len(set(short)) == len(short) else [name[:_MOST_LETTERS] for name in names]


def _num_columns(names: Sequence[str]) -> int:
    """Return how many of the longest names, with their markers, stand side by side without leaving the figure."""
    return max(1, min(3, _LINE_LETTERS // (max(map(len, names)) + 8)))


def line_style(index: int, more: float = 0.0) -> dict[str, Any]:
    """Return how the line of a place in the legend is drawn, some larger: colour, marker and dash differ together."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markersize": 4.5 + 1.5 * more,
        "linewidth": 1.4 + 0.8 * more,
    }


def extent(metric: MetricValue | None) -> tuple[float, float, float] | None:
    """Return value, low and high, the value thrice without an interval above zero; None if it is not above zero."""
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    if metric.low is None or metric.high is None or metric.low <= 0:
        return metric.value, metric.value, metric.value
    return metric.value, metric.low, metric.high


def elided(label: str, most: int = 48) -> str:
    """Return a label that fits: its first word and its last ones, which tell it apart."""
    if len(label) <= most:
        return label
    [head, *rest] = label.split(" ")
    while rest and len(f"{head} ... {' '.join(rest)}") > most:
        rest.pop(0)
    return f"{head} ... {' '.join(rest)}" if rest else textwrap.shorten(label, most)


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [elided(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def name_ranks(axis: Axis, ranks: Sequence[int]) -> None:
    places = range(0, len(ranks), -(-len(ranks) // _MAX_RANK_TICKS))
    axis.set_ticks(places, labels=[str(ranks[place]) for place in places])


def heat_map(
    axes: Axes, rows: Sequence[Sequence[Square]], series: int, *, height: float = 1.0, fontsize: float = 7.0
) -> None:
    """Draw rows of squares from the top, each so full of the colour as its share says, with its words; None as none."""
    from matplotlib.patches import Rectangle

    axes.grid(visible=False)
    axes.set(xlim=(-0.5, max(map(len, rows)) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    for i, row in enumerate(rows):
        for j, (share, words) in enumerate(row):
            if share is not None:
                alpha = round(_PALEST + (_FULLEST - _PALEST) * share, 3)
                square = (j - 0.5, i - height / 2), 1, height
                axes.add_patch(Rectangle(*square, color=SERIES[series], alpha=alpha, linewidth=0))
            if words:
                axes.text(j, i, words, ha="center", va="center", fontsize=fontsize)


def scale_places(axes: Axes, places: Sequence[float], name: str, words: Callable[[float], str] = cells.whole) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(lambda x, _: words(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)


def scale_sizes(axes: Axes, sizes: Sequence[float]) -> None:
    """Make the level axis a log one of sizes, with ticks at powers of two, few enough to be read side by side."""
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = max(1, math.ceil((last - first + 1) / _MAX_SIZE_TICKS))
    ticks = [2.0**exponent for exponent in range(first, last + 1, step)]
    scale_places(axes, ticks, "size (bytes, 1024-based)", lambda x: format_size(round(x)))


def log_heights(axes: Axes, words: Callable[[float], str]) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    log_ticks(axes.yaxis, words, (1.0,) if high / low > 100 else (1.0, 2.0, 5.0))


def log_ticks(axis: Axis, words: Callable[[float], str], factors: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=factors))
    axis.set_major_formatter(lambda value, _: _brief(words(value)))
    axis.set_minor_locator(NullLocator())


def even_ticks(axis: Axis, longest: float, words: Callable[[float], str]) -> None:
    """Put a few ticks from zero on, of bytes at multiples of a power of two."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    binary = MultipleLocator(2.0 ** math.ceil(math.log2(longest / _MAX_TICKS)))
    axis.set_major_locator(binary if words is cells.num_bytes else MaxNLocator(_MAX_TICKS))
    axis.set_major_formatter(lambda value, _: _brief(words(value)))


def _brief(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f"{float(number):.12g} {unit}".rstrip() if float(number) else "0"
