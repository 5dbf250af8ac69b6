"""Two settings of one machine, measured repetition by repetition in the order A B B A A B B A.

Repetition k of B is paired with repetition k of A, which ran next to it. The order alternates, so a
linear drift of the machine has no effect on the mean of the pairs' log ratios. The comparison is
tested a few times, each time at its share of the error rate, so stopping early does not increase
the rate of false alarms.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.launch.budget import RESERVE, estimate_run_seconds, format_budget
from parbench.bench.launch.processes import run_child
from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError, format_duration, get_last_line
from parbench.reports.compare.compare import RunComparison, compare
from parbench.reports.compare.pool import pool_runs
from parbench.reports.compare.rule import Rule
from parbench.reports.compare.verdicts import Verdict
from parbench.reports.run_data import RunData

TEST_POINTS = (6, 8, 12, 16, 24)
"""The numbers of pairs after which the comparison is tested. The last one ends it."""
MAX_PAIRS = TEST_POINTS[-1]
"""The largest number of repetitions per side."""
DEPENDENT_PATHS = {
    "OMP_NUM_THREADS": "torch.threads",
    "MKL_NUM_THREADS": "torch.threads",
    "GLOO_SOCKET_IFNAME": "process.interface",
}
"""The path of the environment value that each environment variable changes."""
RESERVED_OPTIONS = ("--repetitions", "--budget", "--out", "--format", "--quiet", "-q", "--resume")
"""The options of ``parbench run`` that ``parbench ab`` and ``aa`` set themselves."""
MEASURED_SHARE = 0.8  # of a session's time. The rest is for starting the commands.
MIN_REPETITION_SECONDS = 30.0  # A repetition ends earlier once it is precise enough.


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two settings that are compared, A or B."""

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


