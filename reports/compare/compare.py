"""The comparison of two runs, series by series: exact counts first, then times.

A series is a case on a world: the same target, parameters, ranks, nodes, backend and device. A
difference between the environments blocks the comparison of its times, because the difference may
be the cause.
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


@dataclass(frozen=True, kw_only=True)
class SeriesComparison:
    """The comparison of one case with one world size in a base run and a new run.

    The result of a run without the case is None.
    """

    base: CaseResult | None
    new: CaseResult | None
    verdict: Verdict = Verdict.UNCONFIRMED
    reason: str = ""
    effect: Effect | None = None
    times: SeriesTimes = field(default_factory=SeriesTimes)
    environment_changes: tuple[EnvironmentChange, ...] = ()
    threshold: Threshold | None = None
    """The higher of the thresholds that were measured for the two sides, if there is one."""
    counts: CountComparison = field(default_factory=CountComparison)

    @property
    def any_result(self) -> CaseResult:
        """The new result, or the base result if the new run does not have the series."""
        result = self.new or self.base
        assert result is not None, "a series is in at least one run"
        return result

    @property
    def case(self) -> Case:
        """The case of the series."""
        return self.any_result.case

    @property
    def world(self) -> WorldInfo:
        """The ranks, nodes, backend and device of the series."""
        return self.any_result.world

    @property
    def kernel_change(self) -> str:
        """NCCL's kernels in BASE and NEW, empty if they are the same or unknown."""
        base, new = (side.kernel if side else None for side in (self.base, self.new))
        return f"{base} -> {new}" if base and new and base != new else ""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run compared with another one, and the environment differences between them."""

    base: RunData
    new: RunData
    rule: Rule
    overall: TimeJudgement | None
    """The change of the median series, None if fewer than two were judged."""
    num_judged: int
    series: tuple[SeriesComparison, ...]
    environment_changes: tuple[EnvironmentChange, ...]
    limits: tuple[LimitResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of series with each verdict, and of changed counts that are not intended."""
        verdicts = [series.verdict for series in self.series]
        verdicts += [change.verdict for _, change in self.count_changes if not change.is_intended]
        return count_verdicts(verdicts)

    @property
    def counted_series(self) -> list[SeriesComparison]:
        """The series with compared or changed counts."""
        return [
            series
            for series in self.series
            if series.counts.num_compared > 0 or series.counts.changes
        ]

    @property
    def count_changes(self) -> list[tuple[SeriesComparison, CountChange]]:
        """All changed counts with their series: the worst first, intended ones last."""
        changes = [(series, change) for series in self.series for change in series.counts.changes]
        return sorted(
            changes, key=lambda pair: (pair[1].is_intended, rank_verdict(pair[1].verdict))
        )

    def get_exit_code(self, *, fail_on_unknown: bool = False) -> ExitCode:
        """Return the exit code of all verdicts and limits.

        Undecided series count if ``fail_on_unknown`` is True, or if neither a count nor a time was
        compared.
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
    """Compare ``new`` with ``base``. Differences that match a glob of ``intended`` are intentional.

    ``thresholds`` were measured by ``parbench aa`` and are keyed by fingerprint. Raises
    ``UserError`` if the runs have no series in common.
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
    """Return the series with the judgement of its times.

    NO CHANGE becomes UNCONFIRMED if a count differs between the repetitions of BASE.
    """
    if judgement.verdict == Verdict.NO_CHANGE and series.counts.varying:
        reason = "a count differs between repetitions of BASE"
        judgement = replace(judgement, verdict=Verdict.UNCONFIRMED, reason=reason)
    return replace(
        series, verdict=judgement.verdict, reason=judgement.reason, effect=judgement.effect
    )


def _describe_disjoint_runs(base: RunData, new: RunData) -> str:
    """Return the error for runs that share no series, with the cases and ranks of both."""
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
    """Yield the series of both runs, the series of BASE first."""
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
    """Return the results keyed by case id, without cases that were skipped in every repetition."""
    return {
        result.case.id: result
        for result in data.results
        if result.repetitions or result.status != "skipped"
    }


def _find_world(result: CaseResult) -> WorldInfo:
    """Return the world of a result. The nodes are unknown if it was not measured."""
    return result.world if result.repetitions else structs.replace(result.world, nodes=0)


def _explain_missing(base: CaseResult, new: CaseResult | None, data: RunData) -> str:
    """Return the reason why NEW lacks a series: another world, a skip, or the plan.

    ``new`` is the result on another world, ``data`` the run NEW.
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
    """Return a series with its counts, times and environment.

    The verdict stays UNCONFIRMED if the times decide.
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
    """Return the times of a case in seconds, keyed by repetition. A wrong result has none."""
    return {} if result.status == "wrong" else result.by_repetition(result.headline)
