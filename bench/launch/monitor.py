"""Watching the ranks of one launch: who said what, who died, who did not arrive."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.launch.control_channel import (
    Disconnected,
    Done,
    DriverServer,
    Finished,
    Hello,
    Job,
    Outcome,
    Raised,
    Started,
    StatusReply,
    StatusRequest,
)
from bench.launch.launchers import Launcher, local_state
from bench.results.records import RankState, Status

START_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_SHORT_GRACE = 0.5
_TICK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a case has no outcome, and where each rank was; the gang cannot go on."""

    status: Status
    reason: str
    ranks: tuple[RankState, ...] = ()


class RankMonitor:
    """Hears one gang's ranks for as long as it lives."""

    def __init__(self, server: DriverServer, gang: Launcher, size: int) -> None:
        self.hellos: dict[int, Hello] = {}
        self.can_restart = gang.can_restart
        self._server, self._gang, self._size = server, gang, size
        self._started: dict[int, float] = {}
        self._reached: dict[int, int] = {}
        self._broken: dict[int, Raised] = {}
        self._where: dict[int, StatusReply] = {}
        self._gone: list[int] = []
        self._bye: set[int] = set()
        self._finished: dict[int, Outcome] = {}
        self._last_finished = time.monotonic()

    def assemble(self, timeout_seconds: float) -> Failure | None:
        deadline = time.monotonic() + timeout_seconds
        while len(self.hellos) < self._size:
            self._hear(min(_TICK_SECONDS, deadline - time.monotonic()))
            if self._gone or self._gang.ended():
                return self._ended_early("before every rank had started")
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._size)) - set(self.hellos))
                told = f"{self._named(missing)} did not start within {timeout_seconds:.0f} s"
                return Failure(status="failed", reason=told)
        wrong = [hello for hello in self.hellos.values() if hello.size != self._size]
        if wrong:
            told = f"rank {wrong[0].rank} is in a world of {wrong[0].size} ranks; {self._size} were asked for"
            return Failure(status="failed", reason=told)
        self._last_finished = time.monotonic()
        return None

    @property
    def meeting(self) -> str:
        return self.hellos[0].meeting

    def send(self, job: Job) -> None:
        for rank in self.hellos:
            self._server.send(rank, job)

    def outcome(self, index: int, timeout_seconds: float) -> Outcome | Failure:
        while index not in self._finished:
            deadline = self._deadline(index, timeout_seconds)
            self._hear(min(_TICK_SECONDS, deadline - time.monotonic()))
            trouble = None if index in self._finished else self._trouble(index, deadline, timeout_seconds)
            if trouble is not None and index not in self._finished:  # it may end well while we ask what is wrong
                return trouble
        self._last_finished = time.monotonic()
        return self._finished[index]

    def _deadline(self, index: int, timeout_seconds: float) -> float:
        """Return when the case counts as hung; before the first one ranks may take long to find each other."""
        if index in self._started:
            return self._started[index] + timeout_seconds
        return self._last_finished + (timeout_seconds if self._started else max(timeout_seconds, START_SECONDS))

    def silent_hosts(self) -> set[str]:
        """Return the hosts none of whose ranks has answered when all were asked where they are."""
        answering = {self.hellos[rank].host for rank in self._where}
        return {hello.host for hello in self.hellos.values()} - answering if answering else set()

    def farewell(self, timeout_seconds: float) -> None:
        self._hear_until(lambda: len(self._bye) == self._size or self._gang.ended(), timeout_seconds)
        if self.can_restart:
            self._hear_until(self._gang.ended, timeout_seconds)

    def _trouble(self, index: int, deadline: float, timeout_seconds: float) -> Failure | None:
        if self._broken or self._dead():
            return self._ended_early(None)
        if self._gang.ended():
            return self._ended_early("while it was measured")
        return self._hung(index, timeout_seconds) if time.monotonic() > deadline else None

    def _dead(self) -> list[int]:
        return [rank for rank in self._gone if rank not in self._bye]

    def _hear(self, timeout_seconds: float) -> None:
        event = self._server.next(timeout_seconds)
        if event is None:
            return
        match event.what:
            case Hello() as hello:
                self.hellos[event.rank] = hello
            case Started(index=index):
                self._started.setdefault(index, time.monotonic())
                self._reached[event.rank] = index
            case Finished(index=index, outcome=outcome):
                self._finished[index] = outcome
            case Raised() as broken:
                self._broken[event.rank] = broken
            case StatusReply() as where:
                self._where[event.rank] = where
            case Done():
                self._bye.add(event.rank)
            case Disconnected():
                self._gone.append(event.rank)

    def _hear_until(self, done: Callable[[], bool], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not done() and time.monotonic() < deadline:
            self._hear(min(_TICK_SECONDS, deadline - time.monotonic()))

    def _ended_early(self, when: str | None) -> Failure:
        """Explain the death or the exception of a rank; the first dead is the culprit, others fell with it."""
        grace = _GRACE_SECONDS if self._dead() else _SHORT_GRACE
        # where every rank has raised nobody dies, and torchrun waits with us
        self._hear_until(lambda: self._gang.ended() or len(self._broken) == self._size, grace)
        if self._gang.ended():  # what the ranks said last is still on its way
            self._hear_until(lambda: self.hellos.keys() <= set(self._gone), _SHORT_GRACE)
        exits = self._gang.exits()
        dead = [rank for rank in self._dead() if rank not in self._broken]
        if dead:
            guilty = _guilty(dead, exits)
            reason = f"{self._named(guilty)} died: {_exit_words(exits.get(guilty[0]))}"
        elif self._broken:
            rank, broken = next(iter(self._broken.items()))
            reason = f"{self._named([rank])} raised {broken.error}"
        else:
            told = self._gang.last_error() or "their output is in the run's logs"
            reason = f"the ranks ended {when}; {told}"
        states = tuple(self._last_state(rank, exits) for rank in sorted(self.hellos))
        return Failure(status="failed", reason=reason, ranks=states)

    def _named(self, ranks: list[int]) -> str:
        hosts = {rank: hello.host for rank, hello in self.hellos.items()}
        several = len(set(hosts.values())) > 1
        names = [f"{rank} ({hosts[rank]})" if several and rank in hosts else str(rank) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"

    def _state(self, rank: int, state: str, stack: str = "") -> RankState:
        hello = self.hellos[rank]
        return RankState(rank=rank, host=hello.host, pid=hello.pid, state=state, stack=stack)

    def _last_state(self, rank: int, exits: dict[int, int]) -> RankState:
        broken = self._broken.get(rank)
        if broken is not None:
            return self._state(rank, f"raised {broken.error}", broken.stack)
        return self._state(rank, f"died: {_exit_words(exits.get(rank))}" if rank in self._gone else "alive")

    def _hung(self, index: int, timeout_seconds: float) -> Failure:
        self._where.clear()
        for rank in self.hellos:
            self._server.send(rank, StatusRequest())
        self._hear_until(lambda: len(self._where) == self._size, _GRACE_SECONDS)
        late = self._late(index)
        if late:
            told = f"{self._named(late)} did not arrive"
        elif not self._where:
            told = "no rank answers"
        elif any(reached >= index for reached in self._reached.values()):
            told = "every rank arrived and waits; see their stacks"
        else:
            told = "no rank has begun it; see their stacks"
        return Failure(
            status="hang",
            reason=f"no end within {timeout_seconds:g} s: {told}",
            ranks=tuple(self._hung_state(rank) for rank in sorted(self.hellos)),
        )

    def _late(self, index: int) -> list[int]:
        """Return the ranks that did not arrive where the others wait, by the first of these that tells ranks apart.

        They give no answer; are not in this case yet; have begun fewer steps; are not in torch.distributed.
        """
        silent = [rank for rank in self.hellos if rank not in self._where]
        absent = [rank for rank in self.hellos if self._reached.get(rank, -1) < index]
        furthest = max((where.steps for where in self._where.values()), default=0)
        behind = [rank for rank, where in self._where.items() if where.steps < furthest]
        elsewhere = [rank for rank, where in self._where.items() if not where.communicates]
        return next((sorted(late) for late in (silent, absent, behind, elsewhere) if 0 < len(late) < self._size), [])

    def _hung_state(self, rank: int) -> RankState:
        where = self._where.get(rank)
        if where is not None:
            return self._state(rank, f"{where.phase}, step {where.steps}", where.stack)
        seen = local_state(self.hellos[rank])
        return self._state(rank, f"no answer (process is {seen})" if seen else "no answer")


def _guilty(dead: list[int], exits: dict[int, int]) -> list[int]:
    """Return who of the dead is to blame: a launcher ends the others by SIGTERM when one has failed."""
    codes = {rank: exits[rank] for rank in dead if exits.get(rank)}
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    failed = [rank for rank, code in codes.items() if code > 0]
    return killed or failed or list(codes) or dead[:1]


def _exit_words(code: int | None) -> str:
    if code is None:
        return "its connection closed"
    names = {sign.value: sign.name for sign in signal.Signals}  # real-time signals have none
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
