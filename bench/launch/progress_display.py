"""How a run goes, on stderr: a bar with the expected end on a terminal, plain lines elsewhere."""

import sys
import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.plan.cases import Case
from bench.results.records import Record, encode
from bench.text import format_duration


class Display:
    """Shows progress; what went badly is a line of its own at once, with ``as_json`` every record on stdout too."""

    def __init__(self, total: int, console: Console | None = None, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self._total, self._done = total, 0
        self._began = self._said = time.monotonic()
        self._prefix = ""
        done = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*done, *left, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting ranks", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def launch(self, number: int, of: int, cases: int) -> None:
        self._prefix = f"launch {number}/{of}"
        self._bar.update(self._task, description=f"{self._prefix}: starting ranks")
        self._plain(f"{self._prefix}: {cases} cases")

    def case(self, case: Case) -> None:
        self._bar.update(self._task, description=f"{self._prefix}: {case.name}")

    def record(self, record: Record) -> None:
        if self._as_json:
            sys.stdout.buffer.write(encode(record))
            sys.stdout.buffer.flush()
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        if record.status in ("failed", "hang", "wrong"):
            self._console.print(f"{record.status}: {record.case.label}: {record.reason}", markup=False)
        elif time.monotonic() - self._said > 5.0:
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            self._plain(f"{self._prefix}: {self._done} of {self._total} cases, about {format_duration(left)} left")

    def stopped(self, why: str, path: Path) -> None:
        self._bar.stop()
        told = f"{why}: {self._done} of {self._total} cases measured; go on with: parbench run --resume {path}"
        self._console.print(told, markup=False)

    def _plain(self, line: str) -> None:
        self._said = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, markup=False)
