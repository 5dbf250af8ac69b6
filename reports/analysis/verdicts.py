"""Names of ``parbench.reports.verdicts`` for modules that do not use ``RunData`` yet."""

from collections.abc import Callable, Sequence

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import Summary
from parbench.reports.run_data import RunData
from parbench.reports.verdicts import Problem, Verdict, judge_run, list_problems
from parbench.reports.verdicts import describe_emulations as emulations
from parbench.reports.verdicts import find_noisy as noisy_of

__all__ = ["Problem", "Verdict", "emulations", "noisy_of"]


def verdict_words(run: Run, _: Summary) -> str:
    return ", ".join(verdict.word for verdict in judge_run(RunData(run)))


def bad_rows(run: Run) -> tuple[Problem, ...]:
    return list_problems(RunData(run))


def other_claims(run: Run) -> tuple[str, ...]:
    return run.info.plan.notes


def told_of_runs(runs: Sequence[Run], notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each note of several runs once, with the numbers of the runs that have it."""
    numbers: dict[str, list[int]] = {}
    for number, run in enumerate(runs, start=1):
        for note in notes(run):
            numbers.setdefault(note, []).append(number)
    sentences = []
    for note, run_numbers in numbers.items():
        is_common = len(run_numbers) == len(runs)
        noun = "run" if len(run_numbers) == 1 else "runs"
        prefix = "All runs" if is_common else f"{noun.capitalize()} {format_cpus(run_numbers)}"
        sentences.append(f"{prefix}: {note}")
    return tuple(sentences)
