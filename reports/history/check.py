"""The check of a run against the earlier runs of a branch: which series became slower, since when.

A series is a case on a number of ranks in one environment. A level of a series is successive runs
whose times differ only by noise. A run of the history is checked for steps to a new level. A
candidate, such as the run of a pull request, is not part of the history. It is compared with the
newest level of the branch, so one run decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from parbench.bench.exit_codes import ExitCode
from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.text import UserError, pluralize
from parbench.reports.compare.counts import compare_counts
from parbench.reports.compare.environment import SeriesIdentity, SeriesPoint, collect_points
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.compare.verdicts import (
    Verdict,
    combine_verdicts,
    count_verdicts,
    rank_verdict,
)
from parbench.reports.history.changes import LevelChange, judge_median, judge_series
from parbench.reports.history.database import CANDIDATE, History, StoredRun, open_history
from parbench.reports.history.levels import LevelRule
from parbench.reports.history.noise import MIN_POOLED_SERIES
from parbench.reports.run_data import RunData

NUM_SIMILAR_RUNS = 3
"""A case is missing if one of this many similar earlier runs measured it.

Similar runs have the preset of the checked run, and a case in common with it.
"""

SeriesRuns = list[tuple[StoredRun, SeriesPoint]]
"""The results of a series, each with its run, oldest first."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The times and counts of one case in the checked run and in the newest earlier runs."""

    point: SeriesPoint
    """The result in the checked run."""
    earlier: SeriesRuns
    """The results in earlier runs since the last annotation, oldest first.

    An annotation declares a change intended. At most ``LevelRule.window`` runs are used.
    """
    timed: SeriesRuns
    """The results that have a time: those in ``earlier``, then that of the checked run."""
    has_enough_runs: bool
    """True if the checked run has a time and there are enough earlier times to judge it."""

    @property
    def seconds(self) -> list[float]:
        """The times of the results in ``timed`` in seconds, oldest first."""
        return [point.seconds for _, point in self.timed if point.seconds is not None]


@dataclass(frozen=True, kw_only=True)
class SeriesCheck:
    """The verdict on one case in one environment, with the measurements that led to it."""

    series: SeriesIdentity
    """The case with its ranks and its environment."""
    verdict: Verdict
    """The worst of the verdicts on the time and on the exact counts."""
    reason: str = ""
    """The observation that led to the verdict as text, empty for NO CHANGE."""
    runs: Sequence[str] = ()
    """The ids of the runs whose times were used, oldest first.

    The checked run is the last one, if it has a time.
    """
    seconds: Sequence[float] = ()
    """The times of ``runs`` in seconds."""
    change: LevelChange | None = None
    """The significant change of the time, None if there is none."""
    threshold: Threshold | None = None
    """The least relevant change of the time that ``parbench aa`` measured, None if not measured."""
    num_counts: int = 0
    """The number of exact counts (calls, bytes, memory, schedule) that were compared."""
    count_changes: Sequence[str] = ()
    """A sentence for each exact count that changed."""

    @property
    def first_run(self) -> str | None:
        """The id of the run with which the significant change of the time began.

        None without a significant change.
        """
        return self.runs[self.change.start] if self.change else None


