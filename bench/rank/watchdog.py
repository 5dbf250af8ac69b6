"""A thread of each rank that reports where the rank is once a block exceeds its deadline."""

import faulthandler
import os
import socket
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.launch.flight_recorder import parse_groups
from parbench.bench.launch.messages import ALARM, Mailbox
from parbench.bench.rank.timing import Progress
from parbench.bench.world.torch_compat import dump_flight_records

HANG_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the exit code of a rank that hung and that no driver ended."""
_LOOK_SECONDS = 0.25
_CONNECT_SECONDS = 1.5
_END_SECONDS = 20.0
"""The seconds that a rank waits after its report for the driver to end the rank."""
_STACK_SECONDS = 1.0
"""The seconds after the deadline at which the interpreter's own watchdog dumps stacks."""


class Watchdog:
    """Watches the blocks of this rank.

    The first rank that exceeds its deadline raises an alarm, and all other ranks report at the same
    time. The thread sleeps in the first half of a block's time, so that it does not disturb
    measurements. If C code holds the interpreter lock, the thread cannot run. Then ``stack_file``
    gets the stacks, which ``faulthandler`` writes without the lock.
    """

    def __init__(self, rank: int, mailbox: Mailbox, progress: Progress, stack_file: Path) -> None:
        self._rank = rank
        self._mailbox = mailbox
        self._progress = progress
        self._stack_file = stack_file.open("w")
        self._index = -1
        self._timeout_seconds = 0.0
        self._began = 0.0
        self._handled_alarm: bytes | None = None
        self.store_address: tuple[str, int] | None = None
        """The address of the store of all ranks, once it is known."""
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def begin(self, index: int, timeout_seconds: float) -> None:
        """Set the deadline of the block ``index``, instead of the previous block's deadline."""
        is_sooner = timeout_seconds < self._timeout_seconds
        self._index = index
        self._timeout_seconds = timeout_seconds
        self._began = time.monotonic()
        if is_sooner:
            self._wake.set()
        faulthandler.dump_traceback_later(timeout_seconds + _STACK_SECONDS, file=self._stack_file)
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and cancel the deadline."""
        self._is_closed = True
        self._wake.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread.ident:
            self._thread.join()
        self._stack_file.close()

    def _watch(self) -> None:
        """Wait for the deadline or for an alarm, and report each time; return after ``close``."""
        while True:
            self._wake.clear()
            if self._is_closed:
                return
            elapsed = time.monotonic() - self._began
            if elapsed < self._timeout_seconds / 2:
                self._wake.wait(self._timeout_seconds / 2 - elapsed)
            elif elapsed > self._timeout_seconds or self._has_new_alarm():
                self._report()
            else:
                self._wake.wait(_LOOK_SECONDS)

    def _has_new_alarm(self) -> bool:
        """Return True if a rank has raised an alarm that this watchdog has not handled."""
        alarm = self._mailbox.get(ALARM)
        return alarm is not None and alarm != self._handled_alarm

    def _is_connected(self) -> bool:
        """Return True if this rank can connect to the store of all ranks, or if none is known."""
        if self.store_address is None:
            return True
        try:
            socket.create_connection(self.store_address, timeout=_CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _report(self) -> None:
        """Report the state of this rank, then wait until its block ends.

        The process exits with ``HANG_EXIT_CODE`` if neither the block ends nor the driver ends it
        in time.
        """
        index, began = self._index, self._began
        state = replace(self._progress.make_hang_report(), index=index)
        if not self._has_new_alarm():
            self._mailbox.put(ALARM, f"{self._rank} {index}".encode())
        self._mailbox.post(self._rank, replace(state, more=True))
        state = replace(state, is_connected=self._is_connected())
        groups, dumps = dump_flight_records()
        states = parse_groups(dumps, groups, self._progress.began_ns, time.time_ns())
        self._mailbox.post(self._rank, replace(state, groups=states))
        deadline = time.monotonic() + _END_SECONDS
        while began == self._began and not self._is_closed:
            if time.monotonic() > deadline:
                os._exit(HANG_EXIT_CODE)
            time.sleep(_LOOK_SECONDS)
        self._handled_alarm = self._mailbox.get(ALARM)
