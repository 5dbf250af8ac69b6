"""The statistics by which two runs are compared: Welch's t, a rank test, false discovery rates.

All take one value a launch, the unit of replication (Hunold & Carpen-Amarie, arXiv 1505.07734).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise

from bench.results.stats import CONFIDENCE, median, t_quantile

_EXACT_UP_TO = 24


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of ``new`` minus that of ``base`` with its standard error and Welch's degrees of freedom."""

    value: float
    error: float
    df: float

    @property
    def reach(self) -> float:
        """Half the 95 % interval's width."""
        return t_quantile(0.5 + CONFIDENCE / 2, self.df) * self.error if self.error else 0.0


def welch(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return the difference of two means whose variances may differ, of at least two values each (Welch 1947)."""
    shares = [_variance(values) / len(values) for values in (base, new)]
    total = sum(shares)
    of_df = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (base, new), strict=True))
    return Difference(
        value=_mean(new) - _mean(base),
        error=math.sqrt(total),
        df=total**2 / of_df if of_df else float(len(base) + len(new) - 2),
    )


def p_outside(found: Difference, floor: float) -> float:
    """Return the two-sided p-value of a difference no larger than ``floor``: small if it is surely larger."""
    beyond = abs(found.value) - floor
    if found.error == 0:
        return float(beyond <= 0)
    return min(1.0, 2 * t_tail(beyond / found.error, found.df))


def detectable(found: Difference, floor: float, power: float = 0.8) -> float:
    """Return the smallest difference that clears ``floor`` with this power at the scatter seen, from 0.5 up.

    It is floor + (t(0.975) + t(power)) * error, the usual approximation of the noncentral t.
    """
    return floor + found.reach + (t_quantile(power, found.df) * found.error if found.error else 0.0)


def drift_between(base: Sequence[float], new: Sequence[float]) -> Difference:
    """Return what the common trend inside both sides would make of their difference, were ``new`` taken after ``base``.

    The trend is one least-squares slope through both, each around its own mean; of at least two values each.
    """
    places = [i - (len(side) - 1) / 2 for side in (base, new) for i in range(len(side))]
    values = [value - _mean(side) for side in (base, new) for value in side]
    weight = math.fsum(place**2 for place in places)
    slope = math.fsum(place * value for place, value in zip(places, values, strict=True)) / weight
    rest = math.fsum((value - slope * place) ** 2 for place, value in zip(places, values, strict=True))
    df = len(values) - 3
    distance = len(values) / 2
    return Difference(value=slope * distance, error=distance * math.sqrt(rest / df / weight), df=df)


def t_tail(t: float, df: float) -> float:
    """Return P(T > t) of Student's t, for any df above zero."""
    from scipy.special import stdtr  # type: ignore[import-untyped]  # here, as most commands do without

    return float(stdtr(df, -t))


def rank_test(base: Sequence[float], new: Sequence[float]) -> float:
    """Return the two-sided p-value of Mann-Whitney's test: exact, ties included, up to 24 values, normal above."""
    ranks = _doubled_midranks((*base, *new))
    statistic = sum(ranks[: len(base)])
    if len(ranks) > _EXACT_UP_TO:
        return _normal_rank_p(ranks, len(base), statistic)
    counts = _rank_sums(tuple(sorted(ranks)), len(base))
    total = math.comb(len(ranks), len(base))
    below = sum(count for value, count in enumerate(counts) if value <= statistic) / total
    above = sum(counts[statistic:]) / total
    return min(1.0, 2 * min(below, above))


def simes(p_values: Sequence[float]) -> float:
    """Return the p-value of a family in which nothing moved, from its members' (Simes 1986)."""
    ordered = sorted(p_values)
    return min(1.0, *(p * len(ordered) / rank for rank, p in enumerate(ordered, start=1)))


def discoveries(p_values: Sequence[float], q: float) -> tuple[bool, ...]:
    """Return which hypotheses fall if a share ``q`` of those that fall may be false (Benjamini & Hochberg 1995)."""
    ordered = sorted(p_values)
    passing = [p for rank, p in enumerate(ordered, start=1) if p <= q * rank / len(ordered)]
    limit = max(passing, default=-1.0)
    return tuple(p <= limit for p in p_values)


def discoveries_in_families(families: Sequence[Sequence[float]], q: float) -> tuple[tuple[bool, ...], ...]:
    """Return which members of which families fall: families first, then members at the share of families that fell.

    A family falls exactly if one of its members does (Benjamini & Bogomolov 2014).
    """
    fallen = discoveries([simes(family) for family in families], q)
    share = q * sum(fallen) / len(families) if families else 0.0
    return tuple(
        discoveries(family, share) if fell else (False,) * len(family)
        for family, fell in zip(families, fallen, strict=True)
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _doubled_midranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, equal ones sharing their mean: whole numbers."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks, done = [0] * len(values), 0
    for _, group in groupby(order, key=lambda i: values[i]):
        tied = list(group)
        for i in tied:
            ranks[i] = 2 * done + len(tied) + 1
        done += len(tied)
    return ranks


@cache
def _rank_sums(ranks: tuple[int, ...], chosen: int) -> tuple[int, ...]:
    """Return in how many ways ``chosen`` of these ranks add up to 0, 1, 2, ..."""
    most = sum(ranks[-chosen:])
    ways = [[0] * (most + 1) for _ in range(chosen + 1)]
    ways[0][0] = 1
    for rank in ranks:
        for count in range(chosen, 0, -1):
            fewer, here = ways[count - 1], ways[count]
            for total in range(rank, most + 1):
                here[total] += fewer[total - rank]
    return tuple(ways[chosen])


def _normal_rank_p(doubled: Sequence[int], n: int, statistic: int) -> float:
    """Return the rank test's p-value by the normal approximation, corrected for ties and continuity."""
    total = len(doubled)
    m = total - n
    tied = sum(len(list(group)) ** 3 for _, group in groupby(sorted(doubled)))
    variance = n * m / 12 * (total + 1 - (tied - total) / (total * (total - 1)))
    distance = abs(statistic / 2 - n * (total + 1) / 2) - 0.5
    return min(1.0, math.erfc(distance / math.sqrt(2 * variance))) if variance > 0 else 1.0


_MAD_TO_SIGMA = 1.4826
_CLIP_SIGMAS = 3.0


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What makes a step: the floor as a fraction, the levels of both tests, and the fewest values.

    ``window`` is how many of the newest values are looked at.
    """

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
    """The newest level against an earlier one: ``change`` as a fraction (0.05 is 5 % slower), ``at`` its first value.

    ``p_value`` is that of no change, times the splits that were looked at.
    """

    at: int
    change: float
    p_value: float


def segments(values: Sequence[float], rule: StepRule) -> tuple[Segment, ...]:
    """Return the levels of values above zero, in order: one if nothing changed, none of no values."""
    if not values:
        return ()
    logs = [math.log(value) for value in values]
    places = [0, *sorted(_splits(logs, 0, len(logs), rule)), len(logs)]
    return tuple(
        Segment(start=start, stop=stop, seconds=median(values[start:stop])) for start, stop in pairwise(places)
    )


def newest_shift(values: Sequence[float], rule: StepRule) -> Shift | None:
    """Return how the newest level differs from the fastest before it, or if it is the fastest, from the one before.

    None if there is one level only, or if the two do not differ beyond the floor.
    """
    found = segments(values, rule)
    if len(found) < 2:
        return None
    newest, earlier = found[-1], found[:-1]
    fastest = min(earlier, key=lambda one: one.seconds)
    against = fastest if newest.seconds > fastest.seconds else earlier[-1]
    sides = [[math.log(value) for value in values[one.start : one.stop]] for one in (against, newest)]
    change = newest.seconds / against.seconds - 1
    if abs(math.log1p(change)) <= math.log1p(rule.floor):
        return None
    tried = max(1, len(values) - 2 * rule.min_side + 1)
    return Shift(at=newest.start, change=change, p_value=min(1.0, tried * clipped_p(*sides)))


def clipped_p(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the two-sided p-value of equal levels: Student's t after clipping at three robust deviations.

    The deviation is that of both sides around their own medians, from the median of its absolute values.
    """
    middles = median(before), median(after)
    rests = [value - middle for side, middle in zip((before, after), middles, strict=True) for value in side]
    limit = _CLIP_SIGMAS * _MAD_TO_SIGMA * median([abs(rest) for rest in rests])
    clipped = [max(-limit, min(limit, rest)) for rest in rests]
    ours, theirs = clipped[: len(before)], clipped[len(before) :]
    means = math.fsum(ours) / len(ours), math.fsum(theirs) / len(theirs)
    distance = middles[1] + means[1] - middles[0] - means[0]
    squares = math.fsum((one - means[0]) ** 2 for one in ours) + math.fsum((one - means[1]) ** 2 for one in theirs)
    df = len(rests) - 2
    error = math.sqrt(squares / df * (1 / len(ours) + 1 / len(theirs)))
    if error == 0:
        return float(distance == 0)
    return min(1.0, 2 * t_tail(abs(distance) / error, df))


def best_split(values: Sequence[float], min_side: int) -> int:
    """Return how many values stand before the split that tells two means apart best, after clipping all values.

    Both sides have ``min_side`` values at least.
    """
    middle = median(values)
    limit = _CLIP_SIGMAS * _MAD_TO_SIGMA * median([abs(value - middle) for value in values]) or math.inf
    clipped = [max(-limit, min(limit, value - middle)) for value in values]
    n, mean = len(values), math.fsum(clipped) / len(values)
    best, place, total = -1.0, min_side, math.fsum(clipped[: min_side - 1])
    for k in range(min_side, n - min_side + 1):
        total += clipped[k - 1]
        distance = abs(total - k * mean) / math.sqrt(k * (n - k))
        if distance > best:
            best, place = distance, k
    return place


def _splits(logs: Sequence[float], start: int, stop: int, rule: StepRule) -> list[int]:
    """Return the places between ``start`` and ``stop`` at which the level changes."""
    parts = [(one, other) for one, other in _parts(start, stop) if other - one >= rule.min_values]
    for tried, (one, other) in enumerate(parts):
        found = logs[one:other]
        k = best_split(found, rule.min_side)
        if _is_step(found[:k], found[k:], rule, len(parts) if tried else 1):
            return [*_splits(logs, start, one + k, rule), one + k, *_splits(logs, one + k, stop, rule)]
    return []


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Return where to look for a step: in the whole, then in parts of it, for what came back hides in the whole."""
    n = stop - start
    cuts = ((0, 12), (0, 8), (4, 12), (0, 6), (3, 9), (6, 12))
    return [(start + n * one // 12, start + n * other // 12) for one, other in cuts]


def _is_step(before: Sequence[float], after: Sequence[float], rule: StepRule, parts: int) -> bool:
    if abs(median(after) - median(before)) <= math.log1p(rule.floor) or not _apart(before, after):
        return False
    tried = parts * (len(before) + len(after) - 2 * rule.min_side + 1)
    return rank_test(before, after) <= rule.rank_level and tried * clipped_p(before, after) <= rule.level


def _apart(before: Sequence[float], after: Sequence[float]) -> bool:
    """Say whether three quarters of each side lie on its own side of the middle: two wild nights of three do not."""
    medians = median(before), median(after)
    middle = sum(medians) / 2
    sign = 1 if medians[1] > medians[0] else -1
    ours, theirs = (sum(sign * (value - middle) > 0 for value in side) for side in (before, after))
    return 4 * (len(before) - ours) >= 3 * len(before) and 4 * theirs >= 3 * len(after)
