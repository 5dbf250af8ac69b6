"""One start of all ranks, from their first messages to their end, as the driver follows it."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from parbench.bench.launch.failures import Evidence, explain_end, explain_hang, find_silent_ranks
from parbench.bench.launch.launchers import Ranks, find_process_state
from parbench.bench.launch.mailbox import JOB
from parbench.bench.launch.messages import Done, HangReport, Hello, Job, Outcome, Raised, Started
from parbench.bench.launch.outcomes import OutcomeReader

START_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_OWN_DEADLINE_SECONDS = 5.0
"""Ranks report a hang themselves. If none does, the driver reports it this long after their deadline."""


class Attempt:
    """One start of all ranks: passes them their job, follows their outcomes, and explains how they failed.

    ``folder`` holds the files of these ranks.
    """

    def __init__(self, ranks: Ranks, folder: Path, size: int) -> None:
        self.hellos: dict[int, Hello] = {}
        self._ranks = ranks
        self._folder = folder
        self._size = size
        self._reader = OutcomeReader(folder)
        self._started: dict[int, Started] = {}
        self._finished: dict[int, Outcome] = {}
        self._errors: dict[int, Raised] = {}
        self._reports: dict[int, HangReport] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._last_progress = time.monotonic()

    def wait_for_ranks(self, timeout_seconds: float) -> Outcome | None:
        """Wait until every rank has reported; return the failure if one does not."""
        deadline = time.monotonic() + timeout_seconds
        while len(self.hellos) < self._size:
            self._poll()
            if self._errors or self._ranks.have_ended():
                return self._explain_end("before every rank had started")
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._size) if rank not in self.hellos]
                names = self._collect_evidence().format_ranks(missing)
                return Outcome(status="failed", reason=f"{names} did not start within {timeout_seconds:.0f} s")
        for hello in self.hellos.values():
            if hello.size != self._size:
                reason = f"rank {hello.rank} is in a world of {hello.size} ranks; {self._size} were asked for"
                return Outcome(status="failed", reason=reason)
        return None

    def send_job(self, job: Job) -> None:
        self._ranks.mailbox.put(JOB, msgspec.json.encode(job))
        self._last_progress = time.monotonic()

    def wait_for_visit(self, index: int, timeout_seconds: float) -> Outcome:
        """Return the outcome of the visit at ``index``; if it has ``ranks``, they have failed and cannot continue."""
        while index not in self._finished:
            self._poll()
            # before the first visit ranks may take long to find each other
            patience = timeout_seconds if self._started else max(timeout_seconds, START_SECONDS)
            deadline = self._last_progress + patience + _OWN_DEADLINE_SECONDS
            if self._has_failed():
                self._poll()  # a rank that has completed its job reports so before it ends
            if index in self._finished:
                break
            if self._has_failed():
                failure = self._explain_end("while it was measured")
            elif self._reports or time.monotonic() > deadline:
                failure = self._explain_hang(index, timeout_seconds)
            else:
                continue
            if index not in self._finished:  # it may end well at the last moment
                started = self._started.get(index)
                return msgspec.structs.replace(failure, started=started.time if started else "")
            self._reports.clear()
        return self._finished.pop(index)

    def find_silent_hosts(self) -> set[str]:
        """Return the hosts none of whose ranks has reported a hang and can connect to others, if others can."""
        hosts = {hello.host for hello in self.hellos.values()}
        silent_ranks = find_silent_ranks(self._collect_evidence())
        answering = {hello.host for rank, hello in self.hellos.items() if rank not in silent_ranks}
        return hosts - answering if answering else set()

    def wait_for_end(self, timeout_seconds: float) -> None:
        """Wait until all ranks have completed their job, and then until they have ended."""
        self._poll_until(lambda: len(self._cpu_seconds) == self._size or self._ranks.have_ended(), timeout_seconds)
        self._poll_until(self._ranks.have_ended, timeout_seconds)

    def cpu_seconds(self) -> float | None:
        """Return the CPU time of all ranks for their job, None if one has not completed it."""
        return sum(self._cpu_seconds.values()) if len(self._cpu_seconds) == self._size else None

    def end(self) -> None:
        self._ranks.end(self.hellos.values())

    def list_remaining_processes(self, timeout_seconds: float) -> list[str]:
        """Wait until the processes of ranks have ended, and describe those that remain."""
        deadline = time.monotonic() + timeout_seconds
        while self._find_remaining() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        evidence = self._collect_evidence()
        return [
            f"{evidence.format_ranks([rank])} (process {self.hellos[rank].pid} is {state})"
            for rank, state in self._find_remaining().items()
        ]

    def _find_remaining(self) -> Mapping[int, str]:
        states = {rank: find_process_state(hello) for rank, hello in sorted(self.hellos.items())}
        return {rank: state for rank, state in states.items() if state not in (None, "gone")}

    def _poll(self) -> None:
        """Read what has arrived; wait a moment if nothing has."""
        messages = self._ranks.mailbox.receive()
        errors = {}
        for rank, message in messages:
            match message:
                case Hello():
                    self.hellos[rank] = message
                case Raised():
                    errors[rank] = message
                case HangReport():
                    self._reports[rank] = message
                case Done(cpu_seconds=seconds):
                    self._cpu_seconds[rank] = seconds
        self._errors.update(sorted(errors.items(), key=lambda item: item[1].seconds))
        if self._read_progress():
            self._last_progress = time.monotonic()
        elif not messages:
            time.sleep(_POLL_SECONDS)

    def _read_progress(self) -> bool:
        """Read the new lines of rank 0; return whether there are any."""
        num_lines = 0
        for line in self._reader.read():
            num_lines += 1
            if isinstance(line, Started):
                self._started[line.index] = line
            else:
                self._finished[line.index] = line.outcome
        return num_lines > 0

    def _poll_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition() and time.monotonic() < deadline:
            self._poll()

    def _has_failed(self) -> bool:
        return bool(self._errors) or self._has_dead_rank() or self._ranks.have_ended()

    def _has_dead_rank(self) -> bool:
        return any(rank not in self._cpu_seconds for rank in self._ranks.exit_codes())

    def _explain_end(self, when: str) -> Outcome:
        """Explain the end of ranks once all others have noticed it, or the exit code of the first is known."""
        grace = _GRACE_SECONDS if self._has_dead_rank() else self._ranks.exit_code_seconds
        self._poll_until(lambda: len(self._errors) + len(self._ranks.exit_codes()) >= self._size, grace)
        self._poll()
        return explain_end(self._collect_evidence(), when)

    def _explain_hang(self, index: int, timeout_seconds: float) -> Outcome:
        """Explain a hang once all ranks have reported that can."""
        states = self._reports
        self._poll_until(
            lambda: len(states) == self._size and not any(report.more for report in states.values()), _GRACE_SECONDS
        )
        return explain_hang(self._collect_evidence(), index, timeout_seconds)

    def _collect_evidence(self) -> Evidence:
        stacks = {}
        for rank in self.hellos:
            file = self._folder / f"rank-{rank}.stack"
            if file.exists():
                stacks[rank] = file.read_text(errors="replace")
        return Evidence(
            hellos=self.hellos,
            exit_codes=self._ranks.exit_codes(),
            last_error=self._ranks.last_error(),
            errors=self._errors,
            reports=self._reports,
            stacks=stacks,
            completed_ranks=self._cpu_seconds.keys(),
        )
