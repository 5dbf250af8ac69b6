"""The latency and bandwidth of a communication curve, t = latency + size / bandwidth.

Errors are relative to the model, so that a kilobyte counts as much as a gigabyte. They have the
weights of Student's t distribution (Lange, Little & Taylor, JASA 1989), so that single outliers do
not bend the line. Where the protocol switches, the curve has a breakpoint. Breakpoints come from
binary segmentation (Scott & Knott, Biometrics 1974): a curve is split if an F test rejects a single
line (Bonferroni over the places of the breakpoint).

All sizes of a launch may be slow or fast together, which no residual shows. Intervals over several
launches are therefore Student's t over the latency and bandwidth of each launch, which follow from
its times with the weights of the fit.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import variance

import numpy as np
import numpy.typing as npt

from parbench.bench.results.stats import CONFIDENCE, WITHIN_LAUNCH, median, t_quantile

METHOD = (
    "time = latency + size / bandwidth, by least squares of relative errors "
    "with Student-t weights, breakpoints treated as exact"
)
MIN_SIZES = 3
"""The sizes that a line needs."""
MIN_NOISE = 0.01
"""The least relative error that times are taken to have."""
SIGNIFICANCE = 0.01
MIN_OUTLIER_ERROR = 0.20
OUTLIER_SIGMAS = 4
_MAX_BREAKPOINT_PLACES = 48  # so that a curve of a thousand sizes takes seconds
_T_FREEDOM = 4
_MAX_ITERATIONS = 30
_TOLERANCE = 1e-6
_NORMAL_VARIANCE = 1.590
"""The variance of normal errors over their weighted mean square with these weights."""
_SIGMA_OF_MAD = 1.4826
"""The standard deviation of normal errors over the median of their absolute values."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The time of one size in bytes."""

    size_bytes: int
    seconds: float
    low: float | None = None
    """With ``high`` the 95 % interval within a single launch."""
    high: float | None = None
    launches: Mapping[int, float] = field(default_factory=dict)
    """The time of each launch by its number."""

    @property
    def variance(self) -> float | None:
        """The square of the relative standard error of the time, None if it is not known."""
        n = len(self.launches)
        if n > 1:
            of_mean = variance(map(math.log, self.launches.values())) / n
            # Medians over sizes of a variance with few degrees of freedom are too small.
            return of_mean / (1 - 2 / (9 * (n - 1))) ** 3
        if self.low is None or self.high is None:
            return None
        return ((self.high - self.low) / 2 / 1.96 / self.seconds) ** 2


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One line with its 95 % intervals. A bound is None if the noise does not determine it."""

    first_bytes: int
    last_bytes: int
    latency_seconds: float
    latency_low: float
    latency_high: float
    bytes_per_second: float | None
    """None if the line is flat within the noise. Then its low bound is that of the bandwidth."""
    bytes_per_second_low: float | None
    bytes_per_second_high: float | None

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.bytes_per_second if self.bytes_per_second else 0.0

    def predict(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """The lines of a curve in the order of size."""

    segments: tuple[Segment, ...]
    outliers: tuple[tuple[int, float], ...]
    """Sizes far from the curve with their relative errors, which are time over model less 1."""
    residual: float
    """The median of the absolute relative errors of all sizes."""
    launches: int
    """The number of launches that the intervals are over, one for intervals within a launch."""
    method: str

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """n_1/2 (Hockney) of the last line, which is its latency times its bandwidth."""
        last = self.segments[-1]
        if last.bytes_per_second is None:
            return None
        return last.latency_seconds * last.bytes_per_second

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """The sizes in bytes at which one line ends and the next begins.

        They are where the lines cross, otherwise in the middle between the sizes.
        """
        sizes = []
        for left, right in pairwise(self.segments):
            latency_change = right.latency_seconds - left.latency_seconds
            slope_change = left.seconds_per_byte - right.seconds_per_byte
            crossing = latency_change / slope_change if slope_change else 0.0
            is_between = left.last_bytes <= crossing <= right.first_bytes
            middle = math.sqrt(left.last_bytes * right.first_bytes)
            sizes.append(crossing if is_between else middle)
        return tuple(sizes)

    def predict(self, size_bytes: int) -> float:
        index = bisect_left(self.breakpoints, size_bytes)
        return self.segments[index].predict(size_bytes)


def fit_curve(points: Sequence[CurvePoint]) -> CurveFit | None:
    """Return the latency and bandwidth that explain times, None with fewer than three sizes.

    Sizes and times are above zero. Of several points of one size, the fastest counts.
    """
    ordered = sorted(points, key=lambda point: (point.size_bytes, -point.seconds))
    curve = list({point.size_bytes: point for point in ordered}.values())
    if len(curve) < MIN_SIZES:
        return None
    sizes = np.array([float(point.size_bytes) for point in curve])
    times = np.array([point.seconds for point in curve])
    noise = _estimate_noise(curve)
    lines = _split_curve(sizes, times, noise)
    # The lines once more, with the scale of their own errors.
    scale = max(MIN_NOISE, _SIGMA_OF_MAD * float(np.median(abs(_join_errors(lines)))))
    lines = [_fit_line(line.sizes, line.times, scale) for line in lines]
    errors = _join_errors(lines)
    freedom = len(errors) - 2 * len(lines)
    mean_square = float(_compute_weights(errors, scale) @ errors**2) / freedom
    time_error = max(math.sqrt(_NORMAL_VARIANCE * mean_square), noise)
    launches = sorted(set[int].intersection(*(set(point.launches) for point in curve)))
    segments = []
    for line in lines:
        on_line = [point for point in curve if point.size_bytes in line.sizes]
        launch_times = [[point.launches[launch] for point in on_line] for launch in launches]
        segments.append(_make_segment(line, scale, time_error, freedom, np.array(launch_times)))
    residual = float(np.median(abs(errors)))
    is_outlier = abs(errors) > max(MIN_OUTLIER_ERROR, OUTLIER_SIGMAS * _SIGMA_OF_MAD * residual)
    outliers = zip(sizes[is_outlier], errors[is_outlier], strict=True)
    num_launches = max(1, len(launches))
    return CurveFit(
        segments=tuple(segments),
        outliers=tuple((int(size), float(error)) for size, error in outliers),
        residual=residual,
        launches=num_launches,
        method=f"{METHOD}; {describe_intervals(num_launches)}; {len(sizes)} sizes",
    )


def describe_intervals(launches: int) -> str:
    """Return a phrase about the intervals of a fit over so many launches."""
    if launches < 2:
        return f"95 % t intervals from the fit's covariance, {WITHIN_LAUNCH}"
    freedom = f"{launches - 1} degree{'s' if launches > 2 else ''} of freedom"
    return f"95 % Student's t intervals over the lines of {launches} launches, {freedom}"


def _estimate_noise(curve: Sequence[CurvePoint]) -> float:
    """Return the relative standard error of a time, from the intervals or the launches."""
    variances = [point.variance for point in curve if point.variance is not None]
    return max(MIN_NOISE, math.sqrt(median(variances)) if variances else 0.0)


@dataclass(frozen=True)
class _Line:
    """A part of a curve and the line through it."""

    sizes: _Array
    times: _Array
    latency_seconds: float
    seconds_per_byte: float

    @property
    def fitted(self) -> _Array:
        return self.latency_seconds + self.seconds_per_byte * self.sizes

    @property
    def errors(self) -> _Array:
        return self.times / self.fitted - 1


def _split_curve(sizes: _Array, times: _Array, noise: float) -> list[_Line]:
    """Return one line, or those of both parts of the curve if an F test rejects a single line."""
    line = _fit_line(sizes, times, noise)
    step = 1 + len(sizes) // _MAX_BREAKPOINT_PLACES
    pairs = []
    for place in range(MIN_SIZES, len(sizes) - MIN_SIZES + 1, step):
        left = _fit_line(sizes[:place], times[:place], noise)
        right = _fit_line(sizes[place:], times[place:], noise)
        pairs.append((left, right))
    if not pairs:
        return [line]
    best = min(pairs, key=lambda pair: _compute_deviance(_join_errors(pair), noise))
    if not _rejects_single_line(line.errors, _join_errors(best), len(pairs), noise):
        return [line]
    left, right = best
    return [
        *_split_curve(left.sizes, left.times, noise),
        *_split_curve(right.sizes, right.times, noise),
    ]


def _rejects_single_line(
    single_errors: _Array,
    pair_errors: _Array,
    num_places: int,
    noise: float,
) -> bool:
    """Return True if an F test rejects one line in favor of the best of so many pairs of lines.

    The worst tenth of the errors does not count, so that one or two outliers do not justify a line.
    """
    num_ignored = max(1, len(single_errors) // 10)
    kept = np.argsort(abs(single_errors), kind="stable")[:-num_ignored]
    freedom = len(kept) - 4
    single_square = max(noise**2, float(np.mean(single_errors[kept] ** 2)))
    pair_square = max(noise**2, float(np.mean(pair_errors[kept] ** 2)))
    # The tail of the F distribution with 2 and d degrees of freedom is this ratio to the d/2.
    p_value: float = (pair_square / single_square) ** (freedom / 2)
    return p_value * num_places < SIGNIFICANCE


def _join_errors(lines: Sequence[_Line]) -> _Array:
    return np.concatenate([line.errors for line in lines])


def _compute_weights(errors: _Array, scale: float) -> _Array:
    """Return the weights of Student's t distribution."""
    return _T_FREEDOM / (_T_FREEDOM + (errors / scale) ** 2)


