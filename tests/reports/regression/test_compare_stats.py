"""The statistics of a comparison, against scipy and against brute force."""

import math
import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.reports.regression.statistics import (
    Difference,
    Differences,
    _moderated,
    differences,
    discoveries_in_families,
    rank_test,
    simes,
)

SIZES = [(2, 2), (5, 5), (3, 9), (10, 10), (20, 30)]
P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def sample(n: int, seed: int, mean: float = 0.0, spread: float = 1.0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean, spread) for _ in range(n)]


def launches(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values))


def difference(base: Sequence[float], new: Sequence[float]) -> Difference:
    return differences([launches(base)], [launches(new)]).common


def test_p_beyond_uses_the_distance_past_the_floor() -> None:
    found = difference(sample(8, 3), sample(8, 4, mean=2.0))
    beyond = (found.value - 0.5) / found.error
    mirrored = Difference(value=-found.value, error=found.error, df=found.df)
    assert found.p_beyond(0.5) == pytest.approx(2 * scipy.stats.t.sf(beyond, found.df))
    assert mirrored.p_beyond(0.5) == pytest.approx(found.p_beyond(0.5))
    assert Difference(value=0.01, error=0.02, df=8.0).p_beyond(0.03) == 1.0, "within the floor"


def crowd(rho: float, shared: float, seed: int, count: int = 60, n: int = 6) -> Differences:
    random = np.random.default_rng(seed)
    own, common = random.normal(size=(2 * n, count)), random.normal(size=(2 * n, 1))
    for values in (own, common):
        for i in range(1, 2 * n):
            values[i] = rho * values[i - 1] + math.sqrt(1 - rho * rho) * values[i]
    logs = 0.1 * (math.sqrt(1 - shared) * own + math.sqrt(shared) * common)
    return differences([launches(one[:n]) for one in logs.T], [launches(one[n:]) for one in logs.T])


def test_differences_estimate_rho_and_cover() -> None:
    for rho, shared in ((0.0, 0.0), (0.0, 0.5), (0.6, 0.0), (0.6, 0.5)):
        found = [crowd(rho, shared, seed) for seed in range(60)]
        assert sum(one.autocorrelation for one in found) / 60 == pytest.approx(rho, abs=0.12), (
            rho,
            shared,
        )
        covered = [abs(one.value) <= one.reach for many in found for one in many.own]
        assert 0.92 <= sum(covered) / len(covered) <= 0.985, (rho, shared)
        assert sum(abs(one.common.value) <= one.common.reach for one in found) / 60 >= 0.88, (
            rho,
            shared,
        )


def test_variances_shrink_where_they_are_alike() -> None:
    dfs = np.full(50, 7.0)
    alike = np.random.default_rng(1).chisquare(7, size=50) / 7
    drawn, more = _moderated(alike, dfs)
    assert drawn.std() < 0.2 * alike.std()
    assert more[0] > 50
    uneven = alike * np.geomspace(1e-4, 1, 50)
    drawn, more = _moderated(uneven, dfs)
    assert more[0] < 9
    assert np.abs(np.log(drawn / uneven)).max() < 1.0


def test_rank_test_agrees_with_scipy() -> None:
    for n, m in SIZES:
        base, new = sample(n, 9), sample(m, 10, mean=0.5)
        method = "exact" if n + m <= 24 else "asymptotic"
        assert rank_test(base, new) == pytest.approx(
            scipy.stats.mannwhitneyu(base, new, method=method).pvalue
        )
    base, new = [1.0] * 10 + [2.0] * 10, [2.0] * 15 + [3.0] * 5
    assert rank_test(base, new) == pytest.approx(
        scipy.stats.mannwhitneyu(base, new, method="asymptotic").pvalue
    )
    assert rank_test([1.0] * 20, [1.0] * 20) == 1.0
    assert rank_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252), (
        "the least of five on five"
    )


@given(st.lists(st.integers(0, 3), min_size=4, max_size=8), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_rank_test_of_ties_agrees_with_permutations(values: list[int], n: int) -> None:
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
def test_one_family_is_benjamini_hochberg(p_values: list[float], q: float) -> None:
    ordered = sorted(p_values)
    limit = max(
        (p for rank, p in enumerate(ordered, 1) if p <= q * rank / len(ordered)), default=-1.0
    )
    near = min(abs(p - q * rank / len(ordered)) for rank, p in enumerate(ordered, 1)) < 1e-12
    [fallen] = discoveries_in_families([p_values], q)
    assert near or fallen == tuple(p <= limit for p in p_values)
    assert near or any(fallen) == (simes(p_values) <= q)


def test_discoveries_in_families_share_the_level() -> None:
    assert [
        simes(found) for found in ([0.2], [0.02, 0.02, 0.02], [0.01, 0.9, 0.9, 0.9])
    ] == pytest.approx([0.2, 0.02, 0.04])
    # one family of two falls, so its members are tested at half of q
    assert discoveries_in_families([[0.001, 0.03], [0.9, 0.9]], 0.05) == (
        (True, False),
        (False, False),
    )
    assert discoveries_in_families([[0.001, 0.03]], 0.05) == ((True, True),)
    assert discoveries_in_families([], 0.05) == ()


def test_false_discovery_rate_is_controlled() -> None:
    chance = random.Random(11)
    false_shares = []
    for _ in range(200):
        families = [[chance.random() for _ in range(4)] for _ in range(20)]
        families += [[chance.random() * 1e-5 for _ in range(4)] for _ in range(5)]
        fallen = discoveries_in_families(families, 0.05)
        false = sum(any(members) for members in fallen[:20])
        false_shares.append(false / max(1, sum(any(members) for members in fallen)))
    assert sum(false_shares) / 200 < 0.05
    assert max(false_shares) > 0
