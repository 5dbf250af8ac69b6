"""Two settings of this machine, repetition by repetition in turns (ABBA), until they are told apart.

Drift that is linear in time falls on both sides alike. The comparison is looked at a few times, each at its share of
the false discovery rate, so that looking often finds no more.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from parbench.bench.launch.budget import RESERVE, compute_costs, format_budget
from parbench.bench.launch.processes import run_child
from parbench.bench.results.runs import Run, load_run
from parbench.bench.text import UserError, format_duration, get_last_line
from parbench.reports.compare.compare import Comparison, compare, notes_of_pools, pool_runs
from parbench.reports.compare.rule import Rule

LOOKS = (
    6,
    8,
    12,
    16,
    24,
)  # repetitions a side after which the comparison is looked at; the last is the end
# what a variable sets elsewhere in the environment
FOLLOWS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "torch.threads")
FOLLOWS |= {"GLOO_SOCKET_IFNAME": "process.interface"}
OURS = (
    "--repetitions",
    "--budget",
    "--out",
    "--json",
    "--format",
    "--resume",
)  # of parbench run, which ab sets itself
_SHARE = 0.8  # of a session's time is for the repetitions; the rest is for what surrounds each
SHORTEST_SECONDS = 30.0  # for a repetition, as starting ranks is part of it; it ends before where it is precise enough


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two settings: its letter, the variables that are set, and the Python it runs with, empty for this one."""

    name: str
    variables: Mapping[str, str]
    python: str = ""

    @property
    def text(self) -> str:
        words = [self.python, *(f"{name}={value}" for name, value in self.variables.items())]
        return " ".join(words).strip() or "as it is"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The comparison of B with A, and why no more repetitions were made; ``short`` if there were too few to decide."""

    comparison: Comparison
    repetitions: int
    reason: str
    short: bool = False


MeasureSide = Callable[[Side, float], Run]  # of a side, within so many seconds


class Turns:
    """Repetitions of both sides in turns (ABBA); iterates over all runs by side after each pair, of which one is made.

    Both need ``least`` repetitions of all cases, and the first pair tells what these take. A budget that is not
    ``given``
    becomes as long as that; of one that is, ``short`` says in words what it lacks, and nothing more is launched.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        measure: MeasureSide,
        repetitions: int,
        *,
        budget_seconds: float,
        first: int,
        least: int,
        given: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sides, self._measure, self._repetitions, self._clock = (
            sides,
            measure,
            repetitions,
            clock,
        )
        self._seconds, self._least, self._given = budget_seconds, least, given
        self._each = max(_SHARE * budget_seconds / (2 * first), SHORTEST_SECONDS)
        self.short = ""

    def __iter__(self) -> Iterator[Mapping[str, Sequence[Run]]]:
        begun, slowest = self._clock(), 0.0
        runs: dict[str, list[Run]] = {side.name: [] for side in self._sides}
        for number in range(self._repetitions):
            before = self._clock()
            if number and before - begun + slowest > self._seconds:
                if number < self._least:
                    self.short = self._lacking(slowest)
                return
            for side in self._sides if number % 2 == 0 else self._sides[::-1]:
                runs[side.name].append(self._measure(side, self._each))
            slowest = max(slowest, self._clock() - before)
            if number == 0:
                self._plan(slowest, [run for of_side in runs.values() for run in of_side])
            yield runs
            if self.short:
                return

    def _plan(self, pair_seconds: float, runs: Sequence[Run]) -> None:
        """Decide, now that a repetition of both sides took so long, how long each is to be and whether enough fit."""
        cut = [run for run in runs if any(record.is_out_of_budget for record in run.records)]
        if cut:
            each = RESERVE * max(
                compute_costs(run).estimate_repetition(run.info.plan.cases) for run in cut
            )
            pair_seconds += 2 * max(each - self._each, 0.0)
            self._each = max(each, self._each)
        needed = RESERVE * self._least * pair_seconds
        if not self._given:
            self._seconds = max(self._seconds, needed)
        elif self._least * pair_seconds > self._seconds:
            self.short = self._lacking(pair_seconds)

    def _lacking(self, pair_seconds: float) -> str:
        needed = format_budget(self._least * pair_seconds)
        pair = format_duration(pair_seconds)
        return f"a repetition of both sides takes {pair} and {self._least} of them are needed: --budget {needed}"


