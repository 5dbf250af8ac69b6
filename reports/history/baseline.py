"""The verdict of the history on a new run, for the last page of the run."""

import os
from pathlib import Path

from parbench.bench.text import UserError, pluralize
from parbench.reports.options import HISTORY_FILE
from parbench.reports.run_data import RunData
from parbench.reports.verdicts import Verdict


def judge_by_history(data: RunData) -> Verdict:
    """Compare a run with earlier runs of its preset. The run is not added, and never fails.

    The history is ``$PARBENCH_HISTORY``, or the default of ``parbench history add``.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    if not file.exists():
        return _report_no_baseline("there is no history to compare with", data.run.path)
    try:
        return _judge(data, file)
    except UserError as error:
        return Verdict(word="NO BASELINE", level="doubtful", message=str(error))


def _judge(data: RunData, file: Path) -> Verdict:
    # These modules load numpy and SQLite, which runs without a history do not need.
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history.check import check_candidate
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import LevelRule
    from parbench.reports.history.verdicts import FAILURES, NOT_COMPARED, HistoryVerdict

    info = data.run.info
    with open_history(file) as history:
        runs = history.list_runs()
    same_preset = [run for run in runs if run.preset == info.plan.preset and run.id != info.id]
    if not same_preset:
        problem = f"the history has no run of preset {info.plan.preset}"
        return _report_no_baseline(problem, data.run.path)
    branch = same_preset[-1].branch
    threshold, thresholds = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
    rule = LevelRule(threshold=threshold)
    check = check_candidate(file, data, branch, rule, thresholds)
    hint = f"Try: parbench history check {data.run.path} --branch {branch}"
    messages = [change.message for _, change, _ in check.count_changes if change.fails]
    if messages:
        more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
        return Verdict(
            word="COUNT CHANGED", level="doubtful", message=f"{messages[0]}{more}", hint=hint
        )
    untimed = {*FAILURES, *NOT_COMPARED} - {HistoryVerdict.SLOWER}
    compared = [series for series in check.series if series.verdict not in untimed]
    if not compared:
        reason = f"no series has {rule.min_runs} earlier runs on {branch}"
        reasons = [f"{series.verdict}: {series.reason}" for series in check.series]
        return _report_no_baseline((reasons or [reason])[0], data.run.path)
    runs_text = pluralize(check.num_earlier_runs, "earlier run")
    slower = [series for series in compared if series.verdict == HistoryVerdict.SLOWER]
    if slower:
        text = f"{len(slower)} of {len(compared)} series are slower than in {runs_text}"
        return Verdict(word="SLOWER", level="doubtful", message=text, hint=hint)
    text = f"{len(compared)} series are not slower than in {runs_text} on {branch}"
    return Verdict(word="NO CHANGE", level="good", message=text)


def _report_no_baseline(problem: str, path: Path) -> Verdict:
    hint = f"Try: parbench history add {path}"
    return Verdict(word="NO BASELINE", level="doubtful", message=problem, hint=hint)
