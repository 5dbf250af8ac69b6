"""The statistics of a comparison, against scipy and against brute force."""

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.comparing.compare_stats import (
    Difference,
    detectable,
    discoveries,
    discoveries_in_families,
    drift_between,
    p_outside,
    rank_test,
    simes,
    t_quantile,
    t_tail,
    welch,
)

SIZES = [(2, 2), (5, 5), (3, 9), (10, 10), (20, 30)]


def sample(n: int, seed: int, mean: float = 0.0, spread: float = 1.0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean, spread) for _ in range(n)]


# --- Student's t ---


@pytest.mark.parametrize("df", [0.7, 1, 1.3, 2, 4.5, 8, 18, 60.2, 1000])
def test_tail_and_quantile_agree_with_scipy(df: float) -> None:
    for t in (-5.0, -1.0, 0.0, 0.3, 1.0, 2.5, 12.0):
        assert t_tail(t, df) == pytest.approx(scipy.stats.t.sf(t, df), rel=1e-9)
    for p in (0.5, 0.6, 0.8, 0.975, 0.999):
        assert t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-8, abs=1e-10)


@given(st.floats(0.5, 200), st.floats(0.5, 0.9999))
@settings(max_examples=50, deadline=None)
def test_the_quantile_is_the_tails_inverse(df: float, p: float) -> None:
    assert t_tail(t_quantile(p, df), df) == pytest.approx(1 - p, rel=1e-8)


# --- Welch ---


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_welch_agrees_with_scipy(n: int, m: int) -> None:
    base, new = sample(n, 1), sample(m, 2, mean=0.7, spread=3.0)
    expected = scipy.stats.ttest_ind(new, base, equal_var=False)
    found = welch(base, new)
    interval = expected.confidence_interval(0.95)
    assert found.df == pytest.approx(expected.df)
    assert p_outside(found, 0.0) == pytest.approx(expected.pvalue)
    assert (found.value - found.reach, found.value + found.reach) == pytest.approx((interval.low, interval.high))


def test_a_p_value_against_a_floor_is_that_of_the_distance_beyond_it() -> None:
    found = welch(sample(8, 3), sample(8, 4, mean=2.0))
    beyond = (found.value - 0.5) / found.error
    assert p_outside(found, 0.5) == pytest.approx(2 * scipy.stats.t.sf(beyond, found.df))
    assert p_outside(Difference(value=-found.value, error=found.error, df=found.df), 0.5) == pytest.approx(
        p_outside(found, 0.5)
    )


def test_within_the_floor_nothing_is_outside() -> None:
    assert p_outside(Difference(value=0.01, error=0.02, df=8.0), 0.03) == 1.0


def test_values_that_do_not_scatter_are_exact() -> None:
    found = welch([1.0, 1.0], [1.5, 1.5])
    assert (found.value, found.error, found.reach) == (0.5, 0.0, 0.0)
    assert (p_outside(found, 0.4), p_outside(found, 0.5)) == (0.0, 1.0)
    assert detectable(found, 0.4) == 0.4


def test_the_interval_covers_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(600):
        found = welch(sample(5, seed, spread=0.1), sample(7, seed + 10_000, mean=0.3, spread=0.3))
        covered += abs(found.value - 0.3) <= found.reach
    assert covered / 600 == pytest.approx(0.95, abs=0.03)


def test_what_is_detectable_is_found_in_four_of_five() -> None:
    limit, spread, floor = 0.0, 0.01, 0.03
    base, new = sample(10, 5, spread=spread), sample(10, 6, spread=spread)
    exact = Difference(value=0.0, error=spread * math.sqrt(2 / 10), df=18.0)
    limit = detectable(exact, floor)
    assert floor < limit < 0.06
    assert detectable(welch(base, new), floor) == pytest.approx(limit, rel=0.4)
    called = 0
    for seed in range(500):
        found = welch(sample(10, seed, spread=spread), sample(10, seed + 10_000, mean=limit, spread=spread))
        called += found.value - found.reach > floor
    assert called / 500 == pytest.approx(0.8, abs=0.05)


# --- drift ---


def test_a_drift_alone_is_all_of_the_difference() -> None:
    line = [0.01 * i for i in range(12)]
    found = drift_between(line[:5], line[5:])
    assert found.value == pytest.approx(welch(line[:5], line[5:]).value)
    assert found.error == pytest.approx(0.0, abs=1e-12)


def test_a_step_alone_is_no_drift() -> None:
    assert drift_between([1.0] * 5, [2.0] * 5).value == pytest.approx(0.0, abs=1e-12)


