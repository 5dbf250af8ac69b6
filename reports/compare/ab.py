"""Two settings of one machine, measured repetition by repetition in the order A B B A A B B A.

Repetition k of B is paired with repetition k of A, which ran next to it. The order alternates, so a
linear drift of the machine has no effect on the mean of the pairs' log ratios. The comparison is
tested a few times, each time at its share of the error rate, so stopping early does not increase
the rate of false alarms.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.launch.processes import run_child
from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError, format_duration, get_last_line
from parbench.reports.compare.compare import RunComparison, compare
from parbench.reports.compare.pool import pool_runs
from parbench.reports.compare.rule import Rule
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.run_data import RunData

TEST_POINTS = (6, 8, 12, 16, 24)
"""The numbers of pairs after which the changes of times are tested for significance.

Without ``--repetitions``, the session ends at the latest after the last of these numbers.
"""
MEASURED_SHARE = 0.8  # of a session's time. The rest is for starting the commands.
MIN_REPETITION_SECONDS = 30.0  # A repetition ends earlier once it is precise enough.
Pair = tuple[Run, Run]
"""(run of A, run of B), with one repetition each, which were measured next to each other."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two sides of a comparison, A or B: environment variables and a Python."""

    name: str
    """The letter of the side: ``a`` or ``b``."""
    variables: Mapping[str, str]
    """The environment variables that the side sets, by name."""
    python: str = ""
    """The path of the Python interpreter, empty for the interpreter of this process."""

    @property
    def text(self) -> str:
        """The interpreter and the variables as text, ``unchanged`` if the side has neither."""
        parts = [f"{name}={value}" for name, value in self.variables.items()]
        if self.python:
            parts.insert(0, self.python)
        return " ".join(parts) or "unchanged"


MeasureSide = Callable[[Side, float], Run]
"""Measures one repetition of a side in at most the given number of seconds, and returns its run."""


