"""Judges a new run by the history, for the verdicts at the end of the report on the run."""

import os
from pathlib import Path
from shlex import quote

from parbench.bench.text import UserError
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.compare.thresholds import find_thresholds
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.history.check import check_candidate
from parbench.reports.history.check_report import describe_result, name_failures
from parbench.reports.history.database import open_history
from parbench.reports.options import HISTORY_FILE
from parbench.reports.run_data import RunData


def judge_by_history(data: RunData) -> ReportVerdict:
    """Return the verdict on a new run, compared with the branch that last ran the same preset.

    The verdict is COUNT CHANGED, SLOWER, NO CHANGE, or NO BASELINE without enough earlier runs. Its
    severity is ``good`` or ``doubtful``, never ``bad``, so it does not change the exit code. The
    run is not added to the history. The history is the file ``$PARBENCH_HISTORY``, or the default
    of ``parbench history add``.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    preset, run_id = data.plan.preset, data.run.info.id
    path = quote(str(data.run.path))
    hint = f"Add this run: parbench history add {path}" if data.measured else ""
    try:
        if not file.exists():
            raise UserError(f"no earlier runs are stored in {file}")
        with open_history(file) as history:
            runs = history.list_runs()
        branches = [run.branch for run in runs if run.preset == preset and run.id != run_id]
        if not branches:
            raise UserError(f"the history has no run of preset {preset}")
        min_effect, thresholds = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
        check = check_candidate(file, data, branches[-1], min_effect, thresholds)
    except UserError as error:
        return ReportVerdict("NO BASELINE", "doubtful", str(error), hint)
    result = ": ".join(filter(None, [describe_result(check), name_failures(check)]))
    for verdict in (Verdict.COUNT_CHANGED, Verdict.SLOWER):
        if verdict in check.verdicts:
            hint = f"See: parbench history check {path} --branch {quote(branches[-1])}"
            return ReportVerdict(verdict, "doubtful", result, hint)
    if Verdict.NO_CHANGE in check.verdicts:
        return ReportVerdict(Verdict.NO_CHANGE, "good", result)
    reasons = [entry.reason for entry in check.series if entry.verdict is not Verdict.MISSING]
    reason = reasons[0] if reasons else "the run has no result"
    return ReportVerdict("NO BASELINE", "doubtful", reason, hint)