def measure_in_turns(
    sides: tuple[Side, Side],
    measure: MeasureSide,
    *,
    budget_seconds: float,
    floor: float,
    given: bool = True,
    repetitions: int | None = None,
    across: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Start both sides in turns until every series is decided, ``repetitions`` were made, or no time is left."""
    names = dict.fromkeys([*sides[0].variables, *sides[1].variables])
    # what two settings count may differ as well
    meant = (
        "counts.*",
        *(f"variables.{n}" for n in names),
        *(FOLLOWS[n] for n in names if n in FOLLOWS),
        *across,
    )
    usual, looks, most = Rule(), len(LOOKS), repetitions or LOOKS[-1]
    rule = Rule(
        floor=floor,
        level=usual.level / looks,
        false_discovery_rate=usual.false_discovery_rate / looks,
    )
    session = partial(Turns, budget_seconds=budget_seconds, given=given, clock=clock)
    turns = session(sides, measure, most, first=repetitions or LOOKS[0], least=rule.min_repetitions)

    def compared(runs: Mapping[str, Sequence[Run]]) -> Comparison:
        ours, theirs = (
            pool_runs(runs[side.name], f"{side.name.upper()} ({side.text})") for side in sides
        )
        return replace(compare(ours, theirs, rule, meant), notes=notes_of_pools((ours, theirs)))

    found, count = None, 0
    for runs in turns:
        count = len(runs[sides[0].name])
        found = compared(runs) if count in (*LOOKS, most) else None
        if found and not {one.word for one in found.series} & {
            "AMBIGUOUS",
            "INSUFFICIENT",
        }:  # more would change these
            return Outcome(comparison=found, repetitions=count, reason="every series is decided")
    reason = f"{count} repetitions a side were made" if count == most else "the budget ended"
    return Outcome(
        comparison=found or compared(runs),
        repetitions=count,
        reason=turns.short or reason,
        short=bool(turns.short),
    )


def parse_side(name: str, text: str, python: str = "") -> Side:
    """Return a side from ``NAME=VALUE`` words; ``UserError`` if one has no name or no equals sign."""
    variables = {}
    for word in text.split():
        variable, equals, value = word.partition("=")
        if not equals or not variable.isidentifier():
            raise UserError(
                f"--{name} {word!r} is not understood: write variables as NAME=VALUE, with spaces between"
            )
        variables[variable] = value
    return Side(name=name, variables=variables, python=python)


def run_repetition(
    side: Side, seconds: float, *, out: Path, words: Sequence[str], tell: Callable[[str], None]
) -> Run:
    """Measure one repetition under a folder: ``UserError`` in its own words if there is none, 4 after a signal."""
    before = set((folder := out / side.name).glob("*/run.json"))
    tell(f"{side.name.upper()}: {side.text}")
    command = [side.python or sys.executable, "-m", "parbench", "run", *words]
    command += ["--repetitions", "1", "--budget", f"{seconds:.0f}s", "--out", str(folder), "--json"]
    try:
        done = run_child(command, env={**os.environ, **side.variables}, catch_stderr=True)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    except KeyboardInterrupt:
        tell(f"interrupted: nothing more is launched, and what was measured is in {out}")
        raise SystemExit(4) from None  # click would end with 1, which is a regression
    if not (made := set(folder.glob("*/run.json")) - before):
        told = get_last_line(done.stderr) or f"parbench run ended with {done.returncode}"
        raise UserError(f"side {side.name.upper()} has no run: {told.removeprefix('parbench: ')}")
    return load_run(made.pop().parent)


def check_words(words: Sequence[str], command: str = "ab") -> None:
    """Refuse options of ``parbench run`` that are not the user's to give here; ``UserError``."""
    for word in words:
        if word.partition("=")[0] in OURS:
            how = "leave it out after --, and give --budget and --out before"
            raise UserError(f"{word} is for parbench {command} to set: {how}")
