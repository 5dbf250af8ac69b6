"""The check of a run against the earlier runs of a branch: which series became slower, since when.

A series is a case on a number of ranks in one environment. A level of a series is successive runs
whose times differ only by noise. A run of the history is checked for steps to a new level. A
candidate, such as the run of a pull request, is not part of the history. It is compared with the
newest level of the branch, so one run decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from parbench.bench.exit_codes import ExitCode
from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.text import pluralize
from parbench.reports.compare.counts import compare_counts
from parbench.reports.compare.environment import SeriesIdentity, SeriesPoint, collect_points
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.compare.verdicts import (
    Verdict,
    combine_verdicts,
    count_verdicts,
    rank_verdict,
)
from parbench.reports.history.changes import (
    MIN_POOLED_SERIES,
    MIN_RUNS,
    Array,
    LevelChange,
    estimate_correlation,
    judge_histories,
)
from parbench.reports.history.database import Annotation, History, HistoryRun, open_history
from parbench.reports.history.runs import make_history_run
from parbench.reports.run_data import RunData

MAX_RUNS = 30
"""The number of newest runs of a case that are used."""


@dataclass(frozen=True, kw_only=True)
class SeriesWindow:
    """The results of one case in the newest earlier runs of a branch and in the checked run."""

    results: Sequence[tuple[HistoryRun, SeriesPoint]]
    """(run, result) for each run since the last annotation of the case, oldest first.

    An annotation declares that a change is intended. The checked run is the last one.
    """
    min_runs: int
    """The number of earlier runs with a time that the check of the time requires."""

    @property
    def run(self) -> HistoryRun:
        """The checked run."""
        return self.results[-1][0]

    @property
    def point(self) -> SeriesPoint:
        """The result of the case in the checked run."""
        return self.results[-1][1]

    @property
    def seconds(self) -> dict[str, float]:
        """The time of the case in each run that measured it, in seconds by run id, oldest first."""
        return {run.id: point.seconds for run, point in self.results if point.seconds is not None}

    @property
    def has_enough_runs(self) -> bool:
        """True if the checked run has a time and there are enough earlier times to judge it."""
        return self.run.id in self.seconds and len(self.seconds) > self.min_runs


@dataclass(frozen=True, kw_only=True)
class SeriesCheck:
    """The verdict on one case in one environment, with the measurements that led to it."""

    series: SeriesIdentity
    """The case with its ranks and its environment."""
    verdict: Verdict
    """The worst of the verdicts on the time, the exact counts and a failure of the case."""
    reason: str = ""
    """The observation that led to the verdict as text, empty for NO CHANGE."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of the case in seconds in each run that was used, keyed by run id, oldest first.

    The checked run is the last one, if it has a time.
    """
    change: LevelChange | None = None
    """The significant change of the time, None if there is none."""
    num_counts: int = 0
    """The number of exact counts (calls, bytes, memory, schedule) that were compared."""
    count_changes: Sequence[str] = ()
    """A sentence for each exact count that changed."""

    @property
    def first_run(self) -> str | None:
        """The id of the run with which the significant change of the time began.

        None without a significant change.
        """
        return list(self.seconds)[self.change.start] if self.change else None


@dataclass(frozen=True, kw_only=True)
class HistoryCheck:
    """The verdicts of a history check on all series of a run.

    A series is a case on a number of ranks in one environment.
    """

    run: HistoryRun
    """The checked run."""
    min_effect: float
    """The smallest change of a time that counts, as a fraction: 0.03 is 3 %."""
    series: Sequence[SeriesCheck]
    """The verdicts on series, the worst first, also on series that the run lacks."""
    overall: LevelChange | None
    """The significant change over runs of the median relative time of all series, None without one.

    The relative time of a series in a run is the time divided by the median time of the series over
    runs (``judge_median``). The median over series may change significantly although no
    single series does.
    """

    @property
    def num_earlier_runs(self) -> int:
        """The number of earlier runs with a time of one series, the maximum over series."""
        return max(
            (len(result.seconds.keys() - {self.run.id}) for result in self.series), default=0
        )

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """The number of series with each verdict, keyed by verdict, the worst first."""
        return count_verdicts(result.verdict for result in self.series)

    @property
    def overall_verdict(self) -> Verdict:
        """The verdict on the change of the median relative time of all series (``overall``)."""
        return _decide(self.overall, self.run)

    def compute_exit_code(self, *, fail_on_undecided: bool = False) -> ExitCode:
        """Return the exit code of ``parbench history check`` for the verdicts of this check.

        It is 1 if a series or the run is slower, wrong or has changed counts, and 4 if a series is
        missing or failed, otherwise 0. A verdict such as UNDECIDED, which decides nothing, gives
        3 if ``fail_on_undecided`` is True.
        """
        verdicts = [*self.verdicts, self.overall_verdict]
        return combine_verdicts(verdicts, fail_on_undecided=fail_on_undecided)


def check_candidate(
    file: Path,
    data: RunData,
    branch: str,
    min_effect: float,
    thresholds: Mapping[str, Threshold] | None = None,
) -> HistoryCheck:
    """Compare a run that is not part of the history with the runs of a branch, without adding it.

    ``file`` is the file of the history. A missing file counts as an empty history. The other
    arguments are those of ``check_run``.
    """
    run = make_history_run(data.run, branch, is_candidate=True)
    points = collect_points(data.run)
    is_new = not file.exists()
    with open_history(Path(":memory:") if is_new else file, create=is_new) as history:
        return check_run(history, run, points, min_effect, thresholds)


def check_run(
    history: History,
    run: HistoryRun,
    points: Sequence[SeriesPoint],
    min_effect: float,
    thresholds: Mapping[str, Threshold] | None = None,
) -> HistoryCheck:
    """Check a run against the newest earlier runs of its branch and preset, case by case.

    Args:
        history: the history with the earlier runs.
        run: the run to check.
        points: the results of the run, one for each case.
        min_effect: the smallest change of a time that counts, as a fraction.
        thresholds: the thresholds that ``parbench aa`` measured, keyed by the fingerprint (hash) of
            a case in its environment. They only raise ``min_effect``. None if none were measured.
    """
    # A run of the history is one of the runs that are counted.
    num_own = 0 if run.is_candidate else 1
    results_by_run = _read_earlier_results(history, run, MAX_RUNS - num_own)
    notes = [
        note
        for note in history.list_annotations()
        if note.branch == run.branch and note.started <= run.started
    ]
    windows = [
        SeriesWindow(
            results=[*_select_results(results_by_run, point, notes), (run, point)],
            min_runs=MIN_RUNS - num_own,
        )
        for point in points
    ]
    previous = list(results_by_run[-1][1].values()) if results_by_run else []
    thresholds = thresholds or {}
    changes = _find_changes(windows, min_effect, thresholds)
    results = []
    for window in windows:
        series = window.point.series
        result = SeriesCheck(
            series=series,
            verdict=Verdict.NO_CHANGE,
            seconds=window.seconds,
            change=changes.get(series.fingerprint),
        )
        if window.has_enough_runs:
            result = _judge_time(result, window)
        else:
            result = _explain_new_series(result, window, previous)
        results.append(_judge_counts(result, window))
    results += _find_missing(points, previous)
    return HistoryCheck(
        run=run,
        min_effect=min_effect,
        series=sorted(results, key=lambda result: rank_verdict(result.verdict)),
        overall=_find_overall_change(windows, min_effect),
    )


def _read_earlier_results(
    history: History, run: HistoryRun, max_runs: int
) -> list[tuple[HistoryRun, dict[str, SeriesPoint]]]:
    """Return the newest earlier runs of the branch and the preset of a run, oldest first.

    Each run has its results, keyed by the fingerprint, a hash of a case with its ranks and
    environment. At most ``max_runs`` runs are returned.
    """
    earlier_runs = [
        earlier_run
        for earlier_run in history.list_runs(run.branch)
        if earlier_run.preset == run.preset
        and earlier_run.id != run.id
        and earlier_run.started <= run.started
    ]
    return [
        (earlier_run, history.read_points(earlier_run)) for earlier_run in earlier_runs[-max_runs:]
    ]


def _select_results(
    results_by_run: Sequence[tuple[HistoryRun, Mapping[str, SeriesPoint]]],
    point: SeriesPoint,
    notes: Sequence[Annotation],
) -> list[tuple[HistoryRun, SeriesPoint]]:
    """Return (run, result) of one case in the environment of the checked run, oldest first.

    Runs before the last annotation of the case are left out, because the annotation declares a
    change intended.

    Args:
        results_by_run: the earlier runs, oldest first. Each run has its results, keyed by the
            fingerprint (hash) of a case in its environment.
        point: the result of the case in the checked run.
        notes: the annotations of the branch, oldest first.
    """
    fingerprint, label = point.series.fingerprint, point.series.case.label
    starts = [note.started for note in notes if fnmatchcase(label, note.series)]
    first_start = starts[-1] if starts else ""
    return [
        (run, points[fingerprint])
        for run, points in results_by_run
        if run.started >= first_start and fingerprint in points
    ]


def _find_changes(
    windows: Sequence[SeriesWindow], min_effect: float, thresholds: Mapping[str, Threshold]
) -> dict[str, LevelChange | None]:
    """Return the significant change of the time of each case with enough runs.

    The key is the fingerprint (hash) of the case in its environment. The value is None if the time
    did not change significantly. The cases are judged together, because they share the noise of
    runs and the false discovery rate. ``thresholds`` has the measured thresholds of cases, keyed by
    fingerprint. They only raise ``min_effect``.
    """
    logs = {}
    min_effects = []
    for window in windows:
        if window.has_enough_runs:
            fingerprint = window.point.series.fingerprint
            logs[fingerprint] = np.log(list(window.seconds.values()))
            threshold = thresholds.get(fingerprint)
            min_effects.append(max(min_effect, threshold.min_effect if threshold else 0.0))
    if not logs:
        return {}
    is_candidate = any(window.run.is_candidate for window in windows)
    changes = judge_histories(list(logs.values()), min_effects, newest_is_candidate=is_candidate)
    return dict(zip(logs, changes, strict=True))


def _find_overall_change(windows: Sequence[SeriesWindow], min_effect: float) -> LevelChange | None:
    """Return the significant change over runs of the median relative time, None without a change.

    A relative time is the time of a case in a run divided by the case's median over runs. The
    median is over the cases (``judge_median``). Only cases with enough runs count. None also stands
    for fewer than 5 such cases.
    """
    import pandas as pd

    judged = [window for window in windows if window.has_enough_runs]
    if len(judged) < MIN_POOLED_SERIES:
        return None
    times = pd.DataFrame([window.seconds for window in judged])
    starts = {run.id: run.started for window in judged for run, _ in window.results}
    in_order = sorted(times.columns, key=lambda run_id: starts[run_id])
    logs = np.log(times[in_order].to_numpy())
    return judge_median(logs, min_effect, newest_is_candidate=judged[0].run.is_candidate)


def judge_median(
    logs: Array, min_effect: float, *, newest_is_candidate: bool = False
) -> LevelChange | None:
    """Return the significant change over runs of the median relative time, None without a change.

    The time of a case in a run is divided by the case's median time over runs. The value of a run
    is the median of these quotients over its cases. These values are tested for a change like the
    times of one case. Runs that measured at most half of the cases are left out.

    Args:
        logs: the logarithms of the times, of shape (cases, runs), with NaN where a run did not
            measure a case.
        min_effect: the smallest change that counts, as a fraction.
        newest_is_candidate: True if the newest run is not part of the history. Then only a rise in
            this run is returned, because steps and drifts are changes of the history.
    """
    rho = estimate_correlation([row[np.isfinite(row)] for row in logs])
    logs = logs[:, np.isfinite(logs).mean(axis=0) > 0.5]
    if logs.shape[1] < MIN_RUNS:
        return None
    median_logs = np.nanmedian(logs - np.nanmedian(logs, axis=1, keepdims=True), axis=0)
    [change] = judge_histories(
        [median_logs], [min_effect], newest_is_candidate=newest_is_candidate, rho=rho
    )
    return change


def _judge_time(result: SeriesCheck, window: SeriesWindow) -> SeriesCheck:
    """Return the verdict on the time of a case that has enough runs, with its reason.

    The reason for a step also lists the values that changed with it, such as the commit or the
    version of Python. Each of these values may explain the step.
    """
    change = result.change
    if change is None:
        return result
    parts = [describe_change(change, len(window.seconds))]
    if change.kind == "step":
        timed = [pair for pair in window.results if pair[0].id in window.seconds]
        old_values, new_values = [
            {**point.explanatory_values, "commit": run.commit or UNKNOWN}
            for run, point in timed[change.start - 1 : change.start + 1]
        ]
        parts += _format_differences(old_values, new_values)
    return replace(result, verdict=_decide(change, window.run), reason=", ".join(parts))


def _explain_new_series(
    result: SeriesCheck, window: SeriesWindow, previous: Sequence[SeriesPoint]
) -> SeriesCheck:
    """Return the verdict on a case without enough runs in its environment.

    The verdict is ENVIRONMENT CHANGED with the values that differ, such as the version of torch, if
    the previous run of the preset measured the case in another environment. Otherwise it is NOT
    ENOUGH DATA. ``previous`` has the results of the previous run.
    """
    series = result.series
    num_earlier = len(window.seconds.keys() - {window.run.id})
    reason = f"{num_earlier} of {window.min_runs} required earlier runs"
    for point in previous:
        old_series = point.series
        if old_series.case.id == series.case.id and old_series.fingerprint != series.fingerprint:
            differences = _format_differences(old_series.environment, series.environment)
            reason = f"{', '.join(differences) or 'other ranks or nodes'} ({reason})"
            return replace(result, verdict=Verdict.ENVIRONMENT_CHANGED, reason=reason)
    return replace(result, verdict=Verdict.NOT_ENOUGH_DATA, reason=reason)


def _judge_counts(result: SeriesCheck, window: SeriesWindow) -> SeriesCheck:
    """Return the verdict on a case after its status and its exact counts were checked.

    A case that failed or has a wrong result is FAILED or WRONG. Otherwise the verdict is the worst
    of the verdict on the time, which ``result`` has, and of the verdicts on changed counts. Exact
    counts are calls, bytes, memory and the schedule. They are compared with the oldest earlier run
    that has counts, or for a candidate (not part of the history) with the newest. The reason names
    each changed count and, unless it is the checked run, the first run with the new count.
    """
    run, point = window.run, window.point
    if point.status in ("wrong", "failed", "hang"):
        verdict = Verdict.WRONG if point.status == "wrong" else Verdict.FAILED
        return replace(result, verdict=verdict, reason=point.reason or point.status)
    counted = [
        (earlier_run, earlier_point.counts)
        for earlier_run, earlier_point in window.results[:-1]
        if earlier_point.counts
    ]
    if not counted or not point.counts:
        return result
    comparison = compare_counts(counted[-1 if run.is_candidate else 0][1], point.counts)
    messages = []
    for change in comparison.changes:
        first_run = run.id
        for earlier_run, counts in reversed(counted):
            differing = compare_counts(counts, point.counts).changes
            if change.path in [difference.path for difference in differing]:
                break
            first_run = earlier_run.id
        suffix = "" if first_run == run.id else f" (since {first_run})"
        messages.append(change.message + suffix)
    verdicts = [result.verdict, *(change.verdict for change in comparison.changes)]
    return replace(
        result,
        verdict=min(verdicts, key=rank_verdict),
        reason="; ".join(filter(None, [*messages, result.reason])),
        num_counts=comparison.num_compared,
        count_changes=messages,
    )


def _find_missing(
    points: Sequence[SeriesPoint], previous: Sequence[SeriesPoint]
) -> list[SeriesCheck]:
    """Return the verdict MISSING for each case of ``previous`` that the checked run lacks.

    ``points`` are the results of the checked run, and ``previous`` those of the previous run of the
    preset.
    """
    measured = {point.series.case.id for point in points}
    return [
        SeriesCheck(
            series=point.series,
            verdict=Verdict.MISSING,
            reason="measured in the previous run, but not in this one",
        )
        for point in previous
        if point.series.case.id not in measured
    ]


def _decide(change: LevelChange | None, run: HistoryRun) -> Verdict:
    """Return the verdict on a case from the significant change of its time, NO CHANGE for None.

    A lasting increase is SLOWER, a gradual one DRIFT, and a decrease FASTER. An increase in only the
    checked run is SLOWER if ``run`` is not part of the history, otherwise UNDECIDED.
    """
    if change is None:
        return Verdict.NO_CHANGE
    if change.change < 0:
        return Verdict.FASTER
    if change.kind == "drift":
        return Verdict.DRIFT
    return Verdict.SLOWER if run.is_candidate or change.kind == "step" else Verdict.UNDECIDED


def describe_change(change: LevelChange, num_runs: int) -> str:
    """Return a phrase with a change of a time in percent, its 95 % interval and the affected runs.

    For example ``+5.0 % for 4 runs (95 % CI +3.9 to +6.1 %)``. ``num_runs`` is the number of all
    runs that were examined. A step affects the runs from ``change.start`` to the last of them, a
    drift affects all of them, and a rise only the last one (``in this run``).
    """
    percent = f"{100 * change.change:+.1f} %"
    interval = f"95 % CI {100 * change.low:+.1f} to {100 * change.high:+.1f} %"
    duration = {
        "step": f"for {pluralize(num_runs - change.start, 'run')}",
        "drift": f"gradually over {num_runs} runs",
        "rise": "in this run",
    }
    return f"{percent} {duration[change.kind]} ({interval})"


def _format_differences(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the values that differ between two environments, as ``name: old -> new``.

    ``base`` is the old and ``new`` the new environment. Both have values as text, keyed by the
    dotted name of the value, such as ``versions.torch``.
    """
    return [
        f"{path}: {base.get(path, UNKNOWN)} -> {new.get(path, UNKNOWN)}"
        for path in sorted({**base, **new})
        if base.get(path, UNKNOWN) != new.get(path, UNKNOWN)
    ]
