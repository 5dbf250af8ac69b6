"""Collectives as subjects. Size and bus bandwidth follow nccl-tests (its doc/PERFORMANCE.md); n ranks, s = S / n."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.coding import Code, count_wrong, dtype_of, poison
from bench.compat import all_gather_single, reduce_scatter_single
from bench.dtypes import DTYPES
from bench.messages import Work
from bench.subject import Description
from bench.world import World

CONVENTION = "nccl-tests"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One communication as a subject: ``restore`` makes inputs right and outputs poison before each ``call``."""

    call: Callable[[], object]
    restore: Callable[[], object]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]
    description: Description

    def step(self) -> None:
        """Communicate once."""
        self.call()

    def reset(self) -> None:
        """Restore inputs and poison outputs."""
        self.restore()

    def check(self) -> int:
        """Return how many output elements differ from the reference."""
        return count_wrong(self.output, self.expected())

    def describe(self) -> Description:
        """Return the bytes and the rates."""
        return self.description

    def close(self) -> None:
        """Nothing to give back: tensors go with the subject."""


def describe(size_bytes: int, factor: float, send_bytes: int, recv_bytes: int) -> Description:
    """Return what an operation of S = ``size_bytes`` moves: algbw = S / t, busbw = algbw * factor."""
    return Description(
        work=(
            Work(name="algbw", amount=size_bytes, unit="B/s"),
            Work(name="busbw", amount=size_bytes * factor, unit="B/s"),
        ),
        details={
            "size_bytes": size_bytes,
            "send_bytes": send_bytes,
            "recv_bytes": recv_bytes,
            "busbw_factor": factor,
            "convention": CONVENTION,
        },
    )


def _empty(world: World, count: int, dtype: str) -> torch.Tensor:
    return torch.empty(count, dtype=dtype_of(dtype), device=world.device)


def all_reduce(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Sum a buffer of S bytes in place: factor 2(n-1)/n."""
    n, count = world.size, size_bytes // DTYPES[dtype].itemsize
    code = Code(dtype, n, world.device)
    mine, buffer = code.values(world.rank, 0, count), _empty(world, count, dtype)
    return Operation(
        call=lambda: dist.all_reduce(buffer, group=world.group),
        restore=lambda: buffer.copy_(mine),
        output=buffer,
        expected=lambda: code.sums(0, count),
        description=describe(size_bytes, 2 * (n - 1) / n, size_bytes, size_bytes),
    )


def all_gather(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Gather shards of s bytes into S = n s on every rank: factor (n-1)/n."""
    n, count = world.size, size_bytes // DTYPES[dtype].itemsize // world.size
    code = Code(dtype, 1, world.device)
    mine, gathered = code.values(world.rank, 0, count), _empty(world, n * count, dtype)
    return Operation(
        call=lambda: all_gather_single(gathered, mine, world.group),
        restore=lambda: poison(gathered),
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank in range(n)]),
        description=describe(size_bytes, (n - 1) / n, size_bytes // n, size_bytes),
    )


def reduce_scatter(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Sum an input of S = n s bytes and leave one shard of s on each rank: factor (n-1)/n."""
    n, count = world.size, size_bytes // DTYPES[dtype].itemsize // world.size
    code = Code(dtype, n, world.device)
    mine, shard = code.values(world.rank, 0, n * count), _empty(world, count, dtype)
    return Operation(
        call=lambda: reduce_scatter_single(shard, mine, world.group),
        restore=lambda: poison(shard),
        output=shard,
        expected=lambda: code.sums(world.rank * count, count),
        description=describe(size_bytes, (n - 1) / n, size_bytes, size_bytes // n),
    )


def all_to_all(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Send one shard of s bytes of S to each rank, itself included: factor (n-1)/n."""
    n, count = world.size, size_bytes // DTYPES[dtype].itemsize // world.size
    code = Code(dtype, 1, world.device)
    mine, received = code.values(world.rank, 0, n * count), _empty(world, n * count, dtype)
    return Operation(
        call=lambda: dist.all_to_all_single(received, mine, group=world.group),
        restore=lambda: poison(received),
        output=received,
        expected=lambda: torch.cat([code.values(rank, world.rank * count, count) for rank in range(n)]),
        description=describe(size_bytes, (n - 1) / n, size_bytes, size_bytes),
    )


def broadcast(world: World, *, size_bytes: int, dtype: str, root: int) -> Operation:
    """Send the root's buffer of S bytes to every rank: factor 1."""
    count = size_bytes // DTYPES[dtype].itemsize
    code = Code(dtype, 1, world.device)
    mine, buffer = code.values(root, 0, count), _empty(world, count, dtype)

    def restore() -> None:
        if world.rank == root:
            buffer.copy_(mine)
        else:
            poison(buffer)

    return Operation(
        call=lambda: dist.broadcast(buffer, group=world.group, group_src=root),
        restore=restore,
        output=buffer,
        expected=lambda: mine,
        description=describe(size_bytes, 1.0, size_bytes, size_bytes),
    )
