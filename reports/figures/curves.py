"""Lines over message size: bandwidth, time and efficiency of operations, with their fits. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import GIGA
from parbench.bench.results.metrics import MetricValue
from parbench.reports.analysis.fits import Ceiling, Curve, size_of
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.labels import operation
from parbench.reports.analysis.summary import Row, estimate_of
from parbench.reports.figures.primitives import Line, Point
from parbench.reports.figures.style import OPERATIONS

MAX_OVERVIEW_LINES = 6
_FIT_STEPS = 16


def read_interval(metric: MetricValue | None) -> tuple[float, float, float] | None:
    """Return the value, low and high of a metric, or None if the value is not above zero.

    Without an interval above zero, all three are the value.
    """
    estimate = estimate_of(metric)
    if estimate is None:
        return None
    return estimate.value, estimate.low or estimate.value, estimate.high or estimate.value


def lines_over_size(
    rows: Sequence[Row], metric: Literal["busbw", "time"], curves: Sequence[Curve] = ()
) -> list[Line]:
    """Return a line for each operation with two sizes or more: seconds, or bandwidth in GB/s."""
    fits = {operation(curve.rows[0].case): _fitted_pieces(curve.fit) for curve in curves}
    unit = GIGA if metric == "busbw" else 1.0
    lines = []
    for label, operation_rows in group_by(rows, lambda row: operation(row.case)).items():
        points = []
        for row in operation_rows:
            interval = read_interval(row.metrics.get(metric))
            if interval and size_of(row) > 0:
                points.append(Point(size_of(row), *(value / unit for value in interval)))
        if len({point.x for point in points}) > 1:
            fit = fits.get(label, ()) if metric == "time" else ()
            lines.append(Line(label=label, points=tuple(sorted(points)), fit=fit))
    return lines


def overview_lines(rows: Sequence[Row]) -> list[Line]:
    """Return a line of bandwidth for each of the six best-known operations that were measured.

    They share the mode and the data type that most operations were measured in.
    """
    series = group_by(rows, lambda row: (row.case.params.get("mode"), row.case.params.get("dtype")))
    candidates = [lines_over_size(group, "busbw") for group in series.values()]
    lines = max(candidates, key=len, default=[])
    known_names = list(OPERATIONS)

    def sort_key(line: Line) -> tuple[bool, int]:
        name, *params = line.label.split(" ")
        place = known_names.index(name) if name in known_names else len(known_names)
        return bool(params), place

    plainest: dict[str, Line] = {}
    for line in sorted(lines, key=sort_key):
        plainest.setdefault(line.label.partition(" ")[0], line)
    return list(plainest.values())[:MAX_OVERVIEW_LINES]


def as_efficiency(lines: Sequence[Line], ceiling: Ceiling) -> list[Line]:
    """Return lines of bandwidth in GB/s as fractions of the ceiling."""
    unit = ceiling.bytes_per_second / GIGA
    efficiencies = []
    for line in lines:
        points = [Point(point.x, *(rate / unit for rate in point[1:])) for point in line.points]
        efficiencies.append(Line(label=line.label, points=tuple(points)))
    return efficiencies


def _fitted_pieces(fit: CurveFit) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return the segments of a fit as points that are close enough to look like curves."""
    ends = (fit.segments[0].first_bytes, *fit.breakpoints, fit.segments[-1].last_bytes)
    pieces = []
    for segment, (low, high) in zip(fit.segments, pairwise(ends), strict=True):
        sizes = [low * (high / low) ** (i / _FIT_STEPS) for i in range(_FIT_STEPS + 1)]
        points = ((size, segment.predict(size)) for size in sizes)
        pieces.append(tuple((size, seconds) for size, seconds in points if seconds > 0))
    return tuple(pieces)
