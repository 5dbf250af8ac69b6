"""The statistics of a comparison, against scipy and against brute force."""

import math
import random
from itertools import combinations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from parbench.reports.regression.statistics import (
    Difference,
    Differences,
    differences,
    discoveries_in_families,
    rank_test,
)

Logs = NDArray[np.float64]


def draw(n: int, seed: int, mean: float = 0.0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, 1.0) for _ in range(n)]


def compare_logs(logs: Logs) -> Differences:
    """Return the differences of series (columns) whose first half of rows is the base."""
    middle = len(logs) // 2
    base = [dict(enumerate(series[:middle])) for series in logs.T.tolist()]
    new = [dict(enumerate(series[middle:])) for series in logs.T.tolist()]
    return differences(base, new)


def test_p_beyond_uses_the_distance_past_the_floor() -> None:
    difference = Difference(value=2.0, error=0.5, df=8.0)
    p_value = 2 * scipy.stats.t.sf((2.0 - 0.5) / 0.5, 8.0)
    assert difference.p_beyond(0.5) == pytest.approx(p_value)
    assert Difference(value=-2.0, error=0.5, df=8.0).p_beyond(0.5) == pytest.approx(p_value)
    assert Difference(value=0.01, error=0.02, df=8.0).p_beyond(0.03) == 1.0


def test_noise_is_the_pooled_deviation() -> None:
    base = draw(4, 3)
    new = draw(7, 4, mean=2.0)
    result = differences([dict(enumerate(base))], [dict(enumerate(new))])
    squares = 3 * np.var(base, ddof=1) + 6 * np.var(new, ddof=1)
    assert result.noise == pytest.approx([math.sqrt(squares / 9)])
    assert result.common.value == pytest.approx(np.mean(new) - np.mean(base))


def simulate(rho: float, shared: float, seed: int, num_series: int = 60, n: int = 6) -> Logs:
    """Return AR(1) noise of 10 %, of which series share a part of the variance."""
    generator = np.random.default_rng(seed)
    separate = generator.normal(size=(2 * n, num_series))
    common = generator.normal(size=(2 * n, 1))
    for noise in (separate, common):
        for i in range(1, 2 * n):
            noise[i] = rho * noise[i - 1] + math.sqrt(1 - rho * rho) * noise[i]
    logs: Logs = 0.1 * (math.sqrt(1 - shared) * separate + math.sqrt(shared) * common)
    return logs


@pytest.mark.parametrize(("rho", "shared"), [(0.0, 0.5), (0.6, 0.0), (0.6, 0.5)])
def test_intervals_cover_and_autocorrelation_is_estimated(rho: float, shared: float) -> None:
    results = [compare_logs(simulate(rho, shared, seed)) for seed in range(30)]
    estimates = [result.autocorrelation for result in results]
    assert np.mean(estimates) == pytest.approx(rho, abs=0.12)
    series = [difference for result in results for difference in result.own]
    covered = [abs(difference.value) <= difference.reach for difference in series]
    assert 0.91 <= np.mean(covered) <= 0.99
    common = [abs(result.common.value) <= result.common.reach for result in results]
    assert np.mean(common) >= 0.86


def test_equal_variances_are_shared_and_unequal_are_not() -> None:
    logs = simulate(0.0, 0.0, seed=1)
    equal = compare_logs(logs)
    errors = np.log([difference.error for difference in equal.own])
    assert errors.std() < 0.7 * np.log(equal.noise).std()
    unequal = compare_logs(logs * np.geomspace(0.01, 1, 60))
    errors = np.log([difference.error for difference in unequal.own])
    assert np.std(errors - np.log(unequal.noise)) < 0.3
    assert unequal.own[0].df < 15 < 50 < equal.own[0].df


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 9), (10, 10), (20, 30)])
def test_rank_test_agrees_with_scipy(n: int, m: int) -> None:
    base = draw(n, 9)
    new = draw(m, 10, mean=0.5)
    method = "exact" if n + m <= 24 else "asymptotic"
    p_value = scipy.stats.mannwhitneyu(base, new, method=method).pvalue
    assert rank_test(base, new) == pytest.approx(p_value)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=8), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rank_test_of_ties_agrees_with_permutations(values: list[int], n: int) -> None:
    ranks = scipy.stats.rankdata(values)
    sums = np.array([sum(group) for group in combinations(ranks, n)])
    observed = sum(ranks[:n])
    at_most = np.mean(sums <= observed + 1e-9)
    at_least = np.mean(sums >= observed - 1e-9)
    p_value = min(1.0, 2 * min(at_most, at_least))
    assert rank_test(values[:n], values[n:]) == pytest.approx(p_value)


def test_discoveries_in_families_share_the_level() -> None:
    # One of two families is discovered, so its members are tested at half of the level.
    two_families = discoveries_in_families([[0.001, 0.03], [0.9, 0.9]], 0.05)
    assert two_families == ((True, False), (False, False))
    assert discoveries_in_families([[0.001, 0.03]], 0.05) == ((True, True),)
    assert discoveries_in_families([], 0.05) == ()
