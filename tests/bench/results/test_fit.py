"""Latency and bandwidth of known curves, from their noisy times."""

import math
import random
from collections.abc import Callable, Sequence
from statistics import geometric_mean

import pytest

from parbench.bench.results.fit import CurveFit, CurvePoint, Segment, fit_curve
from parbench.bench.results.stats import quantile

Model = Callable[[float], float]

KIB = 1024
OCTAVES = [1 << exponent for exponent in range(10, 31)]
NODE_PRESET = [KIB * 4**i for i in range(8)]
LATENCY = 15e-6
BANDWIDTH = 5e9


def line_model(size: float) -> float:
    return LATENCY + size / BANDWIDTH


def make_switch(
    last_bytes: int, small: tuple[float, float], large: tuple[float, float]
) -> Model:
    """Return the time of two protocols, (latency, bandwidth) each, that switch after a size."""

    def model(size: float) -> float:
        latency, bandwidth = small if size <= last_bytes else large
        return latency + size / bandwidth

    return model


def make_times(
    model: Model, sizes: Sequence[int], seed: int = 0, noise: float = 0.0
) -> list[CurvePoint]:
    """Return times without intervals, exact where the noise is 0."""
    source = random.Random(seed)
    return [
        CurvePoint(size_bytes=size, seconds=model(size) * math.exp(source.gauss(0, noise)))
        for size in sizes
    ]


def fit_points(points: Sequence[CurvePoint]) -> CurveFit:
    result = fit_curve(points)
    assert result is not None
    return result


def fit_line(points: Sequence[CurvePoint]) -> Segment:
    (segment,) = fit_points(points).segments
    return segment


def get_bandwidth(segment: Segment) -> float:
    assert segment.bandwidth is not None
    return segment.bandwidth.value


def count_hits(segment: Segment, latency: float, bandwidth: float) -> int:
    """Return the number of the two intervals that contain the true value."""
    hits = 0
    for estimate, truth in ((segment.latency, latency), (segment.bandwidth, bandwidth)):
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= truth <= estimate.high
    return hits


def test_exact_times_give_the_exact_line() -> None:
    result = fit_points(make_times(line_model, NODE_PRESET))
    [line] = result.segments
    assert (line.latency.value, get_bandwidth(line)) == pytest.approx((LATENCY, BANDWIDTH))
    assert line.half_bandwidth_bytes == pytest.approx(75_000, rel=1e-6)
    assert result.predict(75_000) == pytest.approx(30e-6)
    assert result.residual < 1e-6
    assert result.outliers == ()


# 66 KiB is next to the switch, which a fit can only locate between two sizes.
SWITCH_SIZES = sorted([*OCTAVES, 66 * KIB])
SWITCH = make_switch(64 * KIB, (12e-6, 8e9), (25e-6, 45e9))


def test_fit_recovers_both_protocols() -> None:
    errors: list[list[float]] = []
    for seed in range(5):
        result = fit_points(make_times(SWITCH, SWITCH_SIZES, seed, 0.008))
        small, large = result.segments
        estimates = [
            small.latency.value / 12e-6,
            get_bandwidth(small) / 8e9,
            large.latency.value / 25e-6,
            get_bandwidth(large) / 45e9,
            small.last_bytes / (64 * KIB),
        ]
        for size in (3 * KIB, 200 * KIB, 300 << 20):
            estimates.append(result.predict(size) / SWITCH(size))
        errors.append([abs(estimate - 1) for estimate in estimates])
    for parameter_errors in zip(*errors, strict=True):
        assert quantile(parameter_errors, 0.9) <= 0.05


@pytest.mark.parametrize("noise", [0.02, 0.10])
def test_noisy_line_is_not_split(noise: float) -> None:
    results = [
        fit_points(make_times(line_model, NODE_PRESET, seed, noise)) for seed in range(30)
    ]
    assert sum(len(result.segments) == 1 for result in results) >= 28


@pytest.mark.parametrize(("noise", "segments"), [(0.0008, 2), (0.08, 1)])
def test_breakpoint_within_noise_is_not_claimed(noise: float, segments: int) -> None:
    model = make_switch(64 * KIB, (12e-6, 8e9), (18e-6, 8e9))
    points = make_times(model, OCTAVES, 1, noise)
    assert len(fit_points(points).segments) == segments


@pytest.mark.parametrize(
    "factors",
    [{0: 10}, {20: 0.1}, {4: 2.5, 15: 1.6}, {12: 1.6, 13: 2.5}],
    ids=["smallest size", "largest size", "two", "neighbors"],
)
def test_outliers_are_named_and_left_out(factors: dict[int, float]) -> None:
    def model(size: float) -> float:
        return line_model(size) * factors.get(OCTAVES.index(int(size)), 1)

    result = fit_points(make_times(model, OCTAVES, 7, 0.01))
    (line,) = result.segments
    assert line.latency.value == pytest.approx(LATENCY, rel=0.02)
    assert get_bandwidth(line) == pytest.approx(BANDWIDTH, rel=0.02)
    assert [size for size, _ in result.outliers] == [OCTAVES[index] for index in factors]
    errors = [error for _, error in result.outliers]
    assert errors == pytest.approx([factor - 1 for factor in factors.values()], rel=0.1)


def test_fit_needs_three_sizes() -> None:
    assert fit_curve([]) is None
    assert fit_curve(make_times(line_model, [KIB, 4 * KIB])) is None
    line = fit_line(make_times(line_model, [KIB, 256 * KIB, 16 << 20]))
    assert line.latency.value == pytest.approx(LATENCY)


def test_flat_curve_has_no_bandwidth() -> None:
    sizes = NODE_PRESET[:4]
    lines = [fit_line(make_times(lambda size: 10e-6, sizes, seed, 0.02)) for seed in range(20)]
    assert [line.bandwidth for line in lines].count(None) >= 18
    line = fit_line(make_times(lambda size: 10e-6, sizes))
    assert line.half_bandwidth_bytes is None
    assert line.predict(1 << 40) == line.latency.value == pytest.approx(10e-6)


def test_latency_and_slope_are_not_negative() -> None:
    line = fit_line(make_times(lambda size: size / 1e9 - 0.3e-6, NODE_PRESET))
    assert line.latency.value == 0
    for segment in fit_points(make_times(lambda size: 1e-3 / size, NODE_PRESET)).segments:
        assert segment.bandwidth is None


def make_repetition_points(seed: int) -> list[CurvePoint]:
    """Return times of three repetitions in which all sizes share half of the variance."""
    source = random.Random(seed)
    repetition_errors = [source.gauss(0, 0.1) for _ in range(3)]
    points = []
    for size in NODE_PRESET:
        by_repetition: dict[int, float] = {}
        for repetition, repetition_error in enumerate(repetition_errors):
            error = (repetition_error + source.gauss(0, 0.1)) / math.sqrt(2)
            by_repetition[repetition] = line_model(size) * math.exp(error)
        seconds = geometric_mean(by_repetition.values())
        points.append(CurvePoint(size_bytes=size, seconds=seconds, repetitions=by_repetition))
    return points


def test_intervals_over_repetitions_cover_the_truth() -> None:
    results = [fit_points(make_repetition_points(seed)) for seed in range(60)]
    lines = [result.segments[0] for result in results if len(result.segments) == 1]
    hits = sum(count_hits(line, LATENCY, BANDWIDTH) for line in lines)
    assert 0.9 <= hits / (2 * len(lines)) <= 0.99
    assert fit_line(make_times(line_model, NODE_PRESET)).latency.low is None
