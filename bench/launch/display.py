"""The progress of a run on standard error."""

import sys
import time
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress

from parbench.bench.launch.recorder import FAILED_STATUSES
from parbench.bench.results.records import Record, encode_record

_LINE_SECONDS = 5.0
"""The least time in seconds between lines of progress, if standard error is not a terminal."""


class Display(ExitStack):
    """Shows the progress of a run on standard error, and a line for each case that failed.

    On a terminal the progress is a bar with the remaining time.
    """

    def __init__(self, console: Console | None = None, *, as_json: bool = False) -> None:
        """Show the progress of a run that has yet to start its ranks.

        Args:
            console: the output of the progress, None for standard error.
            as_json: True if each record is also printed on standard output, as a line of JSON.
        """
        super().__init__()
        self._as_json = as_json
        # FORCE_COLOR makes no terminal of a pipe, which has lines instead of a bar.
        self._console = console or Console(
            stderr=True, soft_wrap=True, highlight=False, force_terminal=sys.stderr.isatty()
        )
        self._last_line = time.monotonic()
        self._bar = Progress(console=self._console, disable=not self._console.is_terminal)
        self.enter_context(self._bar)
        self._task = self._bar.add_task("starting ranks", total=1.0)

    def show_progress(self, title: str, share: float) -> None:
        """Show the completed fraction of the run and a text about the case that is being measured.

        ``title`` is the text about the case. ``share`` is the completed fraction, from 0 to 1. If
        standard error is not a terminal, a line is printed at most every 5 s.
        """
        self._bar.update(self._task, description=title, completed=share)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            self.print_message(f"{title}, {share:.0%} of the run")

    def print_message(self, message: str) -> None:
        """Print a text as a line on standard error."""
        self._console.print(message, markup=False)

    def show_record(self, record: Record) -> None:
        """Print the status and reason of a record if its case failed, hung or was wrong.

        A wrong result is not printed if it is the effect of an injected fault.
        With ``as_json`` the record is also printed on standard output.
        """
        if self._as_json:
            sys.stdout.buffer.write(encode_record(record))
            sys.stdout.buffer.flush()
        is_injected = record.status == "wrong" and record.injected.startswith("corrupt")
        if record.status in FAILED_STATUSES and not is_injected:
            self.print_message(f"{record.status}: {record.case.label}: {record.reason}")
