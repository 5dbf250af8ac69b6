"""Ranks without torch for tests of the driver: a real connection each, and they say what the test tells them to."""

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
    Done,
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


def wait_until(true: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail, in the main thread, what waits for ever: no test of a hang may hang itself."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_fake_case(number: int = 0, name: str = "collective.all_reduce") -> Case:
    return make_case(
        name,
        "parbench.bench.operations.collectives:all_reduce",
        {"size_bytes": 1024, "number": number},
    )


def make_outcome(seconds: float = 1e-3, **more: Any) -> Outcome:
    samples = {"seconds": [seconds] * 20, "skew_seconds": [1e-6] * 20, "visits": [2] * 10}
    fields = {"stop": "precision", **samples, "wall_seconds": 0.1}
    return Outcome(**{"status": "ok", "check": Check(passed=True, wrong=0), **fields, **more})


def case_order(
    cases: Sequence[Case], seed: int, launch: int, more: int
) -> tuple[list[int], list[int]]:
    """Stand for ``order_of_visits``: every case once."""
    return [*range(len(cases))], []


def make_status(**more: Any) -> StatusReply:
    return StatusReply(
        **{"phase": "timed", "steps": 7, "communicates": True, "stack": "in all_reduce", **more}
    )


def make_job(cases: Sequence[Case], **more: Any) -> Job:
    own = {name: more.pop(name) for name in Job.__struct_fields__ if name in more}
    return Job(
        **{
            "visits": [*range(len(cases))],
            "weights": [1.0] * len(cases),
            "budget_seconds": 1.0,
            "run_seconds": 60.0,
            **own,
        },
        plan=make_plan(cases, **more),
    )


def make_plan(
    cases: Iterable[Case], *, nproc: int = 2, skipped: Iterable[Skipped] = (), **more: Any
) -> Plan:
    fields = {
        "preset": "smoke",
        "backend": "gloo",
        "device": "cpu",
        "launches": 1,
        "budget_seconds": 60.0,
    }
    given = {
        "cases": tuple(cases),
        "skipped": tuple(skipped),
        "nproc": nproc,
        "timeout_seconds": 30.0,
    }
    return Plan(**{**fields, **given, **more})


class NotingBenchmark:
    """A benchmark that does nothing and notes what it is asked."""

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
    """One rank's end of the channel, driven by hand."""

    def __init__(
        self, variables: Mapping[str, str], rank: int, size: int = 2, **hello: Any
    ) -> None:
        self.rank = rank
        usual = {
            "rank": rank,
            "size": size,
            "host": HOSTNAME,
            "pid": os.getpid(),
            "environment": {},
        }
        self._hello = Hello(**{**usual, **hello})
        self.line = RankClient(variables[ADDRESS_VARIABLE], variables[KEY_VARIABLE])

    def say(self, *messages: FromRank) -> None:
        for message in messages:
            self.line.say(message)

    def hello(self) -> None:
        self.say(self._hello)

    def start(self, index: int) -> None:
        self.say(Started(index=index))

    def finish(self, index: int, what: Outcome | None = None) -> None:
        self.say(Finished(index=index, outcome=what or make_outcome()))

    def break_(self, index: int | None, error: str = "RuntimeError: fire") -> None:
        self.say(Raised(index=index, error=error, stack=f"the stack of rank {self.rank}"))

    def answer(self, *what: StatusReply) -> None:
        self.line.listen(answer=lambda: what, on_gone=lambda: None)

    def job(self) -> Job:
        heard = self.line.hear()
        assert isinstance(heard, Job), heard
        return heard

    def work(
        self, each: Callable[[int, Case], Outcome] = lambda index, make_fake_case: make_outcome()
    ) -> None:
        make_job = self.job()
        for number, place in enumerate(make_job.visits):
            self.start(number)
            told = each(number, make_job.plan.cases[place])
            if self.rank == 0:
                self.finish(number, told)
        self.say(Done())

    def die(self) -> None:
        """Close the connection in both directions, as a process that ends does."""
        connection = self.line._connection
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as duplicate,
        ):  # the hub may be gone
            duplicate.shutdown(socket.SHUT_RDWR)


class FakeLauncher(Launcher):
    """A gang whose end and exit codes the test decides; with ``act``, each rank is a thread that does it."""

    def __init__(self, *, can_restart: bool = True) -> None:
        self.can_restart = can_restart
        self.has_ended = False
        self.known_exits: dict[int, int] = {}
        self.said = ""
        self.told_to_end: list[int] | None = None
        self._ranks: Sequence[FakeRank] = ()
        self._threads: list[threading.Thread] = []

    def run(
        self, ranks: Sequence[FakeRank], act: Callable[["FakeLauncher", FakeRank], None]
    ) -> None:
        self._ranks = ranks
        self._threads = [
            threading.Thread(target=act, args=(self, rank), daemon=True) for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    def ended(self) -> bool:
        done = bool(self._threads) and not any(thread.is_alive() for thread in self._threads)
        return self.has_ended or done

    def exits(self) -> dict[int, int]:
        return self.known_exits

    def last_error(self) -> str:
        return self.said

    def end(self, ranks: Iterable[Hello]) -> None:
        self.told_to_end = sorted(hello.rank for hello in ranks)
        for rank in self._ranks if self.can_restart else ():
            rank.die()


def connect_ranks(hub: DriverServer, size: int = 2, **hello: Any) -> list[FakeRank]:
    ranks = [FakeRank(hub.variables(), rank, size, **hello) for rank in range(size)]
    for rank in ranks:
        rank.hello()
    return ranks
