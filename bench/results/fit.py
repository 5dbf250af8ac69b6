"""The latency and bandwidth of a communication curve: t = latency + size / bandwidth, in pieces where it switches.

Errors count relative to the model, so that a kilobyte weighs as much as a gigabyte, and with the weights of Student's
t distribution (Lange, Little & Taylor, JASA 1989), so that single sizes off the curve do not bend it. A switch of
protocol is a knee: one more line costs two parameters, and is drawn only if the F test refuses to do without it
(Bonferroni over the places where a knee could be). Nothing here knows what was timed.

A launch is slow or fast at all sizes alike, which no residual shows: intervals are Student's t over the launches, each
with the latency and bandwidth that the same weights give of its own times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, groupby, pairwise
from statistics import variance

import numpy as np
import numpy.typing as npt

from parbench.bench.results.stats import CONFIDENCE, WITHIN_LAUNCH, median, t_quantile

METHOD = (
    "time = latency + size / bandwidth, by least squares of relative errors with Student-t weights, "
    "knee positions treated as exact"
)
MIN_SIZES = 3
NOISE_FLOOR = 0.01
_TAILS = 4
_ROUNDS = 30
# of normal errors: what these weights leave of the variance is scaled back to the variance of the fit
_NORMAL_VARIANCE = 1.622

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A size in bytes and its time in seconds over all launches, with those of each launch by its number.

    ``low`` and ``high`` are the time's 95 % interval within a launch that is the only one.
    """

    size_bytes: int
    seconds: float
    low: float | None = None
    high: float | None = None
    launches: Mapping[int, float] = field(default_factory=dict)

    @property
    def variance(self) -> float | None:
        """The square of the time's standard error, relative to it; None where it is not known."""
        if (n := len(self.launches)) > 1:
            of_launches = variance(map(math.log, self.launches.values())) / n
            return of_launches / (1 - 2 / (9 * (n - 1))) ** 3  # as medians of few degrees of freedom are too small
        if self.low is None or self.high is None:
            return None
        return ((self.high - self.low) / 2 / 1.96 / self.seconds) ** 2


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One line with its 95 % intervals, over the sizes from first to last.

    ``bytes_per_second`` is None where the line is flat within the noise: then the bandwidth is at least its low bound.
    A low or high bound of None is one that the noise does not give.
    """

    first_bytes: int
    last_bytes: int
    latency_seconds: float
    latency_low: float
    latency_high: float
    bytes_per_second: float | None
    bytes_per_second_low: float | None
    bytes_per_second_high: float | None

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.bytes_per_second if self.bytes_per_second else 0.0

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A curve's lines in the order of size; ``half_bandwidth_bytes`` is n_1/2, latency times bandwidth of the last.

    ``launches`` is how many the intervals are over, one where they are within it. ``off_curve`` holds sizes with their
    relative residuals, which is time over the model's less one; ``residual`` is the median of those of all sizes,
    without their signs.
    """

    segments: tuple[Segment, ...]
    half_bandwidth_bytes: float | None
    off_curve: tuple[tuple[int, float], ...]
    residual: float
    launches: int
    method: str

    @property
    def knees(self) -> tuple[float, ...]:
        """Where one line ends and the next begins, in bytes: where they cross, else the middle between the sizes."""
        pairs = pairwise(self.segments)
        return tuple(_crossing(one, other) or math.sqrt(one.last_bytes * other.first_bytes) for one, other in pairs)

    def predict(self, size_bytes: int) -> float:
        return self.segments[sum(size_bytes > knee for knee in self.knees)].seconds(size_bytes)


