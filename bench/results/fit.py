"""The latency and bandwidth of a communication curve, t = latency + size / bandwidth.

Errors are relative, so that a kilobyte counts as much as a gigabyte. They have the weights of
Student's t distribution (Lange, Little & Taylor, JASA 1989), so that single outliers do not bend
the line. Where the protocol switches, the curve has a second line, which needs very strong
evidence: a Bayesian information criterion (BIC) that is lower by 10 or more (Kass & Raftery, JASA
1995).

All sizes of a repetition may be slow or fast together, which no residual shows. Intervals are
therefore Student's t over the latency and bandwidth of each repetition.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parbench.bench.results.stats import Estimate, estimate_mean

METHOD = (
    "time = latency + size / bandwidth, by least squares of relative errors with Student-t "
    "weights; 95 % Student's t intervals over three or more repetitions"
)
MIN_SIZES = 3
"""The number of sizes that a line needs at least."""
MIN_EVIDENCE = 10.0
"""The least decrease of the BIC for which a second line is accepted."""
MIN_NOISE = 0.01
"""The least relative standard error that a measured time is assumed to have."""
MIN_GROWTH_SIGMAS = 3
"""The least growth of the times along a line that is not flat, in robust standard deviations."""
MIN_OUTLIER_ERROR = 0.20
"""The least relative error of an outlier."""
OUTLIER_SIGMAS = 4
"""The least error of an outlier in robust standard deviations of the errors of the curve."""
_T_FREEDOM = 4
"""The degrees of freedom of Student's t distribution of the errors."""
_ITERATIONS = 15
"""The number of times that a line is fitted with new weights."""
_SIGMA_OF_MAD = 1.4826
"""The standard deviation of normal errors over their median absolute deviation."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The measured time of a collective with messages of one size."""

    size_bytes: int
    """The size of the messages."""
    seconds: float
    """The time of one call, averaged over the repetitions."""
    repetitions: Mapping[int, float] = field(default_factory=dict)
    """The time (s) of one call in each repetition, by the number of the repetition."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A line time = latency + size / bandwidth, fitted to a range of message sizes."""

    first_bytes: int
    """The smallest size that the line was fitted to."""
    last_bytes: int
    """The largest size that the line was fitted to."""
    latency: Estimate
    """The time (s) of the line at size 0, mean over repetitions."""
    bandwidth: Estimate | None
    """The asymptotic bandwidth (B/s), mean over repetitions.

    None if the time does not grow with the size.
    """

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """The message size n_1/2 (Hockney) that reaches half of the asymptotic bandwidth.

        It is latency times bandwidth, None if the line is flat.
        """
        return self.latency.value * self.bandwidth.value if self.bandwidth else None

    def predict(self, size_bytes: float) -> float:
        """Return the time (s) of the line for a message of ``size_bytes``."""
        transfer = size_bytes / self.bandwidth.value if self.bandwidth else 0.0
        return self.latency.value + transfer


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """A fit of the time of a collective over its message size, by one or two lines."""

    segments: tuple[Segment, ...]
    """The lines in the order of size."""
    outliers: tuple[tuple[int, float], ...]
    """Pairs of a size in bytes and the relative error of its time, for times far from the curve.

    The relative error is the measured time over the fitted time, less 1. Its absolute value exceeds
    0.2 and four robust standard deviations.
    """
    residual: float
    """The median over all sizes of the absolute value of measured / fitted time - 1."""

    def predict(self, size_bytes: float) -> float:
        """Return the time (s) of the curve for a message of ``size_bytes``.

        The second line applies to all sizes above the largest size of the first line.
        """
        is_small = size_bytes <= self.segments[0].last_bytes
        return self.segments[0 if is_small else -1].predict(size_bytes)


