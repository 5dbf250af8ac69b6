"""The latency and bandwidth of a communication curve: t = latency + size / bandwidth, in pieces where it switches.

Errors count relative to the model, so that a kilobyte weighs as much as a gigabyte, and with the weights of Student's
t distribution (Lange, Little & Taylor, JASA 1989), so that single sizes off the curve do not bend it. A switch of
protocol is a knee: one more line costs two parameters, and is drawn only if the F test refuses to do without it
(Bonferroni over the places where a knee could be). Pure; nothing here knows what was timed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, groupby, pairwise
from typing import Literal

from bench.results.stats import CONFIDENCE, median, t_quantile

METHOD = (
    "time = latency + size / bandwidth, by least squares of relative errors with Student-t weights; "
    "95 % t intervals from the fit's covariance, the knees taken as found"
)
MIN_SIZES = 3
NOISE_FLOOR = 0.01
OFF_CURVE = 0.20
OFF_CURVE_SIGMAS = 4
CeilingName = Literal["link", "copy"]
LINK: CeilingName = "link"
COPY: CeilingName = "copy"
_ABOVE = {
    LINK: "above the link's speed: reduction in the network, caches or too slow a declared link can read so",
    COPY: "above the copy in memory: caches that hold the data, or memory that ranks share, can read so",
}
_MAX_SEGMENTS = 3
_MAX_CUTS = 24
_LEVEL = 0.01
_TAILS = 4
_ROUNDS = 30
_CONVERGED = 1e-6
_MAD_TO_SIGMA = 1.4826
# of normal errors: what these weights leave of the variance is scaled back to the variance of the fit
_NORMAL_VARIANCE = 1.622


@dataclass(frozen=True, kw_only=True)
class Point:
    """A size in bytes and its time in seconds, with the time's 95 % interval where it is known."""

    size_bytes: int
    seconds: float
    low: float | None = None
    high: float | None = None


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

    ``off_curve`` holds sizes with their relative residuals, which is time over the model's less one; ``residual`` is
    the median of those of all sizes, without their signs.
    """

    segments: tuple[Segment, ...]
    half_bandwidth_bytes: float | None
    off_curve: tuple[tuple[int, float], ...]
    residual: float
    method: str

    @property
    def knees(self) -> tuple[float, ...]:
        """Where one line ends and the next begins, in bytes: where they cross, else the middle between the sizes."""
        return tuple(_knee(one, other) for one, other in pairwise(self.segments))

    def predict(self, size_bytes: int) -> float:
        return self.segments[sum(size_bytes > knee for knee in self.knees)].seconds(size_bytes)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What cannot be exceeded, one way: the declared speed of a link, or a copy in memory on the same host."""

    name: CeilingName
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a ceiling that was reached, never clipped; None is unknown, and ``against`` names the ceiling."""

    fraction: float | None
    against: CeilingName | None
    note: str = ""


def fit(points: Sequence[Point]) -> Fit | None:
    """Return the latency and bandwidth that explain times at three sizes or more, else None; all are above zero.

    Of several times of one size the (lower) median counts.
    """
    assert all(point.size_bytes > 0 and point.seconds > 0 for point in points)
    ordered = sorted(points, key=lambda point: (point.size_bytes, point.seconds))
    by_size = [list(alike) for _, alike in groupby(ordered, key=lambda point: point.size_bytes)]
    curve = tuple(alike[(len(alike) - 1) // 2] for alike in by_size)
    if len(curve) < MIN_SIZES:
        return None
    # standard errors relative to the times, of those whose interval is known
    errors = [
        (point.high - point.low) / 2 / 1.96 / point.seconds
        for point in curve
        if point.low is not None and point.high is not None
    ]
    noise = max(NOISE_FLOOR, median(errors) if errors else 0.0)
    most = min(_MAX_SEGMENTS, len(curve) // MIN_SIZES)
    chosen, *others = (_best(curve, count, noise) for count in range(1, most + 1))
    for other in others:
        if _is_asked_for(chosen, other, noise):
            chosen = other
    return _described(chosen, noise)


def efficiency(bytes_per_second: float | None, ceiling: Ceiling | None) -> Efficiency:
    """Return a bus bandwidth as a share of the ceiling, with a note where it is above; unknown if either is."""
    if bytes_per_second is None or ceiling is None:
        return Efficiency(fraction=None, against=None if ceiling is None else ceiling.name)
    fraction = bytes_per_second / ceiling.bytes_per_second
    return Efficiency(fraction=fraction, against=ceiling.name, note=_ABOVE[ceiling.name] if fraction > 1 else "")


@dataclass(frozen=True)
class _Line:
    latency: float
    slope: float

    def at(self, size_bytes: float) -> float:
        return self.latency + self.slope * size_bytes


@dataclass(frozen=True)
class _Pieces:
    """Consecutive parts of a curve, a line for each, and among how many ways to cut they were chosen."""

    parts: tuple[tuple[Point, ...], ...]
    lines: tuple[_Line, ...]
    ways: int

    @property
    def errors(self) -> list[float]:
        return [error for part, line in zip(self.parts, self.lines, strict=True) for error in _errors(part, line)]

    @property
    def freedom(self) -> int:
        return sum(len(part) - 2 for part in self.parts)


def _best(curve: tuple[Point, ...], count: int, scale: float) -> _Pieces:
    """Return the best cut into ``count`` parts of three sizes or more; where lines meet they save a parameter."""

    @cache
    def line(start: int, stop: int) -> _Line:
        return _line(curve[start:stop], scale)

    @cache
    def cost(start: int, stop: int) -> float:
        return _cost(_errors(curve[start:stop], line(start, stop)), scale)

    def total(ends: tuple[int, ...]) -> float:
        spans = list(pairwise(ends))
        meet = sum(
            _crossing(line(*one), line(*other), curve[one[1] - 1].size_bytes, curve[one[1]].size_bytes) is not None
            for one, other in pairwise(spans)
        )
        return sum(cost(*span) for span in spans) - meet * math.log(len(curve))

    ways = _cuts(len(curve), count)
    best = min(ways, key=total)
    spans = list(pairwise(best))
    parts = tuple(curve[start:stop] for start, stop in spans)
    return _Pieces(parts, tuple(line(*span) for span in spans), len(ways))


def _cuts(length: int, count: int) -> list[tuple[int, ...]]:
    """Return the ways to cut into parts of three sizes or more, each as the ends of its parts.

    Of many places only every so many-th is tried, so that a thousand sizes take seconds.
    """
    places = range(MIN_SIZES, length - MIN_SIZES + 1)
    tried = places[:: max(1, math.ceil(len(places) / _MAX_CUTS))]
    ways = ((0, *inner, length) for inner in combinations(tried, count - 1))
    return [ends for ends in ways if all(stop - start >= MIN_SIZES for start, stop in pairwise(ends))]


def _is_asked_for(few: _Pieces, many: _Pieces, noise: float) -> bool:
    """Say whether the F test refuses the fewer lines.

    With 2 and d degrees of freedom its p is x^(d/2), with 4 at most x^(d/2) (1 + d/2), for sums of squares in ratio x.
    The sizes worst off the fewer lines, one in ten, have no voice: an outlier or two do not ask for a line.
    """
    pairs = sorted(zip(few.errors, many.errors, strict=True), key=lambda pair: abs(pair[0]))
    silent = max(1, len(pairs) // 10)
    few_errors, many_errors = zip(*pairs[:-silent], strict=True)
    freedom = many.freedom - silent
    gain = _spread(few_errors, noise) - _spread(many_errors, noise)
    extra = len(many.lines) - len(few.lines) - 1
    return freedom * gain > 2 * math.log(many.ways / _LEVEL) + 2 * extra * math.log(1 + freedom / 2)


def _spread(errors: Sequence[float], noise: float) -> float:
    """Return the logarithm of the errors' mean square, as Student's t likelihood sees it."""
    scale = _scale(errors, noise)
    return 2 * math.log(scale) + _cost(errors, scale) / len(errors)


def _scale(errors: Sequence[float], at_least: float) -> float:
    """Return the scale of Student's t that makes the errors likeliest, by fixed-point iteration."""
    scale = max(at_least, math.sqrt(sum(error**2 for error in errors) / len(errors)))
    for _ in range(_ROUNDS):
        squares = sum(_weight(error / scale) * error**2 for error in errors)
        scale = max(at_least, math.sqrt((_TAILS + 1) / _TAILS * squares / len(errors)))
    return scale


