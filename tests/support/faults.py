"""Benchmarks that fail on purpose, measured with ``tests.support.faults:NAME``."""

import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from parbench.bench.operations import collectives
from parbench.bench.operations.operation import Operation
from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import UserError
from parbench.bench.world.benchmark import Benchmark, Description, Explanation
from parbench.bench.world.world import World


class Steps:
    """All-reduces one number per step; one rank calls ``mischief`` before its step ``at``.

    Steps are counted from 1, so that the mischief of ``at=0`` never happens.
    """

    def __init__(
        self,
        world: World,
        mischief: Callable[[], object],
        rank: int,
        at: int,
    ) -> None:
        self.world = world
        self.mischief = mischief
        self.bad_rank = rank
        self.bad_step = at
        self.steps = 0
        self.number = torch.zeros(1, device=world.device)

    def step(self) -> None:
        self.steps += 1
        if self.world.rank == self.bad_rank and self.steps == self.bad_step:
            self.mischief()
        time.sleep(0.001)
        dist.all_reduce(self.number, group=self.world.group)

    def reset(self) -> None:
        self.number.fill_(1.0)

    def check(self) -> int:
        return int(self.number.item() != self.world.size)

    def describe(self) -> Description:
        return Description()

    def close(self) -> None:
        pass


def do_nothing() -> None:
    """Cause no fault."""


def fine(world: World, *, number: int = 0) -> Steps:
    return Steps(world, do_nothing, rank=0, at=0)


class SlowSteps(Steps):
    """Takes a fifth of a second for a step."""

    def step(self) -> None:
        time.sleep(0.2)
        super().step()


def slow(world: World) -> Steps:
    return SlowSteps(world, do_nothing, rank=0, at=0)


def killed(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    return Steps(world, lambda: os.kill(os.getpid(), signal.SIGKILL), rank, at)


def stopped(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    return Steps(world, lambda: os.kill(os.getpid(), signal.SIGSTOP), rank, at)


def asleep(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    return Steps(world, lambda: time.sleep(3600), rank, at)


def spinning(world: World, *, rank: int = 1, at: int = 10, synchronizes: bool = True) -> Steps:
    """Keep the GPU busy for minutes; wait for it on the host, or go on to the collective."""

    def mischief() -> None:
        torch.cuda._sleep(1 << 40)  # type: ignore[no-untyped-call]
        if synchronizes:
            world.sync()

    return Steps(world, mischief, rank, at)


def stubborn(world: World, *, number: int = 0) -> Steps:
    """Ignore SIGTERM and hang in case 0; refuse case 1 while a rank of case 0 still runs."""
    if number == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"{os.getpid()}.pid").touch()
        return Steps(world, lambda: time.sleep(3600), rank=1, at=8)
    for path in Path().glob("*.pid"):
        pid = int(path.stem)
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            raise UserError(f"rank process {pid} of the previous case still runs")
    return fine(world)


def waiting(world: World, *, rank: int = 0, at: int = 3) -> Steps:
    """Write a file ``begun`` before step ``at``, and wait until a file ``cut`` exists."""

    def mischief() -> None:
        Path("begun").touch()
        while not Path("cut").exists():
            time.sleep(0.01)

    return Steps(world, mischief, rank, at)


def raising(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    def mischief() -> None:
        raise RuntimeError("the roof is on fire")

    return Steps(world, mischief, rank, at)


class Tangled(Steps):
    """Refers to itself in a cycle, as a model and its hooks do."""

    previous: "weakref.ref[Tangled] | None" = None

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        self.cycle = self
        metric = MetricValue(value=1.0, unit="", better="lower", method="constant")
        return Explanation(metrics={"cycle": metric})


def tangled(world: World, *, number: int = 0) -> Tangled:
    """Refuse while the previous benchmark of this kind is still in memory."""
    if Tangled.previous is not None and Tangled.previous() is not None:
        raise UserError("the last one is still here")
    benchmark = Tangled(world, do_nothing, rank=0, at=0)
    Tangled.previous = weakref.ref(benchmark)
    return benchmark


def refusing(world: World, *, rank: int = -1) -> Steps:
    if rank in (-1, world.rank):
        raise UserError("this device has no flux capacitor")
    return fine(world)


def swapped(world: World, *, size_bytes: int = 4096) -> Operation:
    """Return an all_gather whose backend swaps two chunks of the result.

    The function of torch is replaced underneath the benchmark.
    """
    functions = vars(collectives)
    all_gather_single = functions["all_gather_single"]

    def swap_chunks(
        output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        all_gather_single(output, shard, group)
        first, second = output.chunk(world.size)[:2]
        copy = first.clone()
        first.copy_(second)
        second.copy_(copy)

    functions["all_gather_single"] = swap_chunks
    return collectives.all_gather(world, size_bytes=size_bytes, dtype="float32")


Fault = Literal["fine", "killed", "stopped", "asleep", "spinning", "raising", "swapped"]


def several(world: World, *, how: Fault = "fine") -> Benchmark:
    """Return the benchmark of this name, so that one run can have several faults."""
    benchmark: Benchmark = globals()[how](world)
    return benchmark
