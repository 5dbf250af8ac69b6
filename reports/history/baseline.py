"""Judges a new run by the history, for the verdicts at the end of the report on the run."""

import os
from pathlib import Path

from parbench.bench.text import UserError
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.options import HISTORY_FILE
from parbench.reports.run_data import RunData


def judge_by_history(data: RunData) -> ReportVerdict:
    """Return the verdict on a new run, compared with earlier runs of its preset in the history.

    The verdict is SLOWER, COUNT CHANGED, NO CHANGE, or NO BASELINE without enough earlier runs. Its
    severity is ``good`` or ``doubtful``, never ``bad``, so it does not change the exit code. The
    run is not added to the history. The history is the file ``$PARBENCH_HISTORY``, or the default
    of ``parbench history add``.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    if not file.exists():
        return _report_no_baseline(f"the history {file} does not exist", data)
    try:
        return _judge(data, file)
    except UserError as error:
        return ReportVerdict(word="NO BASELINE", level="doubtful", message=str(error))


def _judge(data: RunData, file: Path) -> ReportVerdict:
    """Return the verdict on a run, compared with the branch that last ran the same preset.

    ``file`` is the file of the history.
    """
    # These modules load numpy and SQLite, which runs without a history do not need.
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.compare.verdicts import Verdict
    from parbench.reports.history.check import check_candidate
    from parbench.reports.history.check_report import describe_result, name_failures
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import LevelRule

    preset = data.plan.preset
    with open_history(file) as history:
        runs = history.list_runs()
    branches = [run.branch for run in runs if run.preset == preset and run.id != data.run.info.id]
    if not branches:
        return _report_no_baseline(f"the history has no run of preset {preset}", data)
    branch = branches[-1]
    min_effect, thresholds = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
    check = check_candidate(file, data, branch, LevelRule(min_effect=min_effect), thresholds)
    message = ": ".join(filter(None, (describe_result(check), name_failures(check))))
    hint = f"Try: parbench history check {data.run.path} --branch {branch}"
    for verdict in (Verdict.COUNT_CHANGED, Verdict.SLOWER):
        if verdict in check.verdicts:
            return ReportVerdict(word=verdict, level="doubtful", message=message, hint=hint)
    if Verdict.NO_CHANGE in check.verdicts:
        return ReportVerdict(word=Verdict.NO_CHANGE, level="good", message=message)
    reasons = [f"{result.verdict}: {result.reason}" for result in check.series]
    return _report_no_baseline(reasons[0] if reasons else "the run has no result", data)


def _report_no_baseline(problem: str, data: RunData) -> ReportVerdict:
    """Return the verdict NO BASELINE on a run, with the command that adds the run to the history.

    ``problem`` is the reason why the run cannot be compared.
    """
    hint = f"Try: parbench history add {data.run.path}"
    return ReportVerdict(word="NO BASELINE", level="doubtful", message=problem, hint=hint)
