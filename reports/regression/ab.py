"""Two settings of this machine, launch by launch in turns (ABBA), until they are told apart.

Drift that is linear in time falls on both sides alike. The comparison is looked at a few times, each at its share of
the false discovery rate, so that looking often finds no more.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.launch.processes import run_child
from bench.results.runs import Run, load_run
from bench.text import UserError
from reports.regression.compare import Comparison, compare, notes_of_pools, pool
from reports.regression.noise_floor import Floor
from reports.regression.rule import Rule

LOOKS = (6, 8, 12, 16, 24)  # launches a side after which the comparison is looked at; the last is the end
# what a variable sets elsewhere in the environment
FOLLOWS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "torch.threads")
FOLLOWS |= {"GLOO_SOCKET_IFNAME": "process.interface"}
OURS = ("--launches", "--budget", "--out", "--json", "--format", "--resume")  # of parbench run, which ab sets itself
SHORTEST_SECONDS = 30.0  # for a launch, as starting ranks is part of it; it ends before where it is precise enough


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
    """The comparison of B with A, and why no more launches were made."""

    comparison: Comparison
    launches: int
    reason: str


Launch = Callable[[Side], Run]


def measure_in_turns(
    sides: tuple[Side, Side],
    launch: Launch,
    *,
    budget_seconds: float,
    floor: float,
    launches: int = LOOKS[-1],
    across: Sequence[str] = (),
    floors: Mapping[str, Floor] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Launch both sides in turns until every series is decided, ``launches`` were made, or no time is left."""
    names = dict.fromkeys([*sides[0].variables, *sides[1].variables])
    meant = (*(f"variables.{n}" for n in names), *(FOLLOWS[n] for n in names if n in FOLLOWS), *across)
    usual, looks = Rule(), len(LOOKS)
    rule = Rule(floor=floor, level=usual.level / looks, false_discovery_rate=usual.false_discovery_rate / looks)

    def compared(runs: Mapping[str, Sequence[Run]]) -> Comparison:
        ours, theirs = (pool(runs[side.name], f"{side.name.upper()} ({side.text})") for side in sides)
        return replace(compare(ours, theirs, rule, meant, floors), notes=notes_of_pools((ours, theirs)))

    found, count = None, 0
    for runs in launch_in_turns(sides, launch, launches, budget_seconds=budget_seconds, clock=clock):
        count = len(runs[sides[0].name])
        found = compared(runs) if count in (*LOOKS, launches) else None
        if found and not {one.word for one in found.series} & {"AMBIGUOUS", "INSUFFICIENT"}:  # more would change these
            return Outcome(comparison=found, launches=count, reason="every series is decided")
    reason = f"{count} launches a side were made" if count == launches else "the budget ended"
    return Outcome(comparison=found or compared(runs), launches=count, reason=reason)


def launch_in_turns(
    sides: tuple[Side, Side],
    launch: Launch,
    count: int,
    *,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Mapping[str, Sequence[Run]]]:
    """Launch both sides in turns (ABBA), yield all runs by side after each pair; one pair is always made."""
    begun, slowest = clock(), 0.0
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    for number in range(count):
        before = clock()
        if number and before - begun + slowest > budget_seconds:
            return
        for side in sides if number % 2 == 0 else sides[::-1]:
            runs[side.name].append(launch(side))
        slowest = max(slowest, clock() - before)
        yield runs


def parse_side(name: str, text: str, python: str = "") -> Side:
    """Return a side from ``NAME=VALUE`` words; ``UserError`` if one has no name or no equals sign."""
    variables = {}
    for word in text.split():
        variable, equals, value = word.partition("=")
        if not equals or not variable.isidentifier():
            raise UserError(f"--{name} {word!r} is not understood: write variables as NAME=VALUE, with spaces between")
        variables[variable] = value
    return Side(name=name, variables=variables, python=python)


def launch_run(side: Side, *, out: Path, words: Sequence[str], seconds: float, tell: Callable[[str], None]) -> Run:
    """Measure one launch under a folder: ``UserError`` in its own words if there is none, 4 after a signal."""
    before = set((folder := out / side.name).glob("*/run.json"))
    tell(f"{side.name.upper()}: {side.text}")
    budget = f"{max(seconds, SHORTEST_SECONDS):.0f}s"
    # -P: a folder named bench where this was started would be taken for ours
    command = [side.python or sys.executable, "-P", "-m", "parbench", "run", *words]
    command += ["--launches", "1", "--budget", budget, "--out", str(folder), "--json"]
    try:
        done = run_child(command, env={**os.environ, **side.variables}, catch_stderr=True)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    except KeyboardInterrupt:
        tell(f"interrupted: nothing more is launched, and what was measured is in {out}")
        raise SystemExit(4) from None  # click would end with 1, which is a regression
    if not (made := set(folder.glob("*/run.json")) - before):
        told = (done.stderr.strip().splitlines() or [f"parbench run ended with {done.returncode}"])[-1]
        raise UserError(f"side {side.name.upper()} has no run: {told.removeprefix('parbench: ')}")
    return load_run(made.pop().parent)


def check_words(words: Sequence[str], command: str = "ab") -> None:
    """Refuse options of ``parbench run`` that are not the user's to give here; ``UserError``."""
    for word in words:
        if word.partition("=")[0] in OURS:
            how = "leave it out after --, and give --budget and --out before"
            raise UserError(f"{word} is for parbench {command} to set: {how}")
