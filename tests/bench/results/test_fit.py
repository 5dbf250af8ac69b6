"""Latency and bandwidth of known curves, from their noisy times."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import geometric_mean

import numpy as np
import pytest
import scipy.optimize  # type: ignore[import-untyped]
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results import fit as module
from parbench.bench.results.fit import Fit, Point, Segment, fit
from parbench.bench.results.stats import quantile, within_launch

Model = Callable[[float], float]

KIB = 1024
OCTAVES = [1 << exponent for exponent in range(10, 31)]
NODE_PRESET = [KIB * 4**i for i in range(8)]


def switching(last_bytes: int, first: tuple[float, float], second: tuple[float, float]) -> Model:
    """Return the time of two protocols, (latency, bandwidth) each, switching after a size."""

    def seconds(size: float) -> float:
        latency, bandwidth = first if size <= last_bytes else second
        return latency + size / bandwidth

    return seconds


LINE = switching(0, (0, 1), (15e-6, 5e9))


def medians(
    model: Model, sizes: Sequence[int], seed: int, *, samples: int = 60, noise: float = 0.05
) -> list[Point]:
    """Return medians with intervals of noisy samples of one launch."""
    source = random.Random(seed)
    points = []
    for size in sizes:
        times = [model(size) * source.gauss(1, noise) for _ in range(samples)]
        estimate = within_launch(times)
        point = Point(size_bytes=size, seconds=estimate.value, low=estimate.low, high=estimate.high)
        points.append(point)
    return points


def times(
    model: Model, sizes: Sequence[int], seed: int | None = None, noise: float = 0.0
) -> list[Point]:
    """Return times without intervals, exact where the noise is 0."""
    source = random.Random(seed)
    return [
        Point(size_bytes=size, seconds=model(size) * math.exp(source.gauss(0, noise)))
        for size in sizes
    ]


def scale(points: Sequence[Point], factors: Mapping[int, float]) -> list[Point]:
    """Return the points with some times, by index, multiplied by a factor."""
    return [
        Point(size_bytes=point.size_bytes, seconds=point.seconds * factors.get(index, 1))
        for index, point in enumerate(points)
    ]


def fit_points(points: Sequence[Point]) -> Fit:
    result = fit(points)
    assert result is not None
    return result


def fit_line(points: Sequence[Point]) -> Segment:
    (segment,) = fit_points(points).segments
    return segment


def bandwidth(segment: Segment) -> float:
    assert segment.bytes_per_second is not None
    return segment.bytes_per_second


def count_hits(segment: Segment, latency: float, rate: float) -> int:
    """Return how many of the two intervals contain the truth."""
    low, high = segment.bytes_per_second_low or 0, segment.bytes_per_second_high or math.inf
    has_latency = segment.latency_low <= latency <= segment.latency_high
    return has_latency + (low <= rate <= high)


BREAKPOINTS: dict[str, tuple[Model, list[int], tuple[float, ...]]] = {
    # 66 KiB brackets the switch, which a fit cannot know better than the sizes do
    "switch": (
        switching(64 * KIB, (12e-6, 8e9), (25e-6, 45e9)),
        sorted([*OCTAVES, 66 * KIB]),
        (12e-6, 8e9, 25e-6, 45e9, 64 * KIB),
    ),
    "minimum": (
        lambda size: min(12e-6 + size / 2e9, 25e-6 + size / 45e9),
        OCTAVES,
        (12e-6, 2e9, 25e-6, 45e9, 13e-6 / (1 / 2e9 - 1 / 45e9)),
    ),
}


@pytest.mark.parametrize("name", BREAKPOINTS)
def test_fit_recovers_both_protocols(name: str) -> None:
    model, sizes, truth = BREAKPOINTS[name]
    unmeasured = [
        round(size * 1.4) for size in OCTAVES[:-1] if abs(math.log(size * 1.4 / truth[4])) > 0.5
    ]
    errors: list[list[float]] = []
    prediction_errors: list[float] = []
    hits = 0
    for seed in range(12):
        result = fit_points(medians(model, sizes, seed))
        first, second = result.segments
        lines = [first.latency_seconds, bandwidth(first), second.latency_seconds, bandwidth(second)]
        estimates = [*lines, *result.knees]
        errors.append([abs(x / y - 1) for x, y in zip(estimates, truth, strict=True)])
        prediction_errors += [abs(result.predict(size) / model(size) - 1) for size in unmeasured]
        hits += count_hits(first, *truth[:2])
    for parameter_errors in zip(*errors, strict=True):
        assert quantile(parameter_errors, 0.9) <= 0.05
    assert quantile(prediction_errors, 0.9) < 0.02
    assert hits / 24 > 0.9


@pytest.mark.parametrize("sizes", [NODE_PRESET, OCTAVES[:17]], ids=["node", "octaves"])
@pytest.mark.parametrize("noise", [0.02, 0.10])
def test_line_is_not_split(sizes: list[int], noise: float) -> None:
    results = [fit_points(times(LINE, sizes, seed, noise)) for seed in range(40)]
    lines = [result.segments[0] for result in results if len(result.segments) == 1]
    assert len(lines) >= 38
    hits = sum(count_hits(line, 15e-6, 5e9) for line in lines)
    assert 0.85 < hits / len(lines) / 2 < 1
    assert all(line.latency_high - line.latency_low < 15 * noise * 15e-6 for line in lines)


def test_fit_finds_two_breakpoints() -> None:
    late = switching(2 << 20, (10e-6, 3e9), (400e-6, 30e9))

    def model(size: float) -> float:
        return 3e-6 + size / 20e9 if size <= 8 * KIB else late(size)

    segments = fit_points(medians(model, OCTAVES, 1)).segments
    assert [segment.last_bytes for segment in segments] == [8 * KIB, 2 << 20, 1 << 30]
    latencies = [segment.latency_seconds for segment in segments]
    assert latencies == pytest.approx([3e-6, 10e-6, 400e-6], rel=0.1)


def test_fit_finds_a_breakpoint_in_the_node_preset() -> None:
    model = switching(64 * KIB, (60e-6, 1e9), (150e-6, 2.5e9))
    segments = fit_points(medians(model, NODE_PRESET, 3)).segments
    assert [segment.first_bytes for segment in segments] == [KIB, 256 * KIB]


def test_breakpoint_within_noise_is_not_claimed() -> None:
    model = switching(64 * KIB, (12e-6, 8e9), (18e-6, 8e9))
    precise = medians(model, OCTAVES, 1, samples=1000, noise=0.02)
    assert len(fit_points(precise).segments) == 2
    assert len(fit_points(medians(model, OCTAVES, 1, noise=0.5)).segments) == 1
    below_floor = switching(64 * KIB, (10e-6, 8e9), (10.1e-6, 8e9))
    assert len(fit_points(times(below_floor, OCTAVES)).segments) == 1


def test_exact_times_give_the_exact_line() -> None:
    result = fit_points(times(LINE, NODE_PRESET))
    assert result.segments[0].latency_seconds == pytest.approx(15e-6, rel=1e-6)
    assert bandwidth(result.segments[0]) == pytest.approx(5e9, rel=1e-6)
    assert result.half_bandwidth_bytes == pytest.approx(75_000, rel=1e-6)
    assert result.predict(75_000) == pytest.approx(30e-6)
    assert result.residual < 1e-6
    assert (result.off_curve, result.knees) == ((), ())


@pytest.mark.parametrize(
    "factors",
    [
        {0: 0.1},
        {20: 0.1},
        {10: 1 / 3},
        {19: 3},
        {0: 10},
        {4: 2.5, 15: 1.6},
        {12: 1.6, 13: 2.5},
        {2: 2.5, 4: 2.5},
    ],
)
def test_outliers_are_named_and_left_out(factors: dict[int, float]) -> None:
    result = fit_points(scale(times(LINE, OCTAVES, 7, 0.01), factors))
    (line,) = result.segments
    assert line.latency_seconds == pytest.approx(15e-6, rel=0.02)
    assert bandwidth(line) == pytest.approx(5e9, rel=0.02)
    assert [size for size, _ in result.off_curve] == [OCTAVES[index] for index in factors]
    errors = [error for _, error in result.off_curve]
    assert errors == pytest.approx([factor - 1 for factor in factors.values()], rel=0.1)


def test_small_deviation_is_not_an_outlier() -> None:
    assert fit_points(scale(times(LINE, OCTAVES, 7, 0.01), {0: 1.15})).off_curve == ()


def test_fit_needs_three_sizes() -> None:
    for sizes in ([], [KIB], [KIB, 4 * KIB]):
        assert fit(times(LINE, sizes) * 3) is None
    three = fit_line(times(LINE, [KIB, 256 * KIB, 16 << 20]))
    many = fit_line(times(LINE, OCTAVES))
    assert three.latency_seconds == pytest.approx(15e-6)
    assert three.latency_high - three.latency_low > 3 * (many.latency_high - many.latency_low)


def test_fit_uses_the_median_time_of_a_size() -> None:
    points = medians(LINE, NODE_PRESET, 1)
    fast, slow = (scale(points, dict.fromkeys(range(8), factor)) for factor in (0.5, 9))
    shuffled = [*points, *fast, *slow]
    random.Random(0).shuffle(shuffled)
    assert fit(shuffled) == fit(points)


def test_flat_curve_has_a_bandwidth_bound() -> None:
    lines = [fit_line(times(lambda _: 10e-6, NODE_PRESET[:4], seed, 0.02)) for seed in range(20)]
    assert sum(line.bytes_per_second is None for line in lines) >= 18
    line = lines[1]
    assert line.bytes_per_second_high is None
    assert line.bytes_per_second_low is not None
    assert line.bytes_per_second_low > NODE_PRESET[3] / 10e-6
    assert line.latency_low < 10e-6 < line.latency_high
    assert line.seconds(1 << 40) == line.latency_seconds
    assert fit_points(times(lambda _: 10e-6, NODE_PRESET)).half_bandwidth_bytes is None


def test_latency_is_not_negative() -> None:
    line = fit_line(times(lambda size: size / 1e9 - 0.3e-6, NODE_PRESET))
    assert (line.latency_seconds, line.latency_low) == (0, 0)
    assert line.latency_high > 0


def test_slope_is_not_negative() -> None:
    for segment in fit_points(times(lambda size: 1e-3 / size, NODE_PRESET)).segments:
        assert segment.seconds_per_byte == 0
        assert (segment.bytes_per_second_low or 0) > 0


def test_measured_intervals_widen_the_fit() -> None:
    points = times(LINE, NODE_PRESET)
    wide = [replace(p, low=p.seconds * 0.7, high=p.seconds * 1.3) for p in points]
    narrow, broad = fit_line(points), fit_line(wide)
    assert broad.latency_seconds == pytest.approx(narrow.latency_seconds)
    narrow_width = narrow.latency_high - narrow.latency_low
    assert broad.latency_high - broad.latency_low > 10 * narrow_width


def launch_points(launches: int, seed: int) -> list[Point]:
    """Return times of launches where all sizes of a launch share half of the variance."""
    source, points = random.Random(seed), []
    shared = [source.gauss(0, 0.1) for _ in range(launches)]
    for size in NODE_PRESET:
        errors = [(error + source.gauss(0, 0.1)) / math.sqrt(2) for error in shared]
        seconds = [LINE(size) * math.exp(error) for error in errors]
        launch_seconds = dict(enumerate(seconds))
        point = Point(size_bytes=size, seconds=geometric_mean(seconds), launches=launch_seconds)
        points.append(point)
    return points


@pytest.mark.parametrize("launches", [2, 5])
def test_intervals_over_launches_cover_the_truth(launches: int) -> None:
    results = [fit_points(launch_points(launches, seed)) for seed in range(150)]
    lines = [result.segments[0] for result in results if len(result.segments) == 1]
    assert {result.launches for result in results} == {launches}
    assert 0.92 <= sum(count_hits(line, 15e-6, 5e9) for line in lines) / 300 <= 0.985


def test_incomplete_launch_is_left_out() -> None:
    first, *rest = launch_points(3, 1)
    short = replace(first, launches={0: first.seconds, 1: first.seconds})
    assert fit_points([short, *rest]).launches == 2


def test_intervals_of_two_launches_are_students() -> None:
    points = [
        replace(point, launches={0: 2 * point.seconds, 1: point.seconds / 2})
        for point in times(LINE, NODE_PRESET)
    ]
    line, factor = fit_line(points), math.exp(scipy.stats.t.ppf(0.975, 1) * math.log(2))
    assert line.latency_high == pytest.approx(15e-6 * factor)
    assert line.latency_low == pytest.approx(15e-6 / factor)
    assert line.bytes_per_second_low == pytest.approx(5e9 / factor)


def test_intervals_agree_with_scipy() -> None:
    """With noise below the floor all weights are relative errors, which scipy can fit."""
    points = times(LINE, OCTAVES, 4, 1e-4)
    line = fit_line(points)
    sizes = np.array([point.size_bytes for point in points], dtype=float)
    _, covariance = scipy.optimize.curve_fit(
        lambda size, latency, slope: latency + size * slope,
        sizes,
        [point.seconds for point in points],
        p0=(15e-6, 2e-10),
        sigma=module.NOISE_FLOOR * np.array([line.seconds(size) for size in sizes]),
        absolute_sigma=True,
    )
    reach = scipy.stats.t.ppf(0.975, len(points) - 2) * np.sqrt(np.diag(covariance))
    slope_high = 1 / (line.bytes_per_second_low or 1)
    assert line.latency_high - line.latency_seconds == pytest.approx(reach[0], rel=1e-3)
    assert slope_high - line.seconds_per_byte == pytest.approx(reach[1], rel=1e-3)


def make_segment(first: int, last: int, latency: float, rate: float) -> Segment:
    latencies = {f"latency_{end}": latency for end in ("seconds", "low", "high")}
    rates = {f"bytes_per_second{end}": rate for end in ("", "_low", "_high")}
    return Segment(first_bytes=first, last_bytes=last, **latencies, **rates)


@pytest.mark.parametrize(
    ("latency", "rate", "predictions"),
    [(3.0, math.inf, {100: 2.0, 200: 3.0}), (9.0, 100.0, {200: 3.0, 201: 11.01})],
    ids=["crossing", "gap"],
)
def test_knee_is_the_crossing_or_the_middle_of_the_gap(
    latency: float, rate: float, predictions: dict[int, float]
) -> None:
    segments = (make_segment(1, 100, 1.0, 100.0), make_segment(400, 1000, latency, rate))
    result = Fit(
        segments=segments,
        half_bandwidth_bytes=None,
        off_curve=(),
        residual=0,
        launches=1,
        method="",
    )
    assert result.knees == pytest.approx((200.0,))
    assert {size: result.predict(size) for size in predictions} == pytest.approx(predictions)


CURVES = st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-9, 1e3), min_size=3, max_size=9)


@settings(deadline=None, max_examples=30)
@given(CURVES)
def test_segments_cover_any_curve(curve: dict[int, float]) -> None:
    points = [Point(size_bytes=size, seconds=seconds) for size, seconds in curve.items()]
    result, sizes = fit_points(points), sorted(curve)
    assert result.segments[0].first_bytes == sizes[0]
    assert result.segments[-1].last_bytes == sizes[-1]
    for before, after in pairwise(result.segments):
        assert sizes.index(after.first_bytes) == sizes.index(before.last_bytes) + 1
    for segment in result.segments:
        latencies = [segment.latency_low, segment.latency_seconds, segment.latency_high]
        assert latencies == sorted(latencies)
        assert 0 <= latencies[0] <= latencies[-1] < math.inf
        assert (segment.bytes_per_second_low or 0) <= (segment.bytes_per_second or math.inf)
    assert all(0 < result.predict(size) < math.inf for size in sizes)
