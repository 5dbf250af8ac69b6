"""Lines: bandwidth and time against size, by nodes or ranks, and methods of context parallelism beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from bench.results.fit import Fit
from reports import cells
from reports.analysis.attention import Context
from reports.analysis.contrasts import Kinds
from reports.analysis.fits import Ceiling, Curve, size_of
from reports.analysis.labels import operation
from reports.analysis.summary import Row
from reports.figures import plot
from reports.figures.svg import INK, SERIES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a label, and its values by number of nodes or by size
Line = tuple[str, dict[int, float]]
_FIT_STYLE: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.8}
_FIT_STEPS = 24


def draw_curves(
    rows: Sequence[Row],
    quantity: Literal["busbw", "time"],
    curves: Sequence[Curve] = (),
    ceiling: Ceiling | None = None,
) -> Figure | None:
    """Return a quantity against size, intervals as bands; None if none is above zero: log axes show nothing else."""
    from matplotlib.lines import Line2D

    series: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        if (found := plot.extent(row.metrics.get(quantity))) and size_of(row) > 0:
            heights = [value / (cells.GIGA if quantity == "busbw" else 1.0) for value in found]
            series.setdefault(operation(row.case), []).append((size_of(row), *heights))
    if not series:
        return None
    names = [*series]
    with plot.canvas(5.2, 3.2 + plot.legend_inches(names)) as (figure, [axes]):
        handles: list[Artist] = []
        for i, points in enumerate(series.values()):
            sizes, values, lows, highs = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            handles += axes.plot(sizes, values, **plot.line_style(i))
            if len(points) == 1:
                axes.vlines(sizes, lows, highs, color=SERIES[i % len(SERIES)], linewidth=1)
            else:
                axes.fill_between(sizes, lows, highs, color=SERIES[i % len(SERIES)], alpha=0.15, linewidth=0)
        if quantity == "time" and curves:
            for curve in curves:
                _draw_fit(axes, curve.fit, SERIES[names.index(operation(curve.rows[0].case)) % len(SERIES)])
            handles.append(Line2D([], [], color=INK, **_FIT_STYLE))
            names.append("fit")
        elif quantity == "busbw" and ceiling:
            rate = ceiling.bytes_per_second
            handles.append(axes.axhline(rate / cells.GIGA, color=INK, linewidth=1, linestyle=(0, (8, 3))))
            names.append(f"{ceiling.name}, {cells.quantity(rate, 'B/s')}")
        plot.scale_sizes(axes, [point[0] for points in series.values() for point in points])
        plot.log_heights(axes, cells.duration if quantity == "time" else cells.significant)
        axes.set_ylabel("time" if quantity == "time" else "bus bandwidth (GB/s)")
        plot.add_legend(figure, handles, names)
    return figure


def _draw_fit(axes: Axes, fit: Fit, color: str) -> None:
    """Draw a fit broken at its knees, in points so close that a straight line reads as a curve on log axes."""
    ends = (fit.segments[0].first_bytes, *fit.knees, fit.segments[-1].last_bytes)
    for segment, (low, high) in zip(fit.segments, pairwise(ends), strict=True):
        sizes = [low * (high / low) ** (i / _FIT_STEPS) for i in range(_FIT_STEPS + 1)]
        axes.plot(sizes, [segment.seconds(size) for size in sizes], color=color, **_FIT_STYLE)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a figure's heights are; ``level`` is where a line says what is perfect; others are log axes."""

    words: str
    text: Callable[[float], str]
    level: float | None = None


RATE = Scale(words="bus bandwidth (GB/s)", text=cells.significant)
TIME = Scale(words="step time", text=cells.duration)
EFFICIENCY = Scale(words="efficiency", text=lambda share: f"{100 * share:.0f} %", level=1.0)


def draw_kinds(series: Sequence[Kinds]) -> Figure | None:
    lines: dict[str, dict[int, float]] = {}
    for one in series:
        for kind in one.rows:
            if one.size_bytes and (rate := one.rate(kind)):
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


_LOG_FROM_RATIO, _MOST_TICKS = 10.0, 5
_TIME = "step time"
_PANELS: tuple[tuple[str, Callable[[Context], float | None], Callable[[float], str]], ...] = (
    (_TIME, lambda one: one.row.value(one.row.headline), cells.duration),
    ("attention's bytes a rank sends in a step", lambda one: one.sent_bytes(), cells.num_bytes),
    ("exposed cp communication, of the traced step", lambda one: one.exposed_share, cells.percent),
)


def draw_methods(
    lines: Mapping[str, Sequence[Context]],
    against: Literal["sequence (tokens)", "cp (ranks)"] = "sequence (tokens)",
    crossover_ranks: float | None = None,
) -> Figure | None:
    """Return what is known of each method's steps against their length or ranks; None without two of those."""

    def place_of(one: Context) -> int:
        return one.ranks if against == "cp (ranks)" else one.facts.sequence

    places = sorted({place_of(one) for of in lines.values() for one in of})
    shown = [panel for panel in _PANELS if any(panel[1](one) is not None for of in lines.values() for one in of)]
    if len(places) < 2 or not shown:
        return None
    with plot.canvas(10.0, 3.4, columns=len(shown)) as (figure, panels):
        for axes, (title, value, words) in zip(panels, shown, strict=True):
            handles, heights = [], []
            for i, of in enumerate(lines.values()):
                points = [(place_of(one), found) for one in of if (found := value(one)) is not None]
                heights += [y for _, y in points]
                # the first ones are wider: those that later lines cover can still be seen around them
                style = plot.line_style(i, more=len(lines) - 1 - i)
                handles += axes.plot([x for x, _ in points], [y for _, y in points], **style)
                for one in of if title == _TIME else ():
                    if extent := plot.extent(one.row.metrics.get(one.row.headline)):
                        beside = place_of(one) * 1.02 ** (i - (len(lines) - 1) / 2)
                        axes.vlines(beside, *extent[1:], color=style["color"], linewidth=0.9)
            if words is cells.num_bytes and crossover_ranks is not None:
                axes.axvline(crossover_ranks, color=INK, linestyle=":", linewidth=1.0)
            plot.scale_places(axes, places[:: -(-len(places) // _MOST_TICKS)], against)
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
