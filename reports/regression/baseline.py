"""What a history says of a run that it has not kept yet: the verdict on its last page."""

import os
from pathlib import Path

from bench.results.runs import load_run
from bench.text import UserError, counted
from reports.analysis.verdicts import Verdict
from reports.regression.commands import FILE


def baseline(path: Path) -> Verdict:
    """Return whether a run is as those before it of its preset; nothing is kept, and nothing here fails a run.

    The history is ``$PARBENCH_HISTORY``, or the one that ``parbench history add`` makes.
    """
    file = Path(os.environ.get("PARBENCH_HISTORY") or FILE)
    more = f"parbench history add {path}"
    if not file.exists():
        return _none("no history says what is usual here", more)
    # numpy and SQLite, which only those with a history wait for
    from reports.regression.history import About, open_history, read_entry
    from reports.regression.history_gate import check
    from reports.regression.levels import StepRule
    from reports.regression.noise_floor import find_floor

    run = load_run(path).info
    try:
        floor, floors = find_floor(os.environ.get("PARBENCH_FLOOR"))
        rule = StepRule(floor=floor)
        with open_history(file) as kept, kept.copied() as history:
            before = [line for line in history.runs() if line.preset == run.plan.preset and line.id != run.id]
            if not before:
                return _none(f"the history has no run of preset {run.plan.preset}", more)
            history.add(read_entry(path, About(branch=before[-1].branch)))
            found = check(history, history.line(run.id), rule, floors)
    except UserError as error:
        return _none(str(error), "")
    runs = f"in the {counted(len(before), 'run')} before"
    known = [one for one in found.findings if one.series and one.word != "INSUFFICIENT"]
    if not known:
        return _none(f"{len(before) + 1} of the {rule.min_values} runs that are needed", more)
    for word, told in (("SLOWER", "slower than"), ("DRIFT", "slower and slower"), ("SUSPECT", "slower this once than")):
        if moved := [one for one in found.findings if one.word == word]:
            where = "all series together" if moved[0].series is None else f"{len(moved)} of {len(known)} series"
            sentence = f"{where} are {told} {runs}"
            return Verdict(word=word, level="doubtful", told=sentence, remedy=f"{more}; parbench history check")
    return Verdict(word="AS BEFORE", level="good", told=f"{len(known)} series are as {runs}")


def _none(told: str, remedy: str) -> Verdict:
    return Verdict(word="NO BASELINE", level="doubtful", told=told, remedy=remedy)
