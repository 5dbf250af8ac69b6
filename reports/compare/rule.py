"""The rule of the gate: from one value a repetition to slower, faster, same or ambiguous. Pure.

An effect counts only where its interval clears a floor, and clears it still when all families are judged together. The
floor is 3 %, or what this machine was measured to need. The whole run is judged as well, by what its series share: a
shift of all can be sure where that of no single one is. Times are the same only within the floor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.results.stats import MIN_INTERVAL_REPETITIONS, median
from parbench.reports.compare.statistics import (
    Difference,
    Repetitions,
    differences,
    discoveries_in_families,
    rank_test,
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What it takes to decide: the floor as a fraction, the level of the whole run's test, the rate of false
    discoveries among series, the rank test's level, repetitions.
    """

    floor: float = 0.03
    level: float = 0.05
    false_discovery_rate: float = 0.04
    rank_level: float = 0.05
    min_repetitions: int = 5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The seconds of one series by the number of the repetition, all above zero, and the floor measured for it, if
    any."""

    base: Repetitions
    new: Repetitions
    measured: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How a time changed, as fractions of the base's: 0.05 is 5 % slower; None where repetitions are too few.

    ``detectable`` is the slow-down that four of five such comparisons would call among all that is compared,
    ``p_value`` that of a change within ``floor``, ``rank_p_value`` that of no change, ``noise`` repetitions' deviation.
    """

    change: float
    floor: float
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    p_value: float | None = None
    rank_p_value: float | None = None
    noise: float | None = None


_SURELY = 1.96 + 1.64  # standard errors: of an interval at 95 %, and of nine in ten
Called = Literal["SLOWER", "FASTER", "SAME", "AMBIGUOUS"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A word and, where it says that nothing can be said, why."""

    word: Called
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What all series together show, the noisy ones weighing less: a change of many of them, and of how many.

    ``autocorrelation`` is that of a repetition with the next, as taken for the errors.
    """

    effect: Effect
    word: Called
    series: int
    autocorrelation: float


def effects(
    families: Sequence[Sequence[Pair]], rule: Rule
) -> tuple[Whole | None, tuple[tuple[Effect, ...], ...]]:
    """Return what changed in all series together, None of fewer than two, and in each."""
    known = [
        pair
        for family in families
        for pair in family
        if min(len(pair.base), len(pair.new)) >= MIN_INTERVAL_REPETITIONS
    ]
    logs = [
        [_logs(side) for side in sides]
        for sides in ([one.base for one in known], [one.new for one in known])
    ]
    found = differences(*logs) if known else None
    own = iter(zip(found.own, found.noise, strict=True) if found else ())

    def effect(pair: Pair, tests: int) -> Effect:
        least = max(rule.floor, pair.measured)
        base, new = _logs(pair.base), _logs(pair.new)
        if min(len(base), len(new)) < MIN_INTERVAL_REPETITIONS:
            change = sum(new.values()) / len(new) - sum(base.values()) / len(base)
            return Effect(change=_fraction(change), floor=least)
        difference, noise = next(own)
        ranks = rank_test([*base.values()], [*new.values()])
        return _effect(difference, least, noise, rule.false_discovery_rate / tests, ranks)

    each = tuple(
        tuple(effect(pair, len(families) * len(family)) for pair in family) for family in families
    )
    if found is None or len(known) < 2:
        return None, each
    least = max(rule.floor, median([pair.measured for pair in known]))
    whole = _effect(found.common, least, median(found.noise), rule.level)
    return Whole(
        effect=whole,
        word=_whole(whole, median([one.value for one in found.own]), rule),
        series=len(known),
        autocorrelation=found.autocorrelation,
    ), each


def judge(families: Sequence[Sequence[Effect]], rule: Rule) -> tuple[tuple[Judgement, ...], ...]:
    p_values = [[_known(member.p_value) for member in family] for family in families]
    moved = discoveries_in_families(p_values, rule.false_discovery_rate)
    pairs = [
        zip(family, fallen, strict=True) for family, fallen in zip(families, moved, strict=True)
    ]
    return tuple(tuple(_judge(member, fell, rule) for member, fell in pair) for pair in pairs)


def repetitions_to_decide(noise: float, floor: float) -> int:
    """Return how many a side, independent, show nine of ten times that nothing moved beyond the floor."""
    return math.ceil(2 * (_SURELY * math.log1p(noise) / math.log1p(floor)) ** 2)


def floor_to_decide(noise: float, repetitions: int) -> float:
    """Return the least floor, in whole percents, within which so many a side show that as surely."""
    return (
        math.ceil(100 * _fraction(_SURELY * math.log1p(noise) / math.sqrt(repetitions / 2)) - 1e-9)
        / 100
    )


def _judge(found: Effect, moved: bool, rule: Rule) -> Judgement:
    if moved and _known(found.rank_p_value) <= rule.rank_level:
        return Judgement(word="SLOWER" if found.change > 0 else "FASTER")
    if _within(found):
        return Judgement(word="SAME")
    why = "the interval reaches across the floor"
    if moved:
        why = "the interval clears the floor, but the ranks of the repetitions do not tell the runs apart"
    elif _known(found.low) > found.floor or 1 + _known(found.high) < 1 / (1 + found.floor):
        why = "it clears the floor alone, but not among all that is compared"
    return Judgement(word="AMBIGUOUS", reason=why)


def _whole(found: Effect, middle: float, rule: Rule) -> Called:
    # half of the series have to have moved as well: a few that moved far are no shift of the whole
    if _known(found.p_value) <= rule.level and abs(middle) > math.log1p(found.floor):
        return (
            "SLOWER"
            if min(found.change, middle) > 0
            else "FASTER"
            if max(found.change, middle) < 0
            else "AMBIGUOUS"
        )
    return "SAME" if _within(found) else "AMBIGUOUS"


def _effect(
    found: Difference, least: float, noise: float, level: float, ranks: float | None = None
) -> Effect:
    floor = math.log1p(least)
    return Effect(
        change=_fraction(found.value),
        floor=least,
        low=_fraction(found.value - found.reach),
        high=_fraction(found.value + found.reach),
        detectable=_fraction(found.detectable(floor, level)),
        p_value=found.p_beyond(floor),
        rank_p_value=ranks,
        noise=_fraction(noise),
    )


def _within(found: Effect) -> bool:
    """Whether the interval lies within the floor, as far below as above on the axis of ratios."""
    return 1 + _known(found.low) > 1 / (1 + found.floor) and _known(found.high) < found.floor


def _logs(repetitions: Repetitions) -> Repetitions:
    return {repetition: math.log(seconds) for repetition, seconds in repetitions.items()}


def _fraction(log_ratio: float) -> float:
    return math.expm1(
        min(log_ratio, 700.0)
    )  # two repetitions that disagree may reach further than a float


def _known(value: float | None) -> float:
    assert value is not None, "an effect without an interval is not judged"
    return value
