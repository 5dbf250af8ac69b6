"""Line charts over message size, sequence length, ranks or nodes, and charts of distributions."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parbench.bench.results.formatting import (
    GIGA,
    format_case_size,
    format_quantity,
)
from parbench.bench.results.tables import Row, is_missing
from parbench.reports.analysis.fits import Ceiling
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.primitives import (
    LIMIT_DASHES,
    LinePoint,
    Lines,
    add_legend,
    choose_looks,
    draw_lines,
)
from parbench.reports.figures.quantities import AxisQuantity, set_x_axis, set_y_axis
from parbench.reports.figures.style import color, new_figure
from parbench.reports.frames import list_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LINES_INCHES = 2.0
"""The height of a line chart without its legend, in inches."""
INTERVALS = "Bands are 95 % intervals over repetitions."
MAX_LINES = 8
"""The largest number of operations in one chart."""
NUM_ECDF_STEPS = 150
"""The number of equal steps of probability with which a distribution function is drawn."""


def make_lines(rows: Iterable[Row], label: str, x: str, y: str, unit: float = 1.0) -> Lines:
    """Return a line for each label that has at least two rows with known values, keyed by label.

    ``label``, ``x`` and ``y`` are the keys of rows that have the label of the line and the
    position. The optional keys ``{y}_low`` and ``{y}_high`` have the bounds of the 95 % interval.
    Values and bounds of y are divided by ``unit``, such as 1e9 for GB/s from B/s.
    """
    points: dict[str, list[LinePoint]] = defaultdict(list)
    for row in rows:
        values: list[Any] = [row.get(key) for key in (y, f"{y}_low", f"{y}_high")]
        if not is_missing(values[0]) and not is_missing(row[x]):
            known = [values[0] if is_missing(value) else value for value in values]
            points[row[label]].append(LinePoint(row[x], *(value / unit for value in known)))
    return {name: sorted(line) for name, line in points.items() if len(line) > 1}


def chart_lines(
    name: str,
    title: str,
    caption: str,
    lines: Lines,
    x: AxisQuantity,
    y: AxisQuantity,
    reference: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart of lines with their 95 % intervals, None if no line has a value above zero.

    ``name`` is the id of the chart and the stem of its file. ``caption`` is the text below
    ``title``. ``x`` and ``y`` are the quantities of the axes. ``reference`` is (value, name) of a
    horizontal line, in units of ``y``.
    """
    points = [point for line in lines.values() for point in line]
    positive = [value for point in points for value in point[1:] if value > 0]
    if not positive:
        return None

    def draw() -> "Figure":
        """Draw the lines, their intervals as bands, and the legend."""
        figure, [axes] = new_figure(LINES_INCHES)
        draw_lines(axes, lines)
        highest = max(positive)
        if reference:
            value, label = reference
            look: dict[str, Any] = {"color": color("text"), "linestyle": LIMIT_DASHES}
            axes.axhline(value, label=label, linewidth=0.8, **look)
            highest = max(highest, value)
        xs = [point.x for point in points]
        set_x_axis(axes, x, min(xs) / 1.12, max(xs) * 1.12)
        set_y_axis(axes, y, min(positive) / 1.1 if y.is_log else 0.0, highest * 1.1)
        add_legend(figure)
        return figure

    return Chart(name=name, title=title, caption=caption, draw=draw)


def _chart_over_size(
    name: str,
    title: str,
    operations: "pd.DataFrame",
    metric: str,
    quantity: AxisQuantity,
    unit: float = 1.0,
    reference: tuple[float, str] | None = None,
) -> Chart | None:
    """Return a chart over message size with a line for each of the first operations.

    ``operations`` is a frame with a row per communication case (``select_operations``). ``metric``
    is the column of the values on the y axis, which are divided by ``unit``. ``quantity`` is the
    quantity of the y axis. At most ``MAX_LINES`` operations are shown. The other arguments are
    those of ``chart_lines``. None if no operation has two sizes.
    """
    lines = make_lines(list_rows(operations), "operation", "size", metric, unit)
    shown = {label: lines[label] for label in list(lines)[:MAX_LINES]}
    caption = f"{len(shown)} of {operations['operation'].nunique()} operations. {INTERVALS}"
    return chart_lines(name, title, caption, shown, quantities.SIZE, quantity, reference)


