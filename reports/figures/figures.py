"""The figures: bandwidth and time against size, step times launch by launch, and where they went."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from bench.results.fit import Fit
from bench.results.metrics import MetricValue
from bench.text import format_size
from reports import cells
from reports.analysis.fits import Ceiling, Curve, size_of
from reports.analysis.labels import operation, short_labels
from reports.analysis.step_parts import broken_down, memory_lines, parts
from reports.analysis.summary import Row
from reports.figures.svg import INK, SERIES, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter

Quantity = Literal["busbw", "time"]

# of different lengths, so that series differ in all three long before any combination returns
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_FIT_STYLE: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.8}
_FIT_STEPS = 24
_MAX_SIZE_TICKS = 8
MAX_RANK_TICKS = 16
_LOG_FROM_RATIO, _MANY_DECADES = 10, 1000
_MIN_LABELLED = 0.12
_MAX_TIME_TICKS = 5
_MAX_LATE, _MAX_LAUNCHES = 8, 20
LEGEND: Literal["outside upper center"] = "outside upper center"
_LEGEND_LETTERS, _MOST_LETTERS, _LINE_LETTERS, _LEGEND_LINE_INCHES = 26, 72, 72, 0.18
_AXIS = {"busbw": "bus bandwidth (GB/s)", "time": "time"}


def draw_curves(
    rows: Sequence[Row], quantity: Quantity, curves: Sequence[Curve] = (), ceiling: Ceiling | None = None
) -> Figure | None:
    """Return a quantity against size on log axes, a line for each operation with its interval as a band.

    Fits of the same rows are thin dashed lines of time, a ceiling a level line of bus bandwidth. None if no row
    has size and quantity above zero: a log axis shows nothing else.
    """
    from matplotlib.figure import Figure

    series: dict[str, list[Row]] = {}
    for row in rows:
        if _is_drawable(row.metrics.get(quantity)) and size_of(row) > 0:
            series.setdefault(operation(row.case), []).append(row)
    if not series:
        return None
    with drawing():
        figure = Figure(figsize=(5.2, 3.2 + legend_inches([*series])), layout="constrained")
        axes = figure.add_subplot()
        lines = [_draw_line(axes, i, sorted(of, key=size_of), quantity) for i, of in enumerate(series.values())]
        models = _draw_fits(axes, list(series), curves) if quantity == "time" else _draw_ceiling(axes, ceiling)
        _label_axes(axes, [size_of(row) for of in series.values() for row in of], quantity)
        names = in_legend([*series, *models])
        figure.legend([*lines, *models.values()], names, loc=LEGEND, ncols=num_columns(names))
    return figure


def draw_steps(rows: Sequence[Row]) -> Figure | None:
    """Return step times: for each step the first launches' medians with intervals, and below them all launches'."""
    from matplotlib.figure import Figure

    drawable = [row for row in rows if _is_drawable(row.metrics.get(row.headline))]
    if not drawable:
        return None
    labels = short_labels(rows)
    with drawing():
        figure = Figure(figsize=(5.2, 1.0 + 0.5 * len(drawable)), layout="constrained")
        axes = figure.add_subplot()
        for place, row in enumerate(drawable):
            _draw_step(axes, place, row)
        _name_places(axes, [labels[row.case.id] for row in drawable])
        _scale_times(axes, [value for row in drawable for value in _extent(row)])
    return figure


def draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    """Return a bar for each traced step, stacked of its known parts; None where none is above zero."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = {row.case.id: {name: value for name, value in parts(row).items() if value > 0} for row in broken_down(rows)}
    bars = [row for row in rows if known.get(row.case.id)]
    if not bars:
        return None
    labels = short_labels(rows)
    stacks = [known[row.case.id] for row in bars]
    names = _merged_order([list(parts(row)) for row in bars], {name for stack in stacks for name in stack})
    longest = max(sum(stack.values()) for stack in stacks)
    with drawing():
        figure = Figure(figsize=(5.2, 1.4 + 0.5 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        patches = [_draw_part(axes, i, name, stacks, names, longest) for i, name in enumerate(names)]
        _name_places(axes, [labels[row.case.id] for row in bars])
        axes.set_xlim(0, longest * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(_MAX_TIME_TICKS))
        axes.xaxis.set_major_formatter(tick_format(cells.duration))
        axes.set_xlabel("time of a traced step")
        figure.legend(patches, names, loc=LEGEND, ncols=3)
    return figure


def draw_memory(rows: Sequence[Row]) -> Figure | None:
    """Return a bar for each step, stacked of the components whose memory was measured; None where there are none."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    lines = [line for line in memory_lines(rows) if (line.num_bytes("memory") or 0) > 0]
    bars = [row for row in rows if any(line.row is row for line in lines)]
    if not bars:
        return None
    labels = short_labels(rows)
    stacks = [{one.component: one.num_bytes("memory") or 0.0 for one in lines if one.row is row} for row in bars]
    names = list(dict.fromkeys(name for stack in stacks for name in stack))
    longest = max(sum(stack.values()) for stack in stacks)
    with drawing():
        figure = Figure(figsize=(5.2, 1.4 + 0.5 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        patches = [_draw_part(axes, i, name, stacks, names, longest) for i, name in enumerate(names)]
        _name_places(axes, [labels[row.case.id] for row in bars])
        axes.set_xlim(0, longest * 1.06)
        axes.xaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(longest / _MAX_TIME_TICKS))))
        axes.xaxis.set_major_formatter(tick_format(lambda value: cells.quantity(value, "B")))
        axes.set_xlabel("memory of the fullest rank")
        figure.legend(patches, names, loc=LEGEND, ncols=3)
    return figure


def draw_arrivals(strips: Sequence[tuple[str, Mapping[int, float]]]) -> Figure | None:
    """Return a strip for each case, a cell for each rank, the fuller the later it arrives; None if no rank is known.

    Each strip is scaled by its own latest rank, which is what it names.
    """
    from matplotlib.figure import Figure

    known = [(label, late) for label, late in strips if late]
    if not known:
        return None
    ranks = sorted({rank for _, late in known for rank in late})
    with drawing():
        figure = Figure(figsize=(5.2, 1.0 + 0.26 * len(known)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False)
        for place, (_, late) in enumerate(known):
            latest = max(late.values())
            for rank, seconds in late.items():
                _draw_late(axes, (place, ranks.index(rank)), seconds, latest, with_number=len(ranks) <= _MAX_LATE)
        places = range(0, len(ranks), -(-len(ranks) // MAX_RANK_TICKS))
        axes.set_xticks(places, [str(ranks[place]) for place in places])
        axes.set(xlabel="rank", xlim=(-0.5, len(ranks) - 0.5))
        _name_places(axes, [label for label, _ in known])
    return figure


def draw_scaling(lines: Sequence[tuple[str, Mapping[int, float]]]) -> Figure | None:
    """Return efficiency against ranks, a line for each case; None if none has two worlds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    known = [(label, points) for label, points in lines if len(points) > 1]
    if not known:
        return None
    ranks = sorted({n for _, points in known for n in points})
    with drawing():
        names = in_legend([label for label, _ in known])
        figure = Figure(figsize=(5.2, 3.2 + legend_inches(names)), layout="constrained")
        axes = figure.add_subplot()
        drawn = [_draw_efficiency(axes, i, points) for i, (_, points) in enumerate(known)]
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ranks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: str(round(x))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (8, 3)))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
        axes.set(xlabel="ranks", ylabel="efficiency")
        figure.legend(drawn, names, loc=LEGEND, ncols=num_columns(names))
    return figure


