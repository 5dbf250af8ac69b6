"""Collectives as benchmarks, each with its call, its input and output, and its reference.

Size and bus bandwidth follow nccl-tests (its doc/PERFORMANCE.md): n ranks, S = ``size_bytes``, shards of s = S / n.
"""

import time
from functools import partial

import torch
import torch.distributed as dist

from parbench.bench.operations.operation import DataPattern, Operation, describe, poison
from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.plan.groups import parse_matrix, skewed, whole_counts
from parbench.bench.world.benchmark import Benchmark, Description
from parbench.bench.world.torch_compat import REDUCE_OPS, all_gather_single, all_reduce_apart, reduce_scatter_single
from parbench.bench.world.world import World


def all_reduce(
    world: World, *, size_bytes: int, dtype: str, redop: str = "sum", placement: str = IN_PLACE
) -> Operation:
    code = DataPattern(dtype, world.size, world.device, redop)
    count, in_place = size_bytes // code.itemsize, placement == IN_PLACE
    buffer = code.empty(count)
    mine = buffer if in_place else code.values(world.rank, 0, count)
    within = partial(dist.all_reduce, buffer, op=REDUCE_OPS[redop], group=world.group)
    notes = () if in_place else ("out of place: torch copies the input, and the result is copied once more",)
    return Operation(
        call=within if in_place else lambda: buffer.copy_(all_reduce_apart(mine, world.group, redop)),
        gathered=in_place,
        restore=code.filler(buffer, world.rank) if in_place else None,
        output=buffer,
        expected=lambda: code.reduced(0, count),
        description=describe("all_reduce", world.size, size_bytes, size_bytes, size_bytes, notes=notes),
    )


def all_reduce_two_step(world: World, *, size_bytes: int, dtype: str, redop: str = "sum") -> Operation:
    code = DataPattern(dtype, world.size, world.device, redop)
    count = size_bytes // code.itemsize
    buffer, shard, group = code.empty(count), code.empty(count // world.size), world.group
    return Operation(
        call=lambda: (reduce_scatter_single(shard, buffer, group, redop), all_gather_single(buffer, shard, group)),
        restore=code.filler(buffer, world.rank),
        output=buffer,
        expected=lambda: code.reduced(0, count),
        description=describe("all_reduce_two_step", world.size, size_bytes, size_bytes, size_bytes),
    )


def all_gather(world: World, *, size_bytes: int, dtype: str, placement: str = OUT_OF_PLACE) -> Operation:
    """Gather shards of s bytes into S = n s on every rank; in place, a shard lies in the output."""
    code = DataPattern(dtype, world.size, world.device)
    n, count = world.size, size_bytes // code.itemsize // world.size
    mine, gathered = code.values(world.rank, 0, count), code.empty(n * count)
    shard = gathered[world.rank * count :][:count] if placement == IN_PLACE else mine
    return Operation(
        call=partial(all_gather_single, gathered, shard, world.group),
        gathered=True,
        restore=lambda: (poison(gathered), shard.copy_(mine)),  # or itself, which is nothing
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank in range(n)]),
        description=describe("all_gather", n, size_bytes, size_bytes // n, size_bytes),
    )


