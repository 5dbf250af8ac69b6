"""The latency and bandwidth of curves that are known, from their noisy times."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import geometric_mean

import numpy as np
import pytest
import scipy.integrate  # type: ignore[import-untyped]
import scipy.optimize  # type: ignore[import-untyped]
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results import fit as module
from parbench.bench.results.fit import Fit, Point, Segment, fit, intervals_words
from parbench.bench.results.stats import quantile, within_launch

Model = Callable[[float], float]

KIB = 1024
OCTAVES = [1 << exponent for exponent in range(10, 31)]
NODE_PRESET = [KIB * 4**i for i in range(8)]
BAR = 0.05


def switching(last: int, first: tuple[float, float], second: tuple[float, float]) -> Model:
    """Return the time of two protocols, each a latency in s and a bandwidth in B/s, the first up to ``last`` bytes."""

    def seconds(size: float) -> float:
        latency, bandwidth = first if size <= last else second
        return latency + size / bandwidth

    return seconds


def straight(latency: float = 15e-6, bandwidth: float = 5e9) -> Model:
    return switching(0, (0, 1), (latency, bandwidth))


def measured(model: Model, sizes: Sequence[int], seed: int, *, samples: int = 60, noise: float = 0.05) -> list[Point]:
    """Return medians of noisy samples, as one launch gives them."""
    source = random.Random(seed)
    points = []
    for size in sizes:
        found = within_launch([model(size) * source.gauss(1, noise) for _ in range(samples)])
        points.append(Point(size_bytes=size, seconds=found.value, low=found.low, high=found.high))
    return points


def bare(model: Model, sizes: Sequence[int], seed: int | None = None, noise: float = 0.0) -> list[Point]:
    """Return times without intervals, exact where there is no noise."""
    source = random.Random(seed)
    return [Point(size_bytes=size, seconds=model(size) * math.exp(source.gauss(0, noise))) for size in sizes]


def spoilt(points: Sequence[Point], factors: Mapping[int, float]) -> list[Point]:
    """Return points of which some, by their places, take longer by a factor."""
    return [
        Point(size_bytes=point.size_bytes, seconds=point.seconds * factors.get(place, 1))
        for place, point in enumerate(points)
    ]


def fitted(points: Sequence[Point]) -> Fit:
    found = fit(points)
    assert found is not None
    return found


def only(points: Sequence[Point]) -> Segment:
    (segment,) = fitted(points).segments
    return segment


def bandwidth(segment: Segment) -> float:
    assert segment.bytes_per_second is not None
    return segment.bytes_per_second


def holds(segment: Segment, latency: float, rate: float) -> int:
    """Return how many of a line's two intervals hold the truth."""
    low, high = segment.bytes_per_second_low or 0, segment.bytes_per_second_high or math.inf
    return (segment.latency_low <= latency <= segment.latency_high) + (low <= rate <= high)


