"""Numbers over ranks and turns: unbiased where nothing differs, and right where something does."""

import random
from operator import sub
from statistics import fmean, stdev

import pytest

from parbench.workloads.step.turns import (
    compare_turns,
    cross_fitted,
    slowest,
)

ROUNDS = 300


def draw_seconds(source: random.Random, ranks: int) -> list[list[float]]:
    """Return times of four turns on each rank, all of the same distribution."""
    return [[source.lognormvariate(0, 0.5) for _ in range(4)] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 32])
def test_difference_of_equal_times_is_zero(ranks: int) -> None:
    source = random.Random(5)
    values: list[float] = []
    covered = 0
    for _ in range(ROUNDS):
        first, second = (slowest(draw_seconds(source, ranks)) for _ in range(2))
        estimate = compare_turns(first, second, sub, "difference")
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        values.append(estimate.value)
        covered += estimate.low <= 0 <= estimate.high
    assert abs(fmean(values)) < 0.15 * stdev(values)
    assert covered > 0.92 * ROUNDS


@pytest.mark.parametrize("ranks", [2, 32])
def test_chosen_rank_of_equal_ranks_has_the_mean(ranks: int) -> None:
    source = random.Random(7)
    estimates = [cross_fitted(draw_seconds(source, ranks)) for _ in range(ROUNDS)]
    expected_mean = 1.1331  # exp(0.5 ** 2 / 2), of the lognormal distribution
    assert fmean(estimate.value for estimate in estimates) == pytest.approx(
        expected_mean, rel=0.05
    )


def test_rank_is_chosen_by_the_other_turns() -> None:
    alternating = cross_fitted([[9.0, 1.0, 9.0, 2.0], [1.0, 8.0, 2.0, 8.0]])
    assert alternating.value == fmean([1.0, 1.0, 2.0, 2.0])
    late_rank = cross_fitted([[1.0, 2.0, 1.0], [7.0, 8.0, 9.0]])
    assert late_rank.value == 8.0
    assert late_rank.low is not None


def test_single_turn_has_the_mean_of_all_ranks() -> None:
    estimate = cross_fitted([[1.0], [4.0]])
    assert estimate.value == 2.5
    assert estimate.low is None