class PairedSession:
    """Measures pairs of repetitions of two sides in the order A B B A, until the budget ends.

    A side is one of two settings that are compared, such as two sets of variables. A budget that
    is not fixed grows to the time of ``min_pairs`` pairs, estimated from the first pair. If a fixed
    budget is too short for ``min_pairs`` pairs, the session ends, and ``problem`` has the reason.

    Args:
        sides: the sides A and B.
        measure: measures one repetition of a side.
        budget_seconds: the time for the whole session.
        min_pairs: the number of pairs for which the budget must suffice.
        planned_pairs: the number of pairs for which the budget should suffice.
        is_fixed_budget: True if the user set the budget.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        measure: MeasureSide,
        *,
        budget_seconds: float,
        min_pairs: int,
        planned_pairs: int,
        is_fixed_budget: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        """The reason why the budget is too short for ``min_pairs``, empty if it is long enough."""
        self.pairs: list[tuple[Run, Run]] = []
        """(run of A, run of B) of each measured pair, in the order of measurement."""
        self._sides = sides
        self._measure = measure
        self._budget_seconds = budget_seconds
        self._min_pairs = min_pairs
        self._is_fixed_budget = is_fixed_budget
        self._clock = clock
        self._repetition_seconds = max(
            MEASURED_SHARE * budget_seconds / (2 * planned_pairs), MIN_REPETITION_SECONDS
        )
        """The longest time in seconds that a repetition of one side may measure."""

    @property
    def runs(self) -> list[Run]:
        """The runs of all pairs in one list, A before B in each pair."""
        return [run for pair in self.pairs for run in pair]

    def measure_pairs(self, max_pairs: int) -> Iterator[int]:
        """Measure at most ``max_pairs`` pairs, and yield their number so far after each one.

        The session ends earlier if the budget does not suffice for another pair.
        """
        start = self._clock()
        longest_pair = 0.0
        while len(self.pairs) < max_pairs:
            pair_start = self._clock()
            is_over = pair_start - start + longest_pair > self._budget_seconds
            if self.pairs and is_over:
                if len(self.pairs) < self._min_pairs:
                    self.problem = self._describe_problem("took up to", longest_pair)
                return
            self._measure_pair()
            longest_pair = max(longest_pair, self._clock() - pair_start)
            if len(self.pairs) == 1:
                self._plan(longest_pair)
            yield len(self.pairs)
            if self.problem:
                return

    def _measure_pair(self) -> None:
        """Measure one repetition of each side, and append both runs to ``pairs``.

        A is measured first in the first, third, ... pair, otherwise B.
        """
        is_reversed = len(self.pairs) % 2 == 1
        order = self._sides[::-1] if is_reversed else self._sides
        first, second = (self._measure(side, self._repetition_seconds) for side in order)
        self.pairs.append((second, first) if is_reversed else (first, second))

    def _plan(self, pair_seconds: float) -> None:
        """Set the time of a repetition and check the budget, after the first pair was measured.

        ``pair_seconds`` is the time that this pair took. If it did not measure all cases, the time
        of a repetition is increased.
        """
        verb = "took"
        cut_runs = [
            run for run in self.runs if any(record.is_out_of_budget for record in run.records)
        ]
        if cut_runs:
            complete_seconds = RESERVE * max(map(estimate_run_seconds, cut_runs))
            if complete_seconds > self._repetition_seconds:
                pair_seconds += 2 * (complete_seconds - self._repetition_seconds)
                self._repetition_seconds = complete_seconds
                verb = "with all cases takes about"
        required_seconds = self._min_pairs * pair_seconds
        if not self._is_fixed_budget:
            self._budget_seconds = max(self._budget_seconds, RESERVE * required_seconds)
        elif required_seconds > self._budget_seconds:
            self.problem = self._describe_problem(verb, pair_seconds)

    def _describe_problem(self, verb: str, pair_seconds: float) -> str:
        """Return a sentence that the budget is too short, with a budget that is long enough.

        ``pair_seconds`` is the time of one pair. ``verb`` precedes it in the sentence, such as
        ``took``.
        """
        min_pairs = self._min_pairs
        budget = format_budget(min_pairs * pair_seconds)
        return (
            f"a repetition of both sides {verb} {format_duration(pair_seconds)}, because each side "
            f"measures for up to {format_duration(self._repetition_seconds)}. "
            f"At least {min_pairs} are needed: --budget {budget}"
        )


@dataclass(frozen=True, kw_only=True)
class PairedResult:
    """The result of ``parbench ab``: the comparison of B with A."""

    comparison: RunComparison
    """The comparison, in which A is BASE and B is NEW."""
    num_pairs: int
    """The number of repetitions of each side."""
    reason: str
    """The reason why the session ended."""
    is_too_short: bool = False
    """True if the budget was too short for the minimum number of pairs."""


def compare_interleaved(
    sides: tuple[Side, Side],
    measure: MeasureSide,
    *,
    budget_seconds: float,
    min_effect: float,
    is_fixed_budget: bool = True,
    max_pairs: int | None = None,
    intended: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> PairedResult:
    """Measure both sides in pairs until each case is decided, and return their comparison.

    The session also ends after ``max_pairs``, or with the budget.

    Args:
        sides: the sides A and B.
        measure: measures one repetition of a side.
        budget_seconds: the time for the whole session.
        min_effect: the threshold as a fraction: smaller changes of the time are ignored.
        is_fixed_budget: False if the budget may grow to the time of the fewest pairs.
        max_pairs: the largest number of pairs, None for ``MAX_PAIRS``.
        intended: globs for the paths of counts and environment values whose differences are
            intentional. Differences that follow from the variables of the sides are added.
        clock: returns a time in seconds.
    """
    limit = max_pairs or MAX_PAIRS
    test_points = sorted({*(point for point in TEST_POINTS if point < limit), limit})
    level = Rule().level / len(test_points)
    rule = Rule(min_effect=min_effect, level=level, is_paired=True)
    session = PairedSession(
        sides,
        measure,
        budget_seconds=budget_seconds,
        min_pairs=rule.min_repetitions,
        planned_pairs=max_pairs or TEST_POINTS[0],
        is_fixed_budget=is_fixed_budget,
        clock=clock,
    )
    globs = (*_find_intended_differences(sides), *intended)
    for num_pairs in session.measure_pairs(limit):
        if num_pairs in test_points:
            comparison = compare_pairs(session.pairs, sides, rule, globs)
            if not {Verdict.UNCONFIRMED, Verdict.TOO_FEW_RUNS} & comparison.verdicts.keys():
                reason = "every series is decided"
                break
    else:
        reason = session.problem or "the budget ended"
        if len(session.pairs) == limit:
            reason = f"{limit} repetitions per side were made"
    return PairedResult(
        comparison=compare_pairs(session.pairs, sides, rule, globs),
        num_pairs=len(session.pairs),
        reason=reason,
        is_too_short=bool(session.problem),
    )


def compare_pairs(
    pairs: Sequence[tuple[Run, Run]],
    sides: tuple[Side, Side],
    rule: Rule,
    intended: Sequence[str] = (),
) -> RunComparison:
    """Compare B with A, whose repetitions are paired in the order in which they were measured.

    Args:
        pairs: the runs of A and B in each pair.
        sides: the sides A and B.
        rule: the threshold and the error rate.
        intended: globs for the paths of differences that are intentional.
    """
    base, new = (
        pool_runs([pair[i] for pair in pairs], f"{side.name.upper()} ({side.text})")
        for i, side in enumerate(sides)
    )
    return compare(RunData(base), RunData(new), rule, intended)


def _find_intended_differences(sides: tuple[Side, Side]) -> list[str]:
    """Return globs for the differences that follow from the environment variables of the sides.

    They match the variables, environment values that depend on them, and all counts of calls, bytes
    and memory, because these may depend on the variables.
    """
    names = list(dict.fromkeys([*sides[0].variables, *sides[1].variables]))
    globs = ["counts.*", *(f"variables.{name}" for name in names)]
    return globs + [DEPENDENT_PATHS[name] for name in names if name in DEPENDENT_PATHS]


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
        if not equals or not variable.isidentifier():
            raise UserError(
                f"--{name} has the invalid assignment {assignment!r}. "
                "Write NAME=VALUE, with spaces between variables"
            )
        variables[variable] = value
    return Side(name=name, variables=variables, python=python)


def run_repetition(
    side: Side, seconds: float, *, out: Path, options: Sequence[str], log: Callable[[str], None]
) -> Run:
    """Measure one repetition of a side in a child process, and return its run.

    Raises ``UserError`` if there is no run, and exits with code 4 after an interrupt.

    Args:
        side: the side.
        seconds: the time budget of the repetition.
        out: the folder in which the runs of each side are stored, in a folder of its letter.
        options: the arguments of ``parbench run`` that select the cases.
        log: prints a line for the user.
    """
    folder = out / side.name
    existing = set(folder.glob("*/run.json"))
    log(f"{side.name.upper()}: {side.text}")
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
        error_message = get_last_line(child.stderr).removeprefix("error: ")
        if not error_message:
            error_message = f"parbench run exited with code {child.returncode}"
        raise UserError(f"side {side.name.upper()} has no run: {error_message}")
    return load_run(created.pop().parent)


def check_run_options(options: Sequence[str], command: str = "ab") -> None:
    """Raise ``UserError`` for an option of ``parbench run`` that a paired session sets itself.

    ``options`` are the arguments after ``--``. ``command`` is the name of the command in the
    message, ``ab`` or ``aa``.
    """
    for option in options:
        if option.partition("=")[0] in RESERVED_OPTIONS:
            raise UserError(
                f"parbench {command} sets {option} itself. "
                "Remove it after --, and give --budget and --out before --"
            )