def _line(part: Sequence[Point], scale: float) -> _Line:
    """Return the line whose relative errors are likeliest, the better of two searches: an outlier can mislead one."""
    times = [point.seconds for point in part]
    middles = [median(times[max(0, min(i - 1, len(times) - 3)) :][:3]) for i in range(len(times))]
    found = [_search(part, scale, start) for start in (times, middles)]
    return min(found, key=lambda line: _cost(_errors(part, line), scale))


def _search(part: Sequence[Point], scale: float, start: Sequence[float]) -> _Line:
    """Return a line by iteratively reweighted least squares, from errors relative to ``start``."""
    line = _least_squares(part, [1 / seconds**2 for seconds in start])
    ends = (part[0].size_bytes, part[-1].size_bytes)
    for _ in range(_ROUNDS):
        before, line = line, _least_squares(part, _weights(part, line, scale))
        if all(abs(line.at(size) / before.at(size) - 1) < _CONVERGED for size in ends):
            break
    return line


def _weights(part: Sequence[Point], line: _Line, scale: float) -> list[float]:
    errors = _errors(part, line)
    return [_weight(e / scale) / line.at(point.size_bytes) ** 2 for e, point in zip(errors, part, strict=True)]


def _weight(deviations: float) -> float:
    return _TAILS / (_TAILS + deviations**2)


