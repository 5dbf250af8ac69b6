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
MIN_NOISE = 0.01
"""The least relative error that times are taken to have."""
SIGNIFICANCE = 0.01
MIN_OUTLIER_ERROR = 0.20
OUTLIER_SIGMAS = 4
_MAX_BREAKPOINT_PLACES = 24  # so that a curve of a thousand sizes takes seconds
_T_FREEDOM = 4
_MAX_ITERATIONS = 30
_TOLERANCE = 1e-6
_NORMAL_VARIANCE = 1.622
"""The variance of normal errors over their weighted mean square with these weights."""
_SIGMA_OF_MAD = 1.4826  # of normal errors

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The time of a case with one size."""

    size_bytes: int
    seconds: float
    low: float | None = None
    """The lower bound in seconds of the 95 % interval within a single repetition."""
    high: float | None = None
    """The upper bound of the same interval."""
    repetitions: Mapping[int, float] = field(default_factory=dict)
    """The time in seconds of each repetition, by the number of the repetition."""

    @property
    def variance(self) -> float | None:
        """The square of the relative standard error of the time, None if it is not known."""
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
    """One line of a fit with its 95 % intervals, which are ``low`` and ``high`` fields."""

    first_bytes: int
    """The smallest size that the line was fitted to."""
    last_bytes: int
    """The largest size that the line was fitted to."""
    latency_seconds: float
    latency_low: float
    latency_high: float
    bytes_per_second: float | None
    """The bandwidth, None if the line is flat within the noise."""
    bytes_per_second_low: float | None
    """The lower bound of the bandwidth, None if the noise does not determine a bound."""
    bytes_per_second_high: float | None
    """The upper bound of the bandwidth, None if the line is flat or the noise allows any value."""

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.bytes_per_second if self.bytes_per_second else 0.0

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """The size n_1/2 (Hockney) in bytes, latency times bandwidth. None if the line is flat."""
        if self.bytes_per_second is None:
            return None
        return self.latency_seconds * self.bytes_per_second

    def predict(self, size_bytes: float) -> float:
        """Return the seconds for a size in bytes."""
        return self.latency_seconds + size_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """A piecewise linear fit of time over size. The segments are in the order of size."""

    segments: tuple[Segment, ...]
    outliers: tuple[tuple[int, float], ...]
    """Sizes far from the curve with their relative errors, which are time over model less 1."""
    residual: float
    """The median of the absolute relative errors of all sizes."""
    repetitions: int
    """The number of repetitions of the intervals, 1 for intervals within a repetition."""
    method: str

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """The sizes in bytes at which one line ends and the next begins.

        They are where the lines cross, otherwise in the middle between the sizes.
        """
        sizes = []
        for left, right in pairwise(self.segments):
            middle = math.sqrt(left.last_bytes * right.first_bytes)
            sizes.append(_find_crossing(left, right) or middle)
        return tuple(sizes)

    def predict(self, size_bytes: int) -> float:
        """Return the seconds for a size in bytes."""
        index = bisect_left(self.breakpoints, size_bytes)
        return self.segments[index].predict(size_bytes)


def fit_curve(points: Sequence[CurvePoint]) -> CurveFit | None:
    """Fit lines of latency and bandwidth to times by size. None with fewer than three sizes.

    Sizes and times must be above zero, and no two points may have the same size.
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
    """Return a phrase about the intervals of a fit over so many repetitions."""
    if repetitions < 2:
        return f"95 % t intervals from the fit's covariance, {WITHIN_REPETITION}"
    freedom = f"{repetitions - 1} degree{'s' if repetitions > 2 else ''} of freedom"
    return f"95 % Student's t intervals over the lines of {repetitions} repetitions, {freedom}"


def _estimate_noise(curve: Sequence[CurvePoint]) -> float:
    """Return the relative standard error of a time, from the intervals or the repetitions."""
    variances = [point.variance for point in curve]
    known = [variance for variance in variances if variance is not None]
    return max(MIN_NOISE, math.sqrt(median(known)) if known else 0.0)


class _Line:
    """A line through successive sizes of a curve, and its relative errors there."""

    def __init__(self, sizes: _Array, times: _Array, latency: float, slope: float) -> None:
        self.sizes = sizes
        self.times = times
        self.first_bytes = int(sizes[0])
        self.last_bytes = int(sizes[-1])
        self.latency_seconds = latency
        self.seconds_per_byte = slope
        self.fitted = latency + slope * sizes
        self.errors = times / self.fitted - 1

    def compute_weights(self, scale: float) -> _Array:
        """Return the weights of the times for a further least-squares fit."""
        return _get_weights(self.errors, scale) / self.fitted**2


