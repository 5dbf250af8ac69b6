"""What a history says of a run that it has not kept yet: the verdict on its last page."""

import os
from pathlib import Path

from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError, pluralize
from parbench.reports.options import HISTORY_FILE
from parbench.reports.verdicts import Verdict


def baseline(path: Path) -> Verdict:
    """Return whether a run is as those before it of its preset; nothing is kept, and nothing here fails a run.

    The history is ``$PARBENCH_HISTORY``, or the one that ``parbench history add`` makes.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or HISTORY_FILE)
    more = f"Try: parbench history add {path}"
    if not file.exists():
        return _none("no history says what is usual here", more)
    # numpy and SQLite, which only those with a history wait for
    from parbench.reports.compare.thresholds import find_thresholds
    from parbench.reports.history.database import open_history
    from parbench.reports.history.gate import check_folder
    from parbench.reports.history.levels import StepRule

    run = load_run(path).info
    try:
        floor, floors = find_thresholds(os.environ.get("PARBENCH_MIN_EFFECT"))
        rule = StepRule(floor=floor)
        with open_history(file) as history:
            before = [
                line
                for line in history.runs()
                if line.preset == run.plan.preset and line.id != run.id
            ]
        if not before:
            return _none(f"the history has no run of preset {run.plan.preset}", more)
        branch = before[-1].branch
        found = check_folder(file, path, branch, rule, floors)
    except UserError as error:
        return _none(str(error), "")
    if changed := [change.message for _, change, _ in found.changes if change.fails]:
        others = f", and {len(changed) - 1} more" if changed[1:] else ""
        remedy = f"Try: parbench history check {path} --branch {branch}"
        return Verdict(
            word="CHANGED", level="doubtful", message=f"{changed[0]}{others}", hint=remedy
        )
    known = [one for one in found.findings if one.word in ("SLOWER", "SAME")]
    if not known:
        reasons = [
            f"{one.word}: {one.reason}" for one in found.findings if one.word != "INSUFFICIENT"
        ]
        insufficient = [one.reason for one in found.findings if one.word == "INSUFFICIENT"]
        return _none(
            (insufficient or reasons or [f"no series has {rule.min_values} earlier runs"])[0], more
        )
    num_runs = max(len(one.times) for one in known) - 1
    runs = f"in the {pluralize(num_runs, 'run')} before"
    if slower := [one for one in found.findings if one.word == "SLOWER"]:
        remedy = f"Try: parbench history check {path} --branch {branch}"
        text = f"{len(slower)} of {len(known)} series are slower than {runs}"
        return Verdict(word="SLOWER", level="doubtful", message=text, hint=remedy)
    return Verdict(word="AS BEFORE", level="good", message=f"{len(known)} series are as {runs}")


def _none(told: str, remedy: str) -> Verdict:
    return Verdict(word="NO BASELINE", level="doubtful", message=told, hint=remedy)
