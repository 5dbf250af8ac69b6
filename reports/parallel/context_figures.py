"""Context-parallel methods against sequence length or ranks: step time, bytes and exposed time side by side."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from reports import cells
from reports.parallel.context import Context
from reports.svg import INK, SERIES, drawing

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_LOG_FROM_RATIO = 10.0
_MOST_TICKS = 5


def _bytes(value: float) -> str:
    return cells.quantity(value, "B")


Value = Callable[[Context], float | None]
Words = Callable[[float], str]
_AXES: tuple[tuple[str, Value, Words], ...] = (
    ("step time", lambda one: one.row.value(one.row.headline), cells.duration),
    ("attention's bytes a rank sends in a step", lambda one: one.sent_bytes(), _bytes),
    ("exposed cp communication", lambda one: one.exposed_seconds, cells.duration),
)


@dataclass(frozen=True, kw_only=True)
class Against:
    """What the steps are drawn against; ``mark`` is where on it an upright line stands on the bytes."""

    words: str
    of: Callable[[Context], int]
    mark: float | None = None


SEQUENCE = Against(words="sequence (tokens)", of=lambda one: one.facts.sequence)


def against_ranks(crossover_ranks: float | None) -> Against:
    """Return cp, with a line above which Ulysses sends less than a ring."""
    return Against(words="cp (ranks)", of=lambda one: one.ranks, mark=crossover_ranks)


def draw_methods(lines: Mapping[str, Sequence[Context]], against: Against = SEQUENCE) -> Figure | None:
    """Return what is known of each method's steps against their length or ranks; None without two of those."""
    places = sorted({against.of(one) for of in lines.values() for one in of})
    shown = [axis for axis in _AXES if any(axis[1](one) is not None for of in lines.values() for one in of)]
    if len(places) < 2 or not shown:
        return None
    with drawing():
        figure = Figure(figsize=(10.0, 3.4), layout="constrained")
        for place, (title, value, words) in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), place + 1)
            for i, of in enumerate(lines.values()):
                _draw_line(axes, _style(i, len(lines)), of, value, against)
            _draw_intervals(axes, lines, value, against)
            if words is _bytes and against.mark is not None:
                axes.axvline(against.mark, color=INK, linestyle=":", linewidth=1.0)
            found = [y for of in lines.values() for one in of if (y := value(one)) is not None]
            axes.set_title(title, fontsize=9)
            _label(axes, places, found, words, against.words)
        handles = [Line2D([], [], **_style(i, len(lines))) for i in range(len(lines))]
        figure.legend(handles, list(lines), loc="outside upper center", ncols=min(5, len(lines)))
    return figure


def _draw_line(axes: Axes, style: Mapping[str, Any], of: Sequence[Context], value: Value, against: Against) -> None:
    points = [(against.of(one), found) for one in of if (found := value(one)) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], **style)


def _draw_intervals(axes: Axes, lines: Mapping[str, Sequence[Context]], value: Value, against: Against) -> None:
    """Draw the intervals of step times as bars, each method's a little beside the others'."""
    if value is not _AXES[0][1]:
        return
    for i, of in enumerate(lines.values()):
        beside = 1.02 ** (i - (len(lines) - 1) / 2)
        for one in of:
            metric = one.row.metrics.get(one.row.headline)
            if metric is not None and metric.low is not None and metric.high is not None:
                color = SERIES[i % len(SERIES)]
                axes.vlines(against.of(one) * beside, metric.low, metric.high, color=color, linewidth=0.9)


def _style(index: int, count: int) -> dict[str, Any]:
    """Return a line's looks, the first ones wider: those that later lines cover can still be seen around them."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markersize": 4.0 + 1.5 * (count - 1 - index),
        "linewidth": 1.2 + 0.8 * (count - 1 - index),
    }


def _label(axes: Axes, places: Sequence[int], values: Sequence[float], words: Words, name: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(places[0] / 1.15, places[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(places[:: -(-len(places) // _MOST_TICKS)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)
    _scale(axes, values, in_bytes=words is _bytes)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(words(y))))


def _scale(axes: Axes, values: Sequence[float], *, in_bytes: bool) -> None:
    """Begin at zero, where heights compare; take a log axis where the lowest could not be seen."""
    if min(values) > 0 and max(values) / min(values) > _LOG_FROM_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.set_title(f"{axes.get_title()} (log axis)", fontsize=9)
    else:
        top = max(axes.get_ylim()[1], 1.06 * max(values), 1e-9)
        axes.set_ylim(0, top)
        whole = MultipleLocator(2.0 ** math.ceil(math.log2(top / _MOST_TICKS)))
        axes.yaxis.set_major_locator(whole if in_bytes else MaxNLocator(_MOST_TICKS))


def _short(text: str) -> str:
    """Return a quantity without the noughts that three digits would end in."""
    number, _, unit = text.partition(" ")
    return f"{float(number):.12g} {unit}" if float(number) else "0"