def _choose_lines(sizes: _Array, times: _Array, noise: float) -> list[_Line]:
    """Return the smallest number of lines that explains the times.

    A further line is accepted if an F test rejects the fit without the further line.
    """
    chosen = [_fit_line(sizes, times, noise)]
    for count in range(2, min(MAX_LINES, len(sizes) // MIN_SIZES) + 1):
        partitions = _list_partitions(len(sizes), count)
        lines = _fit_best_partition(sizes, times, partitions, noise)
        if _rejects_fewer_lines(chosen, lines, len(partitions), noise):
            chosen = lines
    return chosen


def _list_partitions(length: int, count: int) -> list[tuple[int, ...]]:
    """Return the ways to split ``length`` sizes into ``count`` lines of at least MIN_SIZES sizes.

    Each is the indices (0, breaks, ``length``) at which lines begin and end. For long curves only
    every n-th index is a break.
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
    """Return the lines of the most likely partition of a curve.

    ``partitions`` are index tuples from ``_list_partitions``. ``scale`` is the relative error to
    which Student's t distribution is scaled. The cost of a partition is -2 log likelihood, less
    log(number of sizes) for each crossing of two adjacent lines between their sizes, because such a
    crossing saves a parameter.
    """

    @cache
    def fit_span(start: int, stop: int) -> _Line:
        return _fit_line(sizes[start:stop], times[start:stop], scale)

    def fit_partition(ends: tuple[int, ...]) -> list[_Line]:
        return [fit_span(start, stop) for start, stop in pairwise(ends)]

    def compute_cost(ends: tuple[int, ...]) -> float:
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
    """Return True if an F test rejects the fewer lines.

    The lines of ``more`` are the best of so many partitions. The worst tenth of the errors does not
    count, so that one or two outliers do not justify a line.
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
    """Return the relative errors of all lines in one array."""
    return np.concatenate([line.errors for line in lines])


def _compute_log_mean_square(errors: _Array, noise: float) -> float:
    """Return the logarithm of the mean square of errors, by the likelihood of Student's t.

    ``noise`` is the least scale of the errors.
    """
    scale = _fit_scale(errors, noise)
    return 2 * math.log(scale) + _compute_deviance(errors, scale) / len(errors)


def _fit_scale(errors: _Array, min_scale: float) -> float:
    """Return the likeliest scale of Student's t, by fixed-point iteration."""
    scale = max(min_scale, math.sqrt(np.mean(errors**2)))
    for _ in range(_MAX_ITERATIONS):
        weighted = np.mean(_get_weights(errors, scale) * errors**2)
        scale = max(min_scale, math.sqrt((_T_FREEDOM + 1) / _T_FREEDOM * weighted))
    return scale


def _get_weights(errors: _Array, scale: float) -> _Array:
    """Return the weights of Student's t for relative errors, at most 1."""
    return _T_FREEDOM / (_T_FREEDOM + (errors / scale) ** 2)


def _compute_deviance(errors: _Array, scale: float) -> float:
    """Return -2 log likelihood of Student's t without its constants."""
    return float((_T_FREEDOM + 1) * np.log1p((errors / scale) ** 2 / _T_FREEDOM).sum())


def _fit_line(sizes: _Array, times: _Array, scale: float) -> _Line:
    """Return the line with the likeliest relative errors, by iteratively reweighted least squares.

    An outlier can mislead the search. So there are two searches, which begin with errors relative
    to the times and to running medians of three times. The more likely line is returned.
    """
    n = len(times)
    windows = np.clip(np.arange(n) - 1, 0, n - 3)[:, None] + np.arange(3)
    running_medians = np.median(times[windows], axis=1)
    lines = [_search_line(sizes, times, start, scale) for start in (times, running_medians)]
    return min(lines, key=lambda line: _compute_deviance(line.errors, scale))


def _search_line(sizes: _Array, times: _Array, start: _Array, scale: float) -> _Line:
    """Return the line with likeliest errors, starting from errors relative to ``start``."""
    line = _fit_least_squares(sizes, times, 1 / start**2)
    for _ in range(_MAX_ITERATIONS):
        previous = line
        line = _fit_least_squares(sizes, times, previous.compute_weights(scale))
        if abs(line.fitted / previous.fitted - 1).max() < _TOLERANCE:
            break
    return line


def _compute_moments(sizes: _Array, weights: _Array) -> tuple[float, float, float]:
    """Return the total weight, the weighted mean size, and the weighted sum of squares about it."""
    total = float(weights.sum())
    mean = float(weights @ sizes) / total
    return total, mean, float(weights @ (sizes - mean) ** 2)


def _fit_least_squares(sizes: _Array, times: _Array, weights: _Array) -> _Line:
    """Return the line of least weighted squares with latency and slope not below zero."""
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
    """Return the size between two lines at which they cross, None if they do not."""
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
    """Return a line with its intervals.

    Args:
        line: the line that was fitted.
        weights: the weights of the times on the line.
        time_error: the relative standard error of a time.
        freedom: the degrees of freedom of the fit.
        repetition_times: the times of each repetition in a row. Intervals are over repetitions if
            there are several, otherwise they follow from the covariance of the fit.

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
    """Return the bounds of Student's t interval with this center, from the deviation of the values.

    The interval is on logarithms if the center and all values are above zero. Its bounds are never
    below zero.
    """
    n = len(values)
    factor = t_quantile(0.5 + CONFIDENCE / 2, n - 1) / math.sqrt(n)
    if center > 0 and values.min() > 0:
        ratio = math.exp(factor * float(np.log(values).std(ddof=1)))
        return center / ratio, center * ratio
    width = factor * float(values.std(ddof=1))
    return max(0.0, center - width), center + width
