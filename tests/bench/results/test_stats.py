"""Statistics, compared with scipy, numpy, simulations and series of known verdict."""

import math
import random

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.results.stats import (
    CONFIDENCE,
    ValueKind,
    compute_relative_iqr,
    estimate_mean,
    estimate_median,
    grade_noise,
    median,
    quantile,
)

TIMES = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=60)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(TIMES, st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], q: float) -> None:
    original = list(values)
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-12)
    assert median(values) == pytest.approx(float(np.median(values)), rel=1e-12)
    relative_iqr = float(scipy.stats.iqr(values) / np.median(values))
    assert compute_relative_iqr(values) == pytest.approx(relative_iqr, rel=1e-9, abs=1e-12)
    assert values == original


def compute_coverage(num_blocks: int, rank: int) -> float:
    """Return the probability that [x(rank), x(n + 1 - rank)] contains the median."""
    return float(1 - 2 * scipy.stats.binom.cdf(rank - 1, num_blocks, 0.5))


@pytest.mark.parametrize("num_blocks", [6, 7, 39, 1000])
def test_interval_is_the_narrowest_that_covers(num_blocks: int) -> None:
    medians = [float(i) for i in range(1, num_blocks + 1)]
    random.Random(num_blocks).shuffle(medians)
    samples = [value for value in medians for _ in range(4)]
    estimate = estimate_median(samples, [4] * num_blocks)
    assert estimate.low is not None
    assert estimate.high == num_blocks + 1 - estimate.low
    rank = int(estimate.low)
    assert compute_coverage(num_blocks, rank) >= CONFIDENCE
    assert compute_coverage(num_blocks, rank + 1) < CONFIDENCE


@pytest.mark.parametrize("blocks", [[], [30], [6] * 5, [3] * 6])
def test_few_blocks_or_samples_have_no_interval(blocks: list[int]) -> None:
    estimate = estimate_median([2.0] * (sum(blocks) or 30), blocks)
    assert estimate.value == 2.0
    assert estimate.low is None
    assert estimate.high is None
    assert estimate.half_width is None
    assert "too few for an interval" in estimate.method


@pytest.mark.parametrize("values", [[0.25], [2.0, 3.0]])
def test_two_repetitions_have_no_interval(values: list[float]) -> None:
    estimate = estimate_mean(values, "repetition medians", "amount")
    assert estimate.value == pytest.approx(math.prod(values) ** (1 / len(values)))
    assert estimate.low is None
    assert estimate.high is None


STUDENT_T = 4.3026527
"""The 97.5 % quantile of Student's t with 2 degrees of freedom."""


@pytest.mark.parametrize(("kind", "min_value"), [("difference", -math.inf), ("from zero", 0.0)])
def test_interval_of_differences_is_symmetric(kind: ValueKind, min_value: float) -> None:
    estimate = estimate_mean([1.0, 2.0, 6.0], "turns", kind)
    half_width = STUDENT_T * math.sqrt(7 / 3)
    assert estimate.value == pytest.approx(3.0)
    assert estimate.low == pytest.approx(max(min_value, 3.0 - half_width))
    assert estimate.high == pytest.approx(3.0 + half_width)


def test_interval_of_amounts_is_geometric() -> None:
    estimate = estimate_mean([1.0, 2.0, 4.0], "turns", "amount")
    assert estimate.value == pytest.approx(2.0)
    low = 2.0 / math.exp(STUDENT_T * math.log(2) / math.sqrt(3))
    assert estimate.low == pytest.approx(low, abs=1e-6)


@pytest.mark.parametrize(
    ("relative_spread", "name"),
    [(0.049, "stable"), (0.05, "fair"), (0.15, "noisy"), (0.40, "very noisy")],
)
def test_grade_has_limits(relative_spread: float, name: str) -> None:
    assert grade_noise(relative_spread) == name
