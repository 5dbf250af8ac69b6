"""The check of a run against the earlier runs of a branch.

A run of the history is checked for level changes: which series became slower, since which run. A
candidate, such as the run of a pull request, is not part of the history. It is compared with the
newest level of the branch, so one run decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from parbench.bench.exit_codes import ExitCode
from parbench.bench.results.formatting import UNKNOWN, format_seconds
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.counts import CountChange, compare_counts
from parbench.reports.compare.environment import SeriesIdentity, SeriesPoint, collect_points
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.history.database import History, StoredRun, open_history
from parbench.reports.history.levels import (
    LevelChange,
    LevelRule,
    SeriesJudgement,
    judge_series,
)
from parbench.reports.history.verdicts import (
    HistoryVerdict,
    count_verdicts,
    get_verdicts_exit_code,
    rank_verdict,
)
from parbench.reports.run_data import RunData

NOT_JUDGED = SeriesJudgement()
NUM_SIMILAR_RUNS = 3  # A case is missing if one of so many similar earlier runs measured it.


@dataclass(frozen=True, kw_only=True)
class SeriesCheck:
    """The verdict on a series, with its times in the window and the judgement of its levels."""

    series: SeriesIdentity
    verdict: HistoryVerdict = HistoryVerdict.NO_CHANGE
    reason: str = ""
    times: tuple[tuple[StoredRun, float], ...] = ()
    judgement: SeriesJudgement = NOT_JUDGED
    threshold: Threshold | None = None
    environment_changes: tuple[str, ...] = ()
    """What changed in the environment between the last run before a step and its first run."""

    @property
    def level_change(self) -> LevelChange | None:
        return self.judgement.change

    @property
    def change(self) -> float | None:
        """The change of the time as a fraction."""
        return self.level_change.change if self.level_change else self.judgement.rise

    @property
    def since(self) -> str | None:
        """The id of the run that began the newest level."""
        return self.times[self.level_change.start][0].id if self.level_change else None


@dataclass(frozen=True, kw_only=True)
class CountCheck:
    """The exact counts of a series, and each change with the id of the run that began it."""

    series: SeriesIdentity
    num_compared: int
    changes: tuple[tuple[CountChange, str], ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a run, the worst series first."""

    run: StoredRun
    rule: LevelRule
    is_candidate: bool
    series: tuple[SeriesCheck, ...]
    counts: tuple[CountCheck, ...] = ()

    @property
    def count_changes(self) -> list[tuple[SeriesIdentity, CountChange, str]]:
        return [
            (check.series, change, since)
            for check in self.counts
            for change, since in check.changes
        ]

    @property
    def verdict_counts(self) -> dict[HistoryVerdict, int]:
        verdicts = [check.verdict for check in self.series]
        for _, change, _ in self.count_changes:
            is_sure = change.verdict == "CHANGED"
            verdicts.append(HistoryVerdict.COUNT_CHANGED if is_sure else HistoryVerdict.UNCONFIRMED)
        return count_verdicts(verdicts)

    @property
    def num_earlier_runs(self) -> int:
        """The number of earlier runs of the series that has most of them."""
        return max((len(check.times) for check in self.series), default=1) - 1

    def compute_exit_code(self, *, fail_on_unknown: bool = False) -> ExitCode:
        return get_verdicts_exit_code(self.verdict_counts, fail_on_unknown=fail_on_unknown)


def find_newest_run(history: History, branch: str) -> StoredRun:
    """Return the newest run of a branch, ``UserError`` if it has none."""
    runs = history.list_runs(branch)
    if runs:
        return runs[-1]
    branches = ", ".join(sorted({run.branch for run in history.list_runs()})) or "none"
    raise UserError(f"the history has no run of branch {branch!r}, its branches are: {branches}")


def check_stored_run(
    history: History,
    run: StoredRun,
    rule: LevelRule,
    thresholds: Mapping[str, Threshold] | None = None,
) -> Check:
    """Check a run of the history against the runs of its branch before it."""
    return _Checker(history, run, history.read_points(run), rule, thresholds or {}).check()


def check_candidate(
    file: Path,
    data: RunData,
    branch: str,
    rule: LevelRule,
    thresholds: Mapping[str, Threshold] | None = None,
) -> Check:
    """Compare a run with the runs of a branch. The run is not added."""
    run = data.run
    candidate = StoredRun(
        number=-1,
        id=run.info.id,
        started=run.info.started,
        host=run.info.host,
        preset=run.info.plan.preset,
        branch=branch,
        commit="",
        path=str(run.path),
    )
    points = collect_points(run, data.results)
    is_new = not file.exists()
    with open_history(Path(":memory:") if is_new else file, create=is_new) as history:
        return _Checker(history, candidate, points, rule, thresholds or {}).check()


