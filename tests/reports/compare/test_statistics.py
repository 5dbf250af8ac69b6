"""The statistics of a comparison, against scipy and against brute force."""

from itertools import combinations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.reports.compare.statistics import (
    Difference,
    Differences,
    differences,
    discoveries_in_families,
    rank_test,
)
from tests.studies.gate_study import Logs, Noise, simulate


def compare_logs(logs: Logs) -> Differences:
    """Return the differences of series (columns) whose first half of rows is the base."""
    base, new = (half.T.tolist() for half in np.split(logs, 2))
    base_by_number = [dict(enumerate(values)) for values in base]
    new_by_number = [dict(enumerate(values)) for values in new]
    return differences(base_by_number, new_by_number)


@pytest.mark.parametrize("value", [2.0, -2.0])
def test_p_beyond_uses_the_distance_past_the_floor(value: float) -> None:
    difference = Difference(value=value, error=0.5, df=8.0)
    t = (2.0 - 0.5) / 0.5
    assert difference.p_beyond(0.5) == pytest.approx(2 * scipy.stats.t.sf(t, 8.0))
    assert difference.p_beyond(3.0) == 1.0


def simulate_series(seed: int, rho: float = 0.0, shared: float = 0.0) -> Logs:
    """Return 60 series of two runs with six repetitions each."""
    noise = Noise(autocorrelation=rho, shared=shared, repetitions=6, families=[60])
    return simulate(noise, np.random.default_rng(seed))


@pytest.mark.parametrize(("rho", "shared"), [(0.0, 0.5), (0.6, 0.0), (0.6, 0.5)])
def test_intervals_cover_and_autocorrelation_is_estimated(rho: float, shared: float) -> None:
    estimates = []
    covered_series = []
    covered_runs = []
    for seed in range(30):
        result = compare_logs(simulate_series(seed, rho, shared))
        estimates.append(result.autocorrelation)
        covered_runs.append(abs(result.common.value) <= result.common.reach)
        for difference in result.own:
            covered_series.append(abs(difference.value) <= difference.reach)
    assert np.mean(estimates) == pytest.approx(rho, abs=0.12)
    assert 0.925 <= np.mean(covered_series) <= 0.975
    assert np.mean(covered_runs) >= 0.86


def test_noise_is_the_pooled_standard_deviation() -> None:
    logs = simulate_series(seed=2)
    base, new = np.split(logs[:, 0], 2)
    pooled_variance = (base.var(ddof=1) + new.var(ddof=1)) / 2
    noise = compare_logs(logs[:, :1]).noise
    assert noise == pytest.approx([np.sqrt(pooled_variance)], rel=1e-6)


def test_equal_variances_are_shared_and_unequal_are_not() -> None:
    logs = simulate_series(seed=1)
    equal = compare_logs(logs)
    errors = np.log([difference.error for difference in equal.own])
    assert errors.std() < 0.7 * np.log(equal.noise).std()
    unequal = compare_logs(logs * np.geomspace(0.01, 1, 60))
    errors = np.log([difference.error for difference in unequal.own])
    assert np.std(errors - np.log(unequal.noise)) < 0.3
    assert unequal.own[0].df < 15
    assert equal.own[0].df > 50


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 9), (10, 10), (20, 30)])
def test_rank_test_agrees_with_scipy(n: int, m: int) -> None:
    generator = np.random.default_rng(9)
    base = generator.normal(size=n).tolist()
    new = generator.normal(0.5, size=m).tolist()
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
    two_families = [[0.001, 0.03], [0.9, 0.9]]
    assert discoveries_in_families(two_families, 0.05) == ((True, False), (False, False))
    one_family = [[0.001, 0.03]]
    assert discoveries_in_families(one_family, 0.05) == ((True, True),)
