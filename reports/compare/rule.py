"""The rule of a comparison: the verdicts that follow from the changes of the times of cases.

A time is SLOWER or FASTER if its change is larger than a threshold, and if this is significant
among all cases at the false discovery rate (Benjamini & Hochberg 1995). The verdict is NO CHANGE if
the whole 95 % interval of the change lies within the threshold, otherwise UNCONFIRMED.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from parbench.bench.results.formatting import format_percent
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.stats import (
    Effect,
    Repetitions,
    compute_overall_times,
    estimate_paired_effect,
    estimate_unpaired_effect,
    select_discoveries,
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings of a comparison: the threshold, the error rate and the least repetitions."""

    min_effect: float = 0.03
    """The threshold as a fraction: smaller changes of the time are ignored."""
    level: float = 0.05
    """The false discovery rate over cases, and the significance level of their median change."""
    min_repetitions: int = 5
    """The least number of repetitions per side with which times are judged."""
    is_paired: bool = False
    """True if repetitions of both sides with equal numbers were measured next to each other."""


@dataclass(frozen=True, kw_only=True)
class SeriesTimes:
    """The times of one case in the runs BASE and NEW, and its threshold."""

    base: Repetitions = field(default_factory=dict)
    """The time of an iteration in each repetition of BASE in seconds, keyed by repetition."""
    new: Repetitions = field(default_factory=dict)
    """The time of an iteration in each repetition of NEW in seconds, keyed by repetition."""
    min_effect: float = 0.0
    """The threshold of the case as a fraction: smaller changes are ignored."""


@dataclass(frozen=True, kw_only=True)
class TimeJudgement:
    """The verdict on the change of a time between two runs."""

    verdict: Verdict
    """SLOWER, FASTER, NO CHANGE, UNCONFIRMED or TOO FEW RUNS."""
    effect: Effect | None = None
    """The change of the time with its 95 % interval, None if no repetition can be compared."""
    reason: str = ""
    """The reason for UNCONFIRMED or TOO FEW RUNS as text, empty for other verdicts."""


def estimate_effect(times: SeriesTimes, rule: Rule, num_series: int = 1) -> Effect | None:
    """Return the change of a case's time, None if no repetition can be compared.

    Args:
        times: the times of the case in both runs.
        rule: the significance level, and whether repetitions are paired.
        num_series: the number of cases that are judged together, for which the minimum detectable
            effect is corrected.
    """
    estimate = estimate_paired_effect if rule.is_paired else estimate_unpaired_effect
    level = rule.level / max(1, num_series)
    return estimate(times.base, times.new, min_effect=times.min_effect, level=level)


def judge_series(series: Sequence[SeriesTimes], rule: Rule) -> list[TimeJudgement]:
    """Return the verdict on the change of each case's time, corrected for the number of cases."""
    effects = [estimate_effect(times, rule, len(series)) for times in series]
    p_values = [effect.p_value if effect else None for effect in effects]
    discoveries = select_discoveries(p_values, rule.level)
    return [
        _judge_effect(effect, times.min_effect, rule.level, is_discovery=is_discovery)
        for times, effect, is_discovery in zip(series, effects, discoveries, strict=True)
    ]


def judge_overall(series: Sequence[SeriesTimes], rule: Rule) -> TimeJudgement | None:
    """Return the verdict on the median over cases of the relative change of the time.

    It is judged like the change of one case, with the median of the cases' thresholds. None for
    fewer than two cases, or if no repetition can be compared. ``series`` has the times of each
    case.
    """
    if len(series) < 2:
        return None
    base, new = compute_overall_times(
        [times.base for times in series], [times.new for times in series]
    )
    min_effect = median(times.min_effect for times in series)
    [judgement] = judge_series([SeriesTimes(base=base, new=new, min_effect=min_effect)], rule)
    return judgement if judgement.effect else None


def _judge_effect(
    effect: Effect | None, min_effect: float, level: float, *, is_discovery: bool
) -> TimeJudgement:
    """Return the verdict on the change of one case's time, with a reason if it is inconclusive.

    Args:
        effect: the change, None if no repetition can be compared.
        min_effect: the threshold as a fraction.
        level: the significance level.
        is_discovery: True if the change is significant after the correction for several cases.
    """
    if effect is None:
        reason = "no repetition was measured on both sides"
        return TimeJudgement(verdict=Verdict.TOO_FEW_RUNS, reason=reason)
    if is_discovery:
        verdict = Verdict.SLOWER if effect.change > 0 else Verdict.FASTER
        return TimeJudgement(verdict=verdict, effect=effect)
    if effect.is_within(min_effect):
        return TimeJudgement(verdict=Verdict.NO_CHANGE, effect=effect)
    reason = f"the 95 % interval crosses the threshold of {format_percent(min_effect)}"
    if effect.p_value is not None and effect.p_value <= level:
        reason = "significant alone, but not after correction for multiple comparisons"
    return TimeJudgement(verdict=Verdict.UNCONFIRMED, effect=effect, reason=reason)