class _Checker:
    """Checks one run against the earlier runs of its branch.

    ``thresholds`` are measured ones by fingerprint, which raise that of the rule.
    """

    def __init__(
        self,
        history: History,
        run: StoredRun,
        points: Sequence[SeriesPoint],
        rule: LevelRule,
        thresholds: Mapping[str, Threshold],
    ) -> None:
        self.history = history
        self.run = run
        self.points = points
        self.rule = rule
        self.thresholds = thresholds
        self.is_candidate = run.number < 0
        self.earlier_runs = [
            other
            for other in history.list_runs(run.branch)
            if other.id != run.id and other.started <= run.started
        ]
        self.annotations = [
            note
            for note in history.list_annotations()
            if note.branch == run.branch and note.started <= run.started
        ]
        self.similar_runs = self._find_similar_runs()

    def check(self) -> Check:
        checks = []
        counts = []
        for point in self.points:
            earlier = self._read_earlier_points(point.series)
            checks.append(self._collect_times(point, earlier))
            counts += self._compare_counts(point, earlier)
        checks = self._judge(checks)
        results = []
        for point, check in zip(self.points, checks, strict=True):
            verdict, reason = self._decide(point, check)
            results.append(replace(check, verdict=verdict, reason=reason))
        results += self._find_missing()
        results.sort(key=lambda check: rank_verdict(check.verdict))
        return Check(
            run=self.run,
            rule=self.rule,
            is_candidate=self.is_candidate,
            series=tuple(results),
            counts=tuple(counts),
        )

    def _read_earlier_points(self, series: SeriesIdentity) -> list[tuple[StoredRun, SeriesPoint]]:
        """Return the points of a series since its newest annotation."""
        label = series.case.label
        matching = [note for note in self.annotations if fnmatchcase(label, note.series)]
        newest = max((note.started for note in matching), default="")
        runs = [run for run in self.earlier_runs if run.started >= newest]
        return self.history.read_series(series.fingerprint, runs)

    def _collect_times(
        self, point: SeriesPoint, earlier: Sequence[tuple[StoredRun, SeriesPoint]]
    ) -> SeriesCheck:
        times = [(run, point.seconds) for run, point in earlier if point.seconds]
        num_earlier = self.rule.window if self.is_candidate else self.rule.window - 1
        times = times[-num_earlier:]
        if point.seconds:
            times.append((self.run, point.seconds))
        return SeriesCheck(
            series=point.series,
            times=tuple(times),
            threshold=self.thresholds.get(point.series.fingerprint),
        )

    def _compare_counts(
        self, point: SeriesPoint, earlier: Sequence[tuple[StoredRun, SeriesPoint]]
    ) -> list[CountCheck]:
        """Compare counts with the first run of the window, those of a candidate with the last.

        Return nothing if a side has no counts.
        """
        counted = [(run, point.counts) for run, point in earlier if point.counts]
        counted = counted[-self.rule.window :]
        if not counted or not point.counts:
            return []
        base = counted[-1 if self.is_candidate else 0][1]
        comparison = compare_counts(base, point.counts)
        changes = []
        for change in comparison.changes:
            since = self.run
            for run, counts in () if self.is_candidate else reversed(counted):
                differing = compare_counts(counts, point.counts).changes
                if change.path in [difference.path for difference in differing]:
                    break
                since = run
            changes.append((change, since.id))
        if not comparison.num_compared and not changes:
            return []
        check = CountCheck(
            series=point.series, num_compared=comparison.num_compared, changes=tuple(changes)
        )
        return [check]

    def _has_enough_runs(self, check: SeriesCheck) -> bool:
        needed = self.rule.min_runs + self.is_candidate
        is_measured = bool(check.times) and check.times[-1][0] is self.run
        return is_measured and len(check.times) >= needed

    def _judge(self, checks: Sequence[SeriesCheck]) -> list[SeriesCheck]:
        """Judge all series with enough runs together, because they share the noise of runs."""
        places = [i for i, check in enumerate(checks) if self._has_enough_runs(check)]
        rules = []
        for i in places:
            threshold = checks[i].threshold
            measured = threshold.min_effect if threshold else 0.0
            rules.append(replace(self.rule, threshold=max(self.rule.threshold, measured)))
        logs = [np.log([seconds for _, seconds in checks[i].times]) for i in places]
        judgements = judge_series(logs, rules, newest_is_candidate=self.is_candidate)
        results = list(checks)
        for i, judgement in zip(places, judgements, strict=True):
            results[i] = replace(checks[i], judgement=judgement)
            change = judgement.change
            if change and change.start:
                runs = [run for run, _ in checks[i].times[change.start - 1 : change.start + 1]]
                differences = self._compare_environments(checks[i].series, *runs)
                results[i] = replace(results[i], environment_changes=differences)
        return results

    def _compare_environments(
        self, series: SeriesIdentity, before: StoredRun, after: StoredRun
    ) -> tuple[str, ...]:
        points = self.history.read_series(series.fingerprint, [before, after])
        values = [{**point.explanatory, "commit": run.commit or UNKNOWN} for run, point in points]
        return format_differences(*values)

    def _decide(self, point: SeriesPoint, check: SeriesCheck) -> tuple[HistoryVerdict, str]:
        if point.status == "wrong":
            return HistoryVerdict.WRONG, point.reason or "the result is wrong"
        if point.status in ("failed", "hang"):
            return HistoryVerdict.FAILED, point.reason or point.status
        if not self._has_enough_runs(check):
            return self._explain_too_few_runs(point, check)
        if self.is_candidate:
            return _describe_candidate(check)
        return _describe_levels(check)

    def _explain_too_few_runs(
        self, point: SeriesPoint, check: SeriesCheck
    ) -> tuple[HistoryVerdict, str]:
        number = len(check.times) - (self.is_candidate and bool(point.seconds))
        few = f"{number} of {self.rule.min_runs} required runs"
        previous = self.similar_runs[0] if self.similar_runs else []
        same_case = [series for series in previous if series.case.id == point.series.case.id]
        fingerprints = [series.fingerprint for series in same_case]
        if not same_case or point.series.fingerprint in fingerprints:
            return HistoryVerdict.TOO_FEW_RUNS, few
        differences = format_differences(same_case[0].environment, point.series.environment)
        reason = ", ".join(differences) or "the ranks or nodes differ"
        return HistoryVerdict.ENVIRONMENT_CHANGED, f"{reason} ({few})"

    def _find_similar_runs(self) -> list[list[SeriesIdentity]]:
        """Return the series of the newest earlier runs that share a case with this run.

        Without any point in this run, all runs of its preset are similar.
        """
        measured = {_get_measured_key(point.series) for point in self.points}
        similar = []
        same_preset = [run for run in self.earlier_runs if run.preset == self.run.preset]
        for run in reversed(same_preset[-self.rule.window :]):
            identities = self.history.list_series(run)
            if not measured or measured & set(map(_get_measured_key, identities)):
                similar.append(identities)
            if len(similar) == NUM_SIMILAR_RUNS:
                break
        return similar

    def _find_missing(self) -> list[SeriesCheck]:
        measured = {_get_measured_key(point.series) for point in self.points}
        missing = {}
        for identities in reversed(self.similar_runs):
            for series in identities:
                if _get_measured_key(series) not in measured:
                    missing[_get_measured_key(series)] = series
        number = pluralize(len(self.similar_runs), "similar run")
        reason = f"measured in the last {number}, but not in this one"
        return [
            SeriesCheck(series=series, verdict=HistoryVerdict.MISSING, reason=reason)
            for series in missing.values()
        ]


