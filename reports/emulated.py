"""What a run's numbers cannot claim at all, for the head of whatever shows them: that its nodes were imitated. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence

from bench.machine.environment import EMULATED, format_cpus
from bench.results.runs import Run


def emulations(run: Run) -> tuple[str, ...]:
    """Return the notes that say so, with how many records bear one that not all do."""
    counts = Counter(note for one in run.records for note in dict.fromkeys(one.notes) if note.startswith(EMULATED))
    counts.update({note: len(run.records) for note in run.info.plan.notes if note.startswith(EMULATED)})
    return tuple(
        note if count >= len(run.records) else f"{note} ({count} of {len(run.records)} records)"
        for note, count in counts.items()
    )


def other_claims(run: Run) -> tuple[str, ...]:
    """Return what else no row of the run can claim, as its plan says."""
    return tuple(note for note in run.info.plan.notes if not note.startswith(EMULATED))


def cannot_show(run: Run) -> tuple[str, ...]:
    """Return both, what is emulated first."""
    return (*emulations(run), *other_claims(run))


def told_of_runs(runs: Sequence[Run], notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each note of several runs once, with the runs that it holds for, by their numbers from 1."""
    numbers: dict[str, list[int]] = {}
    for number, run in enumerate(runs, start=1):
        for note in notes(run):
            numbers.setdefault(note, []).append(number)
    return tuple(
        "What no run can show: " + note if 1 < len(runs) == len(of) else f"What {_runs(of)} cannot show: {note}"
        for note, of in numbers.items()
    )


def _runs(numbers: Sequence[int]) -> str:
    return f"run{'s' * (len(numbers) != 1)} {format_cpus(numbers)}"
