"""Figures with a line for each series: over size, ranks and nodes, and distributions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import (
    GIGA,
    format_bytes,
    format_case_size,
    format_percent,
    format_quantity,
)
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.curves import (
    convert_to_efficiency,
    make_lines_over_size,
    make_overview_lines,
)
from parbench.reports.figures.primitives import (
    Line,
    Point,
    add_line_legend,
    draw_ecdf,
    draw_lines,
    draw_reference,
)
from parbench.reports.figures.quantities import Quantity, set_x_axis, set_y_axis
from parbench.reports.figures.style import new_figure
from parbench.reports.fits import Ceiling, Curve
from parbench.reports.groups import BandwidthByScope

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LINES_INCHES = 2.1
INTERVALS = "Bands are 95 % intervals, within the repetition if there is only one."
MAX_ECDF_LINES = 6
_LOG_FROM_RATIO = 10.0
_ECDF_POINTS = 150


def chart_bandwidth_overview(operations: "pd.DataFrame", ceiling: Ceiling | None) -> Chart | None:
    return _line_chart(
        "bandwidth",
        "Bus bandwidth over size",
        INTERVALS,
        make_overview_lines(operations),
        quantities.SIZE,
        quantities.BANDWIDTH,
        _ceiling_line(ceiling),
    )


def chart_bandwidth_and_time(
    number: int,
    title: str,
    operations: "pd.DataFrame",
    curves: Sequence[Curve],
    ceiling: Ceiling | None,
) -> Iterator[Chart]:
    """Yield bandwidth and time over size of the operations of one mode and data type."""
    bandwidth = _line_chart(
        number_name("bandwidth_by_size", number),
        f"Bus bandwidth over size: {title}",
        INTERVALS,
        make_lines_over_size(operations, "busbw"),
        quantities.SIZE,
        quantities.BANDWIDTH,
        _ceiling_line(ceiling),
    )
    lines = make_lines_over_size(operations, "time", curves)
    num_missing = operations["operation"].nunique() - len(lines)
    caption = INTERVALS
    if num_missing:
        caption += f" The table has {num_missing} more with a single size."
    if curves:
        caption += " Thin dashes are fits."
    time = _line_chart(
        number_name("time_by_size", number),
        f"Time over size: {title}",
        caption,
        lines,
        quantities.SIZE,
        quantities.TIME,
    )
    yield from filter(None, (bandwidth, time))


def chart_efficiency(operations: "pd.DataFrame", ceiling: Ceiling | None) -> Chart | None:
    """Return the bandwidth of the overview as a share of the link, or of a memory copy."""
    if ceiling is None:
        return None
    rate = format_quantity(ceiling.bytes_per_second, "B/s")
    return _line_chart(
        "efficiency",
        "Efficiency over size",
        f"Bus bandwidth relative to the {ceiling.name}, {rate}. {INTERVALS}",
        convert_to_efficiency(make_overview_lines(operations), ceiling),
        quantities.SIZE,
        quantities.EFFICIENCY,
        (1.0, ceiling.name),
    )


def chart_groups(number: int, title: str, sizes: Sequence[BandwidthByScope]) -> Chart | None:
    """Return the bandwidth over size of one operation within a node and between nodes."""
    points: dict[str, list[Point]] = {}
    for bandwidth in sizes:
        for scope, value in bandwidth.bandwidths.items():
            point = _make_point(bandwidth.size, value / GIGA)
            points.setdefault(scope.label, []).append(point)
    return _line_chart(
        number_name("groups", number),
        f"Bandwidth by group scope: {title}",
        "A line for each scope, the median of its groups.",
        _make_lines(points),
        quantities.SIZE,
        quantities.BANDWIDTH,
    )


def chart_scaling(
    name: str,
    title: str,
    caption: str,
    values: Mapping[str, Mapping[int, float]],
    count: str,
    quantity: Quantity,
) -> Chart | None:
    """Return a quantity against the number of nodes or ranks, which is called ``count``."""
    points = {
        label: [_make_point(number, value) for number, value in line.items()]
        for label, line in values.items()
    }
    reference = (1.0, "ideal") if quantity is quantities.EFFICIENCY else None
    axis = quantities.count_of(count)
    return _line_chart(name, title, caption, _make_lines(points), axis, quantity, reference)


def chart_context_methods(
    number: int, title: str, rows: Sequence[Mapping[str, Any]]
) -> Iterator[Chart]:
    """Yield step time, bytes and exposed communication over the sequence length, by method.

    A row has the ``method``, the ``sequence`` and the values of each quantity.
    """
    for quantity_number, (key, quantity) in enumerate(_CONTEXT_QUANTITIES.items(), start=1):
        points: dict[str, list[Point]] = {}
        for row in rows:
            value = row.get(key)
            if value is not None:
                low = row.get(f"{key}_low") or value
                high = row.get(f"{key}_high") or value
                point = Point(row["sequence"], value, low, high)
                points.setdefault(row["method"], []).append(point)
        values = [point.value for line in points.values() for point in line]
        if max(values, default=0.0) > 0:
            is_log = min(values) > 0 and max(values) / min(values) > _LOG_FROM_RATIO
            chart = _line_chart(
                f"{number_name('context', number)}_{quantity_number}",
                f"{title}: {quantity.title}",
                f"A line for each method. {INTERVALS}",
                _make_lines(points),
                quantities.count_of("sequence length (tokens)"),
                replace(quantity, is_log=is_log),
            )
            if chart:
                yield chart


_CONTEXT_QUANTITIES = {
    "seconds": quantities.STEP_TIME,
    "bytes_sent": Quantity(title="bytes that attention sends per step", text=format_bytes, base=2),
    "exposed": Quantity(title="exposed cp communication of the step", text=format_percent),
}


def _make_point(x: float, value: float) -> Point:
    return Point(x, value, value, value)


def _make_lines(points: Mapping[str, Sequence[Point]]) -> list[Line]:
    return [
        Line(label=label, points=tuple(sorted(line)))
        for label, line in points.items()
        if len(line) > 1
    ]


def _ceiling_line(ceiling: Ceiling | None) -> tuple[float, str] | None:
    if ceiling is None:
        return None
    rate = format_quantity(ceiling.bytes_per_second, "B/s")
    return ceiling.bytes_per_second / GIGA, f"{ceiling.name}, {rate}"


def _line_chart(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    x: Quantity,
    y: Quantity,
    reference: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart of lines, None without a line of two points that its axes can show."""
    shown = []
    for line in lines:
        is_shown = [point.x > 0 and (point.value > 0 or not y.is_log) for point in line.points]
        points = tuple(point for point, keep in zip(line.points, is_shown, strict=True) if keep)
        if len(points) > 1:
            shown.append(replace(line, points=points))
    if not shown:
        return None
    return Chart(
        name=name,
        title=title,
        caption=caption,
        draw=partial(_draw_line_chart, shown, x, y, reference),
    )


