"""The comparison of two runs, series by series: exact counts first, then times.

BASE is the reference and NEW the run that is judged. A series is a case on given ranks, nodes,
backend and device. A difference between the environments of BASE and NEW blocks the comparison of
times, because the difference may be the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
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
from parbench.reports.run_set import RunSet
from parbench.reports.stats import Effect, Repetitions

MAX_NAMED_CHANGES = 3
"""The number of environment differences that a reason names."""


@dataclass(frozen=True, kw_only=True)
class SeriesComparison:
    """The comparison of one series between the runs BASE and NEW.

    A series is a case (benchmark with parameters) on given ranks, nodes, backend and device.
    """

    case: Case
    """The case that the series measures."""
    label: str
    """The name of the case with the parameters that distinguish it from other cases."""
    world: WorldInfo
    """The ranks, nodes, backend and device on which the series was measured."""
    verdict: Verdict
    """The verdict on the time, or on a failure. It is UNDECIDED until the times are judged."""
    reason: str
    """The reason for the verdict as text, empty for SLOWER, FASTER and NO CHANGE."""
    effect: Effect | None = None
    """The change of the time from BASE to NEW with its 95 % interval.

    None if the times were not compared.
    """
    times: SeriesTimes
    """The time of an iteration in seconds in each repetition of both runs, and the threshold."""
    environment_changes: tuple[EnvironmentChange, ...]
    """The differences between the environments in which the series was measured."""
    counts: CountComparison
    """The comparison of the exact counts of the case: calls, bytes, memory and schedule."""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of the runs BASE and NEW, case by case."""

    base: RunData
    """The results of the run BASE."""
    new: RunData
    """The results of the run NEW."""
    rule: Rule
    """The threshold, the error rate and the least number of repetitions of the comparison."""
    series: tuple[SeriesComparison, ...]
    """The comparison of each case, in the order of the results of BASE and then of NEW."""
    intended: Sequence[str] = ()
    """The globs for differences that the user declared intentional with ``--across``."""
    limits: tuple[LimitResult, ...] = ()
    """The results of the limits on metrics of NEW that the user set with ``--limits``."""

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
        judged = (Verdict.SLOWER, Verdict.FASTER, Verdict.NO_CHANGE, Verdict.UNDECIDED)
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

    def get_exit_code(self, *, fail_on_undecided: bool = False) -> ExitCode:
        """Return the exit code of ``parbench compare`` for all verdicts and limits.

        Verdicts with exit code 3, such as DRIFT, count only if ``fail_on_undecided`` is True. If
        neither a count nor a time was compared, the exit code is at least ``DID_NOT_RUN``.
        """
        code = combine_verdicts(self.verdicts, fail_on_undecided=fail_on_undecided)
        if not self.num_counts and not self.num_judged:
            code = combine_exit_codes([code, ExitCode.DID_NOT_RUN])
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
        intended: globs for the names of counts and environment values whose differences are
            intentional, such as ``counts.dp.*`` or ``versions.*``.
        thresholds: the thresholds that ``parbench aa`` measured, keyed by the fingerprint (hash) of
            a case in its environment. None if none were measured.

    Raises ``UserError`` if the runs have no case on the same ranks in common.
    """
    min_effects = {}
    for point in collect_points(new.run) if thresholds else ():
        threshold = (thresholds or {}).get(point.series.fingerprint)
        if threshold:
            min_effects[point.series.case.id] = threshold.min_effect
    pairs = list(_pair_results(base, new))
    if not any(base_result and new_result for base_result, new_result in pairs):
        varied = RunSet([(base.run, None), (new.run, None)]).varied_params
        differences = [
            f"{case_name}: {param}={old_value} in BASE, {new_value} in NEW"
            for (case_name, param), (old_value, new_value) in varied.items()
        ]
        named = name_first(differences, MAX_NAMED_CHANGES) or ["they have different cases or ranks"]
        raise UserError(
            f"the runs share no series: {'; '.join(named)}. "
            "Compare runs of the same cases on the same number of ranks",
            hint="parbench report BASE NEW shows the effect of a parameter",
        )
    series = []
    for base_result, new_result in pairs:
        member = _examine_series(base_result, new_result, base, new, intended)
        min_effect = max(rule.min_effect, min_effects.get(member.case.id, 0.0))
        series.append(replace(member, times=replace(member.times, min_effect=min_effect)))
    undecided = [member.times for member in series if member.verdict == Verdict.UNDECIDED]
    judgements = iter(judge_series(undecided, rule))
    for i, member in enumerate(series):
        if member.verdict == Verdict.UNDECIDED:
            judgement = next(judgements)
            series[i] = replace(
                member,
                verdict=judgement.verdict,
                reason=judgement.reason,
                effect=judgement.effect,
            )
    return RunComparison(base=base, new=new, rule=rule, series=tuple(series), intended=intended)


def _pair_results(
    base: RunData, new: RunData
) -> Iterator[tuple[CaseResult | None, CaseResult | None]]:
    """Yield (result in BASE, result in NEW) of each case, those of BASE first.

    A result is None if a run does not have the case. A case on different ranks, nodes, backends or
    devices in the two runs gives two pairs. Cases that were skipped in every repetition are left
    out.
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
            if not are_equal_worlds(*worlds):
                yield base_result, None
                base_result = None
        yield base_result, new_result


