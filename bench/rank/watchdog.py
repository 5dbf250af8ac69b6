"""A thread of each rank that reports the rank's position when a step exceeds its timeout."""

import faulthandler
import os
import socket
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.launch.flight_recorder import parse_groups
from parbench.bench.launch.messages import ALARM, Mailbox, StepBegun
from parbench.bench.rank.progress import Progress
from parbench.bench.world.torch_compat import dump_flight_records

HANG_EXIT_CODE = 75
"""The exit code of a rank that hung and that the driver did not end in time.

It is EX_TEMPFAIL of sysexits.h.
"""
_LOOK_SECONDS = 0.25
"""The seconds between two checks whether another rank hangs or the step has ended."""
_CONNECT_SECONDS = 1.5
"""The seconds that a connection to the ranks' store may take before it counts as broken."""
_END_SECONDS = 20.0
"""The seconds after its report for which a rank waits until the driver ends it."""
_STACK_SECONDS = 1.0
"""The seconds after the timeout at which ``faulthandler`` writes the stacks of all threads."""


class Watchdog:
    """A thread of each rank that sends the driver a report when a measurement takes too long.

    The timeout begins with each block (a part of the samples of one case) and begins again with
    each step, which all ranks begin together. When a rank exceeds it, the thread sends a report to
    the driver and publishes an alarm for the other ranks. The driver is the process that started
    the ranks. The threads of the other ranks read the alarm and report too. The reports contain the
    position of the rank in its case and its Python stack. The driver infers the cause of the hang
    from the reports of all ranks.

    The thread sleeps for half of the timeout, so that it rarely disturbs measurements. If C code
    holds the interpreter lock, the thread cannot run. Then ``faulthandler``, which needs no lock,
    writes the Python stacks to ``stack_file``.
    """

    def __init__(self, rank: int, mailbox: Mailbox, progress: Progress, stack_file: Path) -> None:
        """Prepare the thread, which starts with the first block.

        Args:
            rank: the global rank of this process.
            mailbox: carries the reports to the driver, and the alarm to all other ranks.
            progress: the position of the measuring thread in its case.
            stack_file: the file for stacks of a rank whose watchdog cannot run.
        """
        self._rank = rank
        self._mailbox = mailbox
        self._progress = progress
        self._stack_file = stack_file.open("w")
        self.store_address: tuple[str, int] | None = None
        """The host and port of the torch store that rank 0 serves, None without such a store."""
        self._index = -1
        """The index of the current block in the job, -1 before the first block."""
        self._timeout_seconds = 0.0
        self._began = 0.0
        """The ``Progress.seconds`` from which ``faulthandler`` counts the timeout."""
        self._began_ns = 0
        """The time at which the current block began, in ns since the epoch."""
        self._handled_alarm: bytes | None = None
        """The content of the last alarm that this rank has answered by a report."""
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def begin(self, index: int, timeout_seconds: float) -> None:
        """Begin the timeout of a new block of samples, and end that of the previous block.

        ``index`` is the position of the block in the job, -1 for the time before the first block.
        The timeout is counted from this call and from each later step.
        """
        self._index = index
        self._timeout_seconds = timeout_seconds
        self._progress.restart()
        self._began = self._progress.seconds
        self._began_ns = time.time_ns()
        self._wake.set()
        faulthandler.dump_traceback_later(timeout_seconds + _STACK_SECONDS, file=self._stack_file)
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread, cancel the dump of stacks and close its file."""
        self._is_closed = True
        self._wake.set()
        if self._thread.ident:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stack_file.close()

    def _watch(self) -> None:
        """Run the thread: report to the driver if a step exceeds its timeout on this or another rank.

        A step that has begun is reported to the driver too. Returns after ``close``.
        """
        while True:
            self._wake.clear()
            if self._is_closed:
                return
            if self._began != self._progress.seconds:
                self._restart()
            elapsed = time.monotonic() - self._began
            if elapsed < self._timeout_seconds / 2:
                self._wake.wait(self._timeout_seconds / 2 - elapsed)
            elif elapsed > self._timeout_seconds or self._has_new_alarm():
                self._report()
            else:
                self._wake.wait(_LOOK_SECONDS)

    def _restart(self) -> None:
        """Begin the timeout again with the last step, also that of ``faulthandler``.

        Rank 0 reports the step to the driver.
        """
        self._began = self._progress.seconds
        seconds = self._timeout_seconds + _STACK_SECONDS
        faulthandler.dump_traceback_later(seconds, file=self._stack_file)
        if self._rank == 0:
            self._mailbox.post(0, StepBegun())

    def _has_new_alarm(self) -> bool:
        """Return True if a rank has published an alarm that this rank has not yet reported on."""
        alarm = self._mailbox.get(ALARM)
        return alarm is not None and alarm != self._handled_alarm

    def _is_connected(self) -> bool:
        """Return True if this rank can connect to the torch store of rank 0 within 1.5 s.

        The result is also True if ``store_address`` is None.
        """
        if self.store_address is None:
            return True
        try:
            socket.create_connection(self.store_address, timeout=_CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _report(self) -> None:
        """Send the driver two reports about this rank, then wait until its step ends.

        The first report has the stack and the number of steps. The second one adds the state of the
        process groups from torch's flight recorder. If the step has not ended after 20 s and the
        driver has not ended this process, the process exits with code 75.
        """
        index, began = self._index, self._progress.seconds
        state = replace(self._progress.make_hang_report(), index=index)
        if not self._has_new_alarm():
            self._mailbox.put(ALARM, f"{self._rank} {index}".encode())
        self._mailbox.post(self._rank, state)
        state = replace(state, is_connected=self._is_connected())
        groups, dumps = dump_flight_records()
        states = parse_groups(dumps, groups, self._began_ns)
        self._mailbox.post(self._rank, replace(state, groups=states))
        deadline = time.monotonic() + _END_SECONDS
        while began == self._progress.seconds and not self._is_closed:
            if time.monotonic() > deadline:
                os._exit(HANG_EXIT_CODE)
            time.sleep(_LOOK_SECONDS)
        self._handled_alarm = self._mailbox.get(ALARM)
