"""Statistics of samples: medians, their intervals, noise. Pure Python; nothing here knows what was timed.

Within one launch the interval of the median is the distribution-free one of order statistics (binomial). Across
launches it is Student's t on the logarithms of the launches' medians: the launch is the unit of replication
(Hunold & Carpen-Amarie, arXiv 1505.07734).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Grade = Literal["stable", "fair", "noisy", "very noisy"]

CONFIDENCE = 0.95
MIN_FOR_INTERVAL = 6
MIN_FOR_P99 = 100
_GRADES: tuple[tuple[float, Grade], ...] = ((0.05, "stable"), (0.15, "fair"), (0.40, "noisy"))
_STEADY_TOLERANCE = 0.10
_MIN_FOR_STEADY = 20


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
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@cache
def _outer_rank(n: int) -> int:
    """Return the largest 1-based k for which [x(k), x(n+1-k)] covers the median as often as asked; 0 if none does."""
    tail, term, k = 0.0, 0.5**n, 0
    while k < n // 2 and tail + term <= (1 - CONFIDENCE) / 2:
        tail += term
        term *= (n - k) / (k + 1)
        k += 1
    return k


def within_launch(values: Sequence[float]) -> Estimate:
    """Return the median of one launch with its order-statistics interval; samples are taken as independent."""
    n = len(values)
    method = f"median of {n} iterations of one launch"
    k = _outer_rank(min(n, 1000)) if n >= MIN_FOR_INTERVAL else 0
    if n > 1000:  # the binomial's normal approximation; 0.5**n leaves the range of a float soon after
        k = math.floor(n / 2 - 0.98 * math.sqrt(n))
    if k == 0:
        return Estimate(value=median(values), method=f"{method}; too few for an interval")
    ordered = sorted(values)
    return Estimate(
        value=median(values),
        low=ordered[k - 1],
        high=ordered[n - k],
        method=f"{method}, order-statistics interval",
    )


def across_launches(values: Sequence[float], noun: str = "medians") -> Estimate:
    """Return the geometric mean of one value a launch, with Student's t interval on their logarithms."""
    n = len(values)
    logs = [math.log(value) for value in values]
    mean = sum(logs) / n
    method = f"geometric mean of {n} launch {noun}"
    if n < 2:
        return Estimate(value=math.exp(mean), method=f"{method}; one launch has no interval")
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / (n - 1))
    reach = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * deviation / math.sqrt(n)
    return Estimate(
        value=math.exp(mean),
        low=math.exp(mean - reach),
        high=math.exp(mean + reach),
        method=f"{method}, t interval",
    )


def ratio_within_launch(one: Estimate, other: Estimate) -> Estimate:
    """Return one median above zero over another of the same launch.

    The intervals' half-widths on log axes add in quadrature, as those of independent estimates do.
    """
    value = one.value / other.value
    reaches = [math.log(of.high / of.low) / 2 for of in (one, other) if of.low and of.high]
    if len(reaches) < 2:
        return Estimate(value=value, method="medians of one launch; one has no interval above zero")
    reach = math.exp(math.hypot(*reaches))
    method = "medians of one launch, their intervals in quadrature"
    return Estimate(value=value, low=value / reach, high=value * reach, method=method)


def t_quantile(p: float, df: int) -> float:
    """Return Student's t quantile for ``p`` in (0.5, 1), by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _t_distribution(high, df) < p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_distribution(t: float, df: int) -> float:
    """Return P(T <= t): the finite series of Abramowitz & Stegun 26.7.3 and 26.7.4, exact for whole df."""
    theta = math.atan(t / math.sqrt(df))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = df % 2
    term = total = cosine if odd else 1.0
    for i in range(3 if odd else 2, df - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    inside = 2 / math.pi * (theta + (sine * total if df > 1 else 0.0)) if odd else sine * total
    return 0.5 + inside / 2


def spread(values: Sequence[float]) -> float:
    middle = median(values)
    return (quantile(values, 0.75) - quantile(values, 0.25)) / middle if middle else 0.0


def grade(relative_spread: float) -> Grade:
    """Return the noise grade of a spread: stable (under 5 %), fair (15 %), noisy (40 %) or very noisy."""
    return next((name for limit, name in _GRADES if relative_spread < limit), "very noisy")


def steadiness(values: Sequence[float]) -> str:
    """Say whether samples are flat, warmed up late, or drift, from the medians of their quarters (10 % apart)."""
    n = len(values)
    if n < _MIN_FOR_STEADY:
        return f"unknown (fewer than {_MIN_FOR_STEADY} iterations)"
    first, *rest = [median(values[n * i // 4 : n * (i + 1) // 4]) for i in range(4)]
    base = median(rest)
    limit = _STEADY_TOLERANCE * base
    if max(rest) - min(rest) > limit:
        ordered = [first, *rest]
        monotone = ordered in (sorted(ordered), sorted(ordered, reverse=True))
        return "drifting" if monotone else "unsteady"
    if abs(first - base) <= limit:
        return "flat"
    return f"warm-up ended by iteration {n // 4}" if first > base else f"slower from iteration {n // 4} on"
