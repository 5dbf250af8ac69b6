"""The statistics by which two runs are compared. Pure.

All take one value a launch, the unit of replication (Hunold & Carpen-Amarie, arXiv 1505.07734).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from bench.results.stats import CONFIDENCE, t_quantile, t_tail


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of new minus that of base with its standard error, degrees of freedom, and half its 95 % interval."""

    value: float
    error: float
    df: float

    @property
    def reach(self) -> float:
        return t_quantile(0.5 + CONFIDENCE / 2, self.df) * self.error if self.error else 0.0

    def p_beyond(self, floor: float) -> float:
        """Return the two-sided p-value of a difference no larger than ``floor``: small if it is surely larger."""
        beyond = abs(self.value) - floor
        return min(1.0, 2 * t_tail(beyond / self.error, self.df)) if self.error else float(beyond <= 0)

    def detectable(self, floor: float, power: float = 0.8) -> float:
        """The smallest difference that clears ``floor`` with this power: floor + (t(0.975) + t(power)) * error."""
        return floor + self.reach + (t_quantile(power, self.df) * self.error if self.error else 0.0)


def welch(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return the difference of two means whose variances may differ, of at least two values each (Welch 1947)."""
    squares = [math.fsum((value - mean) ** 2 for value in side) for side in (base, new) for mean in [fmean(side)]]
    shares = [square / (len(side) - 1) / len(side) for square, side in zip(squares, (base, new), strict=True)]
    of_df = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (base, new), strict=True))
    return Difference(
        value=fmean(new) - fmean(base),
        error=math.sqrt(sum(shares)),
        df=sum(shares) ** 2 / of_df if of_df else float(len(base) + len(new) - 2),
    )


def drift_between(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return what the one trend inside both sides, by least squares, makes of their difference, new after base."""
    places = [i - (len(side) - 1) / 2 for side in (base, new) for i in range(len(side))]
    values = [value - mean for side in (base, new) for mean in [fmean(side)] for value in side]
    weight = math.fsum(place**2 for place in places)
    slope = math.fsum(place * value for place, value in zip(places, values, strict=True)) / weight
    rest = math.fsum((value - slope * place) ** 2 for place, value in zip(places, values, strict=True))
    df, distance = len(values) - 3, len(values) / 2
    return Difference(value=slope * distance, error=distance * math.sqrt(rest / df / weight), df=df)


def rank_test(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the two-sided p-value of Mann-Whitney's test: exact, ties included, up to 24 values, normal above."""
    if len(base) + len(new) > 24:
        from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]  # here, as most do without

        return float(mannwhitneyu(base, new, method="asymptotic").pvalue)
    values = [*base, *new]
    ordered = sorted(values)  # the ranks are doubled, so that those of equal values are whole
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in values]
    ways, seen = _rank_sums(tuple(sorted(ranks)), len(base)), sum(ranks[: len(base)])
    return min(1.0, 2 * min(sum(ways[: seen + 1]), sum(ways[seen:])) / sum(ways))


@cache
def _rank_sums(ranks: tuple[int, ...], chosen: int) -> list[int]:
    """Return in how many ways ``chosen`` of these ranks add up to 0, 1, 2, ...; scipy's exact test knows no ties."""
    import numpy as np

    ways = np.zeros((chosen + 1, sum(ranks) + 1), dtype=int)
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    return [*map(int, ways[chosen])]


def simes(p_values: Sequence[float]) -> float:
    """Return the p-value of a family in which nothing moved, from its members' (Simes 1986)."""
    from scipy.stats import false_discovery_control

    return float(min(false_discovery_control(p_values)))


def discoveries_in_families(families: Sequence[Sequence[float]], q: float) -> tuple[tuple[bool, ...], ...]:
    """Return which p-values fall if a share ``q`` of those that fall may be false: families, then their members.

    Members are tested at the share of families that fell, so a family falls exactly if one of its members does
    (Benjamini & Hochberg 1995; Benjamini & Bogomolov 2014).
    """
    from scipy.stats import false_discovery_control

    if not families:
        return ()
    adjusted = [false_discovery_control(family) for family in families]
    fallen = false_discovery_control([min(family) for family in adjusted]) <= q
    share = q * sum(fallen) / len(families)
    pairs = zip(adjusted, fallen, strict=True)
    return tuple(tuple(bool(fell and p <= share) for p in family) for family, fell in pairs)
