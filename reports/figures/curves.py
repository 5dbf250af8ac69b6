"""Lines over message size: bandwidth, time and efficiency of operations, with their fits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import GIGA
from parbench.bench.results.metrics import MetricValue
from parbench.reports.figures.primitives import Line, Point
from parbench.reports.figures.style import OPERATIONS
from parbench.reports.fits import Ceiling, Curve
from parbench.reports.labels import label_operation

if TYPE_CHECKING:
    import pandas as pd

MAX_OVERVIEW_LINES = 6
_POINTS_PER_SEGMENT = 16


def read_interval(metric: MetricValue | None) -> tuple[float, float, float] | None:
    """Return the value, low and high of a metric, None if the value is not above zero.

    Without an interval, all three are the value.
    """
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    if not metric.low or not metric.high:
        return metric.value, metric.value, metric.value
    return metric.value, metric.low, metric.high


def make_lines_over_size(
    operations: "pd.DataFrame", metric: Literal["busbw", "time"], curves: Sequence[Curve] = ()
) -> list[Line]:
    """Return a line for each operation with several sizes, in seconds or GB/s.

    ``operations`` is a frame of ``select_operations`` with one mode and data type. Lines of time
    include the fits of ``curves``.
    """
    fits = {label_operation(curve.rows[0].case): _sample_fit(curve.fit) for curve in curves}
    columns = [metric, f"{metric}_low", f"{metric}_high"]
    known = operations[(operations[metric] > 0) & (operations["size"] > 0)].sort_values("size")
    values = known[columns].fillna(dict.fromkeys(columns, known[metric]))
    if metric == "busbw":
        values /= GIGA
    lines = []
    for label in operations["operation"].unique():
        is_own = known["operation"] == label
        sizes = known.loc[is_own, "size"].astype(float)
        if sizes.nunique() > 1:
            points = tuple(map(Point, sizes, *(values.loc[is_own, name] for name in columns)))
            lines.append(Line(label=label, points=points, fit=fits.get(label, ())))
    return lines


def make_overview_lines(operations: "pd.DataFrame") -> list[Line]:
    """Return the bandwidth of the six best-known operations, each in its plainest form.

    They share the mode and the data type in which most operations were measured.
    """
    candidates = [
        make_lines_over_size(cases, "busbw")
        for _, cases in operations.groupby(["mode", "dtype"], sort=False)
    ]
    lines = max(candidates, key=len, default=[])
    plainest: dict[str, Line] = {}
    for line in sorted(lines, key=_get_prominence):
        plainest.setdefault(line.label.partition(" ")[0], line)
    return list(plainest.values())[:MAX_OVERVIEW_LINES]


def _get_prominence(line: Line) -> tuple[bool, int]:
    """Return a sort key: operations without parameters first, well-known ones before others."""
    name, *params = line.label.split(" ")
    known_names = list(OPERATIONS)
    index = known_names.index(name) if name in known_names else len(known_names)
    return bool(params), index


def convert_to_efficiency(lines: Sequence[Line], ceiling: Ceiling) -> list[Line]:
    """Return lines of bandwidth in GB/s as fractions of the ceiling."""
    unit = ceiling.bytes_per_second / GIGA
    efficiencies = []
    for line in lines:
        points = [Point(point.x, *(rate / unit for rate in point[1:])) for point in line.points]
        efficiencies.append(Line(label=line.label, points=tuple(points)))
    return efficiencies


def _sample_fit(fit: CurveFit) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return points on each segment of a fit that are close enough to look like a curve."""
    bounds = (fit.segments[0].first_bytes, *fit.breakpoints, fit.segments[-1].last_bytes)
    pieces = []
    for segment, (low, high) in zip(fit.segments, pairwise(bounds), strict=True):
        steps = range(_POINTS_PER_SEGMENT + 1)
        sizes = [low * (high / low) ** (step / _POINTS_PER_SEGMENT) for step in steps]
        points = ((size, segment.predict(size)) for size in sizes)
        pieces.append(tuple((size, seconds) for size, seconds in points if seconds > 0))
    return tuple(pieces)
