"""Judges a new run by the history, for the verdicts at the end of the report on the run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from parbench.bench.text import UserError
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.options import HISTORY_FILE
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    from parbench.reports.history.check import HistoryCheck


def judge_by_history(data: RunData) -> ReportVerdict:
    """Return the verdict on a new run, compared with earlier runs of its preset in the history.

    The verdict is COUNT CHANGED, SLOWER, NO CHANGE, or NO BASELINE without enough earlier runs. Its
    severity is ``good`` or ``doubtful``, never ``bad``, so it does not change the exit code. The
    run is not added to the history. The history is the file ``$PARBENCH_HISTORY``, or the default
    of ``parbench history add``.
    """
    hint = f"Try: parbench history add {data.run.path}"
    try:
        check = _check(data)
    except UserError as error:
        return ReportVerdict("NO BASELINE", "doubtful", str(error), hint)
    from parbench.reports.compare.verdicts import Verdict
    from parbench.reports.history.check_report import describe_result, name_failures

    failures = name_failures(check)
    result = ": ".join(filter(None, [describe_result(check), failures]))
    hint = f"Try: parbench history check {data.run.path} --branch {check.run.branch}"
    for verdict in (Verdict.COUNT_CHANGED, Verdict.SLOWER):
        if verdict in check.verdicts:
            return ReportVerdict(verdict, "doubtful", result, hint)
    if Verdict.NO_CHANGE in check.verdicts:
        return ReportVerdict(Verdict.NO_CHANGE, "good", result)
    reason = check.series[0].reason if check.series else "the run has no result"
    return ReportVerdict("NO BASELINE", "doubtful", reason, hint)


def _check(data: RunData) -> "HistoryCheck":
    """Compare a run with the branch that last ran the same preset.

    Raises ``UserError`` if there is no such branch, or if the history cannot be read.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    if not file.exists():
        raise UserError(f"the history {file} does not exist")
    # These modules load numpy and SQLite, which runs without a history do not need.
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history.check import check_candidate
    from parbench.reports.history.database import open_history
    from parbench.reports.history.levels import LevelRule

    preset = data.plan.preset
    with open_history(file) as history:
        runs = history.list_runs()
    branches = [run.branch for run in runs if run.preset == preset and run.id != data.run.info.id]
    if not branches:
        raise UserError(f"the history has no run of preset {preset}")
    min_effect, thresholds = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
    return check_candidate(file, data, branches[-1], LevelRule(min_effect=min_effect), thresholds)
