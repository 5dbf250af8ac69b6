"""A step whose rank 1, or the only one, sleeps, or waits for its busy device, or enqueues behind it, or is well."""

import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.world.subject import Description, Subject
from bench.world.world import World

_SECONDS = 60.0


class Stuck(Subject):
    def __init__(self, world: World, how: str) -> None:
        self._world, self._how = world, how
        self._sum = torch.ones(1024, device=world.device)

    def step(self) -> None:
        if self._world.rank == min(1, self._world.size - 1):
            if self._how == "sleep":
                time.sleep(_SECONDS)
            elif self._how != "nothing" and self._world.device.type == "cuda":
                for _ in range(int(_SECONDS)):
                    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
                if self._how == "spin":
                    torch.cuda.synchronize()
            elif self._how != "nothing":
                end = time.monotonic() + _SECONDS
                while time.monotonic() < end:
                    pass
        dist.all_reduce(self._sum, group=self._world.group)

    def reset(self) -> None:
        self._sum.fill_(1)

    def check(self) -> int:
        return int((self._sum != self._world.size).sum())

    def describe(self) -> Description:
        return Description()


def prepare(world: World, how: Literal["sleep", "spin", "enqueued", "nothing"] = "nothing") -> Any:
    return Stuck(world, how)
