"""Watching the ranks of one launch: who said what, who died, who did not arrive."""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from parbench.bench.launch import control_channel as channel
from parbench.bench.launch.control_channel import Hello, Outcome
from parbench.bench.launch.flight_recorder import Waits, waits
from parbench.bench.launch.launchers import Launcher, local_state
from parbench.bench.launch.processes import exit_words
from parbench.bench.results.records import Culprit, CulpritCause, RankState, Status

START_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_SHORT_GRACE = 0.5
_TICK_SECONDS = 0.2


class RankMonitor:
    """Hears one gang's ranks for as long as it lives."""

    def __init__(self, server: channel.DriverServer, gang: Launcher, size: int) -> None:
        self.hellos: dict[int, Hello] = {}
        self.can_restart = gang.can_restart
        self._server, self._gang, self._size = server, gang, size
        self._started: dict[int, float] = {}
        self._reached: dict[int, int] = {}
        self._broken: dict[int, channel.Raised] = {}
        self._where: dict[int, channel.StatusReply] = {}
        self._gone: list[int] = []
        self._bye: dict[int, float] = {}
        self._finished: dict[int, Outcome] = {}
        self._last_finished = time.monotonic()

    def assemble(self, timeout_seconds: float) -> Outcome | None:
        deadline = time.monotonic() + timeout_seconds
        while len(self.hellos) < self._size:
            self._hear(deadline)
            if self._gone or self._gang.ended():
                return self._ended_early("before every rank had started")
            if time.monotonic() > deadline:
                missing = self._named([rank for rank in range(self._size) if rank not in self.hellos])
                return Outcome(status="failed", reason=f"{missing} did not start within {timeout_seconds:.0f} s")
        if other := next((hello for hello in self.hellos.values() if hello.size != self._size), None):
            told = f"rank {other.rank} is in a world of {other.size} ranks; {self._size} were asked for"
            return Outcome(status="failed", reason=told)
        self._last_finished = time.monotonic()
        return None

    def send(self, message: channel.FromDriver) -> None:
        for rank in self.hellos:
            self._server.send(rank, message)

    def outcome(self, index: int, timeout_seconds: float) -> Outcome:
        """Return what the ranks tell of the case at ``index``; where it has ``ranks``, the gang cannot go on."""
        while index not in self._finished:
            # before the first case ranks may take long to find each other
            patience = timeout_seconds if self._started else max(timeout_seconds, START_SECONDS)
            deadline = self._started.get(index, self._last_finished) + patience
            self._hear(deadline)
            if index in self._finished:
                break
            if self._broken or self._dead() or self._gang.ended():
                trouble = self._ended_early("while it was measured")
            elif time.monotonic() > deadline:
                trouble = self._hung(index, timeout_seconds)
            else:
                continue
            if index not in self._finished:  # it may end well while we ask what is wrong
                return trouble
        self._last_finished = time.monotonic()
        return self._finished.pop(index)

    def silent_hosts(self) -> set[str]:
        """Return the hosts none of whose ranks has answered when all were asked where they are."""
        answering = {self.hellos[rank].host for rank in self._where}
        return {hello.host for hello in self.hellos.values()} - answering if answering else set()

    def farewell(self, timeout_seconds: float) -> None:
        self._hear_until(lambda: len(self._bye) == self._size or self._gang.ended(), timeout_seconds)
        if self.can_restart:
            self._hear_until(self._gang.ended, timeout_seconds)

    def cpu_seconds(self) -> float | None:
        """Return the time of cores that all ranks took for their job, None where one has not done it."""
        return sum(self._bye.values()) if len(self._bye) == self._size else None

    def leftovers(self, timeout_seconds: float) -> list[str]:
        """Wait until the ranks that were ended are gone, and name those that stay."""
        self._hear_until(lambda: not self._there(), timeout_seconds)
        return [f"{self._named([rank])} (process {self.hellos[rank].pid} is {state})" for rank, state in self._there()]

    def _there(self) -> list[tuple[int, str]]:
        # of another host a rank is known by its connection; the driver itself may be a rank
        states = {rank: local_state(hello) for rank, hello in self.hellos.items() if hello.pid != os.getpid()}
        known = {rank: state or ("gone" if rank in self._gone else "connected") for rank, state in states.items()}
        return [(rank, state) for rank, state in sorted(known.items()) if state != "gone"]

    def _hear(self, deadline: float) -> None:
        match self._server.next(min(_TICK_SECONDS, deadline - time.monotonic())):
            case rank, Hello() as hello:
                self.hellos[rank] = hello
            case rank, channel.Started(index=index):
                self._started.setdefault(index, time.monotonic())
                self._reached[rank] = index
            case _, channel.Finished(index=index, outcome=outcome):
                self._finished[index] = outcome
            case rank, channel.Raised() as broken:
                self._broken[rank] = broken
            case rank, channel.StatusReply() as where:
                self._where[rank] = where
            case rank, channel.Done(cpu_seconds=seconds):
                self._bye[rank] = seconds
            case rank, None:
                self._gone.append(rank)

    def _hear_until(self, done: Callable[[], bool], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not done() and time.monotonic() < deadline:
            self._hear(deadline)

    def _dead(self) -> list[int]:
        return [rank for rank in self._gone if rank not in self._bye]

    def _ended_early(self, when: str) -> Outcome:
        """Explain the death or the exception of a rank; the first dead is the culprit, others fell with it."""
        grace = _GRACE_SECONDS if self._dead() else _SHORT_GRACE
        # where every rank has raised nobody dies
        self._hear_until(lambda: self._gang.ended() or len(self._broken) == self._size, grace)
        if self._gang.ended():  # what the ranks said last is still on its way
            self._hear_until(lambda: self.hellos.keys() <= set(self._gone), _SHORT_GRACE)
        exits = self._gang.exits()
        culprits: tuple[Culprit, ...] = ()
        if dead := [rank for rank in self._dead() if rank not in self._broken]:
            # a launcher ends the others by SIGTERM when one has failed
            codes = {rank: exits[rank] for rank in dead if exits.get(rank)}
            killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
            guilty = killed or [rank for rank, code in codes.items() if code > 0] or list(codes) or dead[:1]
            reason = f"{self._named(guilty)} died: {_exit_words(exits.get(guilty[0]))}"
            is_terminated = exits.get(guilty[0]) == -signal.SIGTERM
            culprits = self._culprits(guilty, "terminated" if is_terminated else "died")
            if exits.get(guilty[0]) == -signal.SIGABRT:  # C++ says why, such as std::bad_alloc
                reason = "; ".join(filter(None, [reason, self._gang.last_error()]))
        elif self._broken:
            rank, broken = next(iter(self._broken.items()))
            reason = f"{self._named([rank])} raised {broken.error}"
            culprits = self._culprits([rank], "raised")
        else:
            told = self._gang.last_error() or "their output is in the run's logs"
            reason = f"the ranks ended {when}; {told}"
        states = dict.fromkeys(self.hellos, "alive")
        states |= {rank: f"died: {_exit_words(exits.get(rank))}" for rank in self._gone}
        states |= {rank: f"raised {broken.error}" for rank, broken in self._broken.items()}
        stacks = {rank: told.stack for rank, told in self._broken.items()}
        return self._failure("failed", reason, states, stacks, culprits)

    def _hung(self, index: int, timeout_seconds: float) -> Outcome:
        self._where.clear()
        self.send(channel.StatusRequest())
        self._hear_until(lambda: [where.more for where in self._where.values()] == [False] * self._size, _GRACE_SECONDS)
        recorded = {rank: where.groups for rank, where in self._where.items() if where.groups is not None}
        waiting = waits(recorded) if len(recorded) == self._size else {}
        pending = sorted({group.name for groups in recorded.values() for group in groups.values() if group.name})
        coalescing_ranks = [
            rank for rank, groups in recorded.items() if any(group.is_last_coalesced for group in groups.values())
        ]
        culprits: tuple[Culprit, ...] = ()
        if late := self._late(index, waiting, coalescing_ranks, is_recorded=bool(waiting and pending)):
            told = f"{self._named(late)} did not arrive"
            culprits = self._culprits(late, "absent")
        elif not self._where:
            told = "no rank answers"
        elif _find_blamed(waiting):
            reason = "torch records a coalesced launch as done before it is"
            told = f"it is unknown which rank did not arrive, because {reason}; see their stacks"
        elif any(waiting.values()):
            deadlocked = [rank for rank in waiting if waiting[rank]]
            told = f"{self._named(deadlocked)} wait for one another; see their stacks"
            culprits = self._culprits(deadlocked, "waiting")
        elif waiting and pending:
            told = f"every rank has enqueued {', '.join(pending)}, which is not done; see their stacks"
        elif not any(where.communicates for where in self._where.values()):
            told = "every rank is in code of its own; see their stacks"
        elif any(reached >= index for reached in self._reached.values()):
            told = "every rank arrived and waits; see their stacks"
        else:
            told = "no rank has begun it; see their stacks"
        states = {rank: f"{where.phase}, step {where.steps}" for rank, where in self._where.items()}
        for rank, others in waiting.items():
            states[rank] += f", waits for {self._named(sorted(others))}" if others else ""
        for rank in self.hellos.keys() - self._where.keys():
            seen = local_state(self.hellos[rank])
            states[rank] = f"no answer (process is {seen})" if seen else "no answer"
        stacks = {rank: where.stack for rank, where in self._where.items()}
        reason = f"no end within {timeout_seconds:g} s: {told}"
        silent_ranks = self.hellos.keys() - self._where.keys()
        return self._failure("hang", reason, states, stacks, culprits, silent_ranks)

    def _late(self, index: int, waiting: Waits, coalescing_ranks: list[int], *, is_recorded: bool) -> list[int]:
        """Return the ranks that did not arrive where the others wait, by the first of these that tells ranks apart.

        They give no answer; by torch's record others wait for them and they for nobody; and where nothing is recorded:
        they are not in this case yet; have begun fewer steps; are not in torch.distributed. The record does not show
        whether ``coalescing_ranks`` wait in their last launch.
        """
        silent = [rank for rank in self.hellos if rank not in self._where]
        absent = [rank for rank in self.hellos if self._reached.get(rank, -1) < index]
        furthest = max((where.steps for where in self._where.values()), default=0)
        behind = [rank for rank, where in self._where.items() if where.steps < furthest]
        elsewhere = [rank for rank, where in self._where.items() if not where.communicates]
        blamed_ranks = _find_blamed(waiting)
        # gloo's sends and receives are not recorded: ranks may wait in one
        awaited = [rank for rank in blamed_ranks if rank in elsewhere]
        awaited = awaited or [rank for rank in blamed_ranks if rank not in coalescing_ranks]
        told = (silent, awaited) if is_recorded or blamed_ranks else (silent, absent, behind, elsewhere)
        return next((sorted(late) for late in told if 0 < len(late) < self._size), [])

    def _named(self, ranks: list[int]) -> str:
        hosts = {rank: hello.host for rank, hello in self.hellos.items()}
        several = len(set(hosts.values())) > 1
        names = [f"{rank} ({hosts[rank]})" if several and rank in hosts else str(rank) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def _culprits(self, ranks: Sequence[int], cause: CulpritCause) -> tuple[Culprit, ...]:
        return tuple(
            Culprit(rank=rank, host=self.hellos[rank].host, cause=cause) for rank in ranks if rank in self.hellos
        )

    def _failure(
        self,
        status: Status,
        reason: str,
        states: Mapping[int, str],
        stacks: Mapping[int, str],
        culprits: tuple[Culprit, ...],
        silent_ranks: Collection[int] = (),
    ) -> Outcome:
        ranks = [
            RankState(
                rank=rank,
                host=hello.host,
                pid=hello.pid,
                state=states[rank],
                stack=stacks.get(rank, ""),
                is_silent=rank in silent_ranks,
            )
            for rank, hello in sorted(self.hellos.items())
        ]
        return Outcome(status=status, reason=reason, ranks=ranks, culprits=culprits)


def _find_blamed(waiting: Waits) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody."""
    return [rank for rank in waiting if not waiting[rank] and any(rank in others for others in waiting.values())]


def _exit_words(code: int | None) -> str:
    return "its connection closed" if code is None else exit_words(code)
