"""The comparison of two runs, series by series: exact counts first, then times.

BASE is the reference and NEW the run that is judged. A series is a case on given ranks, nodes,
backend and device. A difference between the environments of BASE and NEW blocks the comparison of
times, because the difference may be the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parbench.bench.exit_codes import ExitCode
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import WorldInfo
from parbench.bench.text import UserError, name_first
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.compare.counts import (
    CountChange,
    CountComparison,
    collect_counts,
    compare_counts,
)
from parbench.reports.compare.environment import (
    EnvironmentChange,
    collect_environment,
    collect_points,
    find_environment_changes,
)
from parbench.reports.compare.pool import are_equal_worlds, describe_world, find_world
from parbench.reports.compare.rule import Rule, SeriesTimes, judge_series
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.compare.verdicts import (
    Verdict,
    combine_verdicts,
    count_verdicts,
    rank_verdict,
)
from parbench.reports.limits import LimitResult, get_limits_exit_code
from parbench.reports.run_data import RunData
from parbench.reports.stats import Effect, Repetitions

MAX_NAMED_CHANGES = 3
"""The number of environment differences that a reason names."""


@dataclass(frozen=True, kw_only=True)
class SeriesComparison:
    """The comparison of one series between the runs BASE and NEW.

    A series is a case (benchmark with parameters) on given ranks, nodes, backend and device.
    """

    base: CaseResult | None
    """The result in BASE, None if BASE does not have the series."""
    new: CaseResult | None
    """The result in NEW, None if NEW does not have the series."""
    verdict: Verdict = Verdict.UNCONFIRMED
    """The verdict on the time, or on a failure. It is UNCONFIRMED until the times are judged."""
    reason: str = ""
    """The reason for the verdict as text, empty for SLOWER, FASTER and NO CHANGE."""
    effect: Effect | None = None
    """The change of the time from BASE to NEW with its 95 % interval.

    None if the times were not compared.
    """
    times: SeriesTimes = field(default_factory=SeriesTimes)
    """The time of each repetition in seconds in both runs, and the threshold of the series."""
    environment_changes: tuple[EnvironmentChange, ...] = ()
    """The differences between the environments in which the series was measured."""
    counts: CountComparison = field(default_factory=CountComparison)
    """The comparison of the exact counts: calls, bytes, memory and schedule."""

    @property
    def any_result(self) -> CaseResult:
        """The result in NEW, or the result in BASE if NEW does not have the series."""
        result = self.new or self.base
        assert result is not None, "a series is in at least one run"
        return result

    @property
    def case(self) -> Case:
        """The case that the series measures."""
        return self.any_result.case

    @property
    def world(self) -> WorldInfo:
        """The ranks, nodes, backend and device on which the series was measured."""
        return self.any_result.world


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of the runs BASE and NEW, case by case."""

    base: RunData
    """The results of the run BASE."""
    new: RunData
    """The results of the run NEW."""
    rule: Rule
    """The threshold, the error rate and the least number of repetitions."""
    series: tuple[SeriesComparison, ...]
    """The comparison of each case, in the order of the results of BASE and then of NEW."""
    limits: tuple[LimitResult, ...] = ()
    """The results of the limits that the user set for NEW."""

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of times that each verdict occurs, keyed by verdict, the worst first.

        It counts the verdict on each case, and on each changed count (calls, bytes, memory,
        schedule) that is not intended.
        """
        verdicts = [series.verdict for series in self.series]
        verdicts += [change.verdict for _, change in self.count_changes if not change.is_intended]
        return count_verdicts(verdicts)

    @property
    def environment_changes(self) -> tuple[EnvironmentChange, ...]:
        """The differences between the environments of all cases, each once."""
        changes = [change for series in self.series for change in series.environment_changes]
        return tuple(dict.fromkeys(changes))

    @property
    def num_counts(self) -> int:
        """The number of exact counts that were compared, over all cases."""
        return sum(series.counts.num_compared for series in self.series)

    @property
    def num_judged(self) -> int:
        """The number of cases whose times were judged."""
        judged = (Verdict.SLOWER, Verdict.FASTER, Verdict.NO_CHANGE, Verdict.UNCONFIRMED)
        return sum(series.verdict in judged for series in self.series)

    @property
    def count_changes(self) -> list[tuple[SeriesComparison, CountChange]]:
        """(comparison of the case, changed count) for each count that differs between the runs.

        Counts are calls, bytes, memory and the schedule of a step. The worst verdict comes first.
        Changes that the user declared intentional come last.
        """
        changes = [(series, change) for series in self.series for change in series.counts.changes]
        return sorted(
            changes, key=lambda pair: (pair[1].is_intended, rank_verdict(pair[1].verdict))
        )

    def get_exit_code(self, *, fail_on_unknown: bool = False) -> ExitCode:
        """Return the exit code of ``parbench compare`` for all verdicts and limits.

        Undecided verdicts, such as UNCONFIRMED, make the exit code ``UNDECIDED`` (unless a verdict is
        worse) if ``fail_on_unknown`` is True, or if neither a count nor a time was compared.
        """
        is_unchecked = not self.num_counts and not self.num_judged
        code = combine_verdicts(self.verdicts, fail_on_unknown=fail_on_unknown or is_unchecked)
        return get_limits_exit_code(self.limits, code)


def compare(
    base: RunData,
    new: RunData,
    rule: Rule,
    intended: Sequence[str] = (),
    thresholds: Mapping[str, Threshold] | None = None,
) -> RunComparison:
    """Compare the run NEW with the run BASE, and return the verdict on each case.

    Args:
        base: the run BASE, which is the reference.
        new: the run NEW, which is judged.
        rule: the threshold, the error rate and the least number of repetitions.
        intended: globs for the paths of counts and environment values whose differences are
            intentional.
        thresholds: the thresholds that ``parbench aa`` measured, keyed by the fingerprint of a case
            in its environment. None if none were measured.

    Raises ``UserError`` if the runs have no case on the same ranks in common.
    """
    min_effects: dict[str, float] = {}
    for data in (base, new) if thresholds else ():
        for point in collect_points(data.run, data.results):
            threshold = (thresholds or {}).get(point.series.fingerprint)
            if threshold:
                case_id = point.series.case.id
                min_effects[case_id] = max(threshold.min_effect, min_effects.get(case_id, 0.0))
    series = []
    for pair in _pair_cases(base, new):
        min_effect = max(rule.min_effect, min_effects.get(pair.case.id, 0.0))
        series.append(_examine_series(pair, base, new, min_effect, intended))
    if not any(pair.base and pair.new for pair in series):
        raise UserError(
            f"the runs share no series: BASE is {base.run.path}, NEW is {new.run.path}. "
            "Compare runs of the same cases on the same number of ranks"
        )
    undecided = [pair.times for pair in series if pair.verdict == Verdict.UNCONFIRMED]
    judgements = iter(judge_series(undecided, rule))
    for i, pair in enumerate(series):
        if pair.verdict == Verdict.UNCONFIRMED:
            judgement = next(judgements)
            series[i] = replace(
                pair,
                verdict=judgement.verdict,
                reason=judgement.reason,
                effect=judgement.effect,
            )
    return RunComparison(base=base, new=new, rule=rule, series=tuple(series))


def _pair_cases(base: RunData, new: RunData) -> Iterator[SeriesComparison]:
    """Yield a comparison for each case with its results in BASE and NEW, before times are compared.

    The cases of BASE come first. A case that only BASE has gets the verdict MISSING, a case that
    only NEW has gets NEW. A case on different ranks, nodes, backends or devices in the two runs
    gives both. Cases that were skipped in every repetition are left out.
    """
    base_results, new_results = (
        {
            result.case.id: result
            for result in data.results
            if result.repetitions or result.status != "skipped"
        }
        for data in (base, new)
    )
    for case_id in dict.fromkeys((*base_results, *new_results)):
        base_result = base_results.get(case_id)
        new_result = new_results.get(case_id)
        if base_result and new_result:
            worlds = find_world(base_result.records), find_world(new_result.records)
            if are_equal_worlds(*worlds):
                yield SeriesComparison(base=base_result, new=new_result)
                continue
        if base_result:
            reasons = [skip.reason for skip in new.plan.skipped if skip.case.id == case_id]
            reasons += [record.reason for record in new.run.records if record.case.id == case_id]
            reasons.append(f"NEW has no result on {describe_world(base_result.world)}")
            yield SeriesComparison(
                base=base_result,
                new=None,
                verdict=Verdict.MISSING,
                reason=next(filter(None, reasons)),
            )
        if new_result:
            reason = f"BASE has no result on {describe_world(new_result.world)}"
            yield SeriesComparison(base=None, new=new_result, verdict=Verdict.NEW, reason=reason)


def _examine_series(
    series: SeriesComparison,
    base: RunData,
    new: RunData,
    min_effect: float,
    intended: Sequence[str],
) -> SeriesComparison:
    """Return the comparison of a case with its counts, times and environments.

    The verdict is final if the case failed in NEW, if only one run has it, or if the environments
    differ. Otherwise it stays UNCONFIRMED until the times are judged.

    Args:
        series: the results of the case in both runs.
        base: the run BASE.
        new: the run NEW.
        min_effect: the threshold of the case as a fraction.
        intended: globs for the paths of counts and environment values whose differences are
            intentional.
    """
    if series.new is not None and series.new.status in ("wrong", "failed", "hang"):
        verdict = Verdict.WRONG if series.new.status == "wrong" else Verdict.FAILED
        reason = "; ".join(series.new.reasons) or series.new.status
        return replace(series, verdict=verdict, reason=reason)
    if series.base is None or series.new is None:
        return series
    changes: tuple[EnvironmentChange, ...] = ()
    if series.base.measured and series.new.measured:
        changes = find_environment_changes(
            collect_environment(base.run, series.base.measured),
            collect_environment(new.run, series.new.measured),
            intended,
        )
    series = replace(
        series,
        times=SeriesTimes(
            base=_collect_times(series.base), new=_collect_times(series.new), min_effect=min_effect
        ),
        environment_changes=changes,
        counts=compare_counts(collect_counts(series.base), collect_counts(series.new), intended),
    )
    blocking = [change.text for change in changes if change.is_blocking]
    if blocking:
        reason = "; ".join(name_first(blocking, MAX_NAMED_CHANGES))
        return replace(series, verdict=Verdict.ENVIRONMENT_CHANGED, reason=reason)
    return series


def _collect_times(result: CaseResult) -> Repetitions:
    """Return the times of a case in seconds, keyed by the number of the repetition.

    The result is empty if the result of the case is wrong.
    """
    return {} if result.status == "wrong" else result.by_repetition(result.headline)