def reduce_scatter(
    world: World, *, size_bytes: int, dtype: str, redop: str = "sum", placement: str = OUT_OF_PLACE
) -> Operation:
    """Reduce an input of S = n s bytes, one shard of s to each rank; in place, within the input."""
    code = DataPattern(dtype, world.size, world.device, redop)
    count, in_place = size_bytes // code.itemsize // world.size, placement == IN_PLACE
    whole = code.values(world.rank, 0, world.size * count)
    shard = whole[world.rank * count :][:count] if in_place else code.empty(count)
    return Operation(
        call=partial(reduce_scatter_single, shard, whole, world.group, redop),
        gathered=True,
        restore=code.filler(whole, world.rank) if in_place else None,
        output=shard,
        expected=lambda: code.reduced(world.rank * count, count),
        description=describe("reduce_scatter", world.size, size_bytes, size_bytes, size_bytes // world.size),
    )


def all_to_all(world: World, *, size_bytes: int, dtype: str) -> Operation:
    code = DataPattern(dtype, world.size, world.device)
    n, count = world.size, size_bytes // code.itemsize // world.size
    mine, received = code.values(world.rank, 0, n * count), code.empty(n * count)
    return Operation(
        call=partial(dist.all_to_all_single, received, mine, group=world.group),
        output=received,
        expected=lambda: torch.cat([code.values(rank, world.rank * count, count) for rank in range(n)]),
        description=describe("all_to_all", n, size_bytes, size_bytes, size_bytes),
    )


def all_to_all_v(world: World, *, size_bytes: int, dtype: str, skew: float = 0.0, traffic: str = "") -> Operation:
    """Send uneven shards: the busiest sender sends ``size_bytes``; S = max of sent and received."""
    code, rank = DataPattern(dtype, world.size, world.device), world.rank
    matrix = parse_matrix(traffic) if traffic else skewed(world.size, skew)
    counts = whole_counts(matrix, size_bytes // code.itemsize)  # of each sender to each receiver
    sends, receives = list(counts[rank]), [row[rank] for row in counts]
    mine, received = code.values(rank, 0, sum(sends)), code.empty(sum(receives))
    most_sent, most_received = (max(map(sum, rows)) * code.itemsize for rows in (counts, zip(*counts, strict=True)))
    moved = (max(most_sent, most_received), most_sent, most_received)
    return Operation(
        call=partial(dist.all_to_all_single, received, mine, receives, sends, group=world.group),
        output=received,
        expected=lambda: torch.cat([code.values(peer, sum(row[:rank]), row[rank]) for peer, row in enumerate(counts)]),
        description=describe("all_to_all_v", world.size, *moved),
    )


def all_gather_v(world: World, *, size_bytes: int, dtype: str, skew: float = 0.0) -> Operation:
    """Gather uneven shards, rank 0's larger by a share ``skew`` of S, into S on every rank."""
    code, on_gloo = DataPattern(dtype, world.size, world.device), world.backend == "gloo"
    [counts] = whole_counts(skewed(world.size, skew)[:1], size_bytes // code.itemsize)
    mine, gathered = code.values(world.rank, 0, counts[world.rank]), code.empty(sum(counts))
    parts = list(torch.split(gathered, list(counts)))

    def broadcasts(*, async_op: bool = False) -> list[dist.Work]:
        parts[world.rank].copy_(mine)
        works = [dist.broadcast(part, group=world.group, group_src=r, async_op=True) for r, part in enumerate(parts)]
        for work in [] if async_op else works:
            work.wait()
        return works

    notes = ("gloo has no uneven all_gather: each rank broadcasts its shard",) if on_gloo else ()
    sent = max(counts) * code.itemsize
    return Operation(
        call=broadcasts if on_gloo else partial(dist.all_gather, parts, mine, group=world.group),
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank, count in enumerate(counts)]),
        description=describe("all_gather_v", world.size, size_bytes, sent, size_bytes, notes=notes),
    )


def broadcast(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    code = DataPattern(dtype, world.size, world.device)
    buffer = code.empty(size_bytes // code.itemsize)
    return Operation(
        call=partial(dist.broadcast, buffer, group=world.group, group_src=root),
        restore=code.filler(buffer, root) if world.rank == root else None,
        output=buffer,
        expected=lambda: code.values(root, 0, len(buffer)),
        description=describe("broadcast", world.size, size_bytes, size_bytes, size_bytes),
    )


def reduce(world: World, *, size_bytes: int, dtype: str, redop: str = "sum", root: int = 0) -> Operation:
    """Reduce every rank's buffer of S bytes into the root's; other ranks' buffers are left undefined."""
    code = DataPattern(dtype, world.size, world.device, redop)
    buffer = code.empty(size_bytes // code.itemsize)
    result = buffer if world.rank == root else buffer[:0]
    return Operation(
        call=partial(dist.reduce, buffer, op=REDUCE_OPS[redop], group=world.group, group_dst=root),
        restore=code.filler(buffer, world.rank),
        output=result,
        expected=lambda: code.reduced(0, len(result)),
        description=describe("reduce", world.size, size_bytes, size_bytes, size_bytes),
    )


def gather(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    code = DataPattern(dtype, world.size, world.device)
    n, count = world.size, size_bytes // code.itemsize // world.size
    mine, gathered = code.values(world.rank, 0, count), code.empty(n * count if world.rank == root else 0)
    parts = list(gathered.view(n, count)) if world.rank == root else None
    return Operation(
        call=partial(dist.gather, mine, parts, group=world.group, group_dst=root),
        output=gathered,
        expected=lambda: torch.cat([code.values(rank, 0, count) for rank in range(n)])[: len(gathered)],
        description=describe("gather", n, size_bytes, size_bytes // n, size_bytes),
    )


def scatter(world: World, *, size_bytes: int, dtype: str, root: int = 0) -> Operation:
    code = DataPattern(dtype, world.size, world.device)
    n, count = world.size, size_bytes // code.itemsize // world.size
    shard = code.empty(count)
    parts = [code.values(root, rank * count, count) for rank in range(n)] if world.rank == root else None
    return Operation(
        call=partial(dist.scatter, shard, parts, group=world.group, group_src=root),
        output=shard,
        expected=lambda: code.values(root, world.rank * count, count),
        description=describe("scatter", n, size_bytes, size_bytes, size_bytes // n),
    )


class Barrier(Benchmark):
    """A barrier as a benchmark: right if no rank leaves before the last has come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.reset()

    def step(self) -> None:
        self._arrived = time.perf_counter_ns()
        dist.barrier(group=self._world.group)
        self._left = time.perf_counter_ns()

    def reset(self) -> None:
        self._arrived = self._left = 0

    def check(self) -> int:
        """Return 1 if this rank left before the last had come, on one clock within its uncertainty."""
        self._world.refresh_clock()
        clock = self._world.clock
        offset = clock.offsets_ns[self._world.global_rank]
        last = torch.tensor([self._arrived - offset], device=self._world.device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._world.group)  # ranks of other groups do not count
        return int(self._left == 0 or self._left - offset < int(last) - clock.uncertainty_ns)

    def corrupt(self) -> None:
        """Pretend to have left before anyone came, as an injection."""
        self._left = 1

    def describe(self) -> Description:
        return Description(details={"convention": "time only"})


barrier = Barrier
