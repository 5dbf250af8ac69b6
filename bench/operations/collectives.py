"""Collectives as subjects. Size and bus bandwidth follow nccl-tests (its doc/PERFORMANCE.md); n ranks, s = S / n."""

import time
from functools import partial

import torch
import torch.distributed as dist

from bench.operations.operation import Operation, describe
from bench.operations.test_pattern import DataPattern, dtype_of, poison
from bench.plan.groups import parse_matrix, size_elements, skewed, whole_counts
from bench.plan.operation_spec import DTYPES
from bench.world.subject import Description, Subject
from bench.world.torch_compat import REDUCE_OPS, all_gather_single, all_reduce_apart, reduce_scatter_single
from bench.world.world import World

IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"


def _empty(world: World, count: int, dtype: str) -> torch.Tensor:
    return torch.empty(count, dtype=dtype_of(dtype), device=world.device)


def _count(size_bytes: int, dtype: str) -> int:
    return size_bytes // DTYPES[dtype].itemsize


def _rounding(redop: str, dtype: str, n: int) -> float:
    """Return the relative error that an average may have: some backends multiply by a rounded 1/n before they add."""
    kind = dtype_of(dtype)
    exact = redop != "avg" or not kind.is_floating_point or n & (n - 1) == 0
    return 0.0 if exact else n * torch.finfo(kind).eps


def all_reduce(
    world: World, *, size_bytes: int, dtype: str, redop: str = "sum", placement: str = IN_PLACE
) -> Operation:
    n, count = world.size, _count(size_bytes, dtype)
    code = DataPattern(dtype, n, world.device, redop)
    buffer = _empty(world, count, dtype)
    in_place = placement == IN_PLACE
    mine = buffer if in_place else code.values(world.rank, 0, count)

    def apart() -> None:
        buffer.copy_(all_reduce_apart(mine, world.group, redop))

    notes = () if in_place else ("out of place: torch copies the input, and the result is copied once more",)
    return Operation(
        call=partial(dist.all_reduce, buffer, op=REDUCE_OPS[redop], group=world.group) if in_place else apart,
        asynchronous=in_place,
        restore=code.filler(buffer, world.rank) if in_place else partial(poison, buffer),
        output=buffer,
        expected=lambda: code.reduced(0, count),
        description=describe("all_reduce", n, size_bytes, size_bytes, size_bytes, notes=notes),
        tolerance=_rounding(redop, dtype, n),
    )


def all_reduce_two_step(world: World, *, size_bytes: int, dtype: str, redop: str = "sum") -> Operation:
    n, count = world.size, _count(size_bytes, dtype)
    code = DataPattern(dtype, n, world.device, redop)
    buffer, shard = _empty(world, count, dtype), _empty(world, count // n, dtype)

    def both() -> None:
        reduce_scatter_single(shard, buffer, world.group, redop)
        all_gather_single(buffer, shard, world.group)

    return Operation(
        call=both,
        restore=code.filler(buffer, world.rank),
        output=buffer,
        expected=lambda: code.reduced(0, count),
        description=describe("all_reduce_two_step", n, size_bytes, size_bytes, size_bytes),
        tolerance=_rounding(redop, dtype, n),
    )


def all_gather(world: World, *, size_bytes: int, dtype: str, placement: str = OUT_OF_PLACE) -> Operation:
    """Gather shards of s bytes into S = n s on every rank; in place, a shard lies in the output."""
    n, count = world.size, _count(size_bytes, dtype) // world.size
    code = DataPattern(dtype, 1, world.device)
    mine, gathered = code.values(world.rank, 0, count), _empty(world, n * count, dtype)
    shard = gathered[world.rank * count :][:count] if placement == IN_PLACE else mine

    def restore() -> None:
        poison(gathered)
        if placement == IN_PLACE:
            shard.copy_(mine)

    return Operation(
        call=partial(all_gather_single, gathered, shard, world.group),
        asynchronous=True,
        restore=restore,
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank in range(n)]),
        description=describe("all_gather", n, size_bytes, size_bytes // n, size_bytes),
    )


