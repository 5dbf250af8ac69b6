"""One start of all ranks, from their first messages to their end, as seen by the driver.

The ranks measure a job. It consists of blocks, each a part of the samples of one case.
"""

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
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
    BlockResult,
    HangReport,
    Hello,
    Job,
    JobDone,
    Mailbox,
    Outcome,
    RankError,
)
from parbench.bench.machine.gpu import GpuReport, inspect_gpus, read_report

START_SECONDS = 120.0
"""The seconds that ranks may take to start, and again to connect to each other."""
_GRACE_SECONDS = 3.0
"""The seconds that the driver waits for further reports after the first failure or hang."""
_POLL_SECONDS = 0.05
"""The seconds between two checks for messages of the ranks."""
_OWN_DEADLINE_SECONDS = 5.0
"""The seconds after the timeout of a block at which the driver itself reports a hang.

Until then the ranks report it.
"""
_SLACK_BYTES = 256 << 20
"""The increase in bytes of a GPU's used memory that does not count as memory of a run."""


class Ranks(ABC):
    """The ranks of one start of all ranks, with which the driver communicates.

    The driver sends the ranks their job (the cases to measure), collects the result of each case,
    and explains failures. A subclass starts and kills the ranks. ``mailbox`` carries the messages
    of the ranks, and ``evidence`` stores those about their start, end and failure.
    """

    exit_code_seconds = 3.0
    """The seconds within which the launcher knows the exit code of a rank that has died."""

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
        self._outcomes: dict[int, Outcome] = {}
        """The results that rank 0 has sent and the driver has not used yet.

        The key is the position of the block in the job. The value is the result of its case so far.
        """
        self._deadline = 0.0
        """The ``time.monotonic()`` after which the driver counts the current block as hung."""

    @abstractmethod
    def get_exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ended ranks by rank, as far as known.

        A negative code is a signal.
        """

    @abstractmethod
    def get_last_error(self) -> str:
        """Return the last output line of the rank or launcher that failed, empty without one."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all ranks, also those that SIGSTOP has stopped."""

    def has_launcher_ended(self) -> bool:
        """Return True if the process that has started the ranks has ended.

        The result is always False for a launcher without such a process.
        """
        return False

    def have_ended(self) -> bool:
        """Return True if a rank has failed, all ranks have ended, or their launcher has ended."""
        codes = self.get_exit_codes()
        return self.has_launcher_ended() or any(codes.values()) or len(codes) == self._size

    def wait_for_start(self, timeout_seconds: float) -> Outcome | None:
        """Return None once every rank has sent its first message.

        If a rank fails or does not start within ``timeout_seconds``, the result is an outcome with
        status failed.
        """
        hellos = self.evidence.hellos
        deadline = time.monotonic() + timeout_seconds
        while len(hellos) < self._size:
            self._poll()
            if self.evidence.errors or self.have_ended():
                return self._explain_end("before every rank had started")
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._size) if rank not in hellos]
                names = self.evidence.format_ranks(missing)
                reason = f"{names} did not start within {timeout_seconds:.0f} s"
                return Outcome(status="failed", reason=reason)
        return None

    def send_job(self, job: Job) -> None:
        """Send all ranks their job, and begin the timeout of its first block of samples."""
        self.mailbox.put(JOB, msgspec.json.encode(job))
        # Before the first block ranks may take long to find each other.
        seconds = max(job.plan.timeout_seconds, START_SECONDS)
        self._deadline = time.monotonic() + seconds + _OWN_DEADLINE_SECONDS

    def wait_for_block(self, index: int, timeout_seconds: float) -> Outcome:
        """Wait until a block of samples has ended, and return the result of its case.

        The result includes the samples of earlier blocks of the case. If the ranks fail or the
        block exceeds its timeout, the result has the status failed or hang, and its ``ranks`` (the
        state of each rank) is not empty. Then the ranks cannot continue.

        Args:
            index: the position of the block in ``Job.blocks``.
            timeout_seconds: the time that a block may take.
        """
        while index not in self._outcomes:
            self._poll()
            if self._has_failed():
                self._poll()  # a rank that has completed its job reports so before it ends
            if index in self._outcomes:
                break
            if self._has_failed():
                failure = self._explain_end("while it was measured")
            elif self.evidence.reports or time.monotonic() > self._deadline:
                failure = self._explain_hang(index, timeout_seconds)
            else:
                continue
            if index not in self._outcomes:  # it may end well at the last moment
                return failure
            self.evidence.reports.clear()
        self._deadline = time.monotonic() + timeout_seconds + _OWN_DEADLINE_SECONDS
        return self._outcomes.pop(index)

    def wait_for_end(self, timeout_seconds: float) -> None:
        """Wait until all ranks have ended or one has failed, and read their last messages.

        The wait lasts at most ``timeout_seconds``.
        """
        self._poll_until(self.have_ended, timeout_seconds)
        self._poll()

    def end(self, timeout_seconds: float) -> list[str]:
        """Kill all ranks, wait until they have ended, and remove their messages.

        The wait lasts at most ``timeout_seconds``. Returns a phrase for each rank that still runs
        and for each GPU whose memory is still in use. The list is empty if nothing remains.
        """
        self.kill()
        deadline = time.monotonic() + timeout_seconds
        remaining = self._list_running_ranks()
        while remaining and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            remaining = self._list_running_ranks()
        shutil.rmtree(self._folder / MAIL, ignore_errors=True)
        for file in self._folder.iterdir():
            remove_if_empty(file)
        hellos = self.evidence.hellos
        if len(self.evidence.cpu_seconds) < len(hellos):
            # Only ranks that completed their job have freed their memory themselves.
            uuids = {hello.place.gpu for hello in hellos.values() if hello.place.gpu}
            remaining += wait_for_gpu_memory(uuids, deadline)
        return remaining

    def _list_running_ranks(self) -> list[str]:
        """Return a phrase for each rank whose process has not ended, in rank order.

        A phrase is for example ``rank 1 (process 4711 is stopped)``. Ranks on other hosts are left
        out, because this process cannot see them.
        """
        phrases = []
        for rank, hello in sorted(self.evidence.hellos.items()):
            state = find_process_state(hello)
            if state not in (None, "gone"):
                name = self.evidence.format_ranks([rank])
                phrases.append(f"{name} (process {hello.pid} is {state})")
        return phrases

    def _poll(self) -> None:
        """Store the messages that have arrived, or sleep for 0.05 s if there are none."""
        evidence = self.evidence
        messages = self.mailbox.receive()
        for rank, message in messages:
            match message:
                case BlockResult():
                    self._outcomes[message.index] = message.outcome
                case Hello():
                    evidence.hellos[rank] = message
                case RankError():
                    evidence.errors[rank] = message
                case HangReport():
                    evidence.reports[rank] = message
                case JobDone():
                    evidence.cpu_seconds[rank] = message.cpu_seconds
        if not messages:
            time.sleep(_POLL_SECONDS)

    def _poll_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        """Store arriving messages until ``condition()`` is true or the timeout is over."""
        deadline = time.monotonic() + timeout_seconds
        while not condition() and time.monotonic() < deadline:
            self._poll()

    def _has_failed(self) -> bool:
        """Return True if the ranks cannot continue their job.

        A rank has then raised an exception or ended early, or all ranks or their launcher have
        ended.
        """
        return bool(self.evidence.errors) or self.have_ended() or self._has_dead_rank()

    def _has_dead_rank(self) -> bool:
        """Return True if a rank has ended before it has measured all of its cases."""
        return not self.get_exit_codes().keys() <= self.evidence.cpu_seconds.keys()

    def _explain_end(self, when: str) -> Outcome:
        """Wait for messages about a failure, and return a result of the case that explains it.

        The wait ends when each rank has reported an exception or has an exit code. It lasts at most
        3 s if a rank is known to have died, otherwise at most ``exit_code_seconds``. ``when`` is a
        phrase about the time of the failure, such as ``while it was measured``.
        """
        self.mailbox.put("probe", b"x")  # ranks also end if their messages cannot be written
        errors = self.evidence.errors
        grace = _GRACE_SECONDS if self._has_dead_rank() else self.exit_code_seconds
        self._poll_until(lambda: len(errors) + len(self.get_exit_codes()) >= self._size, grace)
        self._poll()
        self.evidence.exit_codes = self.get_exit_codes()
        self.evidence.last_error = self.get_last_error()
        return explain_end(self.evidence, when)

    def _explain_hang(self, index: int, timeout_seconds: float) -> Outcome:
        """Wait for the reports of all ranks about a hang, and return a result that explains it.

        The wait lasts at most 3 s. ``index`` is the position in the job of the block of samples
        that hangs. ``timeout_seconds`` is the timeout that the block has exceeded.
        """
        evidence = self.evidence
        self._poll_until(lambda: evidence.count_complete_reports() == self._size, _GRACE_SECONDS)
        stacks = {}
        for rank in evidence.hellos:
            file = self._folder / f"rank-{rank}.stack"
            if file.exists():
                stacks[rank] = file.read_text(errors="replace")
        return explain_hang(evidence, index, timeout_seconds, stacks)