def test_the_drifts_error_agrees_with_a_regression() -> None:
    base, new = sample(6, 7), sample(6, 8)
    places = [i - 2.5 for _ in range(2) for i in range(6)]
    centred = [value - sum(side) / 6 for side in (base, new) for value in side]
    slope = scipy.stats.linregress(places, centred)
    found = drift_between(base, new)
    assert found.value == pytest.approx(6 * slope.slope)
    # linregress counts two parameters, and there are three: a slope and two means
    assert found.error == pytest.approx(6 * slope.stderr * math.sqrt(10 / 9))
    assert found.df == 9


def test_two_launches_a_side_have_a_drift() -> None:
    assert drift_between([1.0, 1.1], [1.3, 1.4]).value == pytest.approx(0.2)


# --- ranks ---


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_ranks_agree_with_scipy(n: int, m: int) -> None:
    base, new = sample(n, 9), sample(m, 10, mean=0.5)
    method = "exact" if n + m <= 24 else "asymptotic"
    expected = scipy.stats.mannwhitneyu(base, new, method=method).pvalue
    assert rank_test(base, new) == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=8), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_ties_agree_with_every_permutation(values: list[int], n: int) -> None:
    numbers = [float(value) for value in values]
    assert rank_test(numbers[:n], numbers[n:]) == pytest.approx(by_permutation(numbers, n))


def by_permutation(values: Sequence[float], n: int) -> float:
    """Return the rank test's p-value from all ways to choose the first side."""
    ranks = scipy.stats.rankdata(values)
    sums = [sum(chosen) for chosen in combinations(ranks, n)]
    seen = sum(ranks[:n])
    below = sum(one <= seen + 1e-9 for one in sums) / len(sums)
    above = sum(one >= seen - 1e-9 for one in sums) / len(sums)
    return float(min(1.0, 2 * min(below, above)))


def test_many_ties_agree_with_scipys_approximation() -> None:
    base, new = [1.0] * 10 + [2.0] * 10, [2.0] * 15 + [3.0] * 5
    expected = scipy.stats.mannwhitneyu(base, new, method="asymptotic").pvalue
    assert rank_test(base, new) == pytest.approx(expected)
    assert rank_test([1.0] * 20, [1.0] * 20) == 1.0


def test_five_on_five_cannot_go_below_its_smallest_p() -> None:
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)


# --- many at once ---

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(P_VALUES, st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=80, deadline=None)
def test_discoveries_agree_with_scipys_adjusted_p_values(p_values: list[float], q: float) -> None:
    adjusted = scipy.stats.false_discovery_control(p_values)
    assert discoveries(p_values, q) == tuple(bool(p <= q) for p in adjusted) or min(abs(adjusted - q)) < 1e-9


@given(P_VALUES, st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=80, deadline=None)
def test_a_family_falls_exactly_if_a_member_does(p_values: list[float], q: float) -> None:
    assert any(discoveries(p_values, q)) == (simes(p_values) <= q) or abs(simes(p_values) - q) < 1e-12


def test_simes_of_one_is_itself_and_of_equals_theirs() -> None:
    assert simes([0.2]) == 0.2
    assert simes([0.02, 0.02, 0.02]) == pytest.approx(0.02)
    assert simes([0.01, 0.9, 0.9, 0.9]) == pytest.approx(0.04)


def test_the_step_up_takes_with_it_what_alone_would_stand() -> None:
    assert discoveries([0.04, 0.03, 0.045, 0.9], 0.06) == (True, True, True, False)
    assert discoveries([0.04, 0.5], 0.05) == (False, False)
    assert discoveries([], 0.05) == ()


def test_members_are_held_to_the_share_of_families_that_fell() -> None:
    # one family of two falls, so its members are tested at half of q
    found = discoveries_in_families([[0.001, 0.03], [0.9, 0.9]], 0.05)
    assert found == ((True, False), (False, False))
    assert discoveries_in_families([[0.001, 0.03]], 0.05) == ((True, True),)
    assert discoveries_in_families([], 0.05) == ()


def test_false_discoveries_are_as_rare_as_asked() -> None:
    chance = random.Random(11)
    false_shares = []
    for _ in range(400):
        families = [[chance.random() for _ in range(4)] for _ in range(20)]
        families += [[chance.random() * 1e-5 for _ in range(4)] for _ in range(5)]
        fallen = discoveries_in_families(families, 0.05)
        false = sum(any(members) for members in fallen[:20])
        false_shares.append(false / max(1, sum(any(members) for members in fallen)))
    assert sum(false_shares) / 400 < 0.05
    assert max(false_shares) > 0