def reduce_scatter(
    world: World, *, size_bytes: int, dtype: str, redop: str = "sum", placement: str = OUT_OF_PLACE
) -> Operation:
    """Reduce an input of S = n s bytes, one shard of s to each rank; in place, within the input."""
    n, count = world.size, _count(size_bytes, dtype) // world.size
    code = DataPattern(dtype, n, world.device, redop)
    whole = code.values(world.rank, 0, n * count)
    shard = whole[world.rank * count :][:count] if placement == IN_PLACE else _empty(world, count, dtype)

    return Operation(
        call=partial(reduce_scatter_single, shard, whole, world.group, redop),
        asynchronous=True,
        restore=code.filler(whole, world.rank) if placement == IN_PLACE else partial(poison, shard),
        output=shard,
        expected=lambda: code.reduced(world.rank * count, count),
        description=describe("reduce_scatter", n, size_bytes, size_bytes, size_bytes // n),
        tolerance=_rounding(redop, dtype, n),
    )


def all_to_all(world: World, *, size_bytes: int, dtype: str) -> Operation:
    n, count = world.size, _count(size_bytes, dtype) // world.size
    code = DataPattern(dtype, 1, world.device)
    mine, received = code.values(world.rank, 0, n * count), _empty(world, n * count, dtype)
    return Operation(
        call=partial(dist.all_to_all_single, received, mine, group=world.group),
        asynchronous=True,
        restore=lambda: poison(received),
        output=received,
        expected=lambda: torch.cat([code.values(rank, world.rank * count, count) for rank in range(n)]),
        description=describe("all_to_all", n, size_bytes, size_bytes, size_bytes),
    )


def all_to_all_v(world: World, *, size_bytes: int, dtype: str, skew: float = 0.0, traffic: str = "") -> Operation:
    """Send uneven shards: the busiest sender sends ``size_bytes``; S = max of sent and received."""
    n, rank = world.size, world.rank
    itemsize = DTYPES[dtype].itemsize
    matrix = parse_matrix(traffic) if traffic else skewed(n, skew)
    counts = whole_counts(matrix, _count(size_bytes, dtype))
    sends, receives = list(counts[rank]), [row[rank] for row in counts]
    starts = [[sum(row[:j]) for j in range(n)] for row in counts]
    code = DataPattern(dtype, 1, world.device)
    mine, received = code.values(rank, 0, sum(sends)), _empty(world, sum(receives), dtype)

    def expected() -> torch.Tensor:
        return torch.cat([code.values(peer, starts[peer][rank], counts[peer][rank]) for peer in range(n)])

    return Operation(
        call=partial(dist.all_to_all_single, received, mine, receives, sends, group=world.group),
        asynchronous=True,
        restore=lambda: poison(received),
        output=received,
        expected=expected,
        description=describe(
            "all_to_all_v",
            n,
            size_elements(counts) * itemsize,
            max(sum(row) for row in counts) * itemsize,
            max(sum(column) for column in zip(*counts, strict=True)) * itemsize,
        ),
    )


def all_gather_v(world: World, *, size_bytes: int, dtype: str, skew: float = 0.0) -> Operation:
    """Gather uneven shards, rank 0's larger by a share ``skew`` of S, into S on every rank."""
    n, on_gloo = world.size, world.backend == "gloo"
    [counts] = whole_counts(skewed(n, skew)[:1], _count(size_bytes, dtype))
    code = DataPattern(dtype, 1, world.device)
    mine, gathered = code.values(world.rank, 0, counts[world.rank]), _empty(world, sum(counts), dtype)
    parts = list(torch.split(gathered, list(counts)))

    def broadcasts(*, async_op: bool = False) -> list[dist.Work]:
        parts[world.rank].copy_(mine)
        works = [dist.broadcast(parts[rank], group=world.group, group_src=rank, async_op=True) for rank in range(n)]
        for work in [] if async_op else works:
            work.wait()
        return works

    return Operation(
        call=broadcasts if on_gloo else partial(dist.all_gather, parts, mine, group=world.group),
        asynchronous=True,
        restore=lambda: poison(gathered),
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, counts[rank]) for rank in range(n)]),
        description=describe(
            "all_gather_v",
            n,
            size_bytes,
            max(counts) * DTYPES[dtype].itemsize,
            size_bytes,
            notes=("gloo has no uneven all_gather: each rank broadcasts its shard",) if on_gloo else (),
        ),
    )


