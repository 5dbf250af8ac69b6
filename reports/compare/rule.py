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


@dataclass(frozen=True, kw_only=True)
class SeriesTimes:
    """The median of each repetition in seconds on both sides, and the threshold of the series."""

    base: Repetitions = field(default_factory=dict)
    new: Repetitions = field(default_factory=dict)
    min_effect: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TimeJudgement:
    """The change of a time, and its verdict with a reason if it is inconclusive."""

    verdict: Verdict
    effect: Effect
    reason: str = ""


def estimate_effect(
    times: SeriesTimes, level: float, *, is_paired: bool, num_series: int = 1
) -> Effect | None:
    """Estimate the change of a series, None if no repetition can be compared.

    ``num_series`` corrects the minimum detectable effect for the number of series.
    """
    estimate = estimate_paired_effect if is_paired else estimate_unpaired_effect
    return estimate(
        times.base, times.new, min_effect=times.min_effect, level=level / max(1, num_series)
    )


def judge_series(
    series: Sequence[SeriesTimes], rule: Rule, *, is_paired: bool
) -> list[TimeJudgement | None]:
    """Judge each series among all of them.

    The judgement is None if no repetition can be compared.
    """
    effects = [
        estimate_effect(times, rule.level, is_paired=is_paired, num_series=len(series))
        for times in series
    ]
    p_values = [effect.p_value if effect else None for effect in effects]
    discoveries = select_discoveries(p_values, rule.level)
    judgements: list[TimeJudgement | None] = []
    for times, effect, is_discovery in zip(series, effects, discoveries, strict=True):
        if effect is None:
            judgements.append(None)
        else:
            is_alone = effect.p_value is not None and effect.p_value <= rule.level
            judgements.append(_judge_effect(effect, times.min_effect, is_discovery, is_alone))
    return judgements


def judge_overall(
    series: Sequence[SeriesTimes], rule: Rule, *, is_paired: bool
) -> TimeJudgement | None:
    """Judge the change of the median series, None for fewer than two series."""
    if len(series) < 2:
        return None
    base, new = compute_overall_times(
        [times.base for times in series], [times.new for times in series]
    )
    min_effect = median(times.min_effect for times in series)
    times = SeriesTimes(base=base, new=new, min_effect=min_effect)
    effect = estimate_effect(times, rule.level, is_paired=is_paired)
    if effect is None:
        return None
    is_discovery = effect.p_value is not None and effect.p_value <= rule.level
    return _judge_effect(effect, min_effect, is_discovery, is_discovery)


def _judge_effect(
    effect: Effect, min_effect: float, is_discovery: bool, is_significant_alone: bool
) -> TimeJudgement:
    """Return the verdict on an effect with a reason if it is UNCONFIRMED.

    ``is_discovery`` is after the correction for several series, ``is_significant_alone`` before it.
    """
    if is_discovery:
        verdict = Verdict.SLOWER if effect.change > 0 else Verdict.FASTER
        return TimeJudgement(verdict=verdict, effect=effect)
    if effect.is_within(min_effect):
        return TimeJudgement(verdict=Verdict.NO_CHANGE, effect=effect)
    if is_significant_alone:
        reason = "significant alone, but not after correction for multiple comparisons"
    else:
        reason = f"the 95 % interval crosses the threshold of {format_percent(min_effect)}"
    return TimeJudgement(verdict=Verdict.UNCONFIRMED, effect=effect, reason=reason)
