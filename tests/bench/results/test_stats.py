"""Statistics, each against scipy, numpy or a series whose verdict is known by construction."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results.stats import (
    CONFIDENCE,
    Estimate,
    effective_count,
    grade,
    mean_of,
    median,
    quantile,
    ratio_within_launch,
    spread,
    steadiness,
    within_launch,
)

TIMES = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=60)


@settings(deadline=None, max_examples=50)
@given(TIMES, st.floats(0, 1), st.floats(0.01, 100))
def test_quantiles_medians_and_spreads_are_numpys_and_change_nothing(
    values: list[float], q: float, scale: float
) -> None:
    before = list(values)
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-12)
    assert median(values) == pytest.approx(float(np.median(values)), rel=1e-12)
    expected = float(scipy.stats.iqr(values) / np.median(values))
    assert spread(values) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert spread([value * scale for value in values]) == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )
    assert values == before


# --- within one launch ---


def rank_of_low(n: int) -> int:
    """Return the 1-based rank of the visit that the interval of n visits begins with; check that it is symmetric."""
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    estimate = within_launch([value for value in values for _ in range(4)], [4] * n)
    assert estimate.low is not None
    assert estimate.high == n + 1 - estimate.low
    return int(estimate.low)


def coverage(n: int, rank: int) -> float:
    """Return the probability that [x(rank), x(n + 1 - rank)] holds the median, whatever the distribution."""
    return float(1 - 2 * scipy.stats.binom.cdf(rank - 1, n, 0.5))


def check_coverage(counts: Iterable[int]) -> None:
    """Check that intervals are the narrowest that cover as asked."""
    for n in counts:
        rank = rank_of_low(n)
        assert coverage(n, rank) >= CONFIDENCE, n
        assert coverage(n, rank + 1) < CONFIDENCE, n


def test_the_interval_is_the_narrowest_of_order_statistics_that_covers_as_asked() -> None:
    check_coverage([*range(6, 40), 57, 99, 100, 129, 999, 1000])
    assert coverage(5, 1) < CONFIDENCE, "fewer cannot cover"
    told = "median of 24 iterations in 6 visits of one launch, order-statistics interval of visits"
    assert within_launch([1.0] * 24, [4] * 6).method == told
    assert (few := within_launch([1.0] * 18, [3] * 6)).low is None
    assert few.method == "median of 18 iterations of one launch; 18 are too few for an interval"


def test_samples_in_one_go_or_in_fewer_than_six_visits_have_a_median_and_no_interval_and_say_so() -> (
    None
):
    one = "in one go, so no interval"
    for visits, told in (([], one), ([30], one), ([6] * 5, "5 visits are too few for an interval")):
        estimate = within_launch([2.0] * 30, visits)
        assert (estimate.value, estimate.low, estimate.high, estimate.half_width) == (
            2.0,
            None,
            None,
            None,
        )
        assert estimate.method == f"median of 30 iterations of one launch; {told}"
        assert effective_count([2.0] * 30, visits) is None


def test_what_lasts_for_a_visit_widens_the_interval_and_lessens_the_effective_count() -> None:
    """Ten visits, three of them in a mode that is half as slow again, against the same samples in other visits."""
    source = random.Random(3)
    values = [source.gauss(1.0, 0.02) * (1.5 if i // 30 in (1, 4, 8) else 1.0) for i in range(300)]
    mixed = sorted(values, key=lambda value: source.random())
    apart, alike = within_launch(values, [30] * 10), within_launch(mixed, [30] * 10)
    assert apart.value == alike.value
    assert apart.high is not None
    assert apart.high > 1.4
    assert alike.half_width is not None
    assert alike.half_width < 0.1
    few, many = effective_count(values, [30] * 10), effective_count(mixed, [30] * 10)
    assert few is not None
    assert many is not None
    assert few < 40
    assert many > 100
    assert effective_count([1.0] * 12, [2] * 6) == 12.0


def test_a_ratio_of_two_medians_joins_their_intervals_in_quadrature() -> None:
    one = Estimate(value=6.0, low=6.0 / 1.3, high=6.0 * 1.3, method="")
    other = Estimate(value=2.0, low=2.0 / 1.4, high=2.0 * 1.4, method="")
    found = ratio_within_launch(one, other)
    reach = math.exp(math.hypot(math.log(1.3), math.log(1.4)))
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0 / reach, 3.0 * reach))
    for low in (None, 0.0):
        for pair in ((other, replace(one, low=low)), (replace(other, low=low), one)):
            found = ratio_within_launch(*pair)
            assert found.value == pytest.approx(1 / 3)
            assert (found.low, found.high) == (None, None), low


# --- across launches ---


def across_launches(medians: list[float]) -> Estimate:
    return mean_of(medians, "launch medians", "amount")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=12))
def test_the_interval_across_launches_is_students_on_the_logarithms(medians: list[float]) -> None:
    logs = np.log(medians)
    estimate = across_launches(medians)
    assert estimate.value == pytest.approx(float(scipy.stats.gmean(medians)), rel=1e-9)
    error = float(logs.std(ddof=1)) / math.sqrt(len(medians))
    reach = float(scipy.stats.t.ppf(0.975, len(medians) - 1)) * error
    assert estimate.low == pytest.approx(math.exp(logs.mean() - reach), rel=1e-6)
    assert estimate.high == pytest.approx(math.exp(logs.mean() + reach), rel=1e-6)


def test_one_launch_has_no_interval_and_launches_that_agree_one_of_no_width() -> None:
    one, five = across_launches([0.25]), across_launches([2.0] * 5)
    assert one.value == pytest.approx(0.25)
    assert (one.low, one.high) == (None, None)
    assert (five.low, five.value, five.high) == pytest.approx((2.0, 2.0, 2.0))
    assert across_launches([2.0, 3.0]).low is None
    assert across_launches([1e-130, 1.0, 1e130]).high == pytest.approx(math.exp(700.0)), (
        "as far as a float reaches"
    )
    for n, told in ((3, "2 degrees"), (4, "3 degrees"), (5, "4 degrees")):
        named = f"geometric mean of {n} launch medians, Student's t interval on logarithms, {told} of freedom"
        assert across_launches([2.0] * n).method == named


# --- noise ---


def test_grades_begin_at_their_limits() -> None:
    limits = {
        0.0: "stable",
        0.0499: "stable",
        0.05: "fair",
        0.1499: "fair",
        0.15: "noisy",
        0.3999: "noisy",
        0.4: "very noisy",
    }
    assert {value: grade(value) for value in limits} == limits
    assert (grade(math.inf), grade(math.nan)) == ("very noisy", "very noisy")


def quarters(*levels: float, each: int = 25, noise: float = 0.02) -> list[float]:
    """Return samples around four levels in turn."""
    source = random.Random(1)
    return [level * (1 + source.uniform(-noise, noise)) for level in levels for _ in range(each)]


def test_the_verdict_on_a_series_is_the_one_it_was_built_for() -> None:
    verdicts = {
        (1.0, 1.0, 1.0, 1.0): "flat",
        (1.05, 1.0, 1.0, 1.0): "flat",
        (1.0, 1.05, 1.0, 1.05): "flat",
        (1.5, 1.0, 1.0, 1.0): "warm-up ended by iteration 25",
        (0.5, 1.0, 1.0, 1.0): "slower from iteration 25 on",
        (1.0, 1.2, 1.4, 1.6): "drifting",
        (1.6, 1.4, 1.2, 1.0): "drifting",
        (1.0, 1.0, 1.4, 1.0): "unsteady",
        (1.0, 1.5, 1.0, 1.5): "unsteady",
        (2.0, 1.0, 1.3, 1.6): "unsteady",
    }
    for levels, verdict in verdicts.items():
        values = quarters(*levels)
        assert steadiness(values) == verdict, levels
        assert steadiness([value * 1e-6 for value in values]) == verdict, "it has no unit"


def test_a_tenth_is_still_flat_and_more_is_not_nor_are_single_outliers_of_weight() -> None:
    assert steadiness(quarters(1.0, 1.0, 1.0, 1.09, noise=0)) == "flat"
    assert steadiness(quarters(1.0, 1.0, 1.0, 1.11, noise=0)) == "drifting"
    assert steadiness(quarters(1.09, 1.0, 1.0, 1.0, noise=0)) == "flat"
    assert steadiness(quarters(1.11, 1.0, 1.0, 1.0, noise=0)) == "warm-up ended by iteration 25"
    values = quarters(1.0, 1.0, 1.0, 1.0)
    values[3] = values[40] = values[80] = 100.0
    assert steadiness(values) == "flat"


def test_few_iterations_have_no_verdict_and_of_more_none_is_left_out() -> None:
    """The last quarter's median must see its end: the last quarter is raised from its middle on."""
    for n in (0, 19):
        assert steadiness([1.0] * n) == "unknown (fewer than 20 iterations)"
    assert steadiness([1.0] * 20) == "flat"
    for n in (80, 81, 82, 83):
        assert steadiness([1.0] * (n - 11) + [2.0] * 11) == "drifting", n
