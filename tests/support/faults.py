"""Benchmarks that fail on purpose, measured with ``--target tests.support.faults:NAME``."""

import os
import signal
import sys
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
    """All-reduces one number a step; does ``mischief`` on one rank before the step of a given number."""

    def __init__(self, world: World, mischief: Callable[[], object], rank: int, at: int) -> None:
        self.world, self.mischief, self.rank, self.at = world, mischief, rank, at
        self.taken = 0
        self.number = torch.zeros(1, device=world.device)

    def step(self) -> None:
        self.taken += 1
        if self.world.rank == self.rank and self.taken == self.at:
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


def fine(world: World, *, number: int = 0) -> Steps:
    return Steps(world, lambda: None, rank=0, at=0)


def killed(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    """at = 0 is never."""
    return Steps(world, lambda: os.kill(os.getpid(), signal.SIGKILL), rank, at)


def stopped(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    return Steps(world, lambda: os.kill(os.getpid(), signal.SIGSTOP), rank, at)


def asleep(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    return Steps(world, lambda: time.sleep(3600), rank, at)


def spinning(world: World, *, rank: int = 1, at: int = 10, synchronizes: bool = True) -> Steps:
    """Keep the GPU busy for some minutes, and wait for it or go on to the collective."""

    def mischief() -> None:
        torch.cuda._sleep(1 << 40)  # type: ignore[no-untyped-call]
        if synchronizes:
            world.sync()

    return Steps(world, mischief, rank, at)


def stubborn(world: World, *, number: int = 0) -> Steps:
    """At first rank 1 takes no SIGTERM and sleeps; later ranks refuse where those of the first are still there."""
    if number == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"{os.getpid()}.pid").touch()
    else:
        alive = {one.pid for one in psutil.process_iter() if one.status() != psutil.STATUS_ZOMBIE}
        if alive & {int(path.stem) for path in Path().glob("*.pid")}:
            raise UserError("the ranks before these are still here")
    return Steps(world, lambda: time.sleep(3600), rank=1, at=8 if number == 0 else 0)


def raising(world: World, *, rank: int = 1, at: int = 10) -> Steps:
    def mischief() -> None:
        raise RuntimeError("the roof is on fire")

    return Steps(world, mischief, rank, at)


class Tangled(Steps):
    """Holds itself in a cycle, as a model and its hooks do; ``last`` is the one before it."""

    last: "weakref.ref[Tangled] | None" = None

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        self.me = self
        return Explanation(
            metrics={"cycle": MetricValue(value=1.0, unit="", better="lower", method="as it is")}
        )


def tangled(world: World, *, number: int = 0) -> Tangled:
    """Refuse where the one before it is still there."""
    if Tangled.last is not None and Tangled.last() is not None:
        raise UserError("the last one is still here")
    made = Tangled(world, lambda: None, rank=0, at=0)
    Tangled.last = weakref.ref(made)
    return made


def refusing(world: World, *, rank: int = -1) -> Steps:
    if rank in (-1, world.rank):
        raise UserError("this device has no flux capacitor")
    return Steps(world, lambda: None, rank=0, at=0)


def swapped(world: World, *, size_bytes: int = 4096) -> Operation:
    """An all_gather whose backend swaps two chunks: torch's own name is patched underneath the benchmark."""
    names = vars(collectives)
    right = names["all_gather_single"]

    def wrong(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        right(output, shard, group)
        first, second = output.chunk(world.size)[:2]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    names["all_gather_single"] = wrong
    return collectives.all_gather(world, size_bytes=size_bytes, dtype="float32")


Fault = Literal["fine", "killed", "stopped", "asleep", "spinning", "raising", "swapped"]


def several(world: World, *, how: Fault = "fine") -> Benchmark:
    """Be several faults of one run."""
    fault: Benchmark = globals()[how](world)
    return fault


if __name__ == "__main__":
    sys.exit("this module is measured with --target")
