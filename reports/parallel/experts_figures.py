"""Expert-parallel steps as heat maps: time and drop rate by routing and capacity, and tokens by rank and expert."""

import textwrap
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from reports import cells
from reports.figures import elided
from reports.labels import short_labels
from reports.parallel.experts import Mixture
from reports.parallel.experts_atlas import Atlas, Place
from reports.svg import INK, SERIES, drawing

_MOST_STRIPS = 40
_MOST_NUMBERED = 16
_MOST_TICKS = 16
_PALEST, _FULLEST = 0.06, 0.7

Value = Callable[[str, Place], float | None]
Words = Callable[[str, Place], str]


def draw_atlas(atlas: Atlas) -> Figure | None:
    """Return step times and drop rates by routing and capacity, the fuller of colour the more; None without times."""

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
        axes.set_xticks(range(0, most, -(-most // _MOST_TICKS)))
    return figure


def _time_words(atlas: Atlas, routing: str, place: Place) -> str:
    told = cells.duration(atlas.value(routing, place, "time"))
    factor = atlas.value(routing, place, "imbalance_slowdown")
    return told if factor is None else f"{told}\n{factor:.2f}x"


def _draw_grid(axes: Axes, atlas: Atlas, value: Value, words: Words, series: int) -> None:
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
    left, top, width, height = box
    alpha = _PALEST + (_FULLEST - _PALEST) * share
    axes.add_patch(Rectangle((left, top), width, height, color=SERIES[series], alpha=alpha, linewidth=0))
