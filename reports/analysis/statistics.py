"""Statistics of rows: the ratio of two estimates, and the deviation between repetitions."""

import math
from collections.abc import Sequence
from statistics import stdev

from parbench.bench.results.stats import WITHIN_REPETITION, Estimate


def estimate_ratio(numerator: Estimate, denominator: Estimate) -> Estimate:
    """Return the ratio of two medians of one repetition, which are above zero and independent."""
    value = numerator.value / denominator.value
    factors = [_interval_factor(numerator), _interval_factor(denominator)]
    known_factors = [factor for factor in factors if factor is not None]
    if len(known_factors) < len(factors):
        return Estimate(
            value=value, method="medians of one repetition; one has no interval above zero"
        )
    factor = math.exp(math.hypot(*map(math.log, known_factors)))
    method = f"medians of one repetition, their intervals in quadrature, {WITHIN_REPETITION}"
    return Estimate(value=value, low=value / factor, high=value * factor, method=method)


def _interval_factor(estimate: Estimate) -> float | None:
    """Return the factor from the geometric center of an interval to its ends."""
    if not estimate.low or not estimate.high:
        return None
    return math.sqrt(estimate.high / estimate.low)


def compute_log_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of two or more values above zero.

    The correction of the bias for few values is that of Gurland & Tripathi (The American
    Statistician, 1971).
    """
    correction = 1 + 1 / (4 * (len(values) - 1))
    return stdev(map(math.log, values)) * correction