@dataclass(frozen=True, kw_only=True)
class HistoryCheck:
    """The verdicts of a history check on all series of a run.

    A series is a case on a number of ranks in one environment.
    """

    run: StoredRun
    """The checked run."""
    rule: LevelRule
    """The smallest change that counts, and the numbers of runs that the check needs and uses."""
    num_earlier_runs: int
    """The number of earlier runs with a time of one series, the maximum over series."""
    series: Sequence[SeriesCheck]
    """The verdicts on series, the worst first, also on series that the run lacks."""
    overall: LevelChange | None
    """The significant change over runs of the median relative time of all series, None without one.

    The relative time is the time over the median of the series (``judge_median``). The median may
    change significantly although no single series does.
    """

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of series with each verdict, keyed by verdict, the worst first."""
        return count_verdicts(result.verdict for result in self.series)

    @property
    def overall_verdict(self) -> Verdict:
        """The verdict on the change of the median relative time of all series (``overall``)."""
        return _decide(self.overall, is_candidate=self.run.is_candidate)

    def compute_exit_code(self, *, fail_on_unknown: bool = False) -> ExitCode:
        """Return the exit code of ``parbench history check`` for the verdicts of this check.

        It depends on the verdicts on all series and on their median. Undecided verdicts, such as
        UNCONFIRMED, count only if ``fail_on_unknown`` is True.
        """
        verdicts = [*self.verdicts, self.overall_verdict]
        return combine_verdicts(verdicts, fail_on_unknown=fail_on_unknown)


def find_newest_run(history: History, branch: str) -> StoredRun:
    """Return the newest run of a branch. Raises ``UserError`` if the branch has no run."""
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
) -> HistoryCheck:
    """Check a run of the history against the earlier runs of its branch, case by case.

    Args:
        history: the history that contains the run.
        run: the run to check.
        rule: the smallest change that counts, and the numbers of runs that the check needs and
            uses.
        thresholds: the thresholds that ``parbench aa`` measured, keyed by the fingerprint of a case
            in its environment. They only raise the threshold of the rule. None if none were
            measured.
    """
    return _Checker(history, run, rule, thresholds or {}).check(history.read_points(run))


def check_candidate(
    file: Path,
    data: RunData,
    branch: str,
    rule: LevelRule,
    thresholds: Mapping[str, Threshold] | None = None,
) -> HistoryCheck:
    """Compare a run that is not part of the history with the runs of a branch, without adding it.

    Args:
        file: the file of the history. A missing file counts as an empty history.
        data: the run.
        branch: the branch to compare it with.
        rule: the smallest change that counts, and the numbers of runs that the check needs and
            uses.
        thresholds: the thresholds that ``parbench aa`` measured, keyed by the fingerprint of a case
            in its environment. None if none were measured.
    """
    info = data.run.info
    candidate = StoredRun(
        number=CANDIDATE,
        id=info.id,
        started=info.started,
        host=info.host,
        preset=info.plan.preset,
        branch=branch,
        commit="",
        path=str(data.run.path),
    )
    points = collect_points(data.run, data.results)
    is_new = not file.exists()
    with open_history(Path(":memory:") if is_new else file, create=is_new) as history:
        return _Checker(history, candidate, rule, thresholds or {}).check(points)


class _Checker:
    """Checks one run, of the history or a candidate, against the earlier runs of its branch.

    A candidate, such as the run of a pull request, is not part of the history. A series is a case
    on a number of ranks in one environment.
    """

    def __init__(
        self,
        history: History,
        run: StoredRun,
        rule: LevelRule,
        thresholds: Mapping[str, Threshold],
    ) -> None:
        self.history = history
        self.run = run
        self.rule = rule
        self.thresholds = thresholds
        """The thresholds that ``parbench aa`` measured, keyed by the fingerprint of the series."""
        self.is_candidate = run.is_candidate
        """True if the run is not part of the history."""
        self.earlier_runs = [
            other
            for other in history.list_runs(run.branch)
            if other.id != run.id and other.started <= run.started
        ]
        """The other runs of the branch that did not start later, oldest first."""
        self.annotations = [
            note
            for note in history.list_annotations()
            if note.branch == run.branch and note.started <= run.started
        ]
        """The intended changes of the branch at runs that did not start later."""

    def check(self, points: Sequence[SeriesPoint]) -> HistoryCheck:
        """Return the verdicts on all cases of the checked run, and on cases that it lacks.

        ``points`` are its results, one for each case.
        """
        similar_runs = self._find_similar_runs(points)
        windows = [self._read_window(point) for point in points]
        changes = self._find_changes(windows)
        results = []
        for point, window in zip(points, windows, strict=True):
            change = changes.get(point.series.fingerprint)
            result = self._describe_times(window, change)
            if result.verdict == Verdict.TOO_FEW_RUNS and similar_runs:
                result = _explain_new_series(result, similar_runs[0])
            result = self._add_counts(result, window)
            if point.status in ("wrong", "failed", "hang"):
                verdict = Verdict.WRONG if point.status == "wrong" else Verdict.FAILED
                result = replace(result, verdict=verdict, reason=point.reason or point.status)
            results.append(result)
        results += _find_missing(points, similar_runs)
        results.sort(key=lambda result: rank_verdict(result.verdict))
        return HistoryCheck(
            run=self.run,
            rule=self.rule,
            num_earlier_runs=max((len(result.runs) for result in results), default=1) - 1,
            series=results,
            overall=self._find_overall_change(windows),
        )

    def _read_window(self, point: SeriesPoint) -> _Window:
        """Return the result of a case, and its results in the newest earlier runs of the branch.

        Only runs in the same environment count. ``point`` is the result in the checked run. Runs
        before the last annotation of the case are left out, because the annotation declares a
        change intended.
        """
        label = point.series.case.label
        matching = [note for note in self.annotations if fnmatchcase(label, note.series)]
        newest = max((note.started for note in matching), default="")
        runs = [run for run in self.earlier_runs if run.started >= newest]
        earlier = self.history.read_series(point.series.fingerprint, runs)
        earlier = earlier[-self.rule.window + (not self.is_candidate) :]
        timed = [pair for pair in [*earlier, (self.run, point)] if pair[1].seconds is not None]
        is_long = len(timed) >= self.rule.min_runs + self.is_candidate
        return _Window(
            point=point,
            earlier=earlier,
            timed=timed,
            has_enough_runs=is_long and point.seconds is not None,
        )

    def _find_changes(self, windows: Sequence[_Window]) -> dict[str, LevelChange | None]:
        """Return the significant change of the time of each case with enough runs.

        The key is the fingerprint of the case in its environment, and None stands for an unchanged
        time. The cases are judged together, because they share the noise of runs and the false
        discovery rate.
        """
        judged = [window for window in windows if window.has_enough_runs]
        fingerprints = [window.point.series.fingerprint for window in judged]
        rules = []
        for fingerprint in fingerprints:
            threshold = self.thresholds.get(fingerprint)
            measured = threshold.min_effect if threshold else 0.0
            rules.append(replace(self.rule, min_effect=max(self.rule.min_effect, measured)))
        logs = [np.log(window.seconds) for window in judged]
        changes = judge_series(logs, rules, newest_is_candidate=self.is_candidate)
        return dict(zip(fingerprints, changes, strict=True))

    def _find_overall_change(self, windows: Sequence[_Window]) -> LevelChange | None:
        """Return the significant change over runs of all cases together, None without a change.

        The value of a run is the median over cases of the time in the run over the case's median
        time (``judge_median``). Only cases with enough runs count. None also stands for fewer than
        5 such cases. ``windows`` has the times of each case.
        """
        import pandas as pd

        judged = [window for window in windows if window.has_enough_runs]
        if len(judged) < MIN_POOLED_SERIES:
            return None
        logs = pd.concat(
            [
                pd.Series(np.log(window.seconds), index=[run.id for run, _ in window.timed])
                for window in judged
            ],
            axis="columns",
        )
        logs = logs.reindex([run.id for run in (*self.earlier_runs, self.run)]).dropna(how="all")
        return judge_median(logs.to_numpy().T, self.rule, newest_is_candidate=self.is_candidate)

    def _describe_times(self, window: _Window, change: LevelChange | None) -> SeriesCheck:
        """Return the verdict on the time of a case with its reason.

        Exact counts are not compared yet. ``window`` has the times in earlier runs. ``change`` is
        the significant change of the time, None if there is none.
        """
        timed = window.timed
        series = window.point.series
        result = SeriesCheck(
            series=series,
            verdict=Verdict.NO_CHANGE,
            runs=[run.id for run, _ in timed],
            seconds=window.seconds,
            change=change,
            threshold=self.thresholds.get(series.fingerprint),
        )
        if not window.has_enough_runs:
            number = len(timed) - (self.is_candidate and window.point.seconds is not None)
            reason = f"{number} of {self.rule.min_runs} required runs"
            return replace(result, verdict=Verdict.TOO_FEW_RUNS, reason=reason)
        if change is None:
            return result
        parts = [describe_change(change, len(timed))]
        if change.kind == "step":
            parts += _describe_environments(*timed[change.start - 1 : change.start + 1])
        verdict = _decide(change, is_candidate=self.is_candidate)
        return replace(result, verdict=verdict, reason=", ".join(parts))

    def _add_counts(self, result: SeriesCheck, window: _Window) -> SeriesCheck:
        """Return the verdict on a case after its exact counts were compared with an earlier run.

        Exact counts are calls, bytes, memory and the schedule. The earlier run is the oldest in
        ``window`` that has counts, or for a candidate (not part of the history) the newest. The
        worst of the verdicts on the time and the counts remains. The reason names each changed
        count and, unless the run is a candidate, the first run with the new count.

        Args:
            result: the verdict on the time of the case.
            window: its results in the checked run and in earlier runs.
        """
        new_counts = window.point.counts
        counted = [(run, earlier.counts) for run, earlier in window.earlier if earlier.counts]
        if not counted or not new_counts:
            return result
        comparison = compare_counts(counted[-1 if self.is_candidate else 0][1], new_counts)
        messages = []
        for change in comparison.changes:
            if self.is_candidate:
                messages.append(change.message)
                continue
            first_run = self.run.id
            for run, counts in reversed(counted):
                differing = compare_counts(counts, new_counts).changes
                if change.path in [difference.path for difference in differing]:
                    break
                first_run = run.id
            messages.append(f"{change.message} (since {first_run})")
        result = replace(result, num_counts=comparison.num_compared, count_changes=tuple(messages))
        if not messages:
            return result
        verdicts = [result.verdict, *(change.verdict for change in comparison.changes)]
        return replace(
            result,
            verdict=min(verdicts, key=rank_verdict),
            reason="; ".join(filter(None, [*messages, result.reason])),
        )

    def _find_similar_runs(self, points: Sequence[SeriesPoint]) -> list[list[SeriesIdentity]]:
        """Return the cases of the three newest similar runs, a list for each run, newest first.

        A similar run is an earlier run of the same preset that has a case in common with the
        checked run. If the checked run measured nothing, all earlier runs of its preset are
        similar. Each case comes with its ranks and environment. ``points`` are the results of the
        checked run.
        """
        measured = {_get_benchmark(point.series) for point in points}
        similar = []
        same_preset = [run for run in self.earlier_runs if run.preset == self.run.preset]
        for run in reversed(same_preset[-self.rule.window :]):
            identities = self.history.list_series(run)
            if not measured or measured & set(map(_get_benchmark, identities)):
                similar.append(identities)
            if len(similar) == NUM_SIMILAR_RUNS:
                break
        return similar


def _get_benchmark(series: SeriesIdentity) -> tuple[object, ...]:
    """Return (case id, number of ranks, backend, device) of a case.

    ``series`` is the case with its ranks and environment. The result does not depend on the
    environment.
    """
    world = series.world
    return (series.case.id, world.size, world.backend, world.device)


def _find_missing(
    points: Sequence[SeriesPoint], similar_runs: Sequence[Sequence[SeriesIdentity]]
) -> list[SeriesCheck]:
    """Return the verdict MISSING for each case of similar runs that the checked run did not measure.

    A similar run is an earlier run of the same preset that has a case in common with it.

    Args:
        points: the results of the checked run.
        similar_runs: the cases of each similar run.
    """
    measured = {_get_benchmark(point.series) for point in points}
    missing = {
        _get_benchmark(series): series for identities in similar_runs for series in identities
    }
    number = pluralize(len(similar_runs), "similar run")
    reason = f"measured in the last {number}, but not in this one"
    return [
        SeriesCheck(series=series, verdict=Verdict.MISSING, reason=reason)
        for benchmark, series in missing.items()
        if benchmark not in measured
    ]


def _explain_new_series(result: SeriesCheck, previous: Sequence[SeriesIdentity]) -> SeriesCheck:
    """Return the verdict ENVIRONMENT CHANGED on a case whose environment differs from an earlier run.

    The earlier run is the newest of the same preset that shares a case with the checked run. The
    reason lists the values that differ, such as the version of torch. If the earlier run measured
    the case in the same environment or did not measure it, ``result`` is returned unchanged.

    Args:
        result: the verdict TOO FEW RUNS on the case.
        previous: the cases that the earlier run measured, with their ranks and environments.
    """
    series = result.series
    same_case = [other for other in previous if other.case.id == series.case.id]
    if not same_case or series.fingerprint in [other.fingerprint for other in same_case]:
        return result
    differences = format_differences(same_case[0].environment, series.environment)
    reason = f"{', '.join(differences) or 'other ranks or nodes'} ({result.reason})"
    return replace(result, verdict=Verdict.ENVIRONMENT_CHANGED, reason=reason)


def _decide(change: LevelChange | None, *, is_candidate: bool) -> Verdict:
    """Return the verdict on a case from the significant change of its time, NO CHANGE for None.

    An increase in only the newest run is SLOWER if ``is_candidate`` (the run is not part of the
    history), otherwise UNCONFIRMED. A gradual increase is DRIFT.
    """
    if change is None:
        return Verdict.NO_CHANGE
    if change.change < 0:
        return Verdict.FASTER
    if change.kind == "drift":
        return Verdict.DRIFT
    return Verdict.SLOWER if is_candidate or change.kind == "step" else Verdict.UNCONFIRMED


def describe_change(change: LevelChange, num_runs: int) -> str:
    """Return a phrase with the change of a time in percent, its duration and its 95 % interval.

    ``num_runs`` is the number of runs in which the change was searched for.
    """
    percent = f"{100 * change.change:+.1f} %"
    interval = f"95 % CI {100 * change.low:+.1f} to {100 * change.high:+.1f} %"
    duration = {
        "step": f"for {pluralize(num_runs - change.start, 'run')}",
        "drift": f"gradually over {num_runs} runs",
        "rise": "in this run",
    }
    return f"{percent} {duration[change.kind]} ({interval})"


def _describe_environments(
    before: tuple[StoredRun, SeriesPoint], after: tuple[StoredRun, SeriesPoint]
) -> tuple[str, ...]:
    """Return the values of the environment that differ before and after a step of a case's time.

    They are texts of the form ``path: old -> new``, where the path is a key such as
    ``versions.torch`` or ``commit``. Each may explain the step. ``before`` and ``after`` are the
    last run before the step and the first run after it, each with the result of the case.
    """
    values = [
        {**point.explanatory_values, "commit": run.commit or UNKNOWN}
        for run, point in (before, after)
    ]
    return format_differences(*values)


def format_differences(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that differ between two environments, as ``path: old -> new``.

    Both arguments are keyed by path, such as ``versions.torch``.
    """
    pairs = {path: (base.get(path, UNKNOWN), new.get(path, UNKNOWN)) for path in {**base, **new}}
    return tuple(
        f"{path}: {old} -> {current}"
        for path, (old, current) in sorted(pairs.items())
        if old != current
    )