def _draw_efficiency(axes: Axes, index: int, points: Mapping[int, float]) -> Line2D:
    ranks = sorted(points)
    (line,) = axes.plot(ranks, [points[n] for n in ranks], **line_style(index))
    return line


def _draw_late(axes: Axes, place: tuple[int, int], seconds: float, latest: float, *, with_number: bool) -> None:
    from matplotlib.patches import Rectangle

    i, j = place
    share = seconds / latest if latest else 0.0
    square = Rectangle((j - 0.5, i - 0.4), 1, 0.8, color=SERIES[1], alpha=0.08 + 0.6 * share, linewidth=0)
    axes.add_patch(square)
    if with_number:
        axes.text(j, i, cells.duration(seconds), ha="center", va="center", fontsize=7)


def in_legend(names: Sequence[str]) -> list[str]:
    """Return names short enough for two columns, or whole where short ones could not be told apart."""
    short = [name if len(name) <= _LEGEND_LETTERS else f"{name[: _LEGEND_LETTERS - 3]}..." for name in names]
    return short if len(set(short)) == len(short) else [name[:_MOST_LETTERS] for name in names]


def num_columns(names: Sequence[str]) -> int:
    """Return how many of the longest names, with their markers, stand side by side without leaving the figure."""
    return max(1, min(3, _LINE_LETTERS // (max(map(len, names)) + 8)))


def legend_inches(names: Sequence[str]) -> float:
    """Return the height of a legend of these names and one or two more."""
    shown = in_legend(names)
    return _LEGEND_LINE_INCHES * math.ceil((len(shown) + 2) / num_columns(shown))


def _merged_order(lists: Sequence[Sequence[str]], drawn: set[str]) -> list[str]:
    """Return the drawn parts in an order that all bars share: computing first, then every axis, copy and idle last."""
    found = dict.fromkeys(name for one in lists for name in one if name in drawn)
    return sorted(found, key=lambda name: (name != "compute", name == "idle", name == "copy"))


def _draw_part(
    axes: Axes, index: int, name: str, stacks: Sequence[dict[str, float]], names: Sequence[str], longest: float
) -> Rectangle:
    """Draw one part of every bar, with its share where there is room; return what stands for it in the legend."""
    from matplotlib.patches import Rectangle

    style: dict[str, Any] = {"color": SERIES[index % len(SERIES)], "alpha": 0.55, "linewidth": 0}
    for place, stack in enumerate(stacks):
        width = stack.get(name, 0.0)
        left = sum(stack.get(before, 0.0) for before in names[:index])
        if width:
            axes.barh(place, width, left=left, height=0.6, **style)
        if width > _MIN_LABELLED * longest:
            share = f"{100 * width / sum(stack.values()):.0f} %"
            axes.text(left + width / 2, place, share, ha="center", va="center")
    return Rectangle((0, 0), 1, 1, **style)


def elided(label: str, most: int = 48) -> str:
    """Return a label that fits: its first word and its last ones, which tell it apart."""
    if len(label) <= most:
        return label
    [head, *rest] = label.split(" ")
    while rest and len(f"{head} ... {' '.join(rest)}") > most:
        rest.pop(0)
    return f"{head} ... {' '.join(rest)}" if rest else textwrap.shorten(label, most)


def _name_places(axes: Axes, labels: Sequence[str]) -> None:
    """Write what stands at each height, from the top."""
    axes.set_yticks(range(len(labels)), [elided(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def line_style(index: int) -> dict[str, Any]:
    """Return how the line of a place in the legend is drawn: colour, marker and dash differ together."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markersize": 4.5,
        "linewidth": 1.4,
    }


def _draw_line(axes: Axes, index: int, rows: Sequence[Row], quantity: Quantity) -> Line2D:
    color = SERIES[index % len(SERIES)]
    metrics = [row.metrics[quantity] for row in rows]
    sizes = [size_of(row) for row in rows]
    scale = cells.GIGA if quantity == "busbw" else 1.0
    (line,) = axes.plot(
        sizes,
        [_known(metric.value) / scale for metric in metrics],
        **line_style(index),
    )
    bounds = [_bounds(metric) for metric in metrics]
    lows = [low / scale for low, _ in bounds]
    highs = [high / scale for _, high in bounds]
    if len(rows) == 1:
        axes.vlines(sizes, lows, highs, color=color, linewidth=1)
    else:
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.15, linewidth=0)
    return line


def _draw_fits(axes: Axes, names: Sequence[str], curves: Sequence[Curve]) -> dict[str, Line2D]:
    """Draw fits in their operations' colours, broken at knees; return what the legend says of them."""
    from matplotlib.lines import Line2D

    for curve in curves:
        color = SERIES[names.index(operation(curve.rows[0].case)) % len(SERIES)]
        for sizes, seconds in _fitted_lines(curve.fit):
            axes.plot(sizes, seconds, color=color, **_FIT_STYLE)
    return {"fit": Line2D([], [], color=INK, **_FIT_STYLE)} if curves else {}


def _fitted_lines(fit: Fit) -> list[tuple[list[float], list[float]]]:
    """Return sizes and seconds of each line, so close that a straight line reads as the curve it is on log axes."""
    ends = (fit.segments[0].first_bytes, *fit.knees, fit.segments[-1].last_bytes)
    drawn = []
    for segment, (low, high) in zip(fit.segments, pairwise(ends), strict=True):
        sizes = [low * (high / low) ** (i / _FIT_STEPS) for i in range(_FIT_STEPS + 1)]
        drawn.append((sizes, [segment.seconds(size) for size in sizes]))
    return drawn


def _draw_ceiling(axes: Axes, ceiling: Ceiling | None) -> dict[str, Line2D]:
    """Draw the ceiling where it is known; return what the legend says of it."""
    if ceiling is None:
        return {}
    line = axes.axhline(ceiling.bytes_per_second / cells.GIGA, color=INK, linewidth=1, linestyle=(0, (8, 3)))
    return {f"{ceiling.name}, {cells.quantity(ceiling.bytes_per_second, 'B/s')}": line}


def _label_axes(axes: Axes, sizes: Sequence[int], quantity: Quantity) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(size_ticks(min(sizes), max(sizes))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(tick_format(cells.duration if quantity == "time" else cells.significant))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("size (bytes, 1024-based)")
    axes.set_ylabel(_AXIS[quantity])


def size_ticks(smallest: int, largest: int) -> list[float]:
    """Return powers of two around the sizes, few enough to be read side by side."""
    first, last = math.floor(math.log2(smallest)), math.ceil(math.log2(largest))
    step = max(1, math.ceil((last - first + 1) / _MAX_SIZE_TICKS))
    return [2.0**exponent for exponent in range(first, last + 1, step)]


def tick_format(words: Callable[[float], str]) -> FuncFormatter:
    """Return a writer of ticks without noughts that say nothing."""
    from matplotlib.ticker import FuncFormatter

    def short(value: float, _: object) -> str:
        number, _blank, unit = words(value).partition(" ")
        return f"{float(number):.12g} {unit}".rstrip() if value else "0"

    return FuncFormatter(short)


def _draw_step(axes: Axes, place: int, row: Row) -> None:
    launches = [record.metrics[row.headline] for record in row.measured if row.headline in record.metrics]
    if len(launches) == 1:
        _draw_interval(axes, place, row.metrics[row.headline], SERIES[1], "D", 5.5, 1.8)
        return
    drawable = [metric for metric in launches if _is_drawable(metric)][:_MAX_LAUNCHES]
    for i, metric in enumerate(drawable):
        _draw_interval(axes, place - 0.32 + 0.42 * i / max(1, len(drawable) - 1), metric, SERIES[0], "o", 3.5, 0.9)
    _draw_interval(axes, place + 0.25, row.metrics[row.headline], SERIES[1], "D", 5.5, 1.8)


def _draw_interval(
    axes: Axes, height: float, metric: MetricValue, color: str, marker: str, markersize: float, linewidth: float
) -> None:
    low, high = _bounds(metric)
    axes.hlines([height], low, high, color=color, linewidth=linewidth)
    axes.plot([_known(metric.value)], [height], color=color, marker=marker, markersize=markersize, linestyle="none")


def _extent(row: Row) -> tuple[float, ...]:
    metrics = [row.metrics[row.headline], *(r.metrics[row.headline] for r in row.measured if row.headline in r.metrics)]
    return tuple(bound for metric in metrics if _is_drawable(metric) for bound in _bounds(metric))


def _scale_times(axes: Axes, values: Sequence[float]) -> None:
    """Begin at zero, where lengths compare; go to a log axis, and say so, where the shortest could not be seen."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    logarithmic = max(values) / min(values) > _LOG_FROM_RATIO
    if logarithmic:
        axes.set_xscale("log")
        spread = max(values) / min(values)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if spread > _MANY_DECADES else (1.0, 3.0)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(values) * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(_MAX_TIME_TICKS))
    axes.xaxis.set_major_formatter(tick_format(cells.duration))
    axes.set_xlabel("step time" + (" (log axis)" if logarithmic else ""))


def _is_drawable(metric: MetricValue | None) -> bool:
    return metric is not None and metric.value is not None and metric.value > 0


def _bounds(metric: MetricValue) -> tuple[float, float]:
    """Return the interval; the value twice where there is none that a log axis can show."""
    value = _known(metric.value)
    if metric.low is None or metric.high is None or metric.low <= 0:
        return value, value
    return metric.low, metric.high


def _known(value: float | None) -> float:
    assert value is not None
    return value