def _draw_line_chart(
    lines: Sequence[Line], x: Quantity, y: Quantity, reference: tuple[float, str] | None
) -> "Figure":
    figure, [axes] = new_figure(LINES_INCHES)
    draw_lines(axes, lines)
    xs = [point.x for line in lines for point in line.points]
    values = [value for line in lines for point in line.points for value in point[1:]]
    values += [value for line in lines for piece in line.fit for _, value in piece]
    if reference:
        draw_reference(axes, *reference)
        values.append(reference[0])
    set_x_axis(axes, x, min(xs) / 1.12, max(xs) * 1.12)
    if y.is_log:
        set_y_axis(axes, y, min(value for value in values if value > 0) / 1.1, max(values) * 1.1)
    else:
        set_y_axis(axes, y, 0.0, max(values) * 1.04)
    add_line_legend(figure, axes)
    return figure


def chart_latency(number: int, title: str, operations: "pd.DataFrame") -> Chart | None:
    """Return the distribution of the iterations of each operation at its smallest size."""
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
    return Chart(
        name=number_name("latency_ecdf", number),
        title=f"Distribution of latency: {title}",
        caption="Empirical distribution (ECDF) of the iterations at the smallest size.",
        draw=partial(_draw_ecdf, samples),
    )


def _draw_ecdf(samples: Mapping[str, Sequence[float]]) -> "Figure":
    figure, [axes] = new_figure(LINES_INCHES)
    draw_ecdf(axes, samples, _ECDF_POINTS)
    values = [value for line in samples.values() for value in line]
    set_x_axis(axes, quantities.TIME, min(values) / 1.05, max(values) * 1.05)
    set_y_axis(axes, quantities.ITERATIONS, 0.0, 1.02)
    add_line_legend(figure, axes)
    return figure
