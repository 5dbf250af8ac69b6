"""The latency and bandwidth of a communication curve, t = latency + size / bandwidth.

Errors are relative to the model, so that a kilobyte counts as much as a gigabyte. They have the
weights of Student's t distribution (Lange, Little & Taylor, JASA 1989), so that single outliers do
not bend the line. Where the protocol switches, the curve has a breakpoint: one more line costs two
parameters, and is drawn only if an F test rejects the fit without it (Bonferroni over the places of
the breakpoint).

All sizes of a repetition may be slow or fast together, which no residual shows. Intervals over
several repetitions are therefore Student's t over the latency and bandwidth of each repetition,
which follow from its times with the weights of the fit.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, pairwise
from statistics import variance

import numpy as np
import numpy.typing as npt

from parbench.bench.results.stats import CONFIDENCE, WITHIN_REPETITION, median, t_quantile

METHOD = (
    "time = latency + size / bandwidth, by least squares of relative errors "
    "with Student-t weights, breakpoints treated as exact"
)
MIN_SIZES = 3
"""The number of sizes that a line needs at least."""
MAX_LINES = 3
"""The largest number of lines of a curve."""
MIN_NOISE = 0.01
"""The least relative standard error that a measured time is assumed to have."""
SIGNIFICANCE = 0.01
"""The p-value below which one more line is accepted."""
MIN_OUTLIER_ERROR = 0.20
"""The least relative error of an outlier."""
OUTLIER_SIGMAS = 4
"""The least error of an outlier in robust standard deviations of the errors of the curve."""
_MAX_BREAKPOINT_PLACES = 24  # so that a curve of a thousand sizes takes seconds
_T_FREEDOM = 4
"""The degrees of freedom of Student's t distribution of the errors."""
_MAX_ITERATIONS = 30
_TOLERANCE = 1e-6
"""The relative change of the fitted times below which the search for a line ends."""
_NORMAL_VARIANCE = 1.622
"""The variance of normal errors over their mean square with Student-t weights."""
_SIGMA_OF_MAD = 1.4826
"""The standard deviation of normal errors over their median absolute deviation."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The measured time of a collective with messages of one size."""

    size_bytes: int
    """The size of the messages."""
    seconds: float
    """The time of one call, merged over the repetitions."""
    low: float | None = None
    """The lower bound (s) of the 95 % interval of ``seconds``, None if it is unknown."""
    high: float | None = None
    """The upper bound (s) of this interval, None if it is unknown."""
    repetitions: Mapping[int, float] = field(default_factory=dict)
    """The time (s) of one call in each repetition, by the number of the repetition."""

    @property
    def variance(self) -> float | None:
        """The square of the relative standard error of ``seconds``, None if it is unknown.

        It follows from the variation over repetitions, otherwise from the interval.
        """
        n = len(self.repetitions)
        if n > 1:
            of_mean = variance(map(math.log, self.repetitions.values())) / n
            # Medians over sizes of a variance with few degrees of freedom are too small.
            return of_mean / (1 - 2 / (9 * (n - 1))) ** 3
        if self.low is None or self.high is None:
            return None
        return ((self.high - self.low) / 2 / 1.96 / self.seconds) ** 2


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A line time = latency + size / bandwidth, fitted to a range of message sizes.

    The ``low`` and ``high`` fields are the bounds of 95 % intervals.
    """

    first_bytes: int
    """The smallest size that the line was fitted to."""
    last_bytes: int
    """The largest size that the line was fitted to."""
    latency_seconds: float
    """The time of the line at size 0."""
    latency_low: float
    """The lower bound of the latency in seconds."""
    latency_high: float
    """The upper bound of the latency in seconds."""
    bytes_per_second: float | None
    """The asymptotic bandwidth, None if the time does not grow with the size beyond the noise."""
    bytes_per_second_low: float | None
    """The lower bound of the bandwidth, None if the noise does not determine a bound."""
    bytes_per_second_high: float | None
    """The upper bound of the bandwidth, None if the line is flat or the noise allows any value."""

    @property
    def seconds_per_byte(self) -> float:
        """The slope of the line, 0 if the line is flat."""
        return 1 / self.bytes_per_second if self.bytes_per_second else 0.0

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """The message size n_1/2 (Hockney) that reaches half of the asymptotic bandwidth.

        It is latency times bandwidth, None if the line is flat.
        """
        if self.bytes_per_second is None:
            return None
        return self.latency_seconds * self.bytes_per_second

    def predict(self, size_bytes: float) -> float:
        """Return the time (s) of the line for a message of ``size_bytes``."""
        return self.latency_seconds + size_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """A piecewise linear fit of the time of a collective over its message size."""

    segments: tuple[Segment, ...]
    """The lines in the order of size."""
    outliers: tuple[tuple[int, float], ...]
    """The sizes in bytes whose times are far from the curve, each with its relative error.

    The relative error is the measured time over the fitted time, less 1.
    """
    residual: float
    """The median over all sizes of the absolute relative error, as a fraction."""
    repetitions: int
    """The number of repetitions (starts of all ranks) over which the intervals are computed.

    It is 1 if they follow from the errors of the fit in a single repetition.
    """
    method: str
    """A phrase about the fit, its intervals and the number of sizes."""

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """The sizes in bytes at which one line ends and the next begins, in increasing order.

        A breakpoint is the size at which the two lines cross. If they do not cross between their
        sizes, it is the geometric mean of the last size of one and the first size of the other.
        """
        sizes = []
        for left, right in pairwise(self.segments):
            middle = math.sqrt(left.last_bytes * right.first_bytes)
            sizes.append(_find_crossing(left, right) or middle)
        return tuple(sizes)

    def predict(self, size_bytes: int) -> float:
        """Return the time (s) of the curve for a message of ``size_bytes``."""
        index = bisect_left(self.breakpoints, size_bytes)
        return self.segments[index].predict(size_bytes)


def fit_curve(points: Sequence[CurvePoint]) -> CurveFit | None:
    """Fit a piecewise linear curve of time over size to the points, and return it.

    The result is None for fewer than three points. The points may have any order. Sizes and times
    must be above zero, and no two points may have the same size.
    """
    assert all(point.size_bytes > 0 and point.seconds > 0 for point in points)
    curve = sorted(points, key=lambda point: point.size_bytes)
    if len(curve) < MIN_SIZES:
        return None
    sizes = np.array([float(point.size_bytes) for point in curve])
    times = np.array([point.seconds for point in curve])
    noise = _estimate_noise(curve)
    lines = _choose_lines(sizes, times, noise)
    # The lines once more, with the scale of their own errors.
    scale = _fit_scale(_get_errors(lines), MIN_NOISE)
    lines = [_fit_line(line.sizes, line.times, scale) for line in lines]
    errors = _get_errors(lines)
    freedom = len(errors) - 2 * len(lines)
    mean_square = float((_get_weights(errors, scale) * errors**2).sum()) / freedom
    time_error = max(math.sqrt(_NORMAL_VARIANCE * mean_square), noise)
    repetitions = sorted(set[int].intersection(*(set(point.repetitions) for point in curve)))
    segments = []
    for line in lines:
        on_line = [point for point in curve if point.size_bytes in line.sizes]
        repetition_times = [
            [point.repetitions[repetition] for point in on_line] for repetition in repetitions
        ]
        weights = line.compute_weights(scale)
        segments.append(
            _make_segment(line, weights, time_error, freedom, np.array(repetition_times))
        )
    residual = float(np.median(abs(errors)))
    is_outlier = abs(errors) > max(MIN_OUTLIER_ERROR, OUTLIER_SIGMAS * _SIGMA_OF_MAD * residual)
    outliers = zip(sizes[is_outlier], errors[is_outlier], strict=True)
    num_repetitions = max(1, len(repetitions))
    return CurveFit(
        segments=tuple(segments),
        outliers=tuple((int(size), float(error)) for size, error in outliers),
        residual=residual,
        repetitions=num_repetitions,
        method=f"{METHOD}; {describe_intervals(num_repetitions)}; {len(sizes)} sizes",
    )


def describe_intervals(repetitions: int) -> str:
    """Return a phrase about the method of a fit's 95 % intervals.

    ``repetitions`` is the number of repetitions. With fewer than two, the intervals follow from the
    covariance of the fit in a single repetition.
    """
    if repetitions < 2:
        return f"95 % t intervals from the fit's covariance, {WITHIN_REPETITION}"
    freedom = f"{repetitions - 1} degree{'s' if repetitions > 2 else ''} of freedom"
    return f"95 % Student's t intervals over the lines of {repetitions} repetitions, {freedom}"


def _estimate_noise(curve: Sequence[CurvePoint]) -> float:
    """Return the relative standard error of a time, as the median over the sizes.

    The result is at least 0.01, which is also the result if no standard error is known.
    """
    variances = [point.variance for point in curve]
    known = [variance for variance in variances if variance is not None]
    return max(MIN_NOISE, math.sqrt(median(known)) if known else 0.0)


class _Line:
    """A line time = latency + slope * size, which is fitted to successive sizes of a curve.

    Attributes:
        sizes: the sizes in bytes, in increasing order.
        times: the measured times in seconds, one for each size.
        fitted: the times in seconds of the line at these sizes.
        errors: the relative error at each size, which is measured / fitted time - 1.

    """

    def __init__(self, sizes: _Array, times: _Array, latency: float, slope: float) -> None:
        """Compute the fitted times and the errors of a line.

        ``latency`` is the time in seconds at size 0, and ``slope`` is in seconds per byte.
        """
        self.sizes = sizes
        self.times = times
        self.first_bytes = int(sizes[0])
        self.last_bytes = int(sizes[-1])
        self.latency_seconds = latency
        self.seconds_per_byte = slope
        self.fitted = latency + slope * sizes
        self.errors = times / self.fitted - 1

    def compute_weights(self, scale: float) -> _Array:
        """Return the weight (1/s^2) of each time in the next iteration of a least-squares fit.

        The weights make errors relative and outliers light. ``scale`` is the relative error to
        which Student's t distribution is scaled.
        """
        return _get_weights(self.errors, scale) / self.fitted**2


def _choose_lines(sizes: _Array, times: _Array, noise: float) -> list[_Line]:
    """Return the fitted lines of a curve, in order of size and as few as explain the times.

    One more line is accepted only if an F test rejects the fit without it. ``sizes`` (bytes) and
    ``times`` (s) have the order of size, ``noise`` is the relative standard error of a time.
    """
    chosen = [_fit_line(sizes, times, noise)]
    for count in range(2, min(MAX_LINES, len(sizes) // MIN_SIZES) + 1):
        partitions = _list_partitions(len(sizes), count)
        lines = _fit_best_partition(sizes, times, partitions, noise)
        if _rejects_fewer_lines(chosen, lines, len(partitions), noise):
            chosen = lines
    return chosen


def _list_partitions(length: int, count: int) -> list[tuple[int, ...]]:
    """Return the ways to split ``length`` sizes into ``count`` ranges of at least three sizes.

    Each way is a tuple of ``count`` + 1 indices, from 0 to ``length``, at which ranges begin and
    end. For long curves only every n-th index is tried as a border.
    """
    places = range(MIN_SIZES, length - MIN_SIZES + 1)
    step = max(1, math.ceil(len(places) / _MAX_BREAKPOINT_PLACES))
    partitions = []
    for inner in combinations(places[::step], count - 1):
        ends = (0, *inner, length)
        if all(stop - start >= MIN_SIZES for start, stop in pairwise(ends)):
            partitions.append(ends)
    return partitions


def _fit_best_partition(
    sizes: _Array, times: _Array, partitions: Sequence[tuple[int, ...]], scale: float
) -> list[_Line]:
    """Return the fitted lines of the best partition of a curve into ranges of sizes.

    ``partitions`` are index tuples from ``_list_partitions``. The best one has the lowest cost. The
    cost is -2 log likelihood of the lines through the ranges. It is reduced by log(number of sizes)
    for each two adjacent lines that cross between their sizes, because a continuous curve has one
    parameter less. ``scale`` is the scale of Student's t distribution of the relative errors.
    """

    @cache
    def fit_span(start: int, stop: int) -> _Line:
        """Return the line through the sizes with indices ``start`` to ``stop`` (exclusive)."""
        return _fit_line(sizes[start:stop], times[start:stop], scale)

    def fit_partition(ends: tuple[int, ...]) -> list[_Line]:
        """Return a line for each range of sizes, whose borders are the indices ``ends``."""
        return [fit_span(start, stop) for start, stop in pairwise(ends)]

    def compute_cost(ends: tuple[int, ...]) -> float:
        """Return the cost of a partition, which is lower the more likely its lines are."""
        lines = fit_partition(ends)
        crossings = [_find_crossing(left, right) for left, right in pairwise(lines)]
        num_meeting = sum(crossing is not None for crossing in crossings)
        deviance = sum(_compute_deviance(line.errors, scale) for line in lines)
        return deviance - num_meeting * math.log(len(sizes))

    return fit_partition(min(partitions, key=compute_cost))


def _rejects_fewer_lines(
    fewer: Sequence[_Line],
    more: Sequence[_Line],
    num_partitions: int,
    noise: float,
) -> bool:
    """Return True if an F test shows that a curve needs the larger number of lines.

    The tenth of the sizes at which ``fewer`` has the largest errors is left out of the test, so
    that one or two outliers do not justify a line.

    Args:
        fewer: the fit with fewer lines, which the test may reject.
        more: the fit of the same times with more lines.
        num_partitions: the number of fits of which ``more`` is the best. The significance level of
            the test, 0.01, is divided by this number.
        noise: the least scale of the relative errors.
    """
    fewer_errors = _get_errors(fewer)
    more_errors = _get_errors(more)
    num_ignored = max(1, len(fewer_errors) // 10)
    inliers = np.argsort(abs(fewer_errors), kind="stable")[:-num_ignored]
    freedom = len(inliers) - 2 * len(more)
    gain = _compute_log_mean_square(fewer_errors[inliers], noise) - _compute_log_mean_square(
        more_errors[inliers], noise
    )
    extra = len(more) - len(fewer) - 1
    # For sums of squares in ratio x, p is x^(d/2) with 2 and d degrees of freedom, and at most
    # x^(d/2) (1 + d/2) with 4.
    limit = 2 * math.log(num_partitions / SIGNIFICANCE) + 2 * extra * math.log(1 + freedom / 2)
    return freedom * gain > limit


def _get_errors(lines: Sequence[_Line]) -> _Array:
    """Return the relative error of each measured size to its line, in the order of the sizes.

    The lines of a fit follow each other, so that their errors are joined into one array.
    """
    return np.concatenate([line.errors for line in lines])


def _compute_log_mean_square(errors: _Array, noise: float) -> float:
    """Return the logarithm of a robust mean square of relative errors.

    It is -2 log likelihood of Student's t, divided by the number of errors. A normal distribution
    would give the logarithm of the mean square. ``noise`` is the least scale of the errors.
    """
    scale = _fit_scale(errors, noise)
    return 2 * math.log(scale) + _compute_deviance(errors, scale) / len(errors)


def _fit_scale(errors: _Array, min_scale: float) -> float:
    """Return the scale of Student's t distribution that fits the relative errors best.

    It is the maximum-likelihood estimate, and at least ``min_scale``. Like a standard deviation, it
    is the typical size of an error, but outliers hardly affect it.
    """
    scale = max(min_scale, math.sqrt(np.mean(errors**2)))
    for _ in range(_MAX_ITERATIONS):
        weighted = np.mean(_get_weights(errors, scale) * errors**2)
        scale = max(min_scale, math.sqrt((_T_FREEDOM + 1) / _T_FREEDOM * weighted))
    return scale


def _get_weights(errors: _Array, scale: float) -> _Array:
    """Return the Student-t weight of each relative error: 1 for an error of 0, least for outliers.

    ``scale`` is the relative error to which the distribution is scaled.
    """
    return _T_FREEDOM / (_T_FREEDOM + (errors / scale) ** 2)


def _compute_deviance(errors: _Array, scale: float) -> float:
    """Return -2 log likelihood of relative errors for Student's t with this scale.

    Terms that do not depend on the errors are left out.
    """
    return float((_T_FREEDOM + 1) * np.log1p((errors / scale) ** 2 / _T_FREEDOM).sum())


def _fit_line(sizes: _Array, times: _Array, scale: float) -> _Line:
    """Return the most likely line through times (s) by size, by reweighted least squares.

    The relative errors have Student's t distribution with this ``scale``. An outlier can mislead
    the search. So there are two searches: the first weights begin with the measured times, or with
    running medians of three times. The line with the higher likelihood is returned.
    """
    n = len(times)
    windows = np.clip(np.arange(n) - 1, 0, n - 3)[:, None] + np.arange(3)
    running_medians = np.median(times[windows], axis=1)
    lines = [_search_line(sizes, times, start, scale) for start in (times, running_medians)]
    return min(lines, key=lambda line: _compute_deviance(line.errors, scale))


def _search_line(sizes: _Array, times: _Array, start: _Array, scale: float) -> _Line:
    """Return the line to which iteratively reweighted least squares converge.

    ``start`` holds a time (s) for each size. The errors in the first iteration are relative to it.
    ``scale`` is the relative error to which Student's t distribution is scaled.
    """
    line = _fit_least_squares(sizes, times, 1 / start**2)
    for _ in range(_MAX_ITERATIONS):
        previous = line
        line = _fit_least_squares(sizes, times, previous.compute_weights(scale))
        if abs(line.fitted / previous.fitted - 1).max() < _TOLERANCE:
            break
    return line


def _compute_moments(sizes: _Array, weights: _Array) -> tuple[float, float, float]:
    """Return three weighted moments of the sizes.

    They are the sum of the weights, the mean size, and the sum of squared deviations from the mean.
    """
    total = float(weights.sum())
    mean = float(weights @ sizes) / total
    return total, mean, float(weights @ (sizes - mean) ** 2)


def _fit_least_squares(sizes: _Array, times: _Array, weights: _Array) -> _Line:
    """Return the line with the least weighted sum of squared errors of the times.

    Latency and slope are at least 0. If the best line has a negative one, the result is the best
    line in which this one is 0.
    """
    total, mean_size, squares = _compute_moments(sizes, weights)
    mean_time = float(weights @ times) / total
    slope = float(weights @ ((sizes - mean_size) * times)) / squares
    latency = mean_time - slope * mean_size
    if slope < 0:
        latency, slope = mean_time, 0.0
    elif latency < 0:
        latency, slope = 0.0, float(weights @ (sizes * times)) / (squares + total * mean_size**2)
    return _Line(sizes, times, latency, slope)


def _find_crossing(left: _Line | Segment, right: _Line | Segment) -> float | None:
    """Return the size (bytes) at which two adjacent lines cross.

    Returns None if they do not cross between the last size of the left and the first size of the
    right line.
    """
    if left.seconds_per_byte == right.seconds_per_byte:
        return None
    difference = right.latency_seconds - left.latency_seconds
    size = difference / (left.seconds_per_byte - right.seconds_per_byte)
    return size if left.last_bytes <= size <= right.first_bytes else None


def _make_segment(
    line: _Line,
    weights: _Array,
    time_error: float,
    freedom: int,
    repetition_times: _Array,
) -> Segment:
    """Return the latency and bandwidth of a fitted line with their 95 % intervals.

    Args:
        line: the line that was fitted.
        weights: the weight of each time on the line in the fit.
        time_error: the relative standard error of a time.
        freedom: the degrees of freedom of the whole curve's fit.
        repetition_times: the times in seconds, with a row for each repetition and a column for each
            size. Intervals are over repetitions if there are several rows. Otherwise they follow
            from the covariance of the fit.

    """
    total, mean_size, squares = _compute_moments(line.sizes, weights)
    # The slope is within two standard errors that it would have if it were 0.
    size_spread = math.sqrt(len(line.sizes) * line.sizes.var())
    is_flat = line.seconds_per_byte <= 2 * time_error * float(line.fitted[0]) / size_spread
    slope = line.seconds_per_byte
    # The derivatives of latency and slope with respect to each time.
    slope_gradient = weights * (line.sizes - mean_size) / squares
    latency_gradient = weights / total
    if is_flat:
        latency = float(weights @ line.times) / total
    else:
        latency = line.latency_seconds
        latency_gradient = latency_gradient - mean_size * slope_gradient
    if len(repetition_times) > 1:
        latency_low, latency_high = _compute_interval_around(
            latency, repetition_times @ latency_gradient
        )
        slope_low, slope_high = _compute_interval_around(slope, repetition_times @ slope_gradient)
    else:
        factor = time_error * t_quantile(0.5 + CONFIDENCE / 2, freedom)
        latency_width = factor * math.sqrt(float((latency_gradient**2 / weights).sum()))
        slope_width = factor * math.sqrt(float((slope_gradient**2 / weights).sum()))
        latency_low = max(0.0, latency - latency_width)
        latency_high = latency + latency_width
        slope_low = slope - slope_width
        slope_high = slope + slope_width
    return Segment(
        first_bytes=line.first_bytes,
        last_bytes=line.last_bytes,
        latency_seconds=latency,
        latency_low=latency_low,
        latency_high=latency_high,
        bytes_per_second=None if is_flat else 1 / slope,
        bytes_per_second_low=1 / slope_high if slope_high > 0 else None,
        bytes_per_second_high=1 / slope_low if slope_low > 0 and not is_flat else None,
    )


def _compute_interval_around(center: float, values: _Array) -> tuple[float, float]:
    """Return the bounds (low, high) of a 95 % Student's t interval around ``center``.

    The width follows from the standard deviation of ``values``, such as the latency of each
    repetition. The interval is on logarithms if the center and all values are above zero. Its
    bounds are never below zero.
    """
    n = len(values)
    factor = t_quantile(0.5 + CONFIDENCE / 2, n - 1) / math.sqrt(n)
    if center > 0 and values.min() > 0:
        ratio = math.exp(factor * float(np.log(values).std(ddof=1)))
        return center / ratio, center * ratio
    width = factor * float(values.std(ddof=1))
    return max(0.0, center - width), center + width