CASES: dict[str, tuple[Model, list[int], tuple[float, ...]]] = {
    # the switch is bracketed, for no fit can know it better than the sizes do
    "latency and bandwidth switch": (
        switching(64 * KIB, (12e-6, 8e9), (25e-6, 45e9)),
        sorted([*OCTAVES, 66 * KIB]),
        (12e-6, 8e9, 25e-6, 45e9, 64 * KIB),
    ),
    "only latency switches": (
        switching(64 * KIB, (12e-6, 8e9), (25e-6, 8e9)),
        sorted([*OCTAVES, 66 * KIB]),
        (12e-6, 8e9, 25e-6, 8e9, 64 * KIB),
    ),
    "the faster of two lines": (
        lambda size: min(12e-6 + size / 2e9, 25e-6 + size / 45e9),
        OCTAVES,
        (12e-6, 2e9, 25e-6, 45e9, 13e-6 / (1 / 2e9 - 1 / 45e9)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_switch_of_protocol_is_found_with_both_sides_their_intervals_and_sizes_not_measured(name: str) -> None:
    model, sizes, truth = CASES[name]
    unseen = [round(size * 1.4) for size in OCTAVES[:-1] if abs(math.log(size * 1.4 / truth[4])) > 0.5]
    errors: list[list[float]] = [[] for _ in truth]
    predictions: list[float] = []
    held = 0
    seeds = range(12)
    for seed in seeds:
        found = fitted(measured(model, sizes, seed))
        first, second = found.segments
        values = (first.latency_seconds, bandwidth(first), second.latency_seconds, bandwidth(second), *found.knees)
        for of, value, true in zip(errors, values, truth, strict=True):
            of.append(abs(value / true - 1))
        predictions += [abs(found.predict(size) / model(size) - 1) for size in unseen]
        held += holds(first, *truth[:2])
    assert [quantile(of, 0.9) <= BAR for of in errors] == [True] * len(truth), errors
    assert quantile(predictions, 0.9) < 0.02
    assert max(predictions) < BAR
    assert held / len(seeds) / 2 > 0.9


def check_single_line(sizes: Sequence[int], noise: float, seeds: range) -> None:
    found = [fitted(bare(straight(), sizes, seed, noise)) for seed in seeds]
    assert sum(len(one.segments) > 1 for one in found) <= len(seeds) / 20
    lines = [one.segments[0] for one in found if len(one.segments) == 1]
    assert 0.85 < sum(holds(line, 15e-6, 5e9) for line in lines) / len(lines) / 2 < 1
    assert all(line.latency_high - line.latency_low < 15 * noise * 15e-6 for line in lines)


def test_a_single_line_is_not_broken_and_its_intervals_hold_it() -> None:
    for sizes in (NODE_PRESET, OCTAVES[:17]):
        for noise in (0.02, 0.10):
            check_single_line(sizes, noise, range(40))
    assert all(len(fitted(measured(straight(), OCTAVES, seed)).segments) == 1 for seed in range(4))


def test_two_switches_are_found_and_one_among_the_eight_sizes_of_a_node() -> None:
    model = switching(8 * KIB, (3e-6, 20e9), (0.0, 1.0))
    late = switching(2 << 20, (10e-6, 3e9), (400e-6, 30e9))
    found = fitted(measured(lambda size: model(size) if size <= 8 * KIB else late(size), OCTAVES, 1))
    assert [segment.last_bytes for segment in found.segments] == [8 * KIB, 2 << 20, 1 << 30]
    assert [segment.latency_seconds for segment in found.segments] == pytest.approx([3e-6, 10e-6, 400e-6], rel=0.1)
    of_node = fitted(measured(switching(64 * KIB, (60e-6, 1e9), (150e-6, 2.5e9)), NODE_PRESET, 3))
    assert [segment.first_bytes for segment in of_node.segments] == [KIB, 256 * KIB]


def test_noise_hides_a_switch_that_it_could_have_made() -> None:
    model = switching(64 * KIB, (12e-6, 8e9), (18e-6, 8e9))
    assert len(fitted(measured(model, OCTAVES, 1, samples=1000, noise=0.02)).segments) == 2
    assert len(fitted(measured(model, OCTAVES, 1, samples=60, noise=0.5)).segments) == 1
    below_the_floor = switching(64 * KIB, (10e-6, 8e9), (10.1e-6, 8e9))
    assert len(fitted(bare(below_the_floor, OCTAVES)).segments) == 1


def test_exact_times_give_the_line_exactly() -> None:
    found = fitted(bare(straight(), NODE_PRESET))
    assert found.segments[0].latency_seconds == pytest.approx(15e-6, rel=1e-6)
    assert bandwidth(found.segments[0]) == pytest.approx(5e9, rel=1e-6)
    assert found.half_bandwidth_bytes == pytest.approx(75_000, rel=1e-6)
    assert found.predict(75_000) == pytest.approx(30e-6), "at half its bandwidth it takes twice its latency"
    assert found.residual < 1e-6
    assert (found.off_curve, found.knees) == ((), ())
    assert found.method == f"{module.METHOD}; {intervals_words(1)}; 8 sizes"


def check_one_size_off(factor: float, place: int) -> None:
    points = spoilt(bare(straight(), OCTAVES, 7, 0.01), {place: factor})
    found = fitted(points)
    (line,) = found.segments
    assert line.latency_seconds == pytest.approx(15e-6, rel=0.02), (factor, place)
    assert bandwidth(line) == pytest.approx(5e9, rel=0.02), (factor, place)
    if factor == 1.15:
        assert found.off_curve == (), place
    else:
        ((size, error),) = found.off_curve
        assert size == points[place].size_bytes
        assert error == pytest.approx(factor - 1, rel=0.1)


def test_a_size_off_the_curve_is_named_and_bends_nothing() -> None:
    for factor, place in ((0.1, 0), (0.1, 20), (1 / 3, 10), (1.15, 0), (1.5, 1), (3, 19), (10, 0)):
        check_one_size_off(factor, place)


def test_two_sizes_off_the_curve_make_no_knee() -> None:
    for factors in ({4: 2.5, 15: 1.6}, {12: 1.6, 13: 2.5}, {7: 1.6, 9: 2.5}, {2: 2.5, 4: 2.5}):
        found = fitted(spoilt(bare(straight(), OCTAVES, 2, 0.01), factors))
        assert len(found.segments) == 1, factors
        assert [size for size, _ in found.off_curve] == [OCTAVES[place] for place in factors]


def test_fewer_than_three_sizes_have_no_fit_and_three_have_wide_intervals() -> None:
    for sizes in ([], [KIB], [KIB, 4 * KIB]):
        assert fit(bare(straight(), sizes) * 3) is None
    few, more = only(bare(straight(), [KIB, 256 * KIB, 16 << 20])), only(bare(straight(), OCTAVES))
    assert few.latency_seconds == pytest.approx(15e-6)
    assert few.latency_high - few.latency_low > 3 * (more.latency_high - more.latency_low)


def test_of_several_times_of_a_size_the_middle_one_counts_in_any_order() -> None:
    points = measured(straight(), NODE_PRESET, 1)
    strays = [spoilt(points, dict.fromkeys(range(8), factor)) for factor in (0.5, 9)]
    given = [*points, *strays[0], *strays[1]]
    assert fit(random.Random(0).sample(given, len(given))) == fit(points)


def test_a_flat_curve_has_no_bandwidth_but_a_bound() -> None:
    lines = [only(bare(lambda size: 10e-6, NODE_PRESET[:4], seed, 0.02)) for seed in range(20)]
    assert sum(line.bytes_per_second is None for line in lines) >= 18
    line = lines[1]
    assert line.bytes_per_second_high is None
    assert line.bytes_per_second_low is not None
    assert line.bytes_per_second_low > NODE_PRESET[3] / 10e-6
    assert line.latency_low < 10e-6 < line.latency_high
    assert line.seconds(1 << 40) == line.latency_seconds
    assert fitted(bare(lambda size: 10e-6, NODE_PRESET)).half_bandwidth_bytes is None
    rising = bare(straight(), [KIB, 2 * KIB, 1 << 30], 1, 0.3)
    assert only(rising).bytes_per_second is not None, "it rises beyond its noise"


def test_nothing_is_faster_than_no_latency() -> None:
    line = only(bare(lambda size: size / 1e9 - 0.3e-6, NODE_PRESET))
    assert (line.latency_seconds, line.latency_low) == (0, 0)
    assert line.latency_high > 0


def test_times_that_fall_with_size_have_no_slope_but_a_bound() -> None:
    for segment in fitted(bare(lambda size: 1e-3 / size, NODE_PRESET)).segments:
        assert segment.seconds_per_byte == 0
        assert (segment.bytes_per_second_low or 0) > 0
    falling = bare(lambda size: 20e-6 - size * 1e-11, NODE_PRESET[:4])
    sizes, times = np.array([(float(point.size_bytes), point.seconds) for point in falling]).T
    level = module._least_squares(sizes, times, np.ones(4))
    assert level.seconds_per_byte == 0
    assert level.latency_seconds == pytest.approx(times.mean())


def test_measured_intervals_widen_those_of_the_fit() -> None:
    points = bare(straight(), NODE_PRESET)
    wide = [
        Point(size_bytes=p.size_bytes, seconds=p.seconds, low=p.seconds * 0.7, high=p.seconds * 1.3) for p in points
    ]
    narrow, broad = only(points), only(wide)
    assert broad.latency_seconds == pytest.approx(narrow.latency_seconds)
    assert broad.latency_high - broad.latency_low > 10 * (narrow.latency_high - narrow.latency_low)


def over_launches(launches: int, noise: float, seed: int) -> list[Point]:
    """Return times of launches, half of whose variance all sizes of a launch share."""
    source, points = random.Random(seed), []
    common = [source.gauss(0, noise) for _ in range(launches)]
    for size in NODE_PRESET:
        times = [straight()(size) * math.exp((of + source.gauss(0, noise)) / math.sqrt(2)) for of in common]
        points.append(Point(size_bytes=size, seconds=geometric_mean(times), launches=dict(enumerate(times))))
    return points


def test_intervals_over_launches_hold_what_all_sizes_of_a_launch_share() -> None:
    """tests/studies/fits_and_rows.py is the whole table."""
    for launches in (2, 5):
        found = [fitted(over_launches(launches, 0.1, seed)).segments for seed in range(150)]
        held = sum(holds(one[0], 15e-6, 5e9) for one in found if len(one) == 1)
        assert 0.92 <= held / 300 <= 0.985, launches
    assert fitted(over_launches(5, 0.1, 1)).launches == 5
    assert "over the lines of 5 launches, 4 degrees of freedom" in fitted(over_launches(5, 0.1, 1)).method
    # a launch that lacks a size does not count
    points = over_launches(3, 0.1, 1)
    short = [replace(points[0], launches={0: points[0].seconds, 1: points[0].seconds}), *points[1:]]
    assert fitted(short).launches == 2


def test_intervals_of_two_launches_are_students_on_the_logarithms_of_their_lines() -> None:
    exact = bare(straight(), NODE_PRESET)
    points = [replace(point, launches={0: 2 * point.seconds, 1: point.seconds / 2}) for point in exact]
    line, factor = only(points), math.exp(scipy.stats.t.ppf(0.975, 1) * math.log(2))
    assert line.latency_high == pytest.approx(15e-6 * factor)
    assert line.latency_low == pytest.approx(15e-6 / factor)
    assert line.bytes_per_second_low == pytest.approx(5e9 / factor)


def test_intervals_are_those_of_weighted_least_squares() -> None:
    """With noise at the floor all weights are those of relative errors, which scipy can fit too."""
    points = bare(straight(), OCTAVES, 4, 1e-4)
    line = only(points)
    sizes = np.array([point.size_bytes for point in points], dtype=float)
    times = np.array([point.seconds for point in points])
    _, covariance = scipy.optimize.curve_fit(
        lambda size, latency, slope: latency + size * slope,
        sizes,
        times,
        p0=(15e-6, 2e-10),
        sigma=module.NOISE_FLOOR * np.array([line.seconds(size) for size in sizes]),
        absolute_sigma=True,
    )
    reach = scipy.stats.t.ppf(0.975, len(points) - 2) * np.sqrt(np.diag(covariance))
    assert line.latency_high - line.latency_seconds == pytest.approx(reach[0], rel=1e-3)
    assert 1 / (line.bytes_per_second_low or 1) - line.seconds_per_byte == pytest.approx(reach[1], rel=1e-3)


def line(first: int, last: int, latency: float, rate: float) -> Segment:
    ends = {f"latency_{end}": latency for end in ("seconds", "low", "high")}
    rates = {f"bytes_per_second{end}": rate for end in ("", "_low", "_high")}
    return Segment(first_bytes=first, last_bytes=last, **ends, **rates)


def test_the_knee_is_where_lines_cross_or_else_the_middle_of_the_gap() -> None:
    parts = (line(1, 100, 1.0, 100.0), line(400, 1000, 3.0, math.inf))
    found = Fit(segments=parts, half_bandwidth_bytes=None, off_curve=(), residual=0, launches=1, method="")
    assert found.knees == (200.0,)
    assert found.predict(200) == pytest.approx(3.0)
    assert found.predict(100) == pytest.approx(2.0)
    apart = (parts[0], line(400, 1000, 9.0, 100.0))
    jump = Fit(segments=apart, half_bandwidth_bytes=1, off_curve=(), residual=0, launches=1, method="")
    assert jump.knees == pytest.approx((200.0,))
    assert (jump.predict(200), jump.predict(201)) == pytest.approx((3.0, 11.01))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 40), st.floats(1e-9, 1e3)), min_size=3, max_size=9, unique_by=lambda pair: pair[0]
    )
)
def test_any_curve_ends_in_finite_pieces_that_cover_it(pairs: list[tuple[int, float]]) -> None:
    found = fitted([Point(size_bytes=size, seconds=seconds) for size, seconds in pairs])
    sizes = sorted(size for size, _ in pairs)
    assert found.segments[0].first_bytes == sizes[0]
    assert found.segments[-1].last_bytes == sizes[-1]
    for before, after in pairwise(found.segments):
        assert sizes.index(after.first_bytes) == sizes.index(before.last_bytes) + 1
    for segment in found.segments:
        assert 0 <= segment.latency_low <= segment.latency_seconds <= segment.latency_high < math.inf
        assert sum(segment.first_bytes <= size <= segment.last_bytes for size in sizes) >= 3
        assert (segment.bytes_per_second_low or 0) <= (segment.bytes_per_second or math.inf)
    assert all(0 < found.predict(size) < math.inf for size in sizes)


@settings(deadline=None, max_examples=10)
@given(st.floats(1e-6, 1e6), st.integers(0, 100))
def test_the_fit_has_no_unit_of_time(scale: float, seed: int) -> None:
    points = bare(straight(), NODE_PRESET, seed, 0.05)
    one, other = fitted(points), fitted(spoilt(points, dict.fromkeys(range(8), scale)))
    assert [s.last_bytes for s in one.segments] == [s.last_bytes for s in other.segments]
    assert other.predict(123_456) == pytest.approx(one.predict(123_456) * scale, rel=1e-4)
