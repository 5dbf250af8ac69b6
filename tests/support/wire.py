"""All reduces for tests on nodes that are namespaces: one counts what its interface sends, one waits for a cut."""

import json
import time
from pathlib import Path

from parbench.bench.operations.collectives import all_reduce
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import World

_SENT_COLUMN = 8


def sent_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = {
        name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)
    }
    return sum(int(values[_SENT_COLUMN]) for name, values in fields.items() if name != "lo")


class Counted:
    """The operation, and at its end a line of JSON in the rank's log: steps, and bytes from the first to the last."""

    def __init__(self, world: World, size_bytes: int) -> None:
        self._operation = all_reduce(world, size_bytes=size_bytes, dtype="float32")
        self._first: int | None = None
        self._last = self._steps = 0

    def step(self) -> None:
        if self._first is None:
            self._first = sent_bytes()
        self._operation.step()
        self._steps += 1

    def reset(self) -> None:
        self._last = sent_bytes()
        self._operation.reset()

    def check(self) -> int:
        self._last = sent_bytes()
        return self._operation.check()

    def describe(self) -> Description:
        return self._operation.describe()

    def explain(self, begin: object, budget_seconds: float) -> Explanation:
        """Say nothing: what explains a step leaves out its calls in some, which would be counted."""
        return Explanation()

    def close(self) -> None:
        print(
            json.dumps({"steps": self._steps, "sent_bytes": self._last - (self._first or 0)}),
            flush=True,
        )


def counted(world: World, *, size_bytes: int = 4 << 20) -> Counted:
    return Counted(world, size_bytes)


class Awaited(Counted):
    """Before a step of a number rank 0 writes a file ``begun`` and goes on once there is a file ``cut``."""

    def __init__(self, world: World, size_bytes: int, at: int) -> None:
        super().__init__(world, size_bytes)
        self._at, self._waits = at, world.rank == 0

    def step(self) -> None:
        if self._waits and self._steps == self._at:
            Path("begun").touch()
            while not Path("cut").exists():
                time.sleep(0.01)
        super().step()


def awaited(world: World, *, size_bytes: int = 4 << 20, at: int = 8) -> Awaited:
    """Return an all_reduce of S bytes in float32 whose links may be cut before its step ``at``."""
    return Awaited(world, size_bytes, at)
