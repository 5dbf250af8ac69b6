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
    return tuple(_bad(row) for row in summary.rows if row.status not in ("ok", "skipped"))


def not_measured(summary: Summary) -> tuple[Problem, ...]:
    """Return what was skipped by the plan or by a launch, or is without a record: nearly all, so one line a name."""
    plan, reason = summary.skipped, "no record: the run ended before"
    found = [Problem(case=one.case.label, status="skipped", launches="all", reason=one.reason) for one in plan]
    found += [_bad(row) for row in summary.rows if row.status == "skipped"]
    for name in dict.fromkeys(one.case.name for one in summary.missing):
        group = [one for one in summary.missing if one.case.name == name]
        case = group[0].case.label if len(group) == 1 else f"{name} ({len(group)} cases)"
        launches = f"{sum(one.launches for one in group)}/{sum(one.planned for one in group)}"
        found.append(Problem(case=case, status="not measured", launches=launches, reason=reason))
    return tuple(found)


def _bad(row: Row) -> Problem:
    launches = f"{sum(record.status == row.status for record in row.records)}/{row.planned}"
    reason = "; ".join(row.reasons) or "no reason was recorded"
    return Problem(case=row.case.label, status=row.status, launches=launches, reason=reason, row=row)


def warnings_of(run: Run) -> tuple[str, ...]:
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
    with writing(target):
        replace_file(target, content)


def emulations(run: Run) -> tuple[str, ...]:
    """Return the notes that say so, with how many records bear one that not all do."""
    total = len(run.records)
    counts = Counter(note for one in run.records for note in dict.fromkeys(one.notes) if note.startswith(EMULATED))
    counts.update({note: total for note in run.info.plan.notes if note.startswith(EMULATED)})
    return tuple(note if n >= total else f"{note} ({n} of {total} records)" for note, n in counts.items())


def other_claims(run: Run) -> tuple[str, ...]:
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
