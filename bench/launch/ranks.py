"""One start of all ranks, from their first messages to their end, as seen by the driver.

The ranks measure a job. It consists of blocks, each a part of the samples of one case.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec

from parbench.bench.files import convert_write_errors
from parbench.bench.launch.failures import (
    Evidence,
    explain_end,
    explain_hang,
    find_process_state,
)
from parbench.bench.launch.messages import (
    JOB,
    MAIL,
    HangReport,
    Hello,
    Job,
    JobDone,
    Mailbox,
    Outcome,
    RankError,
    RankExit,
    StepBegun,
)

START_SECONDS = 120.0
"""The seconds that ranks may take to start, and again to connect to each other."""
_GRACE_SECONDS = 2.0
"""The seconds that the driver waits for further reports after the first failure or hang."""
_POLL_SECONDS = 0.05
"""The seconds between two checks for messages of the ranks."""
_TIMEOUTS_TO_DEADLINE = 1.5
"""The timeouts after the last message at which the driver itself reports a hang.

Until then the ranks report it. Half of a timeout may pass before a begun step is reported.
"""
_OWN_DEADLINE_SECONDS = 5.0
"""The seconds that the driver waits in addition to ``_TIMEOUTS_TO_DEADLINE``."""
_EXIT_TIMEOUT_SECONDS = 10.0
"""The seconds for ranks to exit by themselves after their last case."""
_GONE_SECONDS = 30.0
"""The seconds in which killed ranks must end before the next ranks start."""


class Ranks(ABC):
    """The ranks of one start of all ranks, with which the driver communicates.

    The driver sends the ranks their job (the cases to measure), collects the result of each case,
    and explains failures. A subclass starts and kills the ranks. ``mailbox`` carries the messages
    of the ranks, and ``evidence`` stores those about their start, end and failure.
    """

    def __init__(self, size: int, folder: Path) -> None:
        """Create the folder for the messages and logs of these ranks.

        ``size`` is the number of ranks. Raises ``UserError`` if the folder cannot be created.
        """
        with convert_write_errors(folder):
            folder.mkdir(parents=True)
        self.evidence = Evidence()
        self.mailbox = Mailbox(folder)
        self._size = size
        self._folder = folder
        self._outcomes: list[Outcome] = []
        """The results of blocks that rank 0 has sent and the driver has not used yet, in order."""
        self._exit_codes: dict[int, int] = {}
        """The exit codes of the ranks that have ended, by rank."""
        self._has_launcher_ended = False
        """Whether the launcher had ended before the latest messages were read."""
        self._timeout_seconds = 0.0
        """The time that a step may take."""
        self._deadline = 0.0
        """The ``time.monotonic()`` after which the driver counts the current step as hung."""
        self._is_late = False
        """Whether the deadline had passed before the latest messages were read."""

    @abstractmethod
    def get_exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ended ranks by rank, as far as known.

        A negative code is a signal.
        """

    def get_last_error(self) -> str:
        """Return the last output line of the failed rank or launcher, empty if there is none."""
        return ""

    @abstractmethod
    def kill(self) -> None:
        """Kill all ranks, also those that SIGSTOP has stopped."""

    def has_launcher_ended(self) -> bool:
        """Return True if the process that has started the ranks has ended.

        The result is always False for a launcher without such a process.
        """
        return False

    def wait_for_start(self) -> Outcome | None:
        """Wait until every rank has sent its first message, and then return None.

        If a rank fails or does not start within 120 s, the result is an outcome with status failed.
        """
        hellos = self.evidence.hellos
        self._poll_until(lambda: len(hellos) == self._size or self._has_failed(), START_SECONDS)
        if len(hellos) == self._size:
            return None
        if self._has_failed():
            return self._explain_end()
        missing = [rank for rank in range(self._size) if rank not in hellos]
        reason = f"did not start within {START_SECONDS:.0f} s"
        return Outcome(status="failed", reason=f"{self.evidence.format_ranks(missing)} {reason}")

    def send_job(self, job: Job) -> None:
        """Send all ranks their job, and begin the timeout of its first block of samples."""
        self.mailbox.put(JOB, msgspec.json.encode(job))
        self._timeout_seconds = job.plan.timeout_seconds
        # Before the first block ranks may take long to find each other.
        self._restart_timeout(max(self._timeout_seconds, START_SECONDS))

    def wait_for_block(self) -> Outcome:
        """Wait until the next block of samples has ended, and return the result of its case.

        The result includes the samples of earlier blocks of the case. If the ranks fail or a
        step exceeds its timeout, the result has the status failed or hang, and its ``ranks`` (the
        state of each rank) is not empty. Then the ranks cannot continue.
        """
        while not self._outcomes:
            if self._has_failed():
                failure = self._explain_end()
                if not self._outcomes:  # which may arrive late through a shared file system
                    return failure
            elif self.evidence.reports or self._is_late:
                return self._explain_hang()
            self._poll()
        self.evidence.reports.clear()
        self._restart_timeout()
        return self._outcomes.pop(0)

    def _restart_timeout(self, more_seconds: float = 0.0) -> None:
        """Set the time at which a hang is reported, later by ``more_seconds``."""
        seconds = more_seconds + _TIMEOUTS_TO_DEADLINE * self._timeout_seconds
        self._deadline = time.monotonic() + seconds + _OWN_DEADLINE_SECONDS
        self._is_late = False

    def wait_for_end(self) -> None:
        """Wait until all ranks have exited or one has failed, at most 10 s."""
        self._poll_until(
            lambda: len(self._exit_codes) == self._size or self._has_failed(),
            _EXIT_TIMEOUT_SECONDS,
        )

    def end(self) -> None:
        """Kill all ranks, wait until those of this host have ended, and remove their messages.

        The wait lasts at most 30 s, because a process may hang in a kernel driver.
        """
        self.kill()
        deadline = time.monotonic() + _GONE_SECONDS
        for hello in self.evidence.hellos.values():
            while find_process_state(hello) not in (None, "gone") and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        shutil.rmtree(self._folder / MAIL, ignore_errors=True)

    def _poll(self) -> None:
        """Store the messages that have arrived, or sleep for 0.05 s if there are none."""
        evidence = self.evidence
        # Messages are read last, because they may precede an end or answer a deadline that has
        # passed while this process was stopped.
        self._exit_codes = evidence.exits | self.get_exit_codes()
        self._has_launcher_ended = self.has_launcher_ended()
        self._is_late = time.monotonic() > self._deadline
        messages = self.mailbox.receive()
        for rank, message in messages:
            match message:
                case Outcome():
                    self._outcomes.append(message)
                case Hello():
                    evidence.hellos[rank] = message
                case RankError():
                    evidence.errors[rank] = message
                case HangReport():
                    evidence.reports[rank] = message
                case StepBegun():
                    self._restart_timeout()
                case JobDone():
                    evidence.cpu_seconds[rank] = message.cpu_seconds
                case RankExit():
                    evidence.exits[rank] = message.code
        if not messages:
            time.sleep(_POLL_SECONDS)

    def _poll_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        """Store arriving messages until ``condition()`` is true or the timeout is over."""
        deadline = time.monotonic() + timeout_seconds
        while not condition() and time.monotonic() < deadline:
            self._poll()

    def _has_failed(self) -> bool:
        """Return True if the ranks cannot continue their job.

        Then a rank has raised an exception or has ended before it measured all of its cases, or
        their launcher has ended.
        """
        is_dead = not self._exit_codes.keys() <= self.evidence.cpu_seconds.keys()
        return bool(self.evidence.errors) or is_dead or self._has_launcher_ended

    def _explain_end(self) -> Outcome:
        """Wait for messages about a failure, and return a result of the case that explains it.

        The wait lasts 2 s.
        """
        self.mailbox.put("probe", b"x")  # ranks also end if their messages cannot be written
        self._poll_until(lambda: False, _GRACE_SECONDS)
        return explain_end(self.evidence, self._exit_codes, self.get_last_error())

    def _explain_hang(self) -> Outcome:
        """Wait for the reports of all ranks about a hang, and return a result that explains it.

        The wait lasts 2 s.
        """
        self._poll_until(lambda: False, _GRACE_SECONDS)
        stacks = {}
        for rank in self.evidence.hellos:
            file = self._folder / f"rank-{rank}.stack"
            if file.exists():
                stacks[rank] = file.read_text(errors="replace")
        return explain_hang(self.evidence, self._timeout_seconds, stacks)
