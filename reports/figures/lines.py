"""Line charts over message size, sequence length, ranks or nodes, and charts of distributions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import (
    GIGA,
    format_bytes,
    format_case_size,
    format_percent,
    format_quantity,
)
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.tables import Row, is_missing
from parbench.reports.analysis.fits import Ceiling, OperationCurve
from parbench.reports.analysis.labels import label_operation
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.primitives import (
    Line,
    LinePoint,
    add_line_legend,
    draw_ecdf,
    draw_lines,
    draw_reference,
)
from parbench.reports.figures.quantities import AxisQuantity, set_x_axis, set_y_axis
from parbench.reports.figures.style import OPERATIONS, new_figure
from parbench.reports.frames import list_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LINES_INCHES = 2.1
"""The height of a line chart."""
INTERVALS = "Bands are 95 % intervals, within the repetition if there is only one."
MAX_OVERVIEW_LINES = 6
MAX_ECDF_LINES = 6
_LOG_FROM_RATIO = 10.0
_POINTS_PER_SEGMENT = 16


def read_interval(metric: MetricValue | None) -> tuple[float, float, float] | None:
    """Return (value, low, high) of a metric: its value and the bounds of its 95 % interval.

    Without an interval, all three are the value. None if the value is unknown or not above zero.
    """
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    return metric.value, metric.low or metric.value, metric.high or metric.value


def make_lines(rows: Iterable[Row], label: str, x: str, y: str, unit: float = 1.0) -> list[Line]:
    """Return a ``Line`` for each label in the rows that has at least two points.

    ``label``, ``x`` and ``y`` are keys of rows. The keys ``{y}_low`` and ``{y}_high`` are optional.
    Values and bounds of y are divided by ``unit``. Points are in the order of x.
    """
    points: dict[str, list[LinePoint]] = defaultdict(list)
    for row in rows:
        values: list[Any] = [row.get(key) for key in (y, f"{y}_low", f"{y}_high")]
        if not is_missing(values[0]) and not is_missing(row[x]):
            known = [values[0] if is_missing(value) else value for value in values]
            points[row[label]].append(LinePoint(row[x], *(value / unit for value in known)))
    return [
        Line(label=name, points=tuple(sorted(line)))
        for name, line in points.items()
        if len(line) > 1
    ]


def chart_lines(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    x: AxisQuantity,
    y: AxisQuantity,
    reference: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart of lines, None if no line has two points that the axes can show.

    A logarithmic axis shows only positive values. ``reference`` is the value and the name of a
    horizontal line.
    """
    visible = []
    for line in lines:
        points = [
            point for point in line.points if point.x > 0 and (point.value > 0 or not y.is_log)
        ]
        if len(points) > 1:
            visible.append(replace(line, points=tuple(points)))
    if not visible:
        return None

    def draw() -> "Figure":
        """Draw the lines, their intervals as bands, and the legend."""
        figure, [axes] = new_figure(LINES_INCHES)
        draw_lines(axes, visible)
        xs = [point.x for line in visible for point in line.points]
        values = [value for line in visible for point in line.points for value in point[1:]]
        values += [value for line in visible for piece in line.fit for _, value in piece]
        if reference:
            draw_reference(axes, *reference)
            values.append(reference[0])
        set_x_axis(axes, x, min(xs) / 1.12, max(xs) * 1.12)
        if y.is_log:
            set_y_axis(
                axes, y, min(value for value in values if value > 0) / 1.1, max(values) * 1.1
            )
        else:
            set_y_axis(axes, y, 0.0, max(values) * 1.04)
        add_line_legend(figure, axes)
        return figure

    return Chart(name=name, title=title, caption=caption, draw=draw)


def _chart_bandwidth(
    name: str, title: str, lines: Sequence[Line], ceiling: Ceiling | None
) -> Chart | None:
    """Return a chart of bus bandwidth in GB/s over size.

    ``ceiling``, the bandwidth limit of the run, is a horizontal line if it is known. None if no
    line has two points.
    """
    reference = None
    if ceiling:
        rate = format_quantity(ceiling.bytes_per_second, "B/s")
        reference = (ceiling.bytes_per_second / GIGA, f"{ceiling.name}, {rate}")
    return chart_lines(
        name, title, INTERVALS, lines, quantities.SIZE, quantities.BANDWIDTH, reference
    )