def _get_measured_key(series: SeriesIdentity) -> tuple[object, ...]:
    """Return what was measured: the case, the ranks, the backend and the device."""
    world = series.world
    return (series.case.id, world.size, world.backend, world.device)


def _describe_candidate(check: SeriesCheck) -> tuple[HistoryVerdict, str]:
    if check.judgement.rise is None:
        return HistoryVerdict.NO_CHANGE, ""
    return HistoryVerdict.SLOWER, _describe_rise(check, check.judgement.rise)


def _describe_levels(check: SeriesCheck) -> tuple[HistoryVerdict, str]:
    """Return the verdict on a stored run, and a sentence with its numbers."""
    change = check.level_change
    rise = check.judgement.rise
    if change and check.judgement.is_significant:
        if change.change < 0:
            verdict = HistoryVerdict.FASTER
        elif change.slope is not None:
            verdict = HistoryVerdict.DRIFT
        else:
            verdict = HistoryVerdict.SLOWER
        return verdict, _describe_change(change, len(check.times))
    if rise is not None:
        return HistoryVerdict.UNCONFIRMED, _describe_rise(check, rise)
    if change and change.slope is None and change.change > 0:
        text = _describe_change(change, len(check.times))
        return HistoryVerdict.UNCONFIRMED, f"{text}, not significant after FDR correction"
    return HistoryVerdict.NO_CHANGE, ""


def _describe_change(change: LevelChange, num_runs: int) -> str:
    percent = f"{100 * change.change:+.1f} %"
    interval = f"95 % CI {100 * change.low:+.1f} to {100 * change.high:+.1f} %"
    if change.slope is not None:
        slope = f"{100 * change.slope:+.2f} % per run"
        return f"{slope}, {percent} over {num_runs} runs ({interval})"
    return f"{percent} for {pluralize(num_runs - change.start, 'run')} ({interval})"


def _describe_rise(check: SeriesCheck, rise: float) -> str:
    earlier = [seconds for _, seconds in check.times[:-1]]
    limits = f"{format_seconds(min(earlier))} to {format_seconds(max(earlier))}"
    return f"{100 * rise:+.1f} % in this run, earlier runs took {limits}"


def format_differences(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that differ, as ``path: old -> new``."""
    differences = []
    for path in sorted({*base, *new}):
        old, current = base.get(path, UNKNOWN), new.get(path, UNKNOWN)
        if old != current:
            differences.append(f"{path}: {old} -> {current}")
    return tuple(differences)