def measure_pairs(
    sides: tuple[Side, Side],
    measure: MeasureSide,
    *,
    budget_seconds: float,
    min_pairs: int,
    max_pairs: int,
    planned_pairs: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[list[Pair]]:
    """Measure pairs of repetitions of two sides in the order A B B A, until the budget ends.

    Yields all pairs so far after each pair. The time of a repetition is the budget divided by the
    repetitions of ``planned_pairs``, at least 30 s. It doubles after a pair in which it was too
    short for all cases.

    Args:
        sides: the sides A and B.
        measure: measures one repetition of a side.
        budget_seconds: the time for all pairs.
        min_pairs: the least number of pairs, for which the budget must suffice.
        max_pairs: the number of pairs after which the measurement ends, even if time is left.
        planned_pairs: the number of pairs over which the budget is divided.
        clock: returns the current time in seconds, of any origin.

    Raises ``UserError`` if the budget does not suffice for ``min_pairs``.
    """
    repetition_seconds = MEASURED_SHARE * budget_seconds / (2 * planned_pairs)
    repetition_seconds = max(repetition_seconds, MIN_REPETITION_SECONDS)
    end = clock() + budget_seconds
    longest_pair = 0.0
    pairs: list[Pair] = []
    while len(pairs) < max_pairs:
        start = clock()
        is_reversed = len(pairs) % 2 == 1
        order = sides[::-1] if is_reversed else sides
        first, second = (measure(side, repetition_seconds) for side in order)
        pairs.append((second, first) if is_reversed else (first, second))
        longest_pair = max(longest_pair, clock() - start)
        records = [record for run in pairs[-1] for record in run.records]
        if any(record.is_out_of_budget for record in records):
            repetition_seconds *= 2
            longest_pair *= 2
        yield pairs
        num_missing = min_pairs - len(pairs)
        if clock() + max(1, num_missing) * longest_pair > end:
            if num_missing <= 0:
                return
            raise UserError(
                f"--budget is too short: a repetition of both sides takes "
                f"{format_duration(longest_pair)}, and at least {min_pairs} are needed",
                hint=f"use --budget {math.ceil(1.1 * min_pairs * longest_pair / 60)}m",
            )


@dataclass(frozen=True, kw_only=True)
class PairedResult:
    """The result of ``parbench ab``: the comparison of B with A."""

    comparison: RunComparison
    """The comparison, in which A is BASE and B is NEW."""
    num_pairs: int
    """The number of repetitions of each side."""
    reason: str
    """The reason why the session ended, as a clause: ``the budget ended``, for example."""


def compare_interleaved(
    sides: tuple[Side, Side],
    measure: MeasureSide,
    *,
    budget_seconds: float,
    min_effect: float,
    max_pairs: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PairedResult:
    """Measure both sides in pairs until each case has a verdict, and return their comparison.

    A case is a benchmark with its parameters. The changes of times are tested after 6, 8, 12, 16
    and 24 pairs (``TEST_POINTS``). The session ends when no case is UNDECIDED or NOT ENOUGH
    DATA, after ``max_pairs``, or with the budget.

    Args:
        sides: the sides A and B.
        measure: measures one repetition of a side.
        budget_seconds: the time for the whole session.
        min_effect: the threshold as a fraction: smaller changes of the time are ignored.
        max_pairs: the largest number of pairs, None for 24, the last of ``TEST_POINTS``.
        clock: returns the current time in seconds, of any origin.

    Raises ``UserError`` if the budget does not suffice for 5 pairs.
    """
    limit = max_pairs or TEST_POINTS[-1]
    test_points = sorted({*(point for point in TEST_POINTS if point < limit), limit})
    level = Rule().level / len(test_points)
    rule = Rule(min_effect=min_effect, level=level, is_paired=True)
    pairs: list[Pair] = []
    for pairs in measure_pairs(
        sides,
        measure,
        budget_seconds=budget_seconds,
        min_pairs=rule.min_repetitions,
        max_pairs=limit,
        planned_pairs=max_pairs or TEST_POINTS[0],
        clock=clock,
    ):
        if len(pairs) in test_points:
            comparison = compare_pairs(pairs, sides, rule)
            if not {Verdict.UNDECIDED, Verdict.NOT_ENOUGH_DATA} & comparison.verdicts.keys():
                reason = "every series is decided"
                break
    else:
        is_complete = len(pairs) == limit
        reason = f"{limit} repetitions per side were made" if is_complete else "the budget ended"
    comparison = compare_pairs(pairs, sides, rule)
    return PairedResult(comparison=comparison, num_pairs=len(pairs), reason=reason)


def compare_pairs(pairs: Sequence[Pair], sides: tuple[Side, Side], rule: Rule) -> RunComparison:
    """Compare B with A, whose repetitions are paired in the order in which they were measured.

    Differences of environments and counts (calls, bytes, memory) count as intentional, because the
    user chose the sides and both run on the same machine. The report lists these differences.

    Args:
        pairs: (run of A, run of B) for each pair, in the order of time.
        sides: the sides A and B.
        rule: the threshold and the error rate with which changes of times are judged.
    """
    base, new = (
        pool_runs([pair[i] for pair in pairs], f"{side.name.upper()} ({side.text})")
        for i, side in enumerate(sides)
    )
    return compare(RunData(base), RunData(new), rule, intended=["*"])


def parse_side(name: str, text: str, python: str = "") -> Side:
    """Return the side with environment variables from ``NAME=VALUE NAME=VALUE``.

    Raises ``UserError`` for other text.

    Args:
        name: the letter of the side.
        text: the variables, separated by spaces. May be empty.
        python: the Python interpreter, empty for the interpreter of this process.
    """
    variables = {}
    for assignment in text.split():
        variable, equals, value = assignment.partition("=")
        if not equals or not variable.isidentifier() or variable in variables:
            raise UserError(
                f"--{name} has the invalid assignment {assignment!r}. "
                "Write NAME=VALUE once for each variable, with spaces between them"
            )
        variables[variable] = value
    return Side(name=name, variables=variables, python=python)


def run_repetition(
    side: Side, seconds: float, *, out: Path, options: Sequence[str], log: Callable[[str], None]
) -> Run:
    """Measure one repetition of a side in a child process, and return its run.

    Raises ``UserError`` if the child process stores no run, and exits with code 4 after an
    interrupt.

    Args:
        side: the side.
        seconds: the time budget of the repetition.
        out: the folder of the session. The runs of a side are stored in its subfolder ``a`` or
            ``b``.
        options: the arguments of ``parbench run`` that select the cases.
        log: prints a line for the user.
    """
    folder = out / side.name
    existing = set(folder.glob("*/run.json"))
    log(f"{side.name.upper()}: {side.text}, stored in {folder}")
    command = [side.python or sys.executable, "-m", "parbench", "run", *options]
    command += ["--repetitions", "1", "--budget", f"{seconds:.0f}s", "--out", str(folder)]
    command += ["--format=json"]
    try:
        child = run_child(command, env={**os.environ, **side.variables}, catch_stderr=True)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from error
    except KeyboardInterrupt:
        log(f"interrupted: no more repetitions are started. The runs so far are in {out}")
        # click would exit with code 1, which stands for a regression.
        raise SystemExit(4) from None
    created = set(folder.glob("*/run.json")) - existing
    if not created:
        message = get_last_line(child.stderr).removeprefix("error: ")
        raise UserError(
            f"side {side.name.upper()} has no run, exit code {child.returncode}: {message}"
        )
    return load_run(created.pop().parent)
