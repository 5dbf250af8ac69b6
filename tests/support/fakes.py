"""Ranks without torch for tests of the driver: real connections whose messages the test decides."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from parbench.bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    KEY_VARIABLE,
    DriverServer,
    Finished,
    FromRank,
    Hello,
    Job,
    Outcome,
    Raised,
    RankClient,
    Started,
    StatusReply,
)
from parbench.bench.launch.launchers import Launcher
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.plan import Plan, Skipped
from parbench.bench.results.records import Check
from parbench.bench.world.benchmark import Description

HOSTNAME = socket.gethostname()


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return once the condition is true; fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail the block in the main thread after this many seconds, so that no test can hang."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no end within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def make_fake_case(number: int = 0, name: str = "collective.all_reduce") -> Case:
    target = "parbench.bench.operations.collectives:all_reduce"
    return make_case(name, target, {"size_bytes": 1024, "number": number})


def make_outcome(seconds: float = 1e-3, **overrides: Any) -> Outcome:
    fields = {
        "status": "ok",
        "check": Check(passed=True, wrong=0),
        "stop": "precision",
        "seconds": [seconds] * 20,
        "skew_seconds": [1e-6] * 20,
        "visits": [2] * 10,
        "wall_seconds": 0.1,
    }
    return Outcome(**{**fields, **overrides})


def case_order(
    cases: Sequence[Case], seed: int, launch: int, more: int
) -> tuple[list[int], list[int]]:
    """Replace ``order_of_visits``: each case once, in the order of the plan."""
    return [*range(len(cases))], []


def make_status(**overrides: Any) -> StatusReply:
    fields = {"phase": "timed", "steps": 7, "communicates": True, "stack": "in all_reduce"}
    return StatusReply(**{**fields, **overrides})


def make_job(cases: Sequence[Case], **overrides: Any) -> Job:
    """Return a job that visits each case once; overrides are fields of the job or of its plan."""
    fields: dict[str, Any] = {
        "visits": [*range(len(cases))],
        "weights": [1.0] * len(cases),
        "budget_seconds": 1.0,
        "run_seconds": 60.0,
    }
    for name in Job.__struct_fields__:
        if name in overrides:
            fields[name] = overrides.pop(name)
    return Job(plan=make_plan(cases, **overrides), **fields)


def make_plan(
    cases: Iterable[Case], *, nproc: int = 2, skipped: Iterable[Skipped] = (), **overrides: Any
) -> Plan:
    fields = {
        "preset": "smoke",
        "cases": tuple(cases),
        "skipped": tuple(skipped),
        "nproc": nproc,
        "backend": "gloo",
        "device": "cpu",
        "launches": 1,
        "budget_seconds": 60.0,
        "timeout_seconds": 30.0,
    }
    return Plan(**{**fields, **overrides})


class NotingBenchmark:
    """A benchmark that only records the names of the methods that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")

    def reset(self) -> None:
        self.calls.append("reset")

    def check(self) -> int:
        return 0

    def describe(self) -> Description:
        return Description()

    def close(self) -> None:
        self.calls.append("close")


class FakeRank:
    """One rank's end of the control channel, driven by the test."""

    def __init__(
        self, variables: Mapping[str, str], rank: int, size: int = 2, **hello: Any
    ) -> None:
        fields = {"rank": rank, "size": size, "host": HOSTNAME, "pid": os.getpid()}
        self.rank = rank
        self._hello = Hello(**{**fields, "environment": {}, **hello})
        self.client = RankClient(variables[ADDRESS_VARIABLE], variables[KEY_VARIABLE])

    def say(self, *messages: FromRank) -> None:
        for message in messages:
            self.client.say(message)

    def say_hello(self) -> None:
        self.say(self._hello)

    def start(self, index: int) -> None:
        self.say(Started(index=index))

    def finish(self, index: int, outcome: Outcome | None = None) -> None:
        self.say(Finished(index=index, outcome=outcome or make_outcome()))

    def fail(self, index: int | None, error: str = "RuntimeError: fire") -> None:
        self.say(Raised(index=index, error=error, stack=f"the stack of rank {self.rank}"))

    def answer(self, *replies: StatusReply) -> None:
        """Answer each request for the status with these replies."""
        self.client.listen(answer=lambda: replies, on_gone=lambda: None)

    def receive_job(self) -> Job:
        message = self.client.hear()
        assert isinstance(message, Job), message
        return message

    def die(self) -> None:
        """Close the connection in both directions, as a process that ends does."""
        connection = self.client._connection
        # The driver may have closed its end before.
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


class FakeLauncher(Launcher):
    """A launcher whose end and exit codes the test decides; ``run`` starts a thread per rank."""

    def __init__(self, *, can_restart: bool = True) -> None:
        self.can_restart = can_restart
        self.has_ended = False
        self.exit_codes: dict[int, int] = {}
        self.error = ""
        self.ended_ranks: list[int] | None = None
        self._ranks: Sequence[FakeRank] = ()
        self._threads: list[threading.Thread] = []

    def run(
        self, ranks: Sequence[FakeRank], act: Callable[["FakeLauncher", FakeRank], None]
    ) -> None:
        self._ranks = ranks
        for rank in ranks:
            thread = threading.Thread(target=act, args=(self, rank), daemon=True)
            self._threads.append(thread)
            thread.start()

    def ended(self) -> bool:
        is_running = any(thread.is_alive() for thread in self._threads)
        return self.has_ended or bool(self._threads and not is_running)

    def exits(self) -> dict[int, int]:
        return self.exit_codes

    def last_error(self) -> str:
        return self.error

    def end(self, ranks: Iterable[Hello]) -> None:
        self.ended_ranks = sorted(hello.rank for hello in ranks)
        if self.can_restart:
            for rank in self._ranks:
                rank.die()


def connect_ranks(server: DriverServer, size: int = 2) -> list[FakeRank]:
    ranks = [FakeRank(server.variables(), rank, size) for rank in range(size)]
    for rank in ranks:
        rank.say_hello()
    return ranks
