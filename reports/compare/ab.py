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

from parbench.bench.launch.budget import RESERVE, compute_costs, format_budget
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
DEPENDENT_PATHS = {
    "OMP_NUM_THREADS": "torch.threads",
    "MKL_NUM_THREADS": "torch.threads",
    "GLOO_SOCKET_IFNAME": "process.interface",
}
"""Values of the environment that follow from a variable."""
RESERVED_OPTIONS = ("--repetitions", "--budget", "--out", "--format", "--quiet", "-q", "--resume")
MEASURED_SHARE = 0.8  # of a session's time. The rest is for starting the commands.
MIN_REPETITION_SECONDS = 30.0  # A repetition ends earlier once it is precise enough.


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two settings: its letter, its environment variables, and its Python interpreter."""

    name: str
    variables: Mapping[str, str]
    python: str = ""
    """Empty for the interpreter of this process."""

    @property
    def text(self) -> str:
        """The interpreter and the variables of the side, ``unchanged`` if it has neither."""
        parts = [f"{name}={value}" for name, value in self.variables.items()]
        if self.python:
            parts.insert(0, self.python)
        return " ".join(parts) or "unchanged"


MeasureSide = Callable[[Side, float], Run]
"""Measures one repetition of a side in at most the given number of seconds."""


class PairedSession:
    """Measures pairs of repetitions of two sides in the order A B B A, until the budget ends.

    The budget in seconds should suffice for ``planned_pairs`` and must suffice for ``min_pairs``.
    If it is not fixed, it grows to the time of ``min_pairs``, estimated from the first pair. If a
    fixed budget is too short, the session ends, and ``problem`` contains the reason.
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
        self.pairs: list[tuple[Run, Run]] = []
        self._sides = sides
        self._measure = measure
        self._budget_seconds = budget_seconds
        self._min_pairs = min_pairs
        self._is_fixed_budget = is_fixed_budget
        self._clock = clock
        self._repetition_seconds = max(
            MEASURED_SHARE * budget_seconds / (2 * planned_pairs), MIN_REPETITION_SECONDS
        )

    @property
    def runs(self) -> list[Run]:
        """The runs of all pairs, A before B in each pair."""
        return [run for pair in self.pairs for run in pair]

    def measure_pairs(self, max_pairs: int) -> Iterator[int]:
        """Measure at most ``max_pairs`` pairs, and yield the number of pairs after each one."""
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
        """Measure A first in even pairs, and B first in odd ones."""
        is_reversed = len(self.pairs) % 2 == 1
        order = self._sides[::-1] if is_reversed else self._sides
        first, second = (self._measure(side, self._repetition_seconds) for side in order)
        self.pairs.append((second, first) if is_reversed else (first, second))

    def _plan(self, pair_seconds: float) -> None:
        """Set the length of a repetition and check the budget after the first pair.

        ``pair_seconds`` is the time of the first pair.
        """
        verb = "took"
        cut_runs = [
            run for run in self.runs if any(record.is_out_of_budget for record in run.records)
        ]
        if cut_runs:
            complete_seconds = RESERVE * max(
                compute_costs(run).estimate_repetition(run.info.plan.cases) for run in cut_runs
            )
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
        """Return the problem that the budget is too short, with a budget that is long enough."""
        min_pairs = self._min_pairs
        budget = format_budget(min_pairs * pair_seconds)
        return (
            f"a repetition of both sides {verb} {format_duration(pair_seconds)}, because each side "
            f"measures for up to {format_duration(self._repetition_seconds)}. "
            f"At least {min_pairs} are needed: --budget {budget}"
        )


@dataclass(frozen=True, kw_only=True)
class PairedResult:
    """The comparison of B with A, and the reason why the session ended."""

    comparison: RunComparison
    num_pairs: int
    reason: str
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
    """Measure both sides in pairs until each series is decided, and compare them.

    The session also ends after ``max_pairs``, or with the budget.
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
    """Compare two sides, whose repetitions are paired in the order in which they were measured."""
    base, new = (
        pool_runs([pair[i] for pair in pairs], f"{side.name.upper()} ({side.text})")
        for i, side in enumerate(sides)
    )
    return compare(RunData(base), RunData(new), rule, intended)


def _find_intended_differences(sides: tuple[Side, Side]) -> list[str]:
    """Return globs of the values that the settings change. Counts may differ as well."""
    names = list(dict.fromkeys([*sides[0].variables, *sides[1].variables]))
    globs = ["counts.*", *(f"variables.{name}" for name in names)]
    return globs + [DEPENDENT_PATHS[name] for name in names if name in DEPENDENT_PATHS]


def parse_side(name: str, text: str, python: str = "") -> Side:
    """Parse a side from ``NAME=VALUE NAME=VALUE``. Raises ``UserError`` for anything else."""
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
    """Measure one repetition of a side in a child process and return its run below ``out``.

    Raises ``UserError`` if there is no run, and exits with code 4 after a signal.
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
    """Raise ``UserError`` for options of ``parbench run`` that the command sets itself."""
    for option in options:
        if option.partition("=")[0] in RESERVED_OPTIONS:
            raise UserError(
                f"parbench {command} sets {option} itself. "
                "Remove it after --, and give --budget and --out before --"
            )