def _examine_series(
    base_result: CaseResult | None,
    new_result: CaseResult | None,
    base: RunData,
    new: RunData,
    intended: Sequence[str],
) -> SeriesComparison:
    """Return the comparison of one case between two runs: its counts, times and environments.

    The verdict is final if the case failed in NEW, if only one run has it, or if the environments
    differ. Otherwise it is UNDECIDED until the times are judged.

    Args:
        base_result: the result of the case in BASE, None if BASE lacks it.
        new_result: the result of the case in NEW, None if NEW lacks it.
        base: the run BASE.
        new: the run NEW.
        intended: globs for the names of counts and environment values whose differences are
            intentional, such as ``counts.dp.*`` or ``versions.*``.
    """
    result = new_result or base_result
    assert result is not None, "a series is in at least one run"
    verdict, reason = Verdict.UNDECIDED, ""
    changes: tuple[EnvironmentChange, ...] = ()
    counts = CountComparison()
    if new_result and new_result.status in ("wrong", "failed", "hang"):
        verdict = Verdict.WRONG if new_result.status == "wrong" else Verdict.FAILED
        reason = "; ".join(new_result.reasons) or new_result.status
    elif base_result is None:
        verdict, reason = Verdict.NEW, f"BASE has no result on {describe_world(result.world)}"
    elif new_result is None:
        case_id = result.case.id
        reasons = [skip.reason for skip in new.plan.skipped if skip.case.id == case_id]
        reasons += [record.reason for record in new.run.records if record.case.id == case_id]
        reasons.append(f"NEW has no result on {describe_world(result.world)}")
        verdict, reason = Verdict.MISSING, next(filter(None, reasons))
    else:
        if base_result.measured and new_result.measured:
            changes = find_environment_changes(
                collect_environment(base.run, base_result.measured),
                collect_environment(new.run, new_result.measured),
                intended,
            )
        counts = compare_counts(collect_counts(base_result), collect_counts(new_result), intended)
        blocking = [change.text for change in changes if change.is_blocking]
        if blocking:
            verdict = Verdict.ENVIRONMENT_CHANGED
            reason = "; ".join(name_first(blocking, MAX_NAMED_CHANGES))
    return SeriesComparison(
        case=result.case,
        label=(base.labels | new.labels)[result.case.id],
        world=result.world,
        verdict=verdict,
        reason=reason,
        times=SeriesTimes(base=_collect_times(base_result), new=_collect_times(new_result)),
        environment_changes=changes,
        counts=counts,
    )


def _collect_times(result: CaseResult | None) -> Repetitions:
    """Return the time of an iteration of a case in seconds, keyed by the number of the repetition.

    The mapping is empty if the result is None or failed the check of correctness.
    """
    if result is None or result.status == "wrong":
        return {}
    return result.by_repetition(result.headline)