def chart_bandwidth_overview(operations: "pd.DataFrame", ceiling: Ceiling | None) -> Chart | None:
    """Return a chart of bus bandwidth over size for at most six well-known operations.

    ``operations`` is a frame with a row per communication case (``select_operations``).
    ``ceiling``, the bandwidth limit of the run, is a horizontal line if it is known. None without
    data.
    """
    lines = _make_overview_lines(operations, GIGA)
    return _chart_bandwidth("bandwidth", "Bus bandwidth over size", lines, ceiling)


def chart_efficiency(operations: "pd.DataFrame", ceiling: Ceiling | None) -> Chart | None:
    """Return a chart of bus bandwidth as a fraction of the bandwidth limit, over message size.

    The chart has the six best-known operations. ``ceiling`` is the bandwidth limit of the run.
    ``operations`` is a frame with a row per communication case (``select_operations``). None
    without a limit or data.
    """
    if ceiling is None:
        return None
    rate = format_quantity(ceiling.bytes_per_second, "B/s")
    return chart_lines(
        "efficiency",
        "Efficiency over size",
        f"Bus bandwidth relative to the {ceiling.name}, {rate}. {INTERVALS}",
        _make_overview_lines(operations, ceiling.bytes_per_second),
        quantities.SIZE,
        quantities.EFFICIENCY,
        (1.0, ceiling.name),
    )


def _make_overview_lines(operations: "pd.DataFrame", unit: float) -> list[Line]:
    """Return the bus bandwidth over size of well-known operations, divided by ``unit``.

    ``operations`` is a frame with a row per communication case. Each operation has one line, the
    one with the fewest parameters. All lines have the mode and the data type in which most
    operations were measured.
    """
    candidates = [
        make_lines(list_rows(cases), "operation", "size", "busbw", unit)
        for _, cases in operations.groupby(["mode", "dtype"], sort=False)
    ]
    lines = max(candidates, key=len, default=[])
    plainest: dict[str, Line] = {}
    for line in sorted(lines, key=_get_prominence):
        plainest.setdefault(line.label.partition(" ")[0], line)
    return list(plainest.values())[:MAX_OVERVIEW_LINES]


def _get_prominence(line: Line) -> tuple[bool, int]:
    """Return a sort key for lines of operations: without parameters first, then well-known ones."""
    name, *params = line.label.split(" ")
    known_names = list(OPERATIONS)
    index = known_names.index(name) if name in known_names else len(known_names)
    return bool(params), index


def chart_bandwidth_and_time(
    number: int,
    title: str,
    operations: "pd.DataFrame",
    curves: Sequence[OperationCurve],
    ceiling: Ceiling | None,
) -> Iterator[Chart]:
    """Yield a chart of bus bandwidth over size and one of time over size, for one data type.

    Args:
        number: a number from 1 that makes the names of the charts unique in the report. There is
            one for each mode (blocking or pipelined) and data type.
        title: the mode and the data type, which end the titles of the charts.
        operations: a frame with a row per communication case (``select_operations``).
        curves: the fits of time over size, which the chart of time shows.
        ceiling: the bandwidth limit that the chart of bandwidth shows, None if it is unknown.
    """
    rows = list_rows(operations)
    bandwidth = _chart_bandwidth(
        number_name("bandwidth_by_size", number),
        f"Bus bandwidth over size: {title}",
        make_lines(rows, "operation", "size", "busbw", GIGA),
        ceiling,
    )
    fits = {label_operation(curve.rows[0].case): _sample_fit(curve.fit) for curve in curves}
    lines = make_lines(rows, "operation", "size", "seconds")
    lines = [replace(line, fit=fits.get(line.label, ())) for line in lines]
    caption = INTERVALS
    num_missing = operations["operation"].nunique() - len(lines)
    if num_missing:
        caption += f" The table has {num_missing} more with a single size."
    if curves:
        caption += " Thin dashes are fits."
    time = chart_lines(
        number_name("time_by_size", number),
        f"Time over size: {title}",
        caption,
        lines,
        quantities.SIZE,
        quantities.TIME,
    )
    yield from filter(None, (bandwidth, time))


