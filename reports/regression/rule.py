"""The rule of the gate: from one value a launch to slower, faster, same or ambiguous. Pure.

An effect counts only where its interval clears a floor, and clears it still when all families are judged together. The
floor is 3 %, or what this machine was measured to need; or, where that is more, the drift that both runs show within
themselves carried from one to the other, and one and a half of its standard errors: what comparing a thing with itself
may find (A/A). Times are the same only within the 3 %, or within the measured floor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from reports.regression.statistics import discoveries_in_families, drift_between, rank_test, welch

DRIFT_ERRORS = 1.5  # standard errors of the drift in the floor: as few as hold false alarms to 2 % in the study


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What it takes to decide: the floor as a fraction, the false discovery rate, the rank test's level, launches."""

    floor: float = 0.03
    false_discovery_rate: float = 0.05
    rank_level: float = 0.05
    min_launches: int = 5


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How a time changed, as fractions of the base's: 0.05 is 5 % slower; None where launches are too few.

    ``detectable`` is the slow-down that four of five such comparisons would call, ``p_value`` that of a change within
    ``floor``, ``rank_p_value`` that of no change; ``measured`` is this machine's measured floor, 0 where none was.
    """

    change: float
    floor: float
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    p_value: float | None = None
    rank_p_value: float | None = None
    measured: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A word and, where it says that nothing can be said, why."""

    word: Literal["SLOWER", "FASTER", "SAME", "AMBIGUOUS"]
    reason: str = ""


def effect(base: Sequence[float], new: Sequence[float], rule: Rule, measured: float = 0.0) -> Effect:
    """Return the change of a time from one value above zero a launch and side, in the order of launches."""
    least = max(rule.floor, measured)
    logs, new_logs = [[math.log(value) for value in side] for side in (base, new)]
    if min(len(base), len(new)) < 2:
        return Effect(change=_fraction(fmean(new_logs) - fmean(logs)), floor=least, measured=measured)
    found, drift = welch(logs, new_logs), drift_between(logs, new_logs)
    # with the error, as noise whose launches resemble their neighbours shifts whole runs and shows little trend
    floor = max(math.log1p(least), abs(drift.value) + DRIFT_ERRORS * drift.error)
    return Effect(
        change=_fraction(found.value),
        floor=_fraction(floor),
        measured=measured,
        low=_fraction(found.value - found.reach),
        high=_fraction(found.value + found.reach),
        detectable=_fraction(found.detectable(floor)),
        p_value=found.p_beyond(floor),
        rank_p_value=rank_test(logs, new_logs),
    )


def judge(families: Sequence[Sequence[Effect]], rule: Rule) -> tuple[tuple[Judgement, ...], ...]:
    p_values = [[_known(member.p_value) for member in family] for family in families]
    moved = discoveries_in_families(p_values, rule.false_discovery_rate)
    pairs = [zip(family, fallen, strict=True) for family, fallen in zip(families, moved, strict=True)]
    return tuple(tuple(_judge(member, fell, rule) for member, fell in pair) for pair in pairs)


def _judge(found: Effect, moved: bool, rule: Rule) -> Judgement:
    low, high, least = _known(found.low), _known(found.high), max(rule.floor, found.measured)

    def clears(floor: float) -> bool:
        return low > floor or 1 + high < 1 / (1 + floor)  # as far below as above on the axis of ratios

    if moved and _known(found.rank_p_value) <= rule.rank_level:
        return Judgement(word="SLOWER" if found.change > 0 else "FASTER")
    if 1 + low > 1 / (1 + least) and high < least:
        return Judgement(word="SAME")
    why = "the interval reaches across the floor"
    if moved:
        why = "the interval clears the floor, but the ranks of the launches do not tell the runs apart"
    elif clears(found.floor):
        why = "it clears the floor alone, but not among all that is compared"
    elif clears(least):
        why = "it is no more than what the runs' own drift may make of no change"
    return Judgement(word="AMBIGUOUS", reason=why)


def _fraction(log_ratio: float) -> float:
    return math.expm1(min(log_ratio, 700.0))  # two launches that disagree may reach further than a float


def _known(value: float | None) -> float:
    assert value is not None, "an effect without an interval is not judged"
    return value
