"""What did not go as planned, in words: wrong, hung, failed, skipped, and never measured."""

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine.environment import EMULATED, format_cpus
from bench.results.runs import Run
from bench.text import replace_file, writing
from reports.analysis.summary import Row, Summary


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case (or several missing ones), what became of it and why; ``row`` holds the evidence if there is any."""

    case: str
    status: str
    launches: str
    reason: str
    row: Row | None = None


def bad_rows(summary: Summary) -> tuple[Problem, ...]:
    """Return the rows that are not ok, with how many launches ended so."""
    return tuple(_bad(row) for row in summary.rows if row.status not in ("ok", "skipped"))


def not_measured(summary: Summary) -> tuple[Problem, ...]:
    """Return what was left out: skipped by the plan or by a launch, or without a record.

    The latter has one line for a name: after an interruption nearly every case would have its own.
    """
    plan, words = summary.skipped, "no record: the run ended before"
    planned = [Problem(case=one.case.label, status="skipped", launches="all", reason=one.reason) for one in plan]
    skipped = [_bad(row) for row in summary.rows if row.status == "skipped"]
    names = dict.fromkeys(one.case.name for one in summary.missing)
    groups = {name: [one for one in summary.missing if one.case.name == name] for name in names}
    missing = [
        Problem(
            case=group[0].case.label if len(group) == 1 else f"{name} ({len(group)} cases)",
            status="not measured",
            launches=f"{sum(one.launches for one in group)}/{sum(one.planned for one in group)}",
            reason=words,
        )
        for name, group in groups.items()
    ]
    return (*planned, *skipped, *missing)


def _bad(row: Row) -> Problem:
    launches = sum(record.status == row.status for record in row.records)
    return Problem(
        case=row.case.label,
        status=row.status,
        launches=f"{launches}/{row.planned}",
        reason="; ".join(row.reasons) or "no reason was recorded",
        row=row,
    )


def warnings_of(run: Run) -> tuple[str, ...]:
    """Return what a reader must know of how the records were read, each a sentence."""
    try:
        with (run.path / "records.jsonl").open("rb") as file:
            file.seek(-1, os.SEEK_END)
            is_whole = file.read(1) == b"\n"
    except OSError:  # there is none, or nothing in it
        is_whole = True
    told = "is being written, or was cut short by a kill, and does not count"
    last = f"The last line of records.jsonl {told}; parbench run --resume {run.path} measures its case again."
    return () if is_whole else (last,)


def is_written(path: Path) -> bool:
    """Say whether another process holds the run's lock, as ``parbench run`` does until it ends."""
    try:
        with (path / "records.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can tell, so nobody is waited for
        return False
    return False


def write_whole(target: Path, content: bytes) -> None:
    """Write a file whole or not at all; ``UserError`` if it cannot be written."""
    with writing(target):
        replace_file(target, content)


def emulations(run: Run) -> tuple[str, ...]:
    """Return the notes that say so, with how many records bear one that not all do."""
    total = len(run.records)
    counts = Counter(note for one in run.records for note in dict.fromkeys(one.notes) if note.startswith(EMULATED))
    counts.update({note: total for note in run.info.plan.notes if note.startswith(EMULATED)})
    return tuple(note if n >= total else f"{note} ({n} of {total} records)" for note, n in counts.items())


def other_claims(run: Run) -> tuple[str, ...]:
    """Return what else no row of the run can claim, as its plan says."""
    return tuple(note for note in run.info.plan.notes if not note.startswith(EMULATED))


def told_of_runs(runs: Sequence[Run], notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each note of several runs once, with the runs that it holds for, by their numbers from 1."""
    numbers: dict[str, list[int]] = {}
    for number, run in enumerate(runs, start=1):
        for note in notes(run):
            numbers.setdefault(note, []).append(number)
    return tuple(
        "What no run can show: " + note
        if 1 < len(runs) == len(of)
        else f"What run{'s' * (len(of) != 1)} {format_cpus(of)} cannot show: {note}"
        for note, of in numbers.items()
    )
