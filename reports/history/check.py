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

NUM_SIMILAR_RUNS = 3  # A case is missing if one of so many similar earlier runs measured it.

SeriesRuns = list[tuple[StoredRun, SeriesPoint]]
"""Points of a series with their runs, oldest first."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The point of the checked run, and the newest earlier points of its series."""

    point: SeriesPoint
    earlier: SeriesRuns
    timed: SeriesRuns
    """The points of ``earlier`` and then ``point``, without those that have no time."""
    has_enough_runs: bool

    @property
    def seconds(self) -> list[float]:
        """The times in ``timed``, in seconds."""
        return [point.seconds for _, point in self.timed if point.seconds is not None]


@dataclass(frozen=True, kw_only=True)
class SeriesCheck:
    """The verdict on a series, with the runs, the change and the counts that led to it."""

    series: SeriesIdentity
    verdict: Verdict
    reason: str = ""
    runs: Sequence[str] = ()
    """The ids of the runs in the window that have a time."""
    seconds: Sequence[float] = ()
    """The times of ``runs``."""
    change: LevelChange | None = None
    threshold: Threshold | None = None
    """The measured threshold of the series, None if it was not measured."""
    num_counts: int = 0
    """The number of exact counts that were compared."""
    count_changes: Sequence[str] = ()
    """A sentence for each count that changed."""

    @property
    def first_run(self) -> str | None:
        """The id of the run that began the newest level."""
        return self.runs[self.change.start] if self.change else None


@dataclass(frozen=True, kw_only=True)
class HistoryCheck:
    """The result of a run, the worst series first."""

    run: StoredRun
    rule: LevelRule
    num_earlier_runs: int
    """The number of earlier runs of the series that has most."""
    series: Sequence[SeriesCheck]
    overall: LevelChange | None
    """The significant change of the median series, which may show what no single series shows."""

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of series with each verdict, the worst first."""
        return count_verdicts(result.verdict for result in self.series)

    @property
    def overall_verdict(self) -> Verdict:
        """The verdict on the median series."""
        return _decide(self.overall, is_candidate=self.run.is_candidate)

    def compute_exit_code(self, *, fail_on_unknown: bool = False) -> ExitCode:
        """Return the exit code of all verdicts.

        Undecided series count only if ``fail_on_unknown`` is True.
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
    """Check a run of the history against the earlier runs of its branch.

    ``thresholds`` were measured by ``parbench aa`` and are keyed by fingerprint. They only raise
    the threshold of the rule.
    """
    return _Checker(history, run, rule, thresholds or {}).check(history.read_points(run))


def check_candidate(
    file: Path,
    data: RunData,
    branch: str,
    rule: LevelRule,
    thresholds: Mapping[str, Threshold] | None = None,
) -> HistoryCheck:
    """Compare a run with the runs of a branch. The run is not added."""
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
    """Checks one run against the earlier runs of its branch."""

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
        self.is_candidate = run.is_candidate
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

    def check(self, points: Sequence[SeriesPoint]) -> HistoryCheck:
        """Return the verdicts of the checked run on its points, and on series that it lacks."""
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
        """Return the newest points of the series of ``point`` since its last annotation."""
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
        """Return the significant change of each series with enough runs, by fingerprint.

        The series are judged together, because they share the noise of runs.
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
        """Return the significant change of the median series, None if there are few series."""
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
        """Return the verdict on the times of a series, with its reason."""
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
        """Return ``result`` with the counts that changed, and the worst of the verdicts.

        Counts are compared with the first run of the window, or for a candidate with the last one.
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
        """Return the series of the newest earlier runs that share a case with this run.

        If this run has no case, all runs of its preset are similar.
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
    """Return the benchmark of a series: the case, the ranks, the backend and the device."""
    world = series.world
    return (series.case.id, world.size, world.backend, world.device)


def _find_missing(
    points: Sequence[SeriesPoint], similar_runs: Sequence[Sequence[SeriesIdentity]]
) -> list[SeriesCheck]:
    """Return a result with verdict MISSING for each series that only the similar runs measured."""
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
    """Return ``result`` with the differences from the previous similar run, as the reason.

    It stays as it is unless that run measured the case only in another environment.
    """
    series = result.series
    same_case = [other for other in previous if other.case.id == series.case.id]
    if not same_case or series.fingerprint in [other.fingerprint for other in same_case]:
        return result
    differences = format_differences(same_case[0].environment, series.environment)
    reason = f"{', '.join(differences) or 'other ranks or nodes'} ({result.reason})"
    return replace(result, verdict=Verdict.ENVIRONMENT_CHANGED, reason=reason)


def _decide(change: LevelChange | None, *, is_candidate: bool) -> Verdict:
    """Return the verdict on the significant change of a series."""
    if change is None:
        return Verdict.NO_CHANGE
    if change.change < 0:
        return Verdict.FASTER
    if change.kind == "drift":
        return Verdict.DRIFT
    return Verdict.SLOWER if is_candidate or change.kind == "step" else Verdict.UNCONFIRMED


def describe_change(change: LevelChange, num_runs: int) -> str:
    """Return a phrase with the change in percent, its duration in runs and its interval."""
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
    """Return the changes between the runs before and after a level step, as ``path: old -> new``.

    The changes of the environment and of the commit may explain the step.
    """
    values = [
        {**point.explanatory_values, "commit": run.commit or UNKNOWN}
        for run, point in (before, after)
    ]
    return format_differences(*values)


def format_differences(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that differ, as ``path: old -> new``."""
    pairs = {path: (base.get(path, UNKNOWN), new.get(path, UNKNOWN)) for path in {**base, **new}}
    return tuple(
        f"{path}: {old} -> {current}"
        for path, (old, current) in sorted(pairs.items())
        if old != current
    )
