"""The statistics of a comparison, against scipy and against brute force."""

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.regression.statistics import (
    Difference,
    discoveries_in_families,
    drift_between,
    rank_test,
    simes,
    welch,
)

SIZES = [(2, 2), (5, 5), (3, 9), (10, 10), (20, 30)]
P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def sample(n: int, seed: int, mean: float = 0.0, spread: float = 1.0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean, spread) for _ in range(n)]


def test_welch_agrees_with_scipy() -> None:
    for n, m in SIZES:
        base, new = sample(n, 1), sample(m, 2, mean=0.7, spread=3.0)
        expected = scipy.stats.ttest_ind(new, base, equal_var=False)
        found, interval = welch(base, new), expected.confidence_interval(0.95)
        assert found.df == pytest.approx(expected.df)
        assert found.p_beyond(0.0) == pytest.approx(expected.pvalue)
        assert (found.value - found.reach, found.value + found.reach) == pytest.approx((interval.low, interval.high))


def test_a_p_value_against_a_floor_is_that_of_the_distance_beyond_it() -> None:
    found = welch(sample(8, 3), sample(8, 4, mean=2.0))
    beyond = (found.value - 0.5) / found.error
    mirrored = Difference(value=-found.value, error=found.error, df=found.df)
    assert found.p_beyond(0.5) == pytest.approx(2 * scipy.stats.t.sf(beyond, found.df))
    assert mirrored.p_beyond(0.5) == pytest.approx(found.p_beyond(0.5))
    assert Difference(value=0.01, error=0.02, df=8.0).p_beyond(0.03) == 1.0, "within the floor"


def test_values_that_do_not_scatter_are_exact() -> None:
    found = welch([1.0, 1.0], [1.5, 1.5])
    assert (found.value, found.error, found.reach) == (0.5, 0.0, 0.0)
    assert (found.p_beyond(0.4), found.p_beyond(0.5)) == (0.0, 1.0)
    assert found.detectable(0.4) == 0.4


def test_the_interval_covers_and_what_is_detectable_is_found_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(600):
        found = welch(sample(5, seed, spread=0.1), sample(7, seed + 10_000, mean=0.3, spread=0.3))
        covered += abs(found.value - 0.3) <= found.reach
    assert covered / 600 == pytest.approx(0.95, abs=0.03)
    spread, floor = 0.01, 0.03
    limit = Difference(value=0.0, error=spread * math.sqrt(2 / 10), df=18.0).detectable(floor)
    assert floor < limit < 0.06
    seen = welch(sample(10, 5, spread=spread), sample(10, 6, spread=spread))
    assert seen.detectable(floor) == pytest.approx(limit, rel=0.4)
    called = 0
    for seed in range(500):
        found = welch(sample(10, seed, spread=spread), sample(10, seed + 10_000, mean=limit, spread=spread))
        called += found.value - found.reach > floor
    assert called / 500 == pytest.approx(0.8, abs=0.05)


def test_a_drift_is_all_of_the_difference_and_a_step_is_none() -> None:
    line = [0.01 * i for i in range(12)]
    found = drift_between(line[:5], line[5:])
    assert found.value == pytest.approx(welch(line[:5], line[5:]).value)
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert drift_between([1.0] * 5, [2.0] * 5).value == pytest.approx(0.0, abs=1e-12)
    assert drift_between([1.0, 1.1], [1.3, 1.4]).value == pytest.approx(0.2)


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


def test_the_rank_test_is_scipys() -> None:
    for n, m in SIZES:
        base, new = sample(n, 9), sample(m, 10, mean=0.5)
        method = "exact" if n + m <= 24 else "asymptotic"
        assert rank_test(base, new) == pytest.approx(scipy.stats.mannwhitneyu(base, new, method=method).pvalue)
    base, new = [1.0] * 10 + [2.0] * 10, [2.0] * 15 + [3.0] * 5
    assert rank_test(base, new) == pytest.approx(scipy.stats.mannwhitneyu(base, new, method="asymptotic").pvalue)
    assert rank_test([1.0] * 20, [1.0] * 20) == 1.0
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252), "the least of five on five"


@given(st.lists(st.integers(0, 3), min_size=4, max_size=8), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_ties_agree_with_every_permutation(values: list[int], n: int) -> None:
    numbers = [float(value) for value in values]
    assert rank_test(numbers[:n], numbers[n:]) == pytest.approx(by_permutation(numbers, n))


def by_permutation(values: Sequence[float], n: int) -> float:
    ranks = scipy.stats.rankdata(values)
    sums = [sum(chosen) for chosen in combinations(ranks, n)]
    seen = sum(ranks[:n])
    below = sum(one <= seen + 1e-9 for one in sums) / len(sums)
    above = sum(one >= seen - 1e-9 for one in sums) / len(sums)
    return float(min(1.0, 2 * min(below, above)))


@given(P_VALUES, st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=50, deadline=None)
def test_one_family_falls_by_the_step_up_and_if_a_member_does(p_values: list[float], q: float) -> None:
    ordered = sorted(p_values)
    limit = max((p for rank, p in enumerate(ordered, 1) if p <= q * rank / len(ordered)), default=-1.0)
    near = min(abs(p - q * rank / len(ordered)) for rank, p in enumerate(ordered, 1)) < 1e-12
    [fallen] = discoveries_in_families([p_values], q)
    assert near or fallen == tuple(p <= limit for p in p_values)
    assert near or any(fallen) == (simes(p_values) <= q)


def test_what_falls_in_families_is_what_the_step_up_takes() -> None:
    assert [simes(found) for found in ([0.2], [0.02, 0.02, 0.02], [0.01, 0.9, 0.9, 0.9])] == pytest.approx(
        [0.2, 0.02, 0.04]
    )
    assert discoveries_in_families([[0.04, 0.03, 0.044, 0.9]], 0.06) == ((True, True, True, False),)
    assert discoveries_in_families([[0.04, 0.5]], 0.05) == ((False, False),)
    # one family of two falls, so its members are tested at half of q
    assert discoveries_in_families([[0.001, 0.03], [0.9, 0.9]], 0.05) == ((True, False), (False, False))
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
