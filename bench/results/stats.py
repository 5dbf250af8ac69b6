"""Statistics of samples: medians, means, their intervals and noise, whatever was timed.

Within one repetition, the interval of the median is the distribution-free one of order statistics
(binomial) over the medians of the blocks, because samples taken one after another resemble each
other. Across repetitions, it is Student's t on the logarithms of the medians of the repetitions,
because the repetition is the unit of replication (Hunold & Carpen-Amarie, arXiv 1505.07734). For
differences and values that may be zero, it is Student's t on the values themselves.
tests/studies/repetition_coverage.py prints how often the intervals within a repetition contain the
median.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import fmean
from typing import Literal

Grade = Literal["stable", "fair", "noisy", "very noisy"]
"""A word for the relative variation of samples, from the least to the largest variation."""
ValueKind = Literal["amount", "from zero", "difference"]
"""The range of the values of a metric.

``amount``: above zero. ``from zero``: zero or above. ``difference``: of either sign.
"""

CONFIDENCE = 0.95
"""The confidence level of all intervals."""
MIN_ITERATIONS_FOR_P99 = 100
"""The least number of samples of which the 99th percentile is computed."""
MIN_INTERVAL_REPETITIONS = 3
"""The least number of repetitions over which an interval is computed."""
MIN_INTERVAL_ITERATIONS = 20
"""The least number of samples of a repetition from which an interval is computed."""
_GRADE_LIMITS: tuple[tuple[float, Grade], ...] = ((0.05, "stable"), (0.15, "fair"), (0.40, "noisy"))
"""Pairs of the relative variation below which a grade applies, and the grade, in this order."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median or mean with its 95 % confidence interval, in the unit of the averaged values."""

    value: float
    """The median or mean."""
    low: float | None = None
    """The lower bound of the interval, None if there are too few values for an interval."""
    high: float | None = None
    """The upper bound of the interval, None if there are too few values for an interval."""
    method: str
    """A phrase about the statistic of the value and the method of its interval."""

    @property
    def half_width(self) -> float | None:
        """The half-width of the interval as a fraction of ``value``.

        None if there is no interval or the value is 0.
        """
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / self.value


median = statistics.median
"""Returns the median of values, for an even number the mean of the middle two."""


def quantile(values: Sequence[float], q: float) -> float:
    """Return the quantile of the values at ``q``, a fraction from 0 to 1.

    It is interpolated linearly between order statistics, which is numpy's default.
    """
    import numpy as np

    return float(np.quantile(values, q))


def estimate_median(values: Sequence[float], samples_per_block: Sequence[int] = ()) -> Estimate:
    """Return the median of a case's samples in one start of all ranks, with its 95 % interval.

    ``values`` holds the samples in the order of measurement. They consist of blocks: consecutive
    samples, between which other cases ran. ``samples_per_block`` holds the length of each block.
    The interval is that of the median of the blocks' medians, by order statistics. So samples of
    a block may be correlated, but blocks must be independent. An interval needs at least six
    blocks and ``MIN_INTERVAL_ITERATIONS`` samples.
    """
    n = len(values)
    center = median(values)
    num_blocks = len(samples_per_block)
    rank = _compute_interval_rank(num_blocks)
    method = f"median of {n} iterations in {max(1, num_blocks)} blocks of one repetition"
    if rank == 0 or n < MIN_INTERVAL_ITERATIONS:
        return Estimate(value=center, method=f"{method}, too few for an interval")
    stops = list(accumulate(samples_per_block))
    blocks = zip(stops, samples_per_block, strict=True)
    medians = sorted(median(values[stop - count : stop]) for stop, count in blocks)
    low = min(medians[rank - 1], center)
    high = max(medians[-rank], center)
    method += ", interval by order statistics of the medians of blocks"
    return Estimate(value=center, low=low, high=high, method=method)


@cache
def _compute_interval_rank(n: int) -> int:
    """Return the largest k for which [x(k), x(n + 1 - k)] covers the median with 95 % confidence.

    x(k) is the k-th smallest of ``n`` values, counted from 1. Returns 0 if ``n`` is too small.
    """
    tails = accumulate(math.comb(n, k) for k in range(n // 2))
    return sum(tail / 2**n <= (1 - CONFIDENCE) / 2 for tail in tails)


def estimate_mean(values: Sequence[float], noun: str, kind: ValueKind) -> Estimate:
    """Return the mean of independent values with its 95 % Student's t interval.

    An interval needs at least three values.

    Args:
        values: the numbers to average.
        noun: a name of the values in the plural, such as ``repetitions``, for ``Estimate.method``.
        kind: the range of the values. ``amount`` (above 0): the mean is geometric, and the interval
            is computed on logarithms. ``from zero``: the mean is arithmetic, and the interval has
            no bound below zero. ``difference`` (any sign): the mean is arithmetic.
    """
    n = len(values)
    is_amount = kind == "amount"
    terms = [math.log(value) for value in values] if is_amount else values
    mean = fmean(terms)
    method = f"{'geometric ' if is_amount else ''}mean of {n} {noun}"
    if n < MIN_INTERVAL_REPETITIONS:
        value = math.exp(mean) if is_amount else mean
        return Estimate(value=value, method=f"{method}, too few for an interval")
    # statistics.stdev computes with fractions, which takes most of the time of a large report.
    deviation = math.sqrt(sum((term - mean) ** 2 for term in terms) / (n - 1))
    half_width = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * deviation / math.sqrt(n)
    value, low, high = mean, mean - half_width, mean + half_width
    if is_amount:
        value, low, high = math.exp(value), math.exp(low), math.exp(high)
    if kind == "from zero":
        low = max(0.0, low)
    method += f", Student's t interval{' on logarithms' if is_amount else ''}"
    return Estimate(value=value, low=low, high=high, method=method)


@cache
def t_quantile(p: float, df: float) -> float:
    """Return the quantile at ``p`` of Student's t distribution with ``df`` degrees of freedom.

    ``df`` is above zero and need not be an integer.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(df, p))


def compute_relative_iqr(values: Sequence[float]) -> float:
    """Return the interquartile range of the values over their median, 0 if the median is 0."""
    center = median(values)
    if not center:
        return 0.0
    return (quantile(values, 0.75) - quantile(values, 0.25)) / center


def grade_noise(deviation: float) -> Grade:
    """Return the word for a variation: ``stable``, ``fair``, ``noisy`` or ``very noisy``.

    ``deviation`` is the relative variation of samples as a fraction, such as the interquartile
    range over the median.
    """
    for limit, grade in _GRADE_LIMITS:
        if deviation < limit:
            return grade
    return "very noisy"
