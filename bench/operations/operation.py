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
    """An operation whose whole output buffer is compared with the expected result."""

    call: Callable[..., Any]
    """Runs the operation once. With ``async_op=True``, the call returns works to wait for."""
    output: torch.Tensor
    """The buffer to which the operation writes its result."""
    expected: Callable[[], torch.Tensor]
    """Computes the expected content of ``output``."""
    description: Description
    restore: Callable[[], object] | None = None
    """Refills the buffers before each call. None poisons the output instead."""
    has_batched_call: bool = False
    """True if torch has one call for many tensors, which it uses for coalesced calls."""

    def step(self) -> None:
        self.call()

    def issue(self) -> Sequence[dist.Work]:
        """Start the communication without waiting, and return the works to wait for.

        The catalogue refuses mode async for an operation whose call does not take ``async_op``.
        """
        works = self.call(async_op=True)
        if works is None:
            return []
        return works if isinstance(works, list) else [works]

    def reset(self) -> None:
        if self.restore is None:
            poison(self.output)
        else:
            self.restore()

    def check(self) -> int:
        return count_wrong(self.output, self._reference)

    @cached_property
    def _reference(self) -> torch.Tensor:
        return self.expected()

    def corrupt(self) -> None:
        """Set the last element to 0, which is wrong because no result contains 0."""
        self.output[-1:].zero_()

    def describe(self) -> Description:
        return self.description


def make_pattern(world: World, dtype: str, redop: str = "") -> DataPattern:
    """Return the test data of the ranks of a world for one dtype.

    The data is for a reduction by ``redop``, or for an operation that only moves data if ``redop``
    is empty.
    """
    return DataPattern(dtype, world.size, world.device, redop)


def describe_operation(
    name: str,
    num_ranks: int,
    size_bytes: int,
    *,
    send_bytes: int | None = None,
    recv_bytes: int | None = None,
    factor: float | None = None,
    **fields: Any,
) -> Description:
    """Return the description of an operation, with algbw = size / t and busbw = algbw * factor.

    ``send_bytes`` and ``recv_bytes`` are the bytes that one rank sends and receives, by default
    ``size_bytes``. ``factor`` is by default the factor in the catalogue. ``fields`` are other
    fields of the description.
    """
    if factor is None:
        factor = get_busbw_factor(name, num_ranks)
    assert factor is not None, name
    algbw = Work(name="algbw", amount=size_bytes)
    busbw = Work(name="busbw", amount=size_bytes * factor)
    details = {
        "size_bytes": size_bytes,
        "send_bytes": size_bytes if send_bytes is None else send_bytes,
        "recv_bytes": size_bytes if recv_bytes is None else recv_bytes,
        "busbw_factor": factor,
        "convention": "nccl-tests",
    }
    return Description(work=(algbw, busbw), details=details, **fields)
