"""An all-reduce for nodes with a network of their own: it counts the bytes that its rank sends."""

import json
import time
from pathlib import Path

from parbench.bench.operations.collectives import all_reduce
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import World

_SENT_BYTES_COLUMN = 8


def read_sent_bytes() -> int:
    """Return the bytes that this host has sent through all interfaces except the loopback."""
    num_bytes = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        if name.strip() != "lo":
            num_bytes += int(columns.split()[_SENT_BYTES_COLUMN])
    return num_bytes


class CountedAllReduce:
    """An all-reduce that prints its steps and sent bytes as a line of JSON when it is closed.

    Before ``pause_step``, rank 0 writes a file ``begun`` and waits until a file ``cut`` exists.
    """

    def __init__(self, world: World, size_bytes: int, pause_step: int) -> None:
        self._operation = all_reduce(world, size_bytes=size_bytes, dtype="float32")
        self._pause_step = pause_step if world.rank == 0 else -1
        self._num_steps = 0
        self._first_bytes = 0
        self._last_bytes = 0

    def step(self) -> None:
        if self._num_steps == 0:
            self._first_bytes = read_sent_bytes()
        if self._num_steps == self._pause_step:
            Path("begun").touch()
            while not Path("cut").exists():
                time.sleep(0.01)
        self._operation.step()
        self._num_steps += 1

    def reset(self) -> None:
        self._last_bytes = read_sent_bytes()
        self._operation.reset()

    def check(self) -> int:
        self._last_bytes = read_sent_bytes()
        return self._operation.check()

    def describe(self) -> Description:
        return self._operation.describe()

    def explain_step(self, begin: object, budget_seconds: float) -> Explanation:
        """Explain nothing, because the steps of an explanation would be counted."""
        return Explanation()

    def close(self) -> None:
        sent_bytes = self._last_bytes - self._first_bytes
        print(json.dumps({"steps": self._num_steps, "sent_bytes": sent_bytes}), flush=True)


def counted(
    world: World, *, size_bytes: int = 4 << 20, pause_step: int = -1
) -> CountedAllReduce:
    """Return an all_reduce of S bytes in float32 that counts the bytes it sends."""
    return CountedAllReduce(world, size_bytes, pause_step)
