"""Statistics, each against scipy, numpy or a series whose verdict is known by construction."""

import math
import random
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stats import (
    CONFIDENCE,
    MIN_FOR_INTERVAL,
    Estimate,
    Grade,
    across_launches,
    grade,
    median,
    quantile,
    ratio_within_launch,
    spread,
    steadiness,
    t_quantile,
    within_launch,
)

TIMES = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=60)


@settings(deadline=None)
@given(TIMES, st.floats(0, 1))
def test_a_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-12)


@settings(deadline=None)
@given(TIMES)
def test_a_median_is_numpys_and_changes_nothing(values: list[float]) -> None:
    before = list(values)
    assert median(values) == pytest.approx(float(np.median(values)), rel=1e-12)
    assert values == before


@pytest.mark.parametrize(("q", "value"), [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (1.0, 4.0)])
def test_a_quantile_is_linear_between_order_statistics(q: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == value


def rank_of_low(n: int) -> int:
    """Return the 1-based rank of the sample that the interval of n samples begins with; check that it is symmetric."""
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    estimate = within_launch(values)
    assert estimate.low is not None
    assert estimate.high == n + 1 - estimate.low
    return int(estimate.low)


def coverage(n: int, rank: int) -> float:
    """Return the probability that [x(rank), x(n + 1 - rank)] holds the median, whatever the distribution."""
    return float(1 - 2 * scipy.stats.binom.cdf(rank - 1, n, 0.5))


@pytest.mark.parametrize("n", [*range(MIN_FOR_INTERVAL, 130), 500, 999, 1000])
def test_the_interval_is_the_narrowest_of_order_statistics_that_covers_as_asked(n: int) -> None:
    rank = rank_of_low(n)
    assert coverage(n, rank) >= CONFIDENCE
    assert coverage(n, rank + 1) < CONFIDENCE


@pytest.mark.parametrize("n", [1001, 1002, 1500, 2000, 5000, 20001])
def test_the_interval_of_very_many_samples_covers_as_asked_and_is_nearly_the_narrowest(n: int) -> None:
    rank = rank_of_low(n)
    assert coverage(n, rank) >= CONFIDENCE
    assert coverage(n, rank + 2) < CONFIDENCE


def test_intervals_of_a_lopsided_distribution_hold_its_median_as_often_as_said() -> None:
    source = random.Random(7)
    held = 0
    for _ in range(2000):
        estimate = within_launch([source.expovariate(math.log(2)) for _ in range(21)])
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 1.0 <= estimate.high
    assert 0.94 < held / 2000 < 0.99  # 21 samples: 97.3 %


def test_an_interval_says_how_it_was_found() -> None:
    assert within_launch([1.0] * 6).method == "median of 6 iterations of one launch, order-statistics interval"


@pytest.mark.parametrize("n", range(1, MIN_FOR_INTERVAL))
def test_too_few_samples_have_a_median_and_no_interval_and_say_so(n: int) -> None:
    estimate = within_launch([2.0] * n)
    assert (estimate.value, estimate.low, estimate.high, estimate.half_width) == (2.0, None, None, None)
    assert estimate.method == f"median of {n} iterations of one launch; too few for an interval"


def test_the_fewest_samples_for_an_interval_are_the_fewest_that_can_cover() -> None:
    assert coverage(MIN_FOR_INTERVAL, 1) >= CONFIDENCE > coverage(MIN_FOR_INTERVAL - 1, 1)


def test_half_the_width_is_relative_to_the_value() -> None:
    assert Estimate(value=4.0, low=3.0, high=5.0, method="").half_width == 0.25
    assert Estimate(value=0.0, low=0.0, high=1.0, method="").half_width is None
    assert Estimate(value=1.0, low=None, high=None, method="").half_width is None


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 10, 29, 100, 1001])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.975, 0.995, 0.9999, 0.999999])
def test_t_quantiles_are_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(float(scipy.stats.t.ppf(p, df)), rel=1e-9)


def test_t_quantiles_tend_to_the_normal_distributions() -> None:
    assert t_quantile(0.975, 20000) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=12))
def test_the_interval_across_launches_is_students_on_the_logarithms(medians: list[float]) -> None:
    logs = np.log(medians)
    estimate = across_launches(medians)
    assert estimate.value == pytest.approx(float(scipy.stats.gmean(medians)), rel=1e-9)
    error = float(logs.std(ddof=1)) / math.sqrt(len(medians))
    reach = float(scipy.stats.t.ppf(0.975, len(medians) - 1)) * error
    assert estimate.low == pytest.approx(math.exp(logs.mean() - reach), rel=1e-6)
    assert estimate.high == pytest.approx(math.exp(logs.mean() + reach), rel=1e-6)


def test_one_launch_has_a_value_and_no_interval_and_says_so() -> None:
    estimate = across_launches([0.25])
    assert estimate.value == pytest.approx(0.25)
    assert (estimate.low, estimate.high) == (None, None)
    assert estimate.method == "geometric mean of 1 launch medians; one launch has no interval"


def test_launches_that_agree_have_an_interval_of_no_width() -> None:
    estimate = across_launches([2.0] * 5)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))
    assert estimate.method == "geometric mean of 5 launch medians, t interval"