def chart_bandwidth(
    number: int, title: str, operations: "pd.DataFrame", ceiling: Ceiling | None
) -> Chart | None:
    """Return a chart of bus bandwidth in GB/s over message size.

    ``operations`` is a frame with a row per communication case of one mode and data type, which
    ``title`` names. ``number`` is a number from 1 that makes the name of the chart unique.
    ``ceiling``, the bandwidth limit of the run, is a horizontal line if it is known. None if no
    operation has two sizes.
    """
    reference = (ceiling.bytes_per_second / GIGA, ceiling.name) if ceiling else None
    return _chart_over_size(
        number_name("bandwidth", number),
        f"Bus bandwidth over size: {title}",
        operations,
        "busbw",
        quantities.BANDWIDTH,
        GIGA,
        reference,
    )


def list_operation_charts(
    number: int, title: str, operations: "pd.DataFrame", ceiling: Ceiling | None
) -> list[Chart]:
    """Return the charts of efficiency and time over size, and of the distribution of latency.

    Efficiency is bus bandwidth as a fraction of ``ceiling``, the bandwidth limit of the run.
    ``operations`` is a frame with a row per communication case of one mode and data type, which
    ``title`` names. ``number`` is a number from 1 that makes the names of the charts unique. Charts
    without data are left out.
    """
    efficiency = None
    if ceiling:
        efficiency = _chart_over_size(
            number_name("efficiency", number),
            f"Bus bandwidth relative to the {ceiling.name}: {title}",
            operations,
            "busbw",
            quantities.EFFICIENCY,
            ceiling.bytes_per_second,
            (1.0, f"{ceiling.name}, {format_quantity(ceiling.bytes_per_second, 'B/s')}"),
        )
    time = _chart_over_size(
        number_name("time_by_size", number),
        f"Time over size: {title}",
        operations,
        "seconds",
        quantities.TIME,
    )
    return list_charts(efficiency, time, chart_latency(number, title, operations))


def chart_context_methods(number: int, title: str, rows: Sequence[Row]) -> Chart | None:
    """Return a chart of step time over sequence length with a line for each method.

    A method is one of context parallelism. Rows have the keys ``method``, ``sequence`` (tokens) and
    ``seconds`` (step time). ``number`` is a number from 1 that makes the name of the chart unique.
    None if no method ran with two lengths.
    """
    return chart_lines(
        number_name("context", number),
        title,
        f"A line for each method. {INTERVALS}",
        make_lines(rows, "method", "sequence", "seconds"),
        quantities.count_of("sequence length (tokens)"),
        quantities.STEP_TIME,
    )


def chart_latency(number: int, title: str, operations: "pd.DataFrame") -> Chart | None:
    """Return a chart of the distribution of iteration times, one line per operation.

    A line is the empirical distribution function (ECDF) of the iterations of all repetitions at the
    smallest size of the operation. ``operations`` is a frame with a row per communication case
    (``select_operations``) of one mode and data type, which ``title`` names. ``number`` is a number
    from 1 that makes the name of the chart unique. None if no operation has two iterations.
    """
    samples: dict[str, list[float]] = {}
    for label, cases in operations.groupby("operation", sort=False):
        smallest = cases.sort_values("size", na_position="first")["result"].iloc[0]
        values = [value for record in smallest.measured for value in record.samples.values]
        values = [value for value in values if value > 0]
        if len(values) > 1 and len(samples) < MAX_LINES:
            size = f" {format_case_size(smallest.size_bytes)}" if smallest.size_bytes else ""
            samples[f"{label}{size}"] = values
    if not samples:
        return None

    def draw() -> "Figure":
        """Draw the empirical distribution functions as steps, and the legend."""
        figure, [axes] = new_figure(LINES_INCHES)
        shares = np.linspace(0.0, 1.0, NUM_ECDF_STEPS + 1)
        for values, look in zip(samples.values(), choose_looks(samples), strict=True):
            times = np.quantile(values, shares, method="inverted_cdf")
            axes.plot(times, shares, drawstyle="steps-post", **look)
        shortest = min(map(min, samples.values()))
        longest = max(map(max, samples.values()))
        set_x_axis(axes, quantities.TIME, shortest / 1.05, longest * 1.05)
        set_y_axis(axes, quantities.ITERATIONS, 0.0, 1.02)
        add_legend(figure)
        return figure

    return Chart(
        name=number_name("latency_ecdf", number),
        title=f"Distribution of latency: {title}",
        caption="Empirical distribution (ECDF) of the iterations at the smallest size.",
        draw=draw,
    )
