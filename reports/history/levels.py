"""How a series of nights is parted into levels. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from parbench.bench.results.stats import median
from parbench.reports.regression.statistics import Difference, rank_test


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What makes a step: the floor as a fraction, both tests' levels, the fewest values, the newest looked at.

    A line is a drift unless Schwarz's criterion puts it ``for_line`` behind levels.
    """

    floor: float = 0.03
    level: float = 0.01
    rank_level: float = 0.05
    min_side: int = 3
    min_values: int = 8
    window: int = 30
    for_line: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What all series tell of one night's scatter: its correlation with the next night's, its variance, which counts as
    ``df`` values beside a series' own, and the share of ``wild`` nights."""

    rho: float = 0.0
    df: float = 0.0
    variance: float = 0.0
    wild: float = 0.0

    def of_sum(self, n: int) -> float:
        """Return the variance of the mean of ``n`` nights, times ``n``, in variances of one: 1 without correlation."""
        return 1 + 2 * math.fsum((1 - lag / n) * self.rho**lag for lag in range(1, n)) if self.rho else 1.0


ALONE = Noise()


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Values ``start`` to ``stop`` (exclusive) of one level; ``seconds`` is their median."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The newest level against an earlier one, ``change`` as a fraction; all splits count in ``p_value``.

    ``low`` and ``high`` are its 95 % interval. A drift has a ``slope`` a night, and a ``change`` over all nights.
    """

    at: int
    change: float
    p_value: float
    low: float
    high: float
    slope: float | None = None


def segments(values: Sequence[float], rule: StepRule, noise: Noise = ALONE) -> tuple[Segment, ...]:
    """Return the levels of values above zero, in order: one if nothing changed, none of no values."""
    if not values:
        return ()
    places = [0, *_splits([math.log(value) for value in values], 0, len(values), rule, noise), len(values)]
    return tuple(Segment(start=a, stop=b, seconds=median(values[a:b])) for a, b in pairwise(places))


def newest_shift(values: Sequence[float], rule: StepRule, noise: Noise = ALONE) -> Shift | None:
    """Return how the newest level differs from the fastest before it, or, where it is that, from the last one.

    Where a line tells the nights better than levels do they drift, but for what steps beside that line.
    """
    line = trend(values, rule, noise)
    if line and line.slope:
        level = [value / math.exp(line.slope * i) for i, value in enumerate(values)]
        return _newest_step(level, rule, noise) or line
    return _newest_step(values, rule, noise)


def _newest_step(values: Sequence[float], rule: StepRule, noise: Noise) -> Shift | None:
    found = segments(values, rule, noise)
    if len(found) < 2 or found[-1].start < rule.min_values - rule.min_side:  # a few first nights are no level
        return None
    *earlier, newest = found
    fastest = min(earlier, key=lambda one: one.seconds)
    against = fastest if newest.seconds > fastest.seconds else earlier[-1]
    sides = [[math.log(value) for value in values[one.start : one.stop]] for one in (against, newest)]
    change = math.log(newest.seconds / against.seconds)
    if abs(change) <= math.log1p(rule.floor):
        return None
    tried = max(1, len(values) - 2 * rule.min_side + 1)
    p_value = tried * p_of_step(sides[0], sides[1], noise)
    return shift_of(newest.start, change, difference(sides[0], sides[1], noise), p_value)


def shift_of(at: int, change: float, found: Difference, p_value: float, slope: float | None = None) -> Shift:
    low, high = (math.expm1(change + sign * found.reach) for sign in (-1, 1))
    return Shift(at=at, change=math.expm1(change), p_value=min(1.0, p_value), low=low, high=high, slope=slope)


def trend(values: Sequence[float], rule: StepRule, noise: Noise = ALONE) -> Shift | None:
    """Return by how much values grow along a line, if that is more than the floor, sure, and tells them better than
    levels do (by Schwarz's criterion, 1978; a level costs its height and its place)."""
    n = len(values)
    if n < rule.min_values:
        return None
    logs, places = np.log(values), np.arange(n) - (n - 1) / 2
    weight = float(places @ places)
    rests = logs - np.median(logs) - places * float(places @ logs) / weight
    limit = _clip(rests.tolist())
    logs = logs - rests + rests.clip(-limit, limit)
    slope = float(places @ logs) / weight
    if abs(slope) * (n - 1) <= math.log1p(rule.floor):
        return None
    whole, one_step = float(((logs - logs.mean()) ** 2).sum()), rest_beside_a_step(logs)
    line = whole - slope**2 * weight
    parts = segments(values, rule, noise)
    levels = math.fsum(float(((logs[a.start : a.stop] - logs[a.start : a.stop].mean()) ** 2).sum()) for a in parts)
    costs = [(one_step, 4), (levels, 2 * len(parts))]
    least = min(n * math.log(max(rest, 1e-300)) + cost * math.log(n) for rest, cost in costs)
    if n * math.log(max(line, 1e-300)) + 4 * math.log(n) >= least + rule.for_line:
        return None
    df = n - 2 - (noise.of_sum(n) - 1)
    variance = (line + noise.df * noise.variance) / (df + noise.df) * noise.of_sum(n)
    reach = n - 1
    found = Difference(value=slope * reach, error=reach * math.sqrt(variance / weight), df=df + noise.df)
    p_value = found.p_beyond(0.0)
    return shift_of(0, slope * reach, found, p_value, slope) if p_value <= rule.level else None


def p_of_step(before: Sequence[float], after: Sequence[float], noise: Noise = ALONE) -> float:
    """Return the p-value of equal levels, where as many nights of a side as may well be wild count for nothing."""
    p_value = difference(before, after, noise).p_beyond(0.0)
    for other, side in ((before, after), (after, before)) if noise.wild else ():
        n, sign = len(side), 1 if median(side) > median(other) else -1
        ordered = sorted(side, key=lambda value: -sign * value)
        for count in range(1, n + 1):
            ways = [math.comb(n, k) * noise.wild**k * (1 - noise.wild) ** (n - k) for k in range(count, n + 1)]
            if (chance := math.fsum(ways)) <= p_value:
                break
            rest = difference(other, ordered[count:], noise) if count < n else None
            p_value = max(p_value, chance * (rest.p_beyond(0.0) if rest and sign * rest.value > 0 else 1.0))
    return p_value


def rest_beside_a_step(values: NDArray[np.float64]) -> float:
    """Return the sum of squares that one step leaves, the best of all."""
    n, centred = len(values), values - values.mean()
    before = np.arange(1, n)
    told = centred.cumsum()[:-1] ** 2 * n / (before * (n - before))
    return max(float(centred @ centred) - float(told.max(initial=0.0)), 0.0)


def difference(before: Sequence[float], after: Sequence[float], noise: Noise = ALONE) -> Difference:
    """Return by how much two levels differ, after clipping at three robust deviations of both sides.

    The variance is moderated by that of all series (Smyth 2004); the mean of nights that resemble one another (AR(1))
    scatters more, and they among themselves less.
    """
    rests = [np.subtract(side, median(side)) for side in (before, after)]
    limit = _clip(np.concatenate(rests).tolist())
    ours, theirs = (side.clip(-limit, limit) for side in rests)
    n, m = len(ours), len(theirs)
    of_n, of_m = noise.of_sum(n), noise.of_sum(m)
    own = n - of_n + m - of_m
    df = own * (1 - noise.rho**2) / (1 + noise.rho**2)  # Bartlett 1946
    variance = (n * ours.var() + m * theirs.var()) / own
    variance = (df * variance + noise.df * noise.variance) / (df + noise.df)
    value = median(after) - median(before) + float(theirs.mean() - ours.mean())
    return Difference(value=value, error=math.sqrt(variance * (of_n / n + of_m / m)), df=df + noise.df)


def best_split(values: Sequence[float], min_side: int) -> int:
    """Return how many clipped values stand before the split, of so many a side, that tells two means apart."""
    rests = np.subtract(values, median(values))
    limit = _clip(rests.tolist()) or math.inf
    clipped, n = rests.clip(-limit, limit), len(values)
    before = np.arange(min_side, n - min_side + 1)
    distances = np.abs(clipped.cumsum()[before - 1] - before * clipped.mean()) / np.sqrt(before * (n - before))
    return int(before[distances.argmax()])


def _clip(rests: Sequence[float]) -> float:
    """Return three robust deviations: the median of absolute rests times 1.4826 estimates one of a normal."""
    return 3 * 1.4826 * median([abs(rest) for rest in rests])


def _splits(logs: Sequence[float], start: int, stop: int, rule: StepRule, noise: Noise) -> list[int]:
    """Return the places at which the level changes; parts are looked at too, for what came back hides there."""
    twelfths = ((0, 12), (0, 8), (4, 12), (0, 6), (3, 9), (6, 12))
    cuts = [(start + (stop - start) * a // 12, start + (stop - start) * b // 12) for a, b in twelfths]
    parts = [(a, b) for a, b in cuts if b - a >= rule.min_values]
    for i, (a, b) in enumerate(parts):
        place = a + best_split(logs[a:b], rule.min_side)
        if _is_step(logs[a:place], logs[place:b], rule, noise, len(parts) if i else 1):
            return [*_splits(logs, start, place, rule, noise), place, *_splits(logs, place, stop, rule, noise)]
    return []


def _is_step(before: Sequence[float], after: Sequence[float], rule: StepRule, noise: Noise, parts: int) -> bool:
    medians = median(before), median(after)
    middle, sign = sum(medians) / 2, 1 if medians[1] > medians[0] else -1
    ours, theirs = (sum(sign * (value - middle) > 0 for value in side) for side in (before, after))
    # three quarters of each side lie on its own side of the middle: two wild nights of three do not
    apart = 4 * (len(before) - ours) >= 3 * len(before) and 4 * theirs >= 3 * len(after)
    if abs(medians[1] - medians[0]) <= math.log1p(rule.floor) or not apart:
        return False
    tried = parts * (len(before) + len(after) - 2 * rule.min_side + 1)
    surely = tried * p_of_step(before, after, noise) <= rule.level
    return surely and rank_test(before, after) <= rule.rank_level
