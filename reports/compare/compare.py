"""The comparison of two runs, series by series: exact counts first, then times.

BASE is the reference and NEW the run that is judged. A series is a case on given ranks, nodes,
backend and device. A difference between the environments of BASE and NEW blocks the comparison of
times, because the difference may be the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from parbench.bench.exit_codes import ExitCode
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import WorldInfo
from parbench.bench.text import UserError, name_first, pluralize
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
    find_environment_changes,
    find_plan_changes,
)
from parbench.reports.compare.pool import are_equal_worlds, describe_world
from parbench.reports.compare.rule import (
    Rule,
    SeriesTimes,
    TimeJudgement,
    estimate_effect,
    judge_overall,
    judge_series,
)
from parbench.reports.compare.thresholds import Threshold, find_fingerprints
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

    None if no repetition can be compared.
    """
    times: SeriesTimes = field(default_factory=SeriesTimes)
    """The time of each repetition in seconds in both runs, and the threshold of the series."""
    environment_changes: tuple[EnvironmentChange, ...] = ()
    """The differences between the environments in which the series was measured."""
    threshold: Threshold | None = None
    """The least relevant change of the time that ``parbench aa`` measured, None if not measured.

    It was measured in the environment of one run. If it is known for both, it is the higher one.
    """
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

    @property
    def kernel_change(self) -> str:
        """The kernels that NCCL launched in BASE and NEW, as ``BASE -> NEW``.

        Empty if they are equal or unknown.
        """
        base, new = (side.kernel if side else None for side in (self.base, self.new))
        return f"{base} -> {new}" if base and new and base != new else ""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of the runs BASE and NEW: the verdicts on each case and on all together."""

    base: RunData
    """The results of the run BASE."""
    new: RunData
    """The results of the run NEW."""
    rule: Rule
    """The threshold, the error rate and the least number of repetitions."""
    overall: TimeJudgement | None
    """The verdict on the median change over cases, None if fewer than two cases were judged."""
    num_judged: int
    """The number of cases whose times were judged."""
    series: tuple[SeriesComparison, ...]
    """The comparison of each case, in the order of the results of BASE and then of NEW."""
    environment_changes: tuple[EnvironmentChange, ...]
    """The differences between the environments and plans of the runs, each once."""
    limits: tuple[LimitResult, ...] = ()
    """The results of the limits that the user set for NEW."""
    notes: tuple[str, ...] = ()
    """Sentences about runs that were left out when several runs were pooled to BASE or NEW."""

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
    def counted_series(self) -> list[SeriesComparison]:
        """The comparisons of cases with compared or changed counts of calls, bytes or memory."""
        return [
            series
            for series in self.series
            if series.counts.num_compared > 0 or series.counts.changes
        ]

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
        verdicts = list(self.verdicts)
        if self.overall is not None:
            verdicts.append(self.overall.verdict)
        is_unchecked = not self.counted_series and not self.num_judged
        code = combine_verdicts(verdicts, fail_on_unknown=fail_on_unknown or is_unchecked)
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
    pairs = list(_pair_cases(base, new))
    if not any(pair.base and pair.new for pair in pairs):
        raise UserError(_describe_disjoint_runs(base, new))
    series = []
    fingerprints = [find_fingerprints(data) if thresholds else {} for data in (base, new)]
    for pair in pairs:
        measured = [(thresholds or {}).get(side.get(pair.case.id, "")) for side in fingerprints]
        known = [threshold for threshold in measured if threshold]
        highest = max(known, key=lambda threshold: threshold.min_effect, default=None)
        pair = replace(pair, threshold=highest)
        series.append(_examine_series(pair, base, new, rule, intended))
    undecided = [member.times for member in series if member.verdict == Verdict.UNCONFIRMED]
    judgements = iter(judge_series(undecided, rule))
    judged = []
    for member in series:
        if member.verdict == Verdict.UNCONFIRMED:
            judged.append(_apply_judgement(member, next(judgements)))
        else:
            judged.append(replace(member, effect=estimate_effect(member.times, rule)))
    changes = [change for member in judged for change in member.environment_changes]
    changes += find_plan_changes(base.plan, new.plan)
    return RunComparison(
        base=base,
        new=new,
        rule=rule,
        overall=judge_overall(undecided, rule),
        num_judged=len(undecided),
        series=tuple(judged),
        environment_changes=tuple(dict.fromkeys(changes)),
        notes=(*base.run.exclusions, *new.run.exclusions),
    )


def _apply_judgement(series: SeriesComparison, judgement: TimeJudgement) -> SeriesComparison:
    """Return the comparison of a case with the verdict on its times.

    NO CHANGE becomes UNCONFIRMED if a count (calls, bytes, memory) differs between the repetitions
    of BASE.
    """
    if judgement.verdict == Verdict.NO_CHANGE and series.counts.varying:
        reason = "a count differs between repetitions of BASE"
        judgement = replace(judgement, verdict=Verdict.UNCONFIRMED, reason=reason)
    return replace(
        series, verdict=judgement.verdict, reason=judgement.reason, effect=judgement.effect
    )


def _describe_disjoint_runs(base: RunData, new: RunData) -> str:
    """Return the error message for runs without a common case, with the cases and ranks of both."""
    sides = []
    for name, data in (("BASE", base), ("NEW", new)):
        cases = {record.case.id for record in data.run.records if record.status != "skipped"}
        plan = data.plan
        ranks = f"{pluralize(plan.nproc, 'rank')}, {plan.backend}, {plan.device}"
        measured = pluralize(len(cases), "measured case")
        sides.append(f"{name} ({data.run.path}) has {measured} on {ranks}")
    return (
        f"the runs share no series: {', '.join(sides)}. "
        "Compare runs of the same cases on the same world"
    )


def _pair_cases(base: RunData, new: RunData) -> Iterator[SeriesComparison]:
    """Yield a comparison for each case with its results in BASE and NEW, before times are compared.

    The cases of BASE come first. A case that only BASE has gets the verdict MISSING, a case that
    only NEW has gets NEW. A case on different ranks, nodes, backends or devices in the two runs
    gives both.
    """
    base_results = _select_results(base)
    new_results = _select_results(new)
    for case_id in dict.fromkeys((*base_results, *new_results)):
        base_result = base_results.get(case_id)
        new_result = new_results.get(case_id)
        if (
            base_result
            and new_result
            and are_equal_worlds(_find_world(base_result), _find_world(new_result))
        ):
            yield SeriesComparison(base=base_result, new=new_result)
            continue
        if base_result:
            reason = _explain_missing(base_result, new_result, new)
            yield SeriesComparison(
                base=base_result, new=None, verdict=Verdict.MISSING, reason=reason
            )
        if new_result:
            reason = "BASE does not have it, or has it on another world"
            yield SeriesComparison(base=None, new=new_result, verdict=Verdict.NEW, reason=reason)


def _select_results(data: RunData) -> dict[str, CaseResult]:
    """Return the results of a run, keyed by the id of the case.

    Cases that were skipped in every repetition are left out.
    """
    return {
        result.case.id: result
        for result in data.results
        if result.repetitions or result.status != "skipped"
    }


def _find_world(result: CaseResult) -> WorldInfo:
    """Return the ranks, nodes, backend and device of a result.

    The number of nodes is 0 (unknown) if the case was not measured.
    """
    return result.world if result.repetitions else structs.replace(result.world, nodes=0)


def _explain_missing(base: CaseResult, new: CaseResult | None, data: RunData) -> str:
    """Return the reason why NEW lacks a case of BASE: it ran on other ranks, or was not measured.

    Args:
        base: the result in BASE.
        new: the result of the case in NEW on another number of ranks or nodes, None without one.
        data: the run NEW.
    """
    if new is not None:
        worlds = f"{describe_world(base.world)} -> {describe_world(new.world)}"
        return f"NEW has it on another world: {worlds}"
    case_id = base.case.id
    reasons = [skip.reason for skip in data.plan.skipped if skip.case.id == case_id]
    reasons += [record.reason for record in data.run.records if record.case.id == case_id]
    if reasons:
        return f"skipped in NEW: {reasons[0]}"
    if any(case.id == case_id for case in data.plan.cases):
        return "planned in NEW, but without a record"
    return "not in the plan of NEW"


def _examine_series(
    series: SeriesComparison, base: RunData, new: RunData, rule: Rule, intended: Sequence[str]
) -> SeriesComparison:
    """Return the comparison of a case with its counts, times and environments.

    The verdict is final if the case failed in NEW, if only one run has it, if the environments
    differ, or if there are too few repetitions. Otherwise it stays UNCONFIRMED until the times are
    judged.

    Args:
        series: the results of the case in both runs.
        base: the run BASE.
        new: the run NEW.
        rule: the least number of repetitions and the threshold.
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
    torch_differs = any(change.path == "versions.torch" for change in changes)
    counts = compare_counts(
        collect_counts(series.base),
        collect_counts(series.new),
        intended,
        torch_differs=torch_differs,
    )
    measured_effect = series.threshold.min_effect if series.threshold else 0.0
    times = SeriesTimes(
        base=_collect_times(series.base),
        new=_collect_times(series.new),
        min_effect=max(rule.min_effect, measured_effect),
    )
    series = replace(series, times=times, environment_changes=changes, counts=counts)
    blocking = [change.text for change in changes if change.is_blocking]
    if times.base and times.new and blocking:
        reason = "; ".join(name_first(blocking, MAX_NAMED_CHANGES))
        return replace(series, verdict=Verdict.ENVIRONMENT_CHANGED, reason=reason)
    num_base = len(times.base)
    num_new = len(times.new)
    if min(num_base, num_new) < rule.min_repetitions:
        status = series.base.status if series.base else "ok"
        bad = f" (its status in BASE is {status})" if status != "ok" else ""
        reason = (
            f"at least {rule.min_repetitions} repetitions per side are needed: "
            f"BASE has {num_base}, NEW has {num_new}{bad}"
        )
        return replace(series, verdict=Verdict.TOO_FEW_RUNS, reason=reason)
    return series


def _collect_times(result: CaseResult) -> Repetitions:
    """Return the times of a case in seconds, keyed by the number of the repetition.

    The result is empty if the result of the case is wrong.
    """
    return {} if result.status == "wrong" else result.by_repetition(result.headline)
