"""Collectives as benchmarks, each with its call, its input and output, and its reference.

Sizes and bus bandwidth follow nccl-tests (doc/PERFORMANCE.md): n ranks, S = ``size_bytes``, and
shards of s = S / n bytes. Each function prepares a benchmark on a rank: it allocates the buffers
and returns the operation, which communicates only in its ``step``. Every rank calls it.
"""

import time
from functools import partial

import torch
import torch.distributed as dist

from parbench.bench.operations.operation import Operation, describe_operation, make_pattern
from parbench.bench.plan.groups import split_with_skew
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.torch_compat import (
    REDUCE_OPS,
    all_gather_single,
    reduce_scatter_single,
)
from parbench.bench.world.world import World


def all_reduce(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    redop: str = "sum",
) -> Operation:
    """Return the benchmark of an all-reduce of a buffer of ``size_bytes`` on every rank.

    ``redop`` is the reduction, such as ``sum``. The result overwrites the input.
    """
    pattern = make_pattern(world, dtype, redop)
    buffer = pattern.allocate(size_bytes // pattern.itemsize)
    return Operation(
        call=partial(dist.all_reduce, buffer, op=REDUCE_OPS[redop], group=world.group),
        restore=pattern.make_filler(buffer, world.rank),
        output=buffer,
        expected=lambda: pattern.compute_reduction(0, len(buffer)),
        description=describe_operation("all_reduce", world.size, size_bytes),
    )


def all_gather(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
) -> Operation:
    """Return the benchmark of an all-gather, in which every rank gets the shards of all ranks.

    The shards are equal and have ``size_bytes`` together.
    """
    pattern = make_pattern(world, dtype)
    count = size_bytes // pattern.itemsize // world.size
    shard = pattern.compute_values(world.rank, 0, count)
    gathered = pattern.allocate(world.size * count)
    return Operation(
        call=partial(all_gather_single, gathered, shard, world.group),
        output=gathered,
        expected=lambda: pattern.compute_shards(0, [count] * world.size),
        description=describe_operation("all_gather", world.size, size_bytes),
    )


def reduce_scatter(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    redop: str = "sum",
) -> Operation:
    """Return the benchmark of a reduce-scatter, after which each rank has a shard of the result.

    The input of every rank has ``size_bytes``, and the shards are equal. ``redop`` is the
    reduction, such as ``sum``.
    """
    pattern = make_pattern(world, dtype, redop)
    count = size_bytes // pattern.itemsize // world.size
    source = pattern.compute_values(world.rank, 0, world.size * count)
    shard = pattern.allocate(count)
    return Operation(
        call=partial(reduce_scatter_single, shard, source, world.group, redop),
        output=shard,
        expected=lambda: pattern.compute_reduction(world.rank * count, count),
        description=describe_operation("reduce_scatter", world.size, size_bytes),
    )


def all_to_all(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
) -> Operation:
    """Return the benchmark of an all-to-all, in which every rank sends an equal shard to each rank.

    The shards that a rank sends have ``size_bytes`` together.
    """
    pattern = make_pattern(world, dtype)
    count = size_bytes // pattern.itemsize // world.size
    source = pattern.compute_values(world.rank, 0, world.size * count)
    received = pattern.allocate(world.size * count)
    return Operation(
        call=partial(dist.all_to_all_single, received, source, group=world.group),
        output=received,
        expected=lambda: pattern.compute_shards(world.rank * count, [count] * world.size),
        description=describe_operation("all_to_all", world.size, size_bytes),
    )


def all_to_all_v(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    skew: float = 0.0,
) -> Operation:
    """Return the benchmark of an all-to-all with uneven shards, the largest of them for rank 0.

    Every rank sends ``size_bytes`` in total. The fraction ``skew`` of these bytes goes only to rank
    0. The rest is divided equally over all ranks, including rank 0. The bandwidth is computed from
    the bytes that a rank sends or, if these are more, from the bytes that rank 0 receives.
    """
    pattern = make_pattern(world, dtype)
    rank = world.rank
    num_elements = size_bytes // pattern.itemsize
    send_counts = list(split_with_skew(world.size, skew, num_elements))
    recv_counts = [send_counts[rank]] * world.size
    source = pattern.compute_values(rank, 0, num_elements)
    received = pattern.allocate(sum(recv_counts))
    max_count = max(num_elements, max(send_counts) * world.size)
    return Operation(
        call=partial(
            dist.all_to_all_single,
            received,
            source,
            recv_counts,
            send_counts,
            group=world.group,
        ),
        output=received,
        expected=lambda: pattern.compute_shards(sum(send_counts[:rank]), recv_counts),
        description=describe_operation("all_to_all_v", world.size, max_count * pattern.itemsize),
    )


def broadcast(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    root: int = 0,
) -> Operation:
    """Return the benchmark of a broadcast of ``size_bytes`` from the rank ``root`` to all ranks."""
    pattern = make_pattern(world, dtype)
    buffer = pattern.allocate(size_bytes // pattern.itemsize)
    return Operation(
        call=partial(dist.broadcast, buffer, group=world.group, group_src=root),
        restore=pattern.make_filler(buffer, root) if world.rank == root else None,
        output=buffer,
        expected=lambda: pattern.compute_values(root, 0, len(buffer)),
        description=describe_operation("broadcast", world.size, size_bytes),
    )


def reduce(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    redop: str = "sum",
    root: int = 0,
) -> Operation:
    """Return the benchmark of reducing every rank's buffer of ``size_bytes`` to the rank ``root``.

    ``redop`` is the reduction. The operation is in place, and buffers of other ranks than the root
    become undefined.
    """
    pattern = make_pattern(world, dtype, redop)
    buffer = pattern.allocate(size_bytes // pattern.itemsize)
    result = buffer if world.rank == root else buffer[:0]
    return Operation(
        call=partial(
            dist.reduce,
            buffer,
            op=REDUCE_OPS[redop],
            group=world.group,
            group_dst=root,
        ),
        restore=pattern.make_filler(buffer, world.rank),
        output=result,
        expected=lambda: pattern.compute_reduction(0, len(result)),
        description=describe_operation("reduce", world.size, size_bytes),
    )


def gather(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    root: int = 0,
) -> Operation:
    """Return the benchmark of a gather, in which every rank sends an equal shard to one rank.

    The receiving rank is ``root``. The gathered shards of all ranks have ``size_bytes`` together.
    """
    pattern = make_pattern(world, dtype)
    count = size_bytes // pattern.itemsize // world.size
    source = pattern.compute_values(world.rank, 0, count)
    is_root = world.rank == root
    gathered = pattern.allocate(world.size * count if is_root else 0)
    parts = list(gathered.view(world.size, count)) if is_root else None
    return Operation(
        call=partial(dist.gather, source, parts, group=world.group, group_dst=root),
        output=gathered,
        expected=lambda: pattern.compute_shards(0, [count] * world.size)[: len(gathered)],
        description=describe_operation("gather", world.size, size_bytes),
    )


def scatter(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    root: int = 0,
) -> Operation:
    """Return the benchmark of a scatter, in which one rank sends an equal shard to every rank.

    The sending rank is ``root``. The shards of all ranks have ``size_bytes`` together.
    """
    pattern = make_pattern(world, dtype)
    count = size_bytes // pattern.itemsize // world.size
    shard = pattern.allocate(count)
    parts = None
    if world.rank == root:
        starts = [rank * count for rank in range(world.size)]
        parts = [pattern.compute_values(root, start, count) for start in starts]
    return Operation(
        call=partial(dist.scatter, shard, parts, group=world.group, group_src=root),
        output=shard,
        expected=lambda: pattern.compute_values(root, world.rank * count, count),
        description=describe_operation("scatter", world.size, size_bytes),
    )


class Barrier(Benchmark):
    """A benchmark of a barrier.

    A step is wrong if a rank leaves the barrier before the last rank has arrived.
    """

    def __init__(self, world: World) -> None:
        """Store ``world``, whose process group meets in the barrier."""
        self._world = world
        self.reset()

    def step(self) -> None:
        """Wait in a barrier of the measured group, and store the times of arrival and leaving."""
        self._enter_ns = time.perf_counter_ns()
        dist.barrier(group=self._world.group)
        self._leave_ns = time.perf_counter_ns()

    def reset(self) -> None:
        """Forget the times of the last step."""
        self._enter_ns = 0
        self._leave_ns = 0

    def check(self) -> int:
        """Return 1 if the last step is wrong on this rank, otherwise 0. Every rank calls it.

        A step is wrong if it did not happen, or if this rank left the barrier before the last rank
        arrived. The difference must exceed the uncertainty of the clocks.
        """
        self._world.recalibrate_stale_clock()
        clock = self._world.clock
        offset_ns = clock.offsets_ns[self._world.global_rank]
        last_enter_ns = torch.tensor([self._enter_ns - offset_ns], device=self._world.device)
        dist.all_reduce(last_enter_ns, op=dist.ReduceOp.MAX, group=self._world.group)
        earliest_leave_ns = int(last_enter_ns) - clock.uncertainty_ns
        has_stepped = self._leave_ns != 0
        return int(not has_stepped or self._leave_ns - offset_ns < earliest_leave_ns)

    def corrupt(self) -> None:
        """Set the time of leaving so that this rank seems to have left before any rank arrived."""
        self._leave_ns = 1


barrier = Barrier
