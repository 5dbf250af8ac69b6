"""The statistics by which two runs are compared, and those by which a series of nights is parted into levels. Pure.

All take one value a launch, the unit of replication (Hunold & Carpen-Amarie, arXiv 1505.07734).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean

from bench.results.stats import CONFIDENCE, median, t_quantile, t_tail


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


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What makes a step: the floor as a fraction, both tests' levels, the fewest values, the newest looked at."""

    floor: float = 0.03
    level: float = 0.01
    rank_level: float = 0.05
    min_side: int = 3
    min_values: int = 8
    window: int = 30


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Values ``start`` to ``stop`` (exclusive) of one level; ``seconds`` is their median."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The newest level against an earlier one, ``change`` as a fraction; all splits count in ``p_value``."""

    at: int
    change: float
    p_value: float


def segments(values: Sequence[float], rule: StepRule) -> tuple[Segment, ...]:
    """Return the levels of values above zero, in order: one if nothing changed, none of no values."""
    if not values:
        return ()
    places = [0, *_splits([math.log(value) for value in values], 0, len(values), rule), len(values)]
    return tuple(Segment(start=a, stop=b, seconds=median(values[a:b])) for a, b in pairwise(places))


def newest_shift(values: Sequence[float], rule: StepRule) -> Shift | None:
    """Return how the newest level differs from the fastest before it, or, where it is that, from the last one."""
    found = segments(values, rule)
    if len(found) < 2:
        return None
    *earlier, newest = found
    fastest = min(earlier, key=lambda one: one.seconds)
    against = fastest if newest.seconds > fastest.seconds else earlier[-1]
    sides = [[math.log(value) for value in values[one.start : one.stop]] for one in (against, newest)]
    change = newest.seconds / against.seconds - 1
    if abs(math.log1p(change)) <= math.log1p(rule.floor):
        return None
    tried = max(1, len(values) - 2 * rule.min_side + 1)
    return Shift(at=newest.start, change=change, p_value=min(1.0, tried * clipped_p(*sides)))


def clipped_p(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p-value of equal levels: Student's t after clipping at three robust deviations of both sides."""
    import numpy as np

    rests = [np.subtract(side, median(side)) for side in (before, after)]
    limit = _clip(np.concatenate(rests).tolist())
    ours, theirs = (side.clip(-limit, limit) for side in rests)
    n, m = len(ours), len(theirs)
    error = math.sqrt((n * ours.var() + m * theirs.var()) / (n + m - 2) * (1 / n + 1 / m))
    value = median(after) - median(before) + float(theirs.mean() - ours.mean())
    return Difference(value=value, error=error, df=n + m - 2).p_beyond(0.0)


def best_split(values: Sequence[float], min_side: int) -> int:
    """Return how many clipped values stand before the split, of so many a side, that tells two means apart."""
    import numpy as np

    rests = np.subtract(values, median(values))
    limit = _clip(rests.tolist()) or math.inf
    clipped, n = rests.clip(-limit, limit), len(values)
    before = np.arange(min_side, n - min_side + 1)
    distances = np.abs(clipped.cumsum()[before - 1] - before * clipped.mean()) / np.sqrt(before * (n - before))
    return int(before[distances.argmax()])


def _clip(rests: Sequence[float]) -> float:
    """Return three robust deviations: the median of absolute rests times 1.4826 estimates one of a normal."""
    return 3 * 1.4826 * median([abs(rest) for rest in rests])


def _splits(logs: Sequence[float], start: int, stop: int, rule: StepRule) -> list[int]:
    """Return the places at which the level changes; parts are looked at too, for what came back hides there."""
    twelfths = ((0, 12), (0, 8), (4, 12), (0, 6), (3, 9), (6, 12))
    cuts = [(start + (stop - start) * a // 12, start + (stop - start) * b // 12) for a, b in twelfths]
    parts = [(a, b) for a, b in cuts if b - a >= rule.min_values]
    for i, (a, b) in enumerate(parts):
        place = a + best_split(logs[a:b], rule.min_side)
        if _is_step(logs[a:place], logs[place:b], rule, len(parts) if i else 1):
            return [*_splits(logs, start, place, rule), place, *_splits(logs, place, stop, rule)]
    return []


def _is_step(before: Sequence[float], after: Sequence[float], rule: StepRule, parts: int) -> bool:
    medians = median(before), median(after)
    middle, sign = sum(medians) / 2, 1 if medians[1] > medians[0] else -1
    ours, theirs = (sum(sign * (value - middle) > 0 for value in side) for side in (before, after))
    # three quarters of each side lie on its own side of the middle: two wild nights of three do not
    apart = 4 * (len(before) - ours) >= 3 * len(before) and 4 * theirs >= 3 * len(after)
    if abs(medians[1] - medians[0]) <= math.log1p(rule.floor) or not apart:
        return False
    tried = parts * (len(before) + len(after) - 2 * rule.min_side + 1)
    return rank_test(before, after) <= rule.rank_level and tried * clipped_p(before, after) <= rule.level
