"""The verdict of the history on a new run, for the last page of the run."""

import os
from pathlib import Path

from parbench.bench.text import UserError, pluralize
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.options import HISTORY_FILE
from parbench.reports.run_data import RunData


def judge_by_history(data: RunData) -> ReportVerdict:
    """Compare a run with earlier runs of its preset. The run is not added, and never fails.

    The history is ``$PARBENCH_HISTORY``, or the default of ``parbench history add``.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    if not file.exists():
        return _report_no_baseline(f"the history {file} does not exist", data)
    try:
        return _judge(data, file)
    except UserError as error:
        return ReportVerdict(word="NO BASELINE", level="doubtful", message=str(error))


def _judge(data: RunData, file: Path) -> ReportVerdict:
    # These modules load numpy and SQLite, which runs without a history do not need.
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history.check import check_candidate
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import LevelRule
    from parbench.reports.history.verdicts import HistoryVerdict

    preset = data.plan.preset
    with open_history(file) as history:
        runs = history.list_runs()
    branches = [run.branch for run in runs if run.preset == preset and run.id != data.run.info.id]
    if not branches:
        return _report_no_baseline(f"the history has no run of preset {preset}", data)
    threshold, thresholds = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
    rule = LevelRule(threshold=threshold)
    check = check_candidate(file, data, branches[-1], rule, thresholds)
    hint = f"Try: parbench history check {data.run.path} --branch {branches[-1]}"
    for result in check.series:
        if result.count_changes:
            message = result.count_changes[0]
            return ReportVerdict(word="COUNT CHANGED", level="doubtful", message=message, hint=hint)
    num_slower = check.verdicts.get(HistoryVerdict.SLOWER, 0)
    num_compared = num_slower + check.verdicts.get(HistoryVerdict.NO_CHANGE, 0)
    earlier = pluralize(check.num_earlier_runs, "earlier run")
    if num_slower:
        message = f"{num_slower} of {num_compared} series are slower than in {earlier}"
        return ReportVerdict(word="SLOWER", level="doubtful", message=message, hint=hint)
    if num_compared:
        message = f"{num_compared} series are not slower than in {earlier} on {branches[-1]}"
        return ReportVerdict(word="NO CHANGE", level="good", message=message)
    reasons = [f"{result.verdict}: {result.reason}" for result in check.series]
    return _report_no_baseline(reasons[0] if reasons else "the run has no result", data)


def _report_no_baseline(problem: str, data: RunData) -> ReportVerdict:
    hint = f"Try: parbench history add {data.run.path}"
    return ReportVerdict(word="NO BASELINE", level="doubtful", message=problem, hint=hint)