def _sample_fit(fit: CurveFit) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return points along each line of a fit of time over size, for drawing.

    The outer tuple has the lines, the inner one their points: (size in bytes, time in seconds).
    There are 16 points per line, evenly spaced on a logarithmic axis.
    """
    bounds = (fit.segments[0].first_bytes, *fit.breakpoints, fit.segments[-1].last_bytes)
    pieces = []
    for segment, (low, high) in zip(fit.segments, pairwise(bounds), strict=True):
        sizes = np.geomspace(low, high, _POINTS_PER_SEGMENT).tolist()
        points = [(size, segment.predict(size)) for size in sizes]
        pieces.append(tuple(point for point in points if point[1] > 0))
    return tuple(pieces)


_CONTEXT_QUANTITIES = {
    "seconds": quantities.STEP_TIME,
    "bytes_sent": AxisQuantity(
        title="bytes that attention sends per step", text=format_bytes, base=2
    ),
    "exposed": AxisQuantity(title="exposed cp communication of the step", text=format_percent),
}


def chart_context_methods(number: int, title: str, rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield charts of step time, bytes and exposed communication over sequence length.

    A line is a method of context parallelism. Rows have the keys ``method``, ``sequence`` (tokens),
    ``seconds``, ``bytes_sent`` and ``exposed`` (a fraction of the step). ``number`` is a number
    from 1 that makes the names of the charts unique. There is one for each table of methods.
    """
    for quantity_number, (key, quantity) in enumerate(_CONTEXT_QUANTITIES.items(), start=1):
        lines = make_lines(rows, "method", "sequence", key)
        values = [point.value for line in lines for point in line.points]
        if max(values, default=0.0) > 0:
            is_log = min(values) > 0 and max(values) / min(values) > _LOG_FROM_RATIO
            chart = chart_lines(
                f"{number_name('context', number)}_{quantity_number}",
                f"{title}: {quantity.title}",
                f"A line for each method. {INTERVALS}",
                lines,
                quantities.count_of("sequence length (tokens)"),
                replace(quantity, is_log=is_log),
            )
            if chart:
                yield chart


def chart_latency(number: int, title: str, operations: "pd.DataFrame") -> Chart | None:
    """Return a chart of the distribution of iteration times, one line per operation.

    Only the smallest size of each operation counts. ``operations`` is a frame with a row per
    communication case (``select_operations``). ``number`` is a number from 1 that makes the name of
    the chart unique. None if no operation has two iterations.
    """
    samples: dict[str, list[float]] = {}
    for label, cases in operations.groupby("operation", sort=False):
        smallest = cases.sort_values("size", na_position="first")["result"].iloc[0]
        values = [value for record in smallest.measured for value in record.samples.values]
        values = [value for value in values if value > 0]
        if len(values) > 1 and len(samples) < MAX_ECDF_LINES:
            size = f" {format_case_size(smallest.size_bytes)}" if smallest.size_bytes else ""
            samples[f"{label}{size}"] = values
    if not samples:
        return None

    def draw() -> "Figure":
        """Draw the empirical distribution functions and the legend."""
        figure, [axes] = new_figure(LINES_INCHES)
        draw_ecdf(axes, samples)
        values = [value for line in samples.values() for value in line]
        set_x_axis(axes, quantities.TIME, min(values) / 1.05, max(values) * 1.05)
        set_y_axis(axes, quantities.ITERATIONS, 0.0, 1.02)
        add_line_legend(figure, axes)
        return figure

    return Chart(
        name=number_name("latency_ecdf", number),
        title=f"Distribution of latency: {title}",
        caption="Empirical distribution (ECDF) of the iterations at the smallest size.",
        draw=draw,
    )