def _cost(errors: Sequence[float], scale: float) -> float:
    """Return -2 log likelihood of Student's t without its constants."""
    return (_TAILS + 1) * sum(math.log1p((error / scale) ** 2 / _TAILS) for error in errors)


def _errors(part: Sequence[Point], line: _Line) -> list[float]:
    return [point.seconds / line.at(point.size_bytes) - 1 for point in part]


def _moments(part: Sequence[Point], weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the sum of the weights, the mean size, and the weighted squares of the sizes about it."""
    total = sum(weights)
    middle = sum(w * point.size_bytes for w, point in zip(weights, part, strict=True)) / total
    return total, middle, sum(w * (point.size_bytes - middle) ** 2 for w, point in zip(weights, part, strict=True))


def _least_squares(part: Sequence[Point], weights: Sequence[float]) -> _Line:
    """Return the line with latency and slope not below zero that is closest in weighted squares."""
    total, middle, about = _moments(part, weights)
    time = sum(w * point.seconds for w, point in zip(weights, part, strict=True)) / total
    slope = sum(w * (point.size_bytes - middle) * point.seconds for w, point in zip(weights, part, strict=True)) / about
    if slope < 0:
        return _Line(time, 0.0)
    if slope * middle <= time:
        return _Line(time - slope * middle, slope)
    both = sum(w * point.size_bytes * point.seconds for w, point in zip(weights, part, strict=True))
    return _Line(0.0, both / (about + total * middle**2))


def _crossing(one: _Line, other: _Line, low: float, high: float) -> float | None:
    if one.slope == other.slope:
        return None
    size = (other.latency - one.latency) / (one.slope - other.slope)
    return size if low <= size <= high else None


def _knee(one: Segment, other: Segment) -> float:
    low, high = one.last_bytes, other.first_bytes
    lines = [_Line(segment.latency_seconds, segment.seconds_per_byte) for segment in (one, other)]
    return _crossing(lines[0], lines[1], low, high) or math.sqrt(low * high)


def _described(chosen: _Pieces, noise: float) -> Fit:
    """Return the pieces fitted with the scale of their own errors, with intervals from their covariance."""
    scale = _scale(chosen.errors, NOISE_FLOOR)
    pieces = _Pieces(chosen.parts, tuple(_line(part, scale) for part in chosen.parts), chosen.ways)
    errors, freedom = pieces.errors, pieces.freedom
    squares = sum(_weight(error / scale) * error**2 for error in errors) / freedom
    unit = max(math.sqrt(_NORMAL_VARIANCE * squares), noise)
    segments = tuple(
        _segment(part, line, scale, unit, freedom) for part, line in zip(pieces.parts, pieces.lines, strict=True)
    )
    sizes = [point.size_bytes for part in pieces.parts for point in part]
    residual = median([abs(error) for error in errors])
    limit = max(OFF_CURVE, OFF_CURVE_SIGMAS * _MAD_TO_SIGMA * residual)
    last = segments[-1]
    return Fit(
        segments=segments,
        half_bandwidth_bytes=last.latency_seconds * last.bytes_per_second if last.bytes_per_second else None,
        off_curve=tuple((size, error) for size, error in zip(sizes, errors, strict=True) if abs(error) > limit),
        residual=residual,
        method=f"{METHOD}; {len(sizes)} sizes, {freedom} degrees of freedom",
    )


def _segment(part: Sequence[Point], line: _Line, scale: float, unit: float, freedom: int) -> Segment:
    """Return a line with its intervals; ``unit`` is the standard error of one time relative to it."""
    weights = _weights(part, line, scale)
    total, middle, about = _moments(part, weights)
    reach = unit * t_quantile(0.5 + CONFIDENCE / 2, freedom)
    steepest, least = (line.slope + sign * reach / math.sqrt(about) for sign in (1, -1))
    # flat: the slope is within two of the standard errors that it would have if there were none
    _, _, unweighted = _moments(part, [1.0] * len(part))
    flat = line.slope <= 2 * unit * line.at(part[0].size_bytes) / math.sqrt(unweighted)
    latency, latency_reach = line.latency, reach * math.sqrt(1 / total + middle**2 / about)
    if flat:
        latency = sum(w * point.seconds for w, point in zip(weights, part, strict=True)) / total
        latency_reach = reach / math.sqrt(total)
    return Segment(
        first_bytes=part[0].size_bytes,
        last_bytes=part[-1].size_bytes,
        latency_seconds=latency,
        latency_low=max(0.0, latency - latency_reach),
        latency_high=latency + latency_reach,
        bytes_per_second=None if flat else 1 / line.slope,
        bytes_per_second_low=1 / steepest,
        bytes_per_second_high=1 / least if least > 0 and not flat else None,
    )
