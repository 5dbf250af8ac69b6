"""One launch of a side of ``parbench ab``: ``parbench run`` in processes of its own, with the side's variables."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.launch.processes import run_child
from bench.results.runs import Run, load_run
from bench.text import UserError
from reports.comparing.ab import Side

OURS = ("--launches", "--budget", "--out", "--json", "--format", "--resume")
"""Options of ``parbench run`` that ``parbench ab`` sets itself."""
DID_NOT_RUN = 4
SHORTEST_SECONDS = 30.0
"""The least that a launch is given, for starting ranks is part of it; it ends before where it is precise enough."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts launches under a folder, each within its time; ``tell`` hears of each before it begins."""

    out: Path
    words: Sequence[str]
    seconds: float
    tell: Callable[[str], None]

    def launch(self, side: Side) -> Run:
        """Measure one launch and return its run; ``UserError`` with the run's own words if there is none.

        SIGTERM and Ctrl-C stop the launch, which keeps what it has measured, and end this process with 4.
        """
        folder = self.out / side.name
        before = set(folder.glob("*/run.json"))
        self.tell(f"{side.name.upper()}: {side.text}")
        # -P: a folder named bench where this was started would be taken for ours
        command = [side.python or sys.executable, "-P", "-m", "parbench", "run", *self.words]
        command += [
            "--launches",
            "1",
            "--budget",
            f"{max(self.seconds, SHORTEST_SECONDS):.0f}s",
            "--out",
            str(folder),
            "--json",
        ]
        try:
            done = run_child(command, env={**os.environ, **side.variables}, catch_stderr=True)
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
        except KeyboardInterrupt:
            self.tell(f"interrupted: nothing more is launched, and what was measured is in {self.out}")
            raise SystemExit(DID_NOT_RUN) from None  # click would end with 1, which is a regression
        made = set(folder.glob("*/run.json")) - before
        if not made:
            told = (done.stderr.strip().splitlines() or [f"parbench run ended with {done.returncode}"])[-1]
            raise UserError(f"side {side.name.upper()} has no run: {told.removeprefix('parbench: ')}")
        return load_run(made.pop().parent)


def check_words(words: Sequence[str], command: str = "ab") -> None:
    """Refuse options of ``parbench run`` that are not the user's to give here; ``UserError``."""
    for word in words:
        if word.partition("=")[0] in OURS:
            raise UserError(
                f"{word} is for parbench {command} to set: leave it out after --, and give --budget and --out before"
            )