def broadcast(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    count = _count(size_bytes, dtype)
    code = DataPattern(dtype, 1, world.device)
    buffer = _empty(world, count, dtype)

    return Operation(
        call=partial(dist.broadcast, buffer, group=world.group, group_src=root),
        asynchronous=True,
        restore=code.filler(buffer, root) if world.rank == root else partial(poison, buffer),
        output=buffer,
        expected=lambda: code.values(root, 0, count),
        description=describe("broadcast", world.size, size_bytes, size_bytes, size_bytes),
    )


def reduce(world: World, *, size_bytes: int, dtype: str, redop: str = "sum", root: int = 0) -> Operation:
    """Reduce every rank's buffer of S bytes into the root's; other ranks' buffers are left undefined."""
    count = _count(size_bytes, dtype)
    code = DataPattern(dtype, world.size, world.device, redop)
    buffer = _empty(world, count, dtype)
    result = buffer if world.rank == root else buffer[:0]
    return Operation(
        call=partial(dist.reduce, buffer, op=REDUCE_OPS[redop], group=world.group, group_dst=root),
        asynchronous=True,
        restore=code.filler(buffer, world.rank),
        output=result,
        expected=lambda: code.reduced(0, len(result)),
        description=describe("reduce", world.size, size_bytes, size_bytes, size_bytes),
        tolerance=_rounding(redop, dtype, world.size),
    )


def gather(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    n, count = world.size, _count(size_bytes, dtype) // world.size
    code = DataPattern(dtype, 1, world.device)
    mine = code.values(world.rank, 0, count)
    gathered = _empty(world, n * count if world.rank == root else 0, dtype)
    parts = [gathered[rank * count :][:count] for rank in range(n)] if world.rank == root else None
    return Operation(
        call=partial(dist.gather, mine, parts, group=world.group, group_dst=root),
        asynchronous=True,
        restore=lambda: poison(gathered),
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank in range(n)])[: len(gathered)],
        description=describe("gather", n, size_bytes, size_bytes // n, size_bytes),
    )


def scatter(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    n, count = world.size, _count(size_bytes, dtype) // world.size
    code = DataPattern(dtype, 1, world.device)
    shard = _empty(world, count, dtype)
    parts = [code.values(root, rank * count, count) for rank in range(n)] if world.rank == root else None
    return Operation(
        call=partial(dist.scatter, shard, parts, group=world.group, group_src=root),
        asynchronous=True,
        restore=lambda: poison(shard),
        output=shard,
        expected=lambda: code.values(root, world.rank * count, count),
        description=describe("scatter", n, size_bytes, size_bytes, size_bytes // n),
    )


class Barrier(Subject):
    """A barrier as a subject: right if no rank leaves before the last has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._arrived = self._left = 0

    def step(self) -> None:
        self._arrived = time.perf_counter_ns()
        dist.barrier(group=self._world.group)
        self._left = time.perf_counter_ns()

    def reset(self) -> None:
        self._arrived = self._left = 0

    def check(self) -> int:
        """Return 1 if this rank left before the last had come, on one clock within its uncertainty."""
        self._world = self._world.retimed()
        clock = self._world.clock
        offset = clock.offsets_ns[self._world.global_rank]
        last = torch.tensor([self._arrived - offset])
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._world.control)
        return int(self._left == 0 or self._left - offset < int(last) - clock.uncertainty_ns)

    def corrupt(self) -> None:
        """Pretend to have left before anyone came, as an injection."""
        self._left = 1

    def describe(self) -> Description:
        return Description(details={"convention": "time only"})


barrier = Barrier
