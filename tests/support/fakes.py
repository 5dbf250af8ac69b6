"""Ranks without torch or processes for tests of the driver, which follow a script of the test."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from parbench.bench.launch.messages import (
    JOB,
    JOB_DECODER,
    HangReport,
    Hello,
    Job,
    JobDone,
    Mailbox,
    Message,
    Outcome,
    RankError,
)
from parbench.bench.launch.ranks import Ranks
from parbench.bench.machine.environment import RankPlace
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.plan import Plan, SkippedCase
from parbench.bench.results.metrics import make_value
from parbench.bench.results.records import Check, Samples
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
        "samples": Samples(values=[seconds] * 20, samples_per_block=[2] * 10),
        "metrics": {"time": make_value("time", seconds), "skew": make_value("skew", 1e-6)},
        "wall_seconds": 0.1,
    }
    return Outcome(**{**fields, **overrides})


def make_single_blocks(cases: Sequence[Case], seed: str) -> list[int]:
    """Replace ``make_blocks``: each case has one block, in the order of the plan."""
    return [*range(len(cases))]


def make_status(**overrides: Any) -> HangReport:
    fields: dict[str, Any] = {"phase": "timed", "steps": 7, "communicates": True}
    fields |= {"stack": "in all_reduce", "index": 0}
    return HangReport(**{**fields, **overrides})


def make_job(cases: Sequence[Case], **overrides: Any) -> Job:
    """Return a job with one block of each case.

    Overrides are fields of the job or of its plan.
    """
    fields: dict[str, Any] = {
        "blocks": [*range(len(cases))],
        "budget_seconds": 1.0,
        "run_seconds": 60.0,
    }
    for name in Job.__struct_fields__:
        if name in overrides:
            fields[name] = overrides.pop(name)
    return Job(plan=make_plan(cases, **overrides), **fields)


def make_plan(
    cases: Iterable[Case],
    *,
    nproc: int = 2,
    skipped: Iterable[SkippedCase] = (),
    **overrides: Any,
) -> Plan:
    fields = {
        "preset": "smoke",
        "cases": tuple(cases),
        "skipped": tuple(skipped),
        "nproc": nproc,
        "backend": "gloo",
        "device": "cpu",
        "repetitions": 1,
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


Script = Callable[["ScriptedRanks", Job], Iterator[None]]
"""The acts of all ranks with a job. The driver looks for messages at each ``yield``."""


def make_hello(rank: int, **overrides: Any) -> Hello:
    place = RankPlace(host=HOSTNAME, cpus=(), numa_nodes=())
    fields = {"rank": rank, "host": HOSTNAME, "pid": os.getpid(), "place": place}
    return Hello(**{**fields, "environment": {}, **overrides})


class ScriptedRanks(Ranks, Mailbox):
    """All ranks of one start, without processes; they are their own mailbox.

    ``hellos`` has the messages of the ranks that start.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        hellos: Iterable[Hello],
        script: Script,
    ) -> None:
        super().__init__(size, folder)
        self.mailbox: Mailbox = self
        self.codes: dict[int, int] = {}
        self.error = ""
        self.has_ended = False
        self.killed_ranks: list[int] | None = None
        self.job: Job | None = None
        self.variables: Mapping[str, str] = {}
        self._script = script
        self._acts: Iterator[None] = iter(())
        self._posted: list[tuple[int, Message]] = []
        for hello in hellos:
            self.post(hello.rank, hello)

    def finish(self, outcome: Outcome | None = None) -> None:
        """Let rank 0 report the outcome of a block."""
        self.post(0, outcome or make_outcome())

    def fail(self, rank: int, error: str = "RuntimeError: fire") -> None:
        stack = f"the stack of rank {rank}"
        self.post(rank, RankError(error=error, stack=stack, seconds=0.0))

    def complete(self, *ranks: int) -> None:
        for rank in ranks:
            self.post(rank, JobDone(cpu_seconds=1.0))
            self.codes[rank] = 0

    def put(self, name: str, content: bytes) -> None:
        if name == JOB:
            self.job = JOB_DECODER.decode(content)
            self._acts = self._script(self, self.job)

    def get(self, name: str) -> bytes | None:
        return None

    def post(self, rank: int, message: Message) -> None:
        self._posted.append((rank, message))

    def receive(self) -> list[tuple[int, Message]]:
        next(self._acts, None)
        messages = self._posted
        self._posted = []
        return messages

    def has_launcher_ended(self) -> bool:
        return self.has_ended

    def get_exit_codes(self) -> dict[int, int]:
        return self.codes

    def get_last_error(self) -> str:
        return self.error

    def kill(self) -> None:
        self.killed_ranks = sorted(self.evidence.hellos)


def complete_job(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
    """Measure a whole job."""
    yield from complete_blocks(ranks, job, [make_outcome()] * len(job.blocks))


def complete_blocks(
    ranks: ScriptedRanks, job: Job, outcomes: Sequence[Outcome]
) -> Iterator[None]:
    """End the blocks of a job with these outcomes."""
    for outcome in outcomes[: len(job.blocks)]:
        ranks.finish(outcome)
        yield
    ranks.complete(*range(job.plan.nproc))
    ranks.has_ended = True
