"""Steps in a series of one value a run: where its level changed, and by how much. Pure Python.

A step is a split whose two sides have at least three values each, whose medians differ by more than a floor, three
quarters of whose values lie on their own side of the middle, and which both a rank test and Student's t on clipped
values tell apart: one wild night moves nothing. The split is the best of the clipped values' cumulative sum, in the
whole or in a part of it; both sides are then searched again (seeded binary segmentation, Kovacs et al. 2023).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.results.stats import median
from reports.comparing.compare_stats import rank_test, t_tail

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