def _compute_deviance(errors: _Array, scale: float) -> float:
    """Return -2 log likelihood of Student's t without its constants."""
    return float((_T_FREEDOM + 1) * np.log1p((errors / scale) ** 2 / _T_FREEDOM).sum())


def _fit_line(sizes: _Array, times: _Array, scale: float) -> _Line:
    """Return the line with the likeliest relative errors.

    An outlier can mislead the search. So there are two, in which errors are first relative to the
    times or to their running medians of three.
    """
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(times, 1, mode="reflect"), 3)
    starts = (times, np.median(windows, axis=1))
    lines = [_fit_line_from_start(sizes, times, fitted, scale) for fitted in starts]
    return min(lines, key=lambda line: _compute_deviance(line.errors, scale))


def _fit_line_from_start(sizes: _Array, times: _Array, fitted: _Array, scale: float) -> _Line:
    """Return a line by iteratively reweighted least squares, with no negative parameter."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    roots = 1 / fitted
    largest = sizes[-1]
    for _ in range(_MAX_ITERATIONS):
        previous = fitted
        design = np.column_stack([roots, roots * sizes / largest])
        (latency, slope), _residual = nnls(design, roots * times)
        fitted = latency + slope * sizes / largest
        if abs(fitted / previous - 1).max() < _TOLERANCE:
            break
        roots = np.sqrt(_compute_weights(times / fitted - 1, scale)) / fitted
    return _Line(sizes, times, float(latency), float(slope / largest))


def _make_segment(
    line: _Line,
    scale: float,
    time_error: float,
    freedom: int,
    launch_times: _Array,
) -> Segment:
    """Return the line with its intervals.

    ``time_error`` is the relative standard error of a time. Each launch has a row in
    ``launch_times``. With fewer than two launches, the intervals follow from the covariance.
    """
    latency = line.latency_seconds
    slope = line.seconds_per_byte
    weights = _compute_weights(line.errors, scale) / line.fitted**2
    roots = np.sqrt(weights)
    _, covariance = np.polyfit(line.sizes, line.times, 1, w=roots, cov="unscaled")
    slope_error, latency_error = time_error * np.sqrt(np.diag(covariance))
    is_flat = bool(slope <= 2 * slope_error)
    if is_flat:
        latency = float(np.average(line.times, weights=weights))
        latency_error = time_error / math.sqrt(weights.sum())
    if len(launch_times) > 1:
        slopes, latencies = np.polyfit(line.sizes, launch_times.T, 1, w=roots)
        if is_flat:
            latencies = np.average(launch_times, axis=1, weights=weights)
        latency_low, latency_high = _compute_launch_interval(latency, latencies)
        slope_low, slope_high = _compute_launch_interval(slope, slopes)
    else:
        factor = t_quantile(0.5 + CONFIDENCE / 2, freedom)
        latency_low = max(0.0, latency - factor * latency_error)
        latency_high = latency + factor * latency_error
        slope_low = slope - factor * slope_error
        slope_high = slope + factor * slope_error
    has_upper_bound = slope_low > 0 and not is_flat
    return Segment(
        first_bytes=int(line.sizes[0]),
        last_bytes=int(line.sizes[-1]),
        latency_seconds=latency,
        latency_low=float(latency_low),
        latency_high=float(latency_high),
        bytes_per_second=None if is_flat else 1 / slope,
        bytes_per_second_low=1 / float(slope_high) if slope_high > 0 else None,
        bytes_per_second_high=1 / float(slope_low) if has_upper_bound else None,
    )


def _compute_launch_interval(center: float, values: _Array) -> tuple[float, float]:
    """Return Student's t interval with this center, from the deviation of the values.

    It is on logarithms if all are above zero, and has no bound below zero.
    """
    n = len(values)
    factor = t_quantile(0.5 + CONFIDENCE / 2, n - 1) / math.sqrt(n)
    if center > 0 and values.min() > 0:
        ratio = math.exp(factor * float(np.log(values).std(ddof=1)))
        return center / ratio, center * ratio
    width = factor * float(values.std(ddof=1))
    return max(0.0, center - width), center + width
