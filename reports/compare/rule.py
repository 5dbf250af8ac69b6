"""The rule of a comparison: the verdicts that follow from the changes of the times of cases.

A time is SLOWER or FASTER if its change is larger than a threshold, and if this is significant
among all cases at the false discovery rate (Benjamini & Hochberg 1995). The verdict is NO CHANGE if
the whole 95 % interval of the change lies within the threshold, otherwise UNDECIDED.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from parbench.bench.results.formatting import format_percent
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.stats import (
    Effect,
    Repetitions,
    estimate_paired_effect,
    estimate_unpaired_effect,
    select_discoveries,
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings of a comparison: threshold, error rate and least number of repetitions."""

    min_effect: float = 0.03
    """The threshold as a fraction: smaller changes of the time are ignored."""
    level: float = 0.05
    """The accepted false discovery rate: the fraction of false alarms among changed cases."""
    min_repetitions: int = 5
    """The least number of repetitions per side with which times are judged."""
    is_paired: bool = False
    """True if repetition k of BASE and repetition k of NEW were measured next to each other."""


@dataclass(frozen=True, kw_only=True)
class SeriesTimes:
    """The times of one case in the runs BASE and NEW, and its threshold."""

    base: Repetitions
    """The time of an iteration in each repetition of BASE in seconds, keyed by repetition."""
    new: Repetitions
    """The time of an iteration in each repetition of NEW in seconds, keyed by repetition."""
    min_effect: float = 0.0
    """The threshold of the case as a fraction: smaller changes are ignored."""

    @property
    def base_seconds(self) -> float | None:
        """The geometric mean of the times in BASE in seconds, None without times."""
        return geometric_mean(self.base.values()) if self.base else None

    @property
    def new_seconds(self) -> float | None:
        """The geometric mean of the times in NEW in seconds, None without times."""
        return geometric_mean(self.new.values()) if self.new else None


@dataclass(frozen=True, kw_only=True)
class TimeJudgement:
    """The verdict on the change of a case's time from the run BASE to the run NEW."""

    verdict: Verdict
    """SLOWER, FASTER, NO CHANGE, UNDECIDED or NOT ENOUGH DATA."""
    effect: Effect | None
    """The change of the time with its 95 % interval, None if no repetition can be compared."""
    reason: str = ""
    """The reason for UNDECIDED or NOT ENOUGH DATA as text, empty for other verdicts."""


def judge_series(series: Sequence[SeriesTimes], rule: Rule) -> list[TimeJudgement]:
    """Return the verdict on the change of each case's time, corrected for the number of cases.

    ``series`` has the times of each case, and the result has one verdict for each, in the same
    order. A change counts if it exceeds the threshold in the element of ``series``. Cases with too
    few repetitions have the verdict NOT ENOUGH DATA, and do not count as tested.
    """
    estimate = estimate_paired_effect if rule.is_paired else estimate_unpaired_effect
    tested = [min(len(times.base), len(times.new)) >= rule.min_repetitions for times in series]
    level = rule.level / max(1, sum(tested))
    effects = [
        estimate(times.base, times.new, min_effect=times.min_effect, level=level)
        for times in series
    ]
    p_values = [
        effect.p_value if effect and is_tested else None
        for effect, is_tested in zip(effects, tested, strict=True)
    ]
    discoveries = select_discoveries(p_values, rule.level)
    judgements = []
    for times, effect, p_value, is_discovery in zip(
        series, effects, p_values, discoveries, strict=True
    ):
        if effect is None or p_value is None:
            verdict = Verdict.NOT_ENOUGH_DATA
            reason = (
                f"BASE has {len(times.base)} and NEW {len(times.new)} repetitions, but "
                f"{rule.min_repetitions} are needed"
            )
        elif is_discovery:
            verdict = Verdict.SLOWER if effect.change > 0 else Verdict.FASTER
            reason = ""
        elif effect.is_within(times.min_effect):
            verdict = Verdict.NO_CHANGE
            reason = ""
        else:
            verdict = Verdict.UNDECIDED
            reason = (
                f"the 95 % interval crosses the threshold of {format_percent(times.min_effect)}"
            )
            if p_value <= rule.level:
                reason = "significant only before correction for multiple comparisons"
        judgements.append(TimeJudgement(verdict=verdict, effect=effect, reason=reason))
    return judgements
