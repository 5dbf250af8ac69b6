"""A communication operation as a benchmark: its call, its expected result and its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from parbench.bench.operations.data_pattern import DataPattern, count_wrong, poison
from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.world.benchmark import Benchmark, Description, Work
from parbench.bench.world.world import World


@dataclass(frozen=True, kw_only=True)
class Operation(Benchmark):
    """A benchmark of one operation, whose whole output is compared with the expected result."""

    call: Callable[..., Any]
    """A function that runs the operation once.

    If called with ``async_op=True``, it returns a ``dist.Work`` to wait for, or a list of them.
    """
    output: torch.Tensor
    """The buffer to which the operation writes its result."""
    expected: Callable[[], torch.Tensor]
    """A function that computes the content that ``output`` must have after a step."""
    description: Description
    """The bytes of a step and other facts for the record."""
    restore: Callable[[], object] | None = None
    """A function that refills the operation's buffers before each step.

    If it is None, the output is filled before each step with a number that no result contains.
    """

    def step(self) -> None:
        """Run the operation once."""
        self.call()

    def issue(self) -> Sequence[dist.Work]:
        """Start the operation without waiting for its end, and return the works to wait for.

        The works are objects of ``dist.Work``. An operation whose ``call`` does not take
        ``async_op`` is not measured in mode ``async``.
        """
        works = self.call(async_op=True)
        return works if isinstance(works, list) else [works]

    def reset(self) -> None:
        """Refill the buffers by ``restore``, or fill the output with wrong numbers without it.

        So a step that does not write the output is detected, although an earlier step was correct.
        """
        if self.restore is None:
            poison(self.output)
        else:
            self.restore()

    def check(self) -> int:
        """Return the number of wrong elements in this rank's output buffer after the last step.

        Every element is compared with the expected content.
        """
        return count_wrong(self.output, self._reference)

    @cached_property
    def _reference(self) -> torch.Tensor:
        """The expected content of ``output``, which is computed at the first check."""
        return self.expected()

    def corrupt(self) -> None:
        """Set the last element of the output to 0, which is wrong because no result contains 0."""
        self.output[-1:].zero_()

    def describe(self) -> Description:
        """Return the bytes of a step and other facts for the record."""
        return self.description


def make_pattern(world: World, dtype: str, redop: str = "") -> DataPattern:
    """Return the generator of the test data of all ranks in a world, for elements of one dtype.

    The data is for a reduction by ``redop``, such as ``sum``. If ``redop`` is empty, the data is
    for an operation that only moves data.
    """
    return DataPattern(dtype, world.size, world.device, redop)


def describe_operation(
    name: str,
    num_ranks: int,
    size_bytes: int,
    **fields: Any,
) -> Description:
    """Return the facts about an operation for its records, from which bandwidths are computed.

    The bandwidths are algbw = ``size_bytes`` / time of a step, and busbw = algbw times the factor
    of the operation ``name`` in the catalogue on ``num_ranks`` ranks. ``fields`` are other fields
    of ``Description``.
    """
    factor = get_busbw_factor(name, num_ranks)
    assert factor is not None, name
    algbw = Work(name="algbw", amount=size_bytes)
    busbw = Work(name="busbw", amount=size_bytes * factor)
    details = {"size_bytes": size_bytes, "busbw_factor": factor}
    return Description(work=(algbw, busbw), details=details, **fields)
