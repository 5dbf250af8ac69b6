"""Figures of context and expert parallelism: methods against length or ranks, routings by capacity, experts' loads."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports import cells
from reports.analysis.attention import Context
from reports.analysis.experts import Atlas, Mixture, Place
from reports.analysis.labels import short_labels
from reports.figures import plot
from reports.figures.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM_RATIO = 10.0
_MOST_TICKS, _MOST_STRIPS, _MOST_NUMBERED = 5, 40, 16
_TIME = "step time"
_PANELS: tuple[tuple[str, Callable[[Context], float | None], Callable[[float], str]], ...] = (
    (_TIME, lambda one: one.row.value(one.row.headline), cells.duration),
    ("attention's bytes a rank sends in a step", lambda one: one.sent_bytes(), cells.num_bytes),
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
    shown = [panel for panel in _PANELS if any(panel[1](one) is not None for of in lines.values() for one in of)]
    if len(places) < 2 or not shown:
        return None
    with plot.canvas(10.0, 3.4, columns=len(shown)) as (figure, panels):
        for axes, (title, value, words) in zip(panels, shown, strict=True):
            handles, heights = [], []
            for i, of in enumerate(lines.values()):
                points = [(against.of(one), found) for one in of if (found := value(one)) is not None]
                heights += [y for _, y in points]
                # the first ones are wider: those that later lines cover can still be seen around them
                style = plot.line_style(i, more=len(lines) - 1 - i)
                handles += axes.plot([x for x, _ in points], [y for _, y in points], **style)
                if title == _TIME:
                    _draw_intervals(axes, of, against, 1.02 ** (i - (len(lines) - 1) / 2), style["color"])
            if words is cells.num_bytes and against.mark is not None:
                axes.axvline(against.mark, color=INK, linestyle=":", linewidth=1.0)
            plot.scale_places(axes, places[:: -(-len(places) // _MOST_TICKS)], against.words)
            axes.set_xlim(places[0] / 1.15, places[-1] * 1.15)
            # heights compare from zero on, unless the lowest could not be seen
            if min(heights) > 0 and max(heights) / min(heights) > _LOG_FROM_RATIO:
                title = f"{title} (log axis)"
                plot.log_heights(axes, words)
            else:
                top = max(axes.get_ylim()[1], 1.06 * max(heights), 1e-9)
                axes.set_ylim(0, top)
                plot.even_ticks(axes.yaxis, top, words)
            axes.set_title(title, fontsize=9)
        plot.add_legend(figure, handles, [*lines], columns=min(5, len(lines)))
    return figure


def _draw_intervals(axes: Axes, of: Sequence[Context], against: Against, beside: float, color: str) -> None:
    """Draw the intervals of step times as bars, each method's a little beside the others'."""
    for one in of:
        metric = one.row.metrics.get(one.row.headline)
        if metric is not None and metric.low is not None and metric.high is not None:
            axes.vlines(against.of(one) * beside, metric.low, metric.high, color=color, linewidth=0.9)


def draw_atlas(atlas: Atlas) -> Figure | None:
    """Return step times and drop rates by routing and capacity, the fuller of colour the more; None without times."""
    if not any(atlas.value(*cell, "time") for cell in atlas.cells):
        return None
    panels = (("step time, and over balanced routes", "time", 1), ("pairs dropped", "drop_rate", 3))
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


def _cell(atlas: Atlas, cell: tuple[str, Place], name: str, most: float) -> tuple[float | None, str]:
    value = atlas.value(*cell, name)
    words = cells.duration(value) if name == "time" else cells.percent(value)
    factor = atlas.value(*cell, "imbalance_slowdown") if name == "time" else None
    return None if value is None else value / most, words if factor is None else f"{words}\n{factor:.2f}x"


def draw_loads(found: Sequence[Mixture]) -> Figure | None:
    """Return a strip of experts for each step and layer, rank by rank, the fuller of colour the more tokens chose it.

    Colours are shares of the mean load times three: what has three times its share or more is full.
    """
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
            rows.append([(min(1.0, n / full), str(n) if len(load) <= _MOST_NUMBERED else "") for n in load])
            edges = [rank * (len(load) // ranks) - 0.5 for rank in range(1, ranks)]
            axes.vlines(edges, place - 0.42, place + 0.42, color=INK, linewidth=1.4)
        plot.heat_map(axes, rows, 0, height=0.84)
        plot.name_ranks(axes.xaxis, range(max(map(len, rows))))
        axes.set_xlabel("expert")
        plot.name_rows(axes, [label for label, _, _ in strips])
    return figure
