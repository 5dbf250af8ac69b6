"""The rule of a comparison: from the effects of several series to their verdicts.

A change counts if it is larger than a threshold, and if this is significant among all series at the
false discovery rate (Benjamini & Hochberg 1995). A time is the same if the whole 95 % interval of
its change lies within the threshold. Everything else is unconfirmed.
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
    """The threshold, the error rate and the number of repetitions of a comparison."""

    min_effect: float = 0.03
    """The threshold: smaller changes of the time are ignored. A fraction."""
    level: float = 0.05
    """The false discovery rate of the series, and the significance level of the overall change."""
    min_repetitions: int = 5
    """The fewest repetitions per side."""
    is_paired: bool = False
    """True if repetitions with equal numbers were measured next to each other."""


@dataclass(frozen=True, kw_only=True)
class SeriesTimes:
    """The median of each repetition in seconds on both sides, and the threshold of the series."""

    base: Repetitions = field(default_factory=dict)
    new: Repetitions = field(default_factory=dict)
    min_effect: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TimeJudgement:
    """The verdict on a time, with its change if it is known and a reason if it is inconclusive."""

    verdict: Verdict
    effect: Effect | None = None
    reason: str = ""


def estimate_effect(times: SeriesTimes, rule: Rule, num_series: int = 1) -> Effect | None:
    """Estimate the change of a series, None if no repetition can be compared.

    ``num_series`` corrects the minimum detectable effect for the number of series.
    """
    estimate = estimate_paired_effect if rule.is_paired else estimate_unpaired_effect
    level = rule.level / max(1, num_series)
    return estimate(times.base, times.new, min_effect=times.min_effect, level=level)


def judge_series(series: Sequence[SeriesTimes], rule: Rule) -> list[TimeJudgement]:
    """Judge each series among all of them."""
    effects = [estimate_effect(times, rule, len(series)) for times in series]
    p_values = [effect.p_value if effect else None for effect in effects]
    discoveries = select_discoveries(p_values, rule.level)
    return [
        _judge_effect(effect, times.min_effect, rule.level, is_discovery=is_discovery)
        for times, effect, is_discovery in zip(series, effects, discoveries, strict=True)
    ]


def judge_overall(series: Sequence[SeriesTimes], rule: Rule) -> TimeJudgement | None:
    """Judge the change of the median series, None for fewer than two series."""
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
    """Return the verdict on an effect, with a reason if it is inconclusive.

    ``is_discovery`` is True if it is significant after the correction for several series.
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