def remove_if_empty(file: Path) -> None:
    """Remove a file if it is empty. A file that is missing or cannot be removed is ignored."""
    with suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()


def wait_for_gpu_memory(uuids: Collection[str], deadline: float) -> list[str]:
    """Wait until each GPU has at most 256 MiB more memory in use than before the run.

    Returns a phrase such as ``1.2 GiB on GPU-...`` for each GPU of this host that still has more in
    use at the deadline.

    Args:
        uuids: the UUIDs of the GPUs.
        deadline: the ``time.monotonic()`` at which the wait ends.
    """
    if not uuids:
        return []
    before = _get_used_bytes(inspect_gpus(os.environ))
    while True:
        used_bytes = _get_used_bytes(read_report(os.environ, "sample"))
        remains = []
        for uuid in used_bytes.keys() & set(uuids) & before.keys():
            extra_bytes = used_bytes[uuid] - before[uuid]
            if extra_bytes > _SLACK_BYTES:
                remains.append(f"{extra_bytes / 2**30:.1f} GiB on {uuid}")
        if not remains or time.monotonic() > deadline:
            return remains
        time.sleep(0.5)


def _get_used_bytes(report: GpuReport) -> dict[str | None, int]:
    """Return the bytes of memory in use on each GPU, by UUID of the GPU.

    GPUs for which the number is unknown are left out.
    """
    memory = {gpu.uuid: gpu.memory_used_bytes for gpu in report.gpus}
    return {uuid: num_bytes for uuid, num_bytes in memory.items() if num_bytes is not None}
