"""Statistics of samples: medians, their intervals, noise. Nothing here knows what was timed.

Within one launch the interval of the median is the distribution-free one of order statistics (binomial), of visits
spread over the launch, for samples taken one after another resemble each other. Across launches it is Student's t on
the logarithms of the launches' medians: the launch is the unit of replication (Hunold & Carpen-Amarie, 1505.07734); of
differences and of what may be zero, on the values themselves. tests/studies/launch_coverage.py prints how often the
first contain the median.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal

Grade = Literal["stable", "fair", "noisy", "very noisy"]
Kind = Literal["amount", "factor", "excess", "from zero", "difference"]
"""What a number can be: above zero by its nature, one such over another, that less 1, zero or above, of either sign."""
LEAST: Mapping[Kind, float] = {"amount": 0.0, "factor": 0.0, "excess": -1.0}
"""What a kind whose mean is geometric stays above."""

CONFIDENCE = 0.95
WITHIN_LAUNCH = "within this launch"
MIN_FOR_P99, MIN_FOR_Q10 = 100, 20
LEAST_LAUNCHES, LEAST_ITERATIONS = 3, 20  # that an interval is made of


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median with its 95 % interval, None where there are too few samples for one, and the method in words."""

    value: float
    low: float | None = None
    high: float | None = None
    method: str

    @property
    def half_width(self) -> float | None:
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / self.value


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile, linear between order statistics (Hyndman & Fan type 7, numpy's default)."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    return ordered[below] + (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]) * (position - below)


@cache
def _outer_rank(n: int) -> int:
    """Return the largest 1-based k for which [x(k), x(n+1-k)] covers the median as often as asked; 0 if none does."""
    tail, term, k = 0.0, 0.5**n, 0
    while k < n // 2 and tail + term <= (1 - CONFIDENCE) / 2:
        tail += term
        term *= (n - k) / (k + 1)
        k += 1
    return k


def within_launch(values: Sequence[float], visits: Sequence[int] = ()) -> Estimate:
    """Return the median of one launch with the order-statistics interval of its visits' medians (at least six).

    ``visits`` are the counts of samples taken in turn, other work between them. Neighbours within a visit may resemble
    each other; visits do not, as long as what makes them alike ends before the next.
    """
    n, middle = len(values), median(values)
    if (k := _outer_rank(len(visits))) == 0 or n < LEAST_ITERATIONS:
        why = f"{len(visits)} visits are too few for an interval" if len(visits) > 1 else "in one go, so no interval"
        why = f"{n} are too few for an interval" if k else why
        return Estimate(value=middle, method=f"median of {n} iterations of one launch; {why}")
    medians = sorted(
        median(values[stop - count : stop]) for stop, count in zip(accumulate(visits), visits, strict=True)
    )
    method = f"median of {n} iterations in {len(visits)} visits of one launch, order-statistics interval of visits"
    return Estimate(value=middle, low=min(medians[k - 1], middle), high=max(medians[-k], middle), method=method)


def effective_count(values: Sequence[float], visits: Sequence[int]) -> float | None:
    """Return how many independent samples would know the median as well; None where fewer than six visits tell.

    From the variance between visits of the share below the median, visits as clusters (Woodruff, JASA 1952).
    """
    if _outer_rank(len(visits)) == 0:
        return None
    n, middle = len(values), median(values)
    sides = [0.5 * (value < middle) - 0.5 * (value > middle) for value in values]
    ends = zip(accumulate(visits), visits, strict=True)
    squares = math.fsum(math.fsum(sides[stop - count : stop]) ** 2 for stop, count in ends)
    variance = len(visits) / (len(visits) - 1) * squares / n**2
    return min(float(n), 0.25 / variance) if variance else float(n)


def mean_of(values: Sequence[float], of: str, kind: Kind) -> Estimate:
    """Return the mean of independent values with Student's t interval, both as their kind asks, never as they happen.

    Of amounts and factors it is geometric, on logarithms; else arithmetic, with no bound below zero where none can be.
    """
    n, zero = len(values), LEAST.get(kind)
    terms = values if zero is None else [math.log(value - zero) for value in values]
    mean = fmean(terms)

    def back(term: float) -> float:
        return term if zero is None else math.exp(min(term, 700.0)) + zero  # no further than a float reaches

    method = f"{'mean' if zero is None else 'geometric mean'} of {n} {of}"
    if n < LEAST_LAUNCHES:
        return Estimate(value=back(mean), method=f"{method}; of {'two' if n > 1 else 'one'} there is no interval")
    reach = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * stdev(terms) / math.sqrt(n)
    low, middle, high = (back(mean + way * reach) for way in (-1, 0, 1))
    if kind == "from zero":
        low = max(min(0.0, middle), low)
    method += (
        f", Student's t interval{'' if zero is None else ' on logarithms'}, {n - 1} degree{'s' * (n > 2)} of freedom"
    )
    return Estimate(value=middle, low=low, high=high, method=method)


def ratio_within_launch(one: Estimate, other: Estimate) -> Estimate:
    """Return one median above zero over another of the same launch, both taken as independent."""
    value = one.value / other.value
    if not (one.low and one.high and other.low and other.high):
        return Estimate(value=value, method="medians of one launch; one has no interval above zero")
    reach = math.exp(math.hypot(math.log(one.high / one.low) / 2, math.log(other.high / other.low) / 2))
    method = f"medians of one launch, their intervals in quadrature, {WITHIN_LAUNCH}"
    return Estimate(value=value, low=value / reach, high=value * reach, method=method)


@cache
def t_quantile(p: float, df: float) -> float:
    """Return the ``p`` quantile of Student's t, for any df above zero."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(df, p))


def t_tail(t: float, df: float) -> float:
    """Return P(T > t) of Student's t, for any df above zero."""
    from scipy.special import stdtr

    return float(stdtr(df, -t))


def spread(values: Sequence[float]) -> float:
    middle = median(values)
    return (quantile(values, 0.75) - quantile(values, 0.25)) / middle if middle else 0.0


def grade(relative_spread: float) -> Grade:
    limits: tuple[tuple[float, Grade], ...] = ((0.05, "stable"), (0.15, "fair"), (0.40, "noisy"))
    return next((name for limit, name in limits if relative_spread < limit), "very noisy")


def scatter(values: Sequence[float]) -> float:
    """Return how far launches scatter: the standard deviation of their logarithms, made unbiased for a few.

    The factor is Gurland & Tripathi's (The American Statistician, 1971); values are above zero, two or more.
    """
    return stdev(map(math.log, values)) * (1 + 1 / (4 * (len(values) - 1)))


def steadiness(values: Sequence[float]) -> str:
    """Say whether samples are flat, warmed up late, or drift, from their quarters."""
    n = len(values)
    if n < 20:
        return "unknown (fewer than 20 iterations)"
    quarters = [values[n * i // 4 : n * (i + 1) // 4] for i in range(4)]
    if not _differ(quarters):
        return "flat"
    medians = [median(quarter) for quarter in quarters]
    if _differ(quarters[1:]):
        return "drifting" if medians in (sorted(medians), sorted(medians, reverse=True)) else "unsteady"
    is_late = medians[0] > median(medians[1:])
    return f"warm-up ended by iteration {n // 4}" if is_late else f"slower from iteration {n // 4} on"


def _differ(parts: Sequence[Sequence[float]]) -> bool:
    """Return True if parts of a series differ by a tenth, and significantly at the 2 % level.

    The test is that of Kruskal & Wallis (JASA 1952). Its statistic is divided by (1 + rho) / (1 - rho), because
    consecutive samples resemble each other. The autocorrelation rho of the ranks within the parts counts up to 0.5
    only, because a slow mode that comes and goes is not noise.
    """
    medians = [median(part) for part in parts]
    if max(medians) - min(medians) <= 0.10 * median(medians):
        return False
    import numpy as np
    from scipy.stats import chi2, kruskal, rankdata  # type: ignore[import-untyped]

    statistic = kruskal(*parts).statistic
    ranks = np.split(rankdata(np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1])
    deviations = [part - part.mean() for part in ranks]
    variance = sum(part @ part for part in deviations)
    covariance = sum(part[1:] @ part[:-1] for part in deviations)
    rho = min(max(covariance / variance, 0.0), 0.5) if variance else 0.0
    p_value = chi2.sf(statistic * (1 - rho) / (1 + rho), df=len(parts) - 1)
    return bool(p_value < 0.02)