def fit_curve(points: Sequence[CurvePoint]) -> CurveFit | None:
    """Fit one or two lines of time over size to the points, and return them.

    The result is None for fewer than three points. The points may have any order. Sizes and times
    must be above zero, and no two points may have the same size.
    """
    curve = sorted(points, key=attrgetter("size_bytes"))
    if len(curve) < MIN_SIZES:
        return None
    places = range(MIN_SIZES, len(curve) - MIN_SIZES + 1)
    partitions = [[curve[:place], curve[place:]] for place in places]
    parts = min([[curve], *partitions], key=_compute_bic)
    lines = [_fit_line(part) for part in parts]
    errors = np.concatenate([line.errors for line in lines])
    limit = max(MIN_OUTLIER_ERROR, OUTLIER_SIGMAS * _estimate_deviation(errors))
    return CurveFit(
        segments=tuple(map(_make_segment, parts)),
        outliers=tuple(
            (point.size_bytes, float(error))
            for point, error in zip(curve, errors, strict=True)
            if abs(error) > limit
        ),
        residual=float(np.median(abs(errors))),
    )


class _Line(NamedTuple):
    """A line through the times of successive sizes of a curve."""

    latency: float
    """The time (s) at size 0."""
    slope: float
    """The seconds per byte, 0 if the times do not grow clearly with the size."""
    errors: _Array
    """The relative error of each time, which is measured / fitted time - 1."""


def _fit_line(points: Sequence[CurvePoint], repetition: int | None = None) -> _Line:
    """Return the line through points in the order of size, by reweighted least squares.

    The times are those of one repetition. If ``repetition`` is None, they are the averages.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    sizes = np.array([float(point.size_bytes) for point in points])
    times = np.array([point.seconds for point in points])
    if repetition is not None:
        times = np.array([point.repetitions[repetition] for point in points])
    weights = 1 / times
    for _ in range(_ITERATIONS):
        # The latency and the slope are at least 0.
        (latency, slope), _ = nnls(np.column_stack([weights, weights * sizes]), weights * times)
        fitted = latency + slope * sizes
        errors = times / fitted - 1
        deviation = max(MIN_NOISE, _estimate_deviation(errors))
        weights = np.sqrt(_T_FREEDOM / (_T_FREEDOM + (errors / deviation) ** 2)) / fitted
    if fitted[-1] - fitted[0] <= MIN_GROWTH_SIGMAS * deviation * fitted[0]:
        latency, slope = np.average(times, weights=weights**2), 0.0
        errors = times / latency - 1
    return _Line(float(latency), float(slope), errors)


def _estimate_deviation(errors: _Array) -> float:
    """Return the standard deviation of relative errors, estimated from their median absolute value.

    It is 1.4826 times this median, as for normally distributed errors. A few outliers hardly change
    it. ``errors`` holds the measured time of each size over the fitted time, less 1.
    """
    return _SIGMA_OF_MAD * float(np.median(abs(errors)))


def _compute_bic(parts: Sequence[Sequence[CurvePoint]]) -> float:
    """Return the Bayesian information criterion of a curve that has a line for each of its parts.

    It is lower for a better fit. The likelihood is that of errors with Laplace's distribution. The
    criterion of two lines is increased by ``MIN_EVIDENCE``.
    """
    errors = np.concatenate([_fit_line(part).errors for part in parts])
    num_params = 3 * len(parts) - 1  # Two of each line, and the breakpoint.
    freedom = len(errors) - num_params
    mean_error = max(MIN_NOISE, float(np.abs(errors).sum() / freedom))
    deviance = 2 * len(errors) * math.log(mean_error)
    return deviance + num_params * math.log(len(errors)) + MIN_EVIDENCE * (len(parts) - 1)


def _make_segment(points: Sequence[CurvePoint]) -> Segment:
    """Return the latency and bandwidth of points on a line, as means over repetitions.

    A repetition in which a size of the line is missing does not count.
    """
    common = set[int].intersection(*(set(point.repetitions) for point in points))
    lines = [_fit_line(points, repetition) for repetition in common] or [_fit_line(points)]
    bandwidths = [1 / line.slope for line in lines if line.slope]
    latencies = [line.latency for line in lines]
    return Segment(
        first_bytes=points[0].size_bytes,
        last_bytes=points[-1].size_bytes,
        latency=estimate_mean(latencies, "repetitions", "from zero"),
        bandwidth=estimate_mean(bandwidths, "repetitions", "amount") if bandwidths else None,
    )
