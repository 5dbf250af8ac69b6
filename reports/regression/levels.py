"""How a series of nights is parted into levels. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.results.stats import median
from reports.regression.statistics import Difference, rank_test


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
