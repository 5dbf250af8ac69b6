"""The progress of a run on standard error."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from parbench.bench.launch.recorder import FAILED_STATUSES
from parbench.bench.results.records import Record, encode_record

_LINE_SECONDS = 5.0
"""The seconds between lines of progress if the output is not a terminal."""


class Display(ExitStack):
    """Shows the progress of a run and its remaining time, and one line for each case that failed.

    With ``as_json`` every record is also printed on stdout. With ``quiet`` no progress is shown.
    """

    def __init__(
        self,
        num_cases: int,
        console: Console | None = None,
        *,
        as_json: bool = False,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        self._as_json = as_json
        # FORCE_COLOR makes no terminal of a pipe, which has lines instead of a bar.
        self._console = console or Console(
            stderr=True, soft_wrap=True, highlight=False, force_terminal=sys.stderr.isatty()
        )
        self._console.quiet = quiet
        self._num_cases = num_cases
        self._num_records = 0
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self.enter_context(self._bar)
        self._task = self._bar.add_task("starting ranks", total=1.0)

    def show_progress(self, title: str, share: float) -> None:
        """Show what is measured, and the completed share of the run.

        If the output is not a terminal, it gets a line every few seconds instead of a bar.
        """
        self._bar.update(self._task, description=title, completed=share)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            self.print_message(f"{title}, {share:.0%} of the run")

    def print_message(self, message: str) -> None:
        self._console.print(message, markup=False)

    def show_record(self, record: Record) -> None:
        """Count a record, print its failure and, with ``as_json``, print the record on stdout."""
        if self._as_json:
            sys.stdout.buffer.write(encode_record(record))
            sys.stdout.buffer.flush()
        self._num_records += 1
        if record.status in FAILED_STATUSES:
            self.print_message(f"{record.status}: {record.case.label}: {record.reason}")

    def show_stop(self, reason: str, path: Path) -> None:
        """Print the reason why the run in ``path`` stopped early, and the command to resume it."""
        self.close()
        num_measured = f"{self._num_records} of {self._num_cases} cases measured"
        self.print_message(f"{reason}: {num_measured}; go on with: parbench run --resume {path}")
