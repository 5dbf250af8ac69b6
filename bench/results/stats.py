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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal

Grade = Literal["stable", "fair", "noisy", "very noisy"]
"""A word for the relative variation of samples, from the least to the largest variation."""
ValueKind = Literal["amount", "factor", "excess", "from zero", "difference"]
"""The range of the values of a metric.

``amount``: above zero. ``factor``: an amount over another. ``excess``: a factor less 1.
``from zero``: zero or above. ``difference``: of either sign.
"""
LOWER_BOUNDS: Mapping[ValueKind, float] = {"amount": 0.0, "factor": 0.0, "excess": -1.0}
"""The exclusive lower bound of the values of a kind. Kinds in this table have a geometric mean."""

CONFIDENCE = 0.95
"""The confidence level of all intervals."""
WITHIN_REPETITION = "within this repetition"
"""The words for an interval that is computed from the samples of a single repetition.

A repetition is one start of all ranks. The interval lacks the variation between repetitions.
"""
MIN_ITERATIONS_FOR_P99 = 100
"""The least number of samples of which the 99th percentile is computed."""
MIN_ITERATIONS_FOR_Q10 = 20
"""The least number of samples of which the 10th percentile is computed."""
MIN_INTERVAL_REPETITIONS = 3
"""The least number of repetitions over which an interval is computed."""
MIN_INTERVAL_ITERATIONS = 20
"""The least number of samples of a repetition from which an interval is computed."""
_GRADE_LIMITS: tuple[tuple[float, Grade], ...] = ((0.05, "stable"), (0.15, "fair"), (0.40, "noisy"))
"""Pairs of the relative variation below which a grade applies, and the grade, in this order."""
_MAX_EXPONENT = 700.0  # exp of more is not a finite float


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


def median(values: Sequence[float]) -> float:
    """Return the median of the values, for an even number the mean of the middle two."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the quantile of the values at ``q``, a fraction from 0 to 1.

    It is interpolated linearly between order statistics as by numpy's default, which is type 7 of
    Hyndman & Fan (The American Statistician, 1996).
    """
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    index = math.floor(position)
    lower, upper = ordered[index], ordered[math.ceil(position)]
    return lower + (upper - lower) * (position - index)


def estimate_median(values: Sequence[float], samples_per_block: Sequence[int] = ()) -> Estimate:
    """Return the median of a case's samples in one start of all ranks, with its 95 % interval.

    ``values`` holds the samples in the order of measurement. They consist of blocks: consecutive
    samples, between which other cases ran. ``samples_per_block`` holds the length of each block.
    The interval is that of the median of the blocks' medians, by order statistics. So samples of
    a block may be correlated, but blocks must be independent. An interval needs at least six
    blocks.
    """
    n = len(values)
    center = median(values)
    rank = _compute_interval_rank(len(samples_per_block))
    if rank == 0 or n < MIN_INTERVAL_ITERATIONS:
        if rank > 0:
            reason = f"{n} are too few for an interval"
        elif len(samples_per_block) > 1:
            reason = f"{len(samples_per_block)} visits are too few for an interval"
        else:
            reason = "in one go, so no interval"
        return Estimate(
            value=center, method=f"median of {n} iterations of one repetition; {reason}"
        )
    medians = sorted(median(samples) for samples in _split_by_counts(values, samples_per_block))
    method = f"median of {n} iterations in {len(samples_per_block)} visits of one repetition"
    method += ", order-statistics interval of visits"
    low = min(medians[rank - 1], center)
    high = max(medians[-rank], center)
    return Estimate(value=center, low=low, high=high, method=method)


@cache
def _compute_interval_rank(n: int) -> int:
    """Return the largest k for which [x(k), x(n + 1 - k)] covers the median with 95 % confidence.

    x(k) is the k-th smallest of ``n`` values, counted from 1. Returns 0 if ``n`` is too small.
    """
    tails = accumulate(math.comb(n, k) for k in range(n // 2))
    return sum(tail / 2**n <= (1 - CONFIDENCE) / 2 for tail in tails)


def _split_by_counts(values: Sequence[float], counts: Sequence[int]) -> list[Sequence[float]]:
    """Return the values as consecutive parts. ``counts`` holds the length of each part."""
    stops = accumulate(counts)
    return [values[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def count_effective_samples(
    values: Sequence[float], samples_per_block: Sequence[int]
) -> float | None:
    """Return the effective sample size of the median of a case's samples in one start of all ranks.

    It is the number of independent samples whose median would have the same variance. ``values``
    and ``samples_per_block`` are as in ``estimate_median``. The variance follows from the fraction
    of samples below the median in each block, because blocks are clusters (Woodruff, JASA 1952).
    Returns None if there are fewer than six blocks.
    """
    if _compute_interval_rank(len(samples_per_block)) == 0:
        return None
    n = len(values)
    center = median(values)
    sides = [0.5 * (value < center) - 0.5 * (value > center) for value in values]
    squares = sum(sum(cluster) ** 2 for cluster in _split_by_counts(sides, samples_per_block))
    variance = len(samples_per_block) / (len(samples_per_block) - 1) * squares / n**2
    return min(float(n), 0.25 / variance) if variance else float(n)


def estimate_mean(values: Sequence[float], noun: str, kind: ValueKind) -> Estimate:
    """Return the mean of independent values with its 95 % Student's t interval.

    ``noun`` names the values, such as ``repetition medians``. ``kind`` is the range of the values,
    which decides about the mean: amounts, factors and excesses have a geometric mean and an
    interval on logarithms, other kinds an arithmetic mean. The interval of values that cannot be
    negative has no bound below zero. An interval needs at least three values.
    """
    n = len(values)
    lower_bound = LOWER_BOUNDS.get(kind)
    if lower_bound is None:
        terms = list(values)
        method = f"mean of {n} {noun}"
    else:
        terms = [math.log(value - lower_bound) for value in values]
        method = f"geometric mean of {n} {noun}"

    def convert_back(term: float) -> float:
        """Return a mean of terms, or a bound, on the scale of the values."""
        if lower_bound is None:
            return term
        return math.exp(min(term, _MAX_EXPONENT)) + lower_bound

    mean = fmean(terms)
    value = convert_back(mean)
    if n < MIN_INTERVAL_REPETITIONS:
        return Estimate(value=value, method=f"{method}, too few for an interval")
    half_width = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * stdev(terms) / math.sqrt(n)
    low = convert_back(mean - half_width)
    high = convert_back(mean + half_width)
    if kind == "from zero":
        low = max(min(0.0, value), low)
    scale = "" if lower_bound is None else " on logarithms"
    method += f", Student's t interval{scale}, {n - 1} degrees of freedom"
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
    """Return the word for a relative variation of samples, from ``stable`` to ``very noisy``.

    ``deviation`` is a fraction, such as the interquartile range over the median.
    """
    for limit, grade in _GRADE_LIMITS:
        if deviation < limit:
            return grade
    return "very noisy"