def test_times_and_rates_tell_the_same_story_across_launches() -> None:
    times = [1.0, 1.3, 0.9, 1.1]
    of_times, of_rates = across_launches(times), across_launches([1 / time for time in times])
    assert of_times.low is not None
    assert of_times.high is not None
    assert (of_rates.value, of_rates.low, of_rates.high) == pytest.approx(
        (1 / of_times.value, 1 / of_times.high, 1 / of_times.low)
    )


@settings(deadline=None)
@given(TIMES, st.floats(0.01, 100))
def test_spread_is_the_interquartile_range_over_the_median_and_has_no_unit(values: list[float], scale: float) -> None:
    expected = float(scipy.stats.iqr(values) / np.median(values))
    assert spread(values) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert spread([value * scale for value in values]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_spread_of_nothing_but_zeros_is_zero() -> None:
    assert spread([0.0] * 8) == 0.0


@pytest.mark.parametrize(
    ("relative_spread", "name"),
    [
        (0.0, "quiet"),
        (0.0499, "quiet"),
        (0.05, "fair"),
        (0.1499, "fair"),
        (0.15, "noisy"),
        (0.3999, "noisy"),
        (0.40, "wild"),
        (math.inf, "wild"),
        (math.nan, "wild"),
    ],
)
def test_grades_begin_at_their_limits(relative_spread: float, name: Grade) -> None:
    assert grade(relative_spread) == name


def quarters(*levels: float, each: int = 25, noise: float = 0.02) -> list[float]:
    """Return samples around four levels in turn."""
    source = random.Random(1)
    return [level * (1 + source.uniform(-noise, noise)) for level in levels for _ in range(each)]


@pytest.mark.parametrize(
    ("levels", "verdict"),
    [
        ((1.0, 1.0, 1.0, 1.0), "flat"),
        ((1.05, 1.0, 1.0, 1.0), "flat"),
        ((1.0, 1.05, 1.0, 1.05), "flat"),
        ((1.5, 1.0, 1.0, 1.0), "warm-up ended by iteration 25"),
        ((1.0, 1.2, 1.4, 1.6), "drifting"),
        ((1.6, 1.4, 1.2, 1.0), "drifting"),
        ((1.0, 1.0, 1.4, 1.0), "unsteady"),
        ((1.0, 1.5, 1.0, 1.5), "unsteady"),
        ((2.0, 1.0, 1.3, 1.6), "unsteady"),
    ],
)
def test_the_verdict_on_a_series_is_the_one_it_was_built_for(levels: tuple[float, ...], verdict: str) -> None:
    assert steadiness(quarters(*levels)) == verdict


def test_a_tenth_is_still_flat_and_more_is_not() -> None:
    assert steadiness(quarters(1.0, 1.0, 1.0, 1.09, noise=0)) == "flat"
    assert steadiness(quarters(1.0, 1.0, 1.0, 1.11, noise=0)) == "drifting"
    assert steadiness(quarters(1.09, 1.0, 1.0, 1.0, noise=0)) == "flat"
    assert steadiness(quarters(1.11, 1.0, 1.0, 1.0, noise=0)) == "warm-up ended by iteration 25"


def test_single_outliers_unsettle_no_verdict() -> None:
    values = quarters(1.0, 1.0, 1.0, 1.0)
    values[3] = values[40] = values[80] = 100.0
    assert steadiness(values) == "flat"


def test_the_verdict_has_no_unit() -> None:
    values = quarters(1.6, 1.4, 1.2, 1.0)
    assert steadiness([value * 1e-6 for value in values]) == steadiness(values) == "drifting"


@pytest.mark.parametrize(("n", "verdict"), [(0, "unknown"), (19, "unknown (fewer than 20 iterations)"), (20, "flat")])
def test_few_iterations_have_no_verdict(n: int, verdict: str) -> None:
    assert steadiness([1.0] * n).startswith(verdict)


@pytest.mark.parametrize("n", [20, 21, 22, 23])
def test_a_count_that_does_not_divide_by_four_leaves_out_no_sample(n: int) -> None:
    """The last quarter's median must see its end: the last quarter is raised from its middle on."""
    values = [1.0] * (n - 3) + [2.0] * 3
    assert steadiness(values) == "drifting"


def test_a_ratio_of_two_medians_joins_their_intervals_in_quadrature() -> None:
    one = Estimate(value=6.0, low=6.0 / 1.3, high=6.0 * 1.3, method="")
    other = Estimate(value=2.0, low=2.0 / 1.4, high=2.0 * 1.4, method="")
    found = ratio_within_launch(one, other)
    reach = math.exp(math.hypot(math.log(1.3), math.log(1.4)))
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0 / reach, 3.0 * reach))


@pytest.mark.parametrize("low", [None, 0.0])
def test_a_ratio_without_both_intervals_has_none(low: float | None) -> None:
    whole = Estimate(value=2.0, low=1.0, high=3.0, method="")
    for one, other in ((whole, replace(whole, low=low)), (replace(whole, low=low), whole)):
        found = ratio_within_launch(one, other)
        assert (found.value, found.low, found.high) == (1.0, None, None)
