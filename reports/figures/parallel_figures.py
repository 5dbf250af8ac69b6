"""Context-parallel methods against sequence length or ranks: step time, bytes and exposed time side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reports import cells
from reports.analysis.attention import Context
from reports.analysis.experts import Atlas, Mixture, Place
from reports.analysis.labels import short_labels
from reports.figures.figures import elided
from reports.figures.svg import INK, SERIES, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

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
    from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator

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


_MOST_STRIPS = 40
_MOST_NUMBERED = 16
_MOST_TICKS_OF_EXPERTS = 16
_PALEST, _FULLEST = 0.06, 0.7

PlaceValue = Callable[[str, Place], float | None]
PlaceWords = Callable[[str, Place], str]


def draw_atlas(atlas: Atlas) -> Figure | None:
    """Return step times and drop rates by routing and capacity, the fuller of colour the more; None without times."""
    from matplotlib.figure import Figure

    def seconds(routing: str, place: Place) -> float | None:
        return atlas.value(routing, place, "time")

    def dropped(routing: str, place: Place) -> float | None:
        return atlas.value(routing, place, "drop_rate")

    if not any(seconds(*cell) for cell in atlas.cells):
        return None
    with drawing():
        figure = Figure(figsize=(10.0, 1.3 + 0.42 * len(atlas.routings)), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_grid(left, atlas, seconds, lambda routing, place: _time_words(atlas, routing, place), 1)
        left.set_title("step time, and over balanced routes", fontsize=9)
        _draw_grid(right, atlas, dropped, lambda routing, place: cells.percent(dropped(routing, place)), 3)
        right.set_title("pairs dropped", fontsize=9)
    return figure


def draw_loads(found: Sequence[Mixture]) -> Figure | None:
    """Return a strip of experts for each step and layer, rank by rank, the fuller of colour the more tokens chose it.

    Colours are shares of the mean load times three: what has three times its share or more is full.
    """
    from matplotlib.figure import Figure

    labels = short_labels([one.row for one in found])
    strips = [
        (f"{labels[one.row.case.id]}{f' layer {layer}' if len(one.layers) > 1 else ''}", one, load)
        for one in found
        for layer in one.layers
        if sum(load := one.facts.expert_load[layer])
    ][:_MOST_STRIPS]
    if not strips:
        return None
    most = max(len(load) for _, _, load in strips)
    with drawing():
        figure = Figure(figsize=(10.0, 1.0 + 0.3 * len(strips)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False)
        for place, (_, one, load) in enumerate(strips):
            _draw_strip(axes, place, one, load)
        axes.set_yticks(range(len(strips)), [elided(label) for label, _, _ in strips])
        axes.set(xlabel="expert", xlim=(-0.5, most - 0.5), ylim=(len(strips) - 0.5, -0.5))
        axes.set_xticks(range(0, most, -(-most // _MOST_TICKS_OF_EXPERTS)))
    return figure


def _time_words(atlas: Atlas, routing: str, place: Place) -> str:
    told = cells.duration(atlas.value(routing, place, "time"))
    factor = atlas.value(routing, place, "imbalance_slowdown")
    return told if factor is None else f"{told}\n{factor:.2f}x"


def _draw_grid(axes: Axes, atlas: Atlas, value: PlaceValue, words: PlaceWords, series: int) -> None:
    """Draw a cell for each routing and place, shaded from nothing to the most."""
    axes.grid(visible=False)
    known = [found for cell in atlas.cells if (found := value(*cell)) is not None]
    most = max(known, default=0.0)
    for i, routing in enumerate(atlas.routings):
        for j, place in enumerate(atlas.places):
            found = value(routing, place)
            if found is not None:
                _draw_cell(axes, (j - 0.5, i - 0.5, 1.0, 1.0), found / most if most else 0.0, series)
            axes.text(j, i, words(routing, place), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(atlas.routings)), [textwrap.shorten(one, 24) for one in atlas.routings])
    names = [atlas.name_of(place).replace(", ", "\n") for place in atlas.places]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(xlim=(-0.5, len(atlas.places) - 0.5), ylim=(len(atlas.routings) - 0.5, -0.5))


def _draw_strip(axes: Axes, place: int, one: Mixture, load: Sequence[int]) -> None:
    """Draw a mixture's experts side by side, with a line where one rank's end and the next one's begin."""
    mean = sum(load) / len(load)
    for expert, tokens in enumerate(load):
        _draw_cell(axes, (expert - 0.5, place - 0.42, 1.0, 0.84), min(1.0, tokens / (3 * mean)), 0)
        if len(load) <= _MOST_NUMBERED:
            axes.text(expert, place, str(tokens), ha="center", va="center", fontsize=7)
    each = len(load) // one.ep
    edges = [rank * each - 0.5 for rank in range(1, one.ep)]
    axes.vlines(edges, place - 0.42, place + 0.42, color=INK, linewidth=1.4)


def _draw_cell(axes: Axes, box: tuple[float, float, float, float], share: float, series: int) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    alpha = _PALEST + (_FULLEST - _PALEST) * share
    axes.add_patch(Rectangle((left, top), width, height, color=SERIES[series], alpha=alpha, linewidth=0))
