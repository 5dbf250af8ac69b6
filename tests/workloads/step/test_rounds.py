"""Differences of maxima over ranks are unbiased."""

import random
from operator import sub
from statistics import fmean, stdev

import pytest

from parbench.workloads.step.rounds import compare_rounds, slowest

ROUNDS = 300


def draw_seconds(source: random.Random, ranks: int) -> list[list[float]]:
    """Return times of four rounds on each rank, all of the same distribution."""
    return [[source.lognormvariate(0, 0.5) for _ in range(4)] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 32])
def test_difference_of_equal_times_is_zero(ranks: int) -> None:
    source = random.Random(5)
    values: list[float] = []
    covered = 0
    for _ in range(ROUNDS):
        first, second = (slowest(draw_seconds(source, ranks)) for _ in range(2))
        estimate = compare_rounds(first, second, sub)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        values.append(estimate.value)
        covered += estimate.low <= 0 <= estimate.high
    assert abs(fmean(values)) < 0.15 * stdev(values)
    assert covered > 0.92 * ROUNDS