def fit(points: Sequence[Point]) -> Fit | None:
    """Return the latency and bandwidth that explain times at three sizes or more, else None; all are above zero."""
    assert all(point.size_bytes > 0 and point.seconds > 0 for point in points)
    ordered = sorted(points, key=lambda point: (point.size_bytes, point.seconds))
    by_size = [list(alike) for _, alike in groupby(ordered, key=lambda point: point.size_bytes)]
    curve = [alike[(len(alike) - 1) // 2] for alike in by_size]  # of several times of one size the lower median
    if len(curve) < MIN_SIZES:
        return None
    known = [found for point in curve if (found := point.variance) is not None]
    noise = max(NOISE_FLOOR, math.sqrt(median(known)) if known else 0.0)
    sizes, times = np.array([(float(point.size_bytes), point.seconds) for point in curve]).T
    chosen = [_line(sizes, times, noise)]
    for count in range(2, min(3, len(curve) // MIN_SIZES) + 1):
        ways = _cuts(len(curve), count)
        lines = _best(sizes, times, ways, noise)
        if _is_asked_for(chosen, lines, len(ways), noise):
            chosen = lines
    # the lines once more, with the scale of their own errors, and intervals from their covariance
    scale = _scale(_errors(chosen), NOISE_FLOOR)
    lines = [_line(line.sizes, line.times, scale) for line in chosen]
    errors = _errors(lines)
    freedom = len(errors) - 2 * len(lines)
    squares = float((_weights(errors, scale) * errors**2).sum()) / freedom
    unit = max(math.sqrt(_NORMAL_VARIANCE * squares), noise)
    shared = sorted(set[int].intersection(*(set(point.launches) for point in curve)))
    by_launch = np.array([[point.launches[launch] for point in curve] for launch in shared])
    segments = []
    for line in lines:
        own = by_launch[:, np.isin(sizes, line.sizes)] if len(shared) > 1 else None
        segments.append(_segment(line, line.weights(scale), unit, freedom, own))
    residual = float(np.median(abs(errors)))
    off = abs(errors) > max(0.20, 4 * 1.4826 * residual)  # four sigma of normal errors
    last, launches = segments[-1], max(1, len(shared))
    return Fit(
        segments=tuple(segments),
        half_bandwidth_bytes=last.latency_seconds * last.bytes_per_second if last.bytes_per_second else None,
        off_curve=tuple((int(size), float(error)) for size, error in zip(sizes[off], errors[off], strict=True)),
        residual=residual,
        launches=launches,
        method=f"{METHOD}; {intervals_words(launches)}; {len(sizes)} sizes",
    )


class _Line:
    """A part of a curve and the line through it."""

    def __init__(self, sizes: _Array, times: _Array, latency: float, slope: float) -> None:
        self.sizes, self.times = sizes, times
        self.first_bytes, self.last_bytes = int(sizes[0]), int(sizes[-1])
        self.latency_seconds, self.seconds_per_byte = latency, slope
        self.fitted = latency + slope * sizes
        self.errors = times / self.fitted - 1

    def weights(self, scale: float) -> _Array:
        return _weights(self.errors, scale) / self.fitted**2


def _cuts(length: int, count: int) -> list[tuple[int, ...]]:
    """Return the ways to cut into parts of three sizes or more, each as the ends of its parts."""
    places = range(MIN_SIZES, length - MIN_SIZES + 1)
    # at most 24 at even distances, so that a thousand sizes take seconds
    tried = places[:: max(1, math.ceil(len(places) / 24))]
    ways = ((0, *inner, length) for inner in combinations(tried, count - 1))
    return [ends for ends in ways if all(stop - start >= MIN_SIZES for start, stop in pairwise(ends))]


def _best(sizes: _Array, times: _Array, ways: Sequence[tuple[int, ...]], scale: float) -> list[_Line]:
    """Return the lines of the best way to cut; where lines meet they save a parameter."""

    @cache
    def line(start: int, stop: int) -> _Line:
        return _line(sizes[start:stop], times[start:stop], scale)

    def total(ends: tuple[int, ...]) -> float:
        lines = [line(*span) for span in pairwise(ends)]
        meet = sum(_crossing(one, other) is not None for one, other in pairwise(lines))
        return sum(_cost(one.errors, scale) for one in lines) - meet * math.log(len(sizes))

    best = min(ways, key=total)
    return [line(*span) for span in pairwise(best)]


def _is_asked_for(few: Sequence[_Line], many: Sequence[_Line], ways: int, noise: float) -> bool:
    """Say whether the F test refuses the fewer lines at 1 %; the others are the best of so many ``ways`` to cut."""
    few_errors, many_errors = _errors(few), _errors(many)
    silent = max(1, len(few_errors) // 10)  # the worst off have no voice: an outlier or two do not ask for a line
    heard = np.argsort(abs(few_errors), kind="stable")[:-silent]
    freedom = len(heard) - 2 * len(many)
    gain = _spread(few_errors[heard], noise) - _spread(many_errors[heard], noise)
    extra = len(many) - len(few) - 1
    # for sums of squares in ratio x, p is x^(d/2) with 2 and d degrees of freedom, with 4 at most x^(d/2) (1 + d/2)
    return freedom * gain > 2 * math.log(ways / 0.01) + 2 * extra * math.log(1 + freedom / 2)


def _errors(lines: Sequence[_Line]) -> _Array:
    return np.concatenate([line.errors for line in lines])


def _spread(errors: _Array, noise: float) -> float:
    """Return the logarithm of the errors' mean square, as Student's t likelihood sees it."""
    scale = _scale(errors, noise)
    return 2 * math.log(scale) + _cost(errors, scale) / len(errors)


def _scale(errors: _Array, at_least: float) -> float:
    """Return the scale of Student's t that makes the errors likeliest, by fixed-point iteration."""
    scale = max(at_least, math.sqrt(np.mean(errors**2)))
    for _ in range(_ROUNDS):
        scale = max(at_least, math.sqrt((_TAILS + 1) / _TAILS * np.mean(_weights(errors, scale) * errors**2)))
    return scale


def _weights(errors: _Array, scale: float) -> _Array:
    return _TAILS / (_TAILS + (errors / scale) ** 2)


def _cost(errors: _Array, scale: float) -> float:
    """Return -2 log likelihood of Student's t without its constants."""
    return float((_TAILS + 1) * np.log1p((errors / scale) ** 2 / _TAILS).sum())


def _line(sizes: _Array, times: _Array, scale: float) -> _Line:
    """Return the line whose relative errors are likeliest, by iteratively reweighted least squares."""
    n = len(times)
    threes = np.clip(np.arange(n) - 1, 0, n - 3)[:, None] + np.arange(3)
    found = []
    # errors are first relative to the times, or to the medians of three: an outlier can mislead one search
    for start in (times, np.median(times[threes], axis=1)):
        line = _least_squares(sizes, times, 1 / start**2)
        for _ in range(_ROUNDS):
            before, line = line, _least_squares(sizes, times, line.weights(scale))
            if abs(line.fitted / before.fitted - 1).max() < 1e-6:
                break
        found.append(line)
    return min(found, key=lambda line: _cost(line.errors, scale))


def _moments(sizes: _Array, weights: _Array) -> tuple[float, float, float]:
    """Return the sum of the weights, the mean size, and the weighted squares of the sizes about it."""
    total = float(weights.sum())
    middle = float(weights @ sizes) / total
    return total, middle, float(weights @ (sizes - middle) ** 2)


def _least_squares(sizes: _Array, times: _Array, weights: _Array) -> _Line:
    """Return the line with latency and slope not below zero that is closest in weighted squares."""
    total, middle, about = _moments(sizes, weights)
    time = float(weights @ times) / total
    slope = float(weights @ ((sizes - middle) * times)) / about
    latency = time - slope * middle
    if slope < 0:
        latency, slope = time, 0.0
    elif latency < 0:
        latency, slope = 0.0, float(weights @ (sizes * times)) / (about + total * middle**2)
    return _Line(sizes, times, latency, slope)


def _crossing(one: _Line | Segment, other: _Line | Segment) -> float | None:
    if one.seconds_per_byte == other.seconds_per_byte:
        return None
    size = (other.latency_seconds - one.latency_seconds) / (one.seconds_per_byte - other.seconds_per_byte)
    return size if one.last_bytes <= size <= other.first_bytes else None


def intervals_words(launches: int) -> str:
    if launches < 2:
        return f"95 % t intervals from the fit's covariance, {WITHIN_LAUNCH}"
    freedom = f"{launches - 1} degree{'s' * (launches > 2)} of freedom"
    return f"95 % Student's t intervals over the lines of {launches} launches, {freedom}"


def _segment(line: _Line, weights: _Array, unit: float, freedom: int, by_launch: _Array | None) -> Segment:
    """Return a line with its intervals; ``unit`` is the standard error of one time relative to it.

    ``by_launch`` holds the launches' times of its sizes, a row each, None where there is one launch.
    """
    total, middle, about = _moments(line.sizes, weights)
    slope, latency = line.seconds_per_byte, line.latency_seconds
    # flat: the slope is within two of the standard errors that it would have if there were none
    flat = slope <= 2 * unit * line.fitted[0] / math.sqrt(len(line.sizes) * line.sizes.var())
    if flat:
        latency = float(weights @ line.times) / total
    of_slope = weights * (line.sizes - middle) / about
    of_latency = weights / total - (0.0 if flat else middle * of_slope)
    if by_launch is None:
        reach = unit * t_quantile(0.5 + CONFIDENCE / 2, freedom)
        slope_reach, latency_reach = (
            reach * math.sqrt(float((of**2 / weights).sum())) for of in (of_slope, of_latency)
        )
        slope_low, slope_high = slope - slope_reach, slope + slope_reach
        latency_low, latency_high = max(0.0, latency - latency_reach), latency + latency_reach
    else:
        slope_low, slope_high = _over_launches(slope, by_launch @ of_slope)
        latency_low, latency_high = _over_launches(latency, by_launch @ of_latency)
    return Segment(
        first_bytes=line.first_bytes,
        last_bytes=line.last_bytes,
        latency_seconds=latency,
        latency_low=latency_low,
        latency_high=latency_high,
        bytes_per_second=None if flat else 1 / slope,
        bytes_per_second_low=1 / slope_high if slope_high > 0 else None,
        bytes_per_second_high=1 / slope_low if slope_low > 0 and not flat else None,
    )


def _over_launches(middle: float, values: _Array) -> tuple[float, float]:
    """Return Student's t interval around ``middle``, on logarithms where all are above zero, and not below zero."""
    n = len(values)
    reach = t_quantile(0.5 + CONFIDENCE / 2, n - 1) / math.sqrt(n)
    if middle > 0 and values.min() > 0:
        factor = math.exp(reach * float(np.log(values).std(ddof=1)))
        return middle / factor, middle * factor
    reach *= float(values.std(ddof=1))
    return max(0.0, middle - reach), middle + reach
