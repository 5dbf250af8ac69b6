"""The world a benchmark runs in: ranks, device, process groups, clock and seed."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from parbench.bench.machine.gpu import choose_gpu_index
from parbench.bench.machine.machine import read_text
from parbench.bench.plan.cases import Params
from parbench.bench.plan.groups import Ranks, form_groups
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.torch_compat import replace_default_timeout

T = TypeVar("T")
Partition = tuple[Ranks, ...]
"""Disjoint groups of ranks that together contain every rank of the run."""

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""The file with an id of the running kernel, which ranks with a common clock share."""
_NUM_ROUND_TRIPS = 50
"""The number of round trips between rank 0 and another rank to measure the offset of clocks."""
_SINGLE_CLOCK = "one host, one monotonic clock"
"""The method of comparing clocks if all ranks are on one host, so that nothing is measured."""
_STALE_SECONDS = 5.0
"""The age of a clock calibration from which on it is repeated."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The differences between the clocks of the ranks, measured at one time."""

    offsets_ns: tuple[int, ...]
    """The ns by which ``time.perf_counter_ns()`` of a rank is ahead of rank 0's, by global rank."""
    uncertainty_ns: int
    """The largest error in ns of an offset."""
    method: str
    """A phrase about the method by which the clocks of the ranks were compared."""
    taken_ns: int = 0
    """The time in ns of the measurement on the clock of rank 0, 0 if all ranks share one clock."""


def calibrate_clocks(rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    """Measure the clock offset of every rank from rank 0, and return all offsets on every rank.

    Every rank calls this function. ``rank`` is this rank, ``size`` the number of ranks and
    ``control`` a gloo group of all ranks. Ranks of one host share a clock, so one rank of each host
    is measured.
    """
    boot_ids: list[str | None] = [None] * size
    # Ranks with the same kernel have a common clock.
    boot_id = read_text(_BOOT_ID_FILE) or f"rank {rank}"
    dist.all_gather_object(boot_ids, boot_id, group=control)
    if len(set(boot_ids)) == 1:
        return Clock(offsets_ns=(0,) * size, uncertainty_ns=0, method=_SINGLE_CLOCK)
    offsets = [(0, 0)]
    for peer in range(1, size):
        first_on_host = boot_ids.index(boot_ids[peer])
        if first_on_host == peer:
            offsets.append(_measure_offset(rank, peer, control))
        else:
            offsets.append(offsets[first_on_host])
    shared = torch.tensor([*offsets, (time.perf_counter_ns(), 0)])
    dist.broadcast(shared, group=control, group_src=0)
    return Clock(
        offsets_ns=tuple(int(offset) for offset in shared[:size, 0]),
        uncertainty_ns=int(shared[:size, 1].max()),
        method=f"ping-pong with rank 0, least round trip of {_NUM_ROUND_TRIPS}",
        taken_ns=int(shared[size, 0]),
    )


def _measure_offset(rank: int, peer: int, control: dist.ProcessGroup) -> tuple[int, int]:
    """Measure the clock offset of the rank ``peer`` by messages between it and rank 0.

    On rank 0 the result is (the ns by which the clock of ``peer`` is ahead, half of the shortest
    round trip in ns). On other ranks it is (0, 0). ``rank`` is this rank, and ``control`` a gloo
    group of all ranks. Every rank calls this function, although only two send messages.
    """
    stamp = torch.zeros(1, dtype=torch.int64)
    round_trips = []
    for _ in range(_NUM_ROUND_TRIPS):
        if rank == 0:
            sent = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=peer)
            dist.recv(stamp, group=control, group_src=peer)
            received = time.perf_counter_ns()
            offset = int(stamp) - (sent + received) // 2
            round_trips.append((received - sent, offset))
        elif rank == peer:
            dist.recv(stamp, group=control, group_src=0)
            stamp[0] = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=0)
    least_ns, offset = min(round_trips, default=(0, 0))
    return offset, least_ns // 2


@dataclass(kw_only=True)
class World:
    """The environment of a benchmark on this rank: its ranks, device, process groups and clock.

    The ranks of a world are all ranks of the run, or the members of this rank's process group if a
    case measures process groups of some of the ranks.
    """

    rank: int
    """This rank in ``group``."""
    size: int
    """The number of ranks in ``group``."""
    global_rank: int
    """This rank among all ranks of the run."""
    hosts: tuple[str, ...]
    """The host name of every rank of the run, by global rank."""
    device: torch.device
    """The device of this rank, a GPU or the CPU."""
    backend: str
    """The backend of the measured traffic, ``gloo`` or ``nccl``."""
    group: dist.ProcessGroup
    """The process group that carries the measured traffic."""
    control: dist.ProcessGroup
    """A gloo group of all ranks for decisions and checks, apart from the measured traffic."""
    clock: Clock
    """The differences between the clocks of all ranks."""
    seed: int
    """The seed of random test data, equal on all ranks."""
    process_groups: dict[Partition, dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )
    """This rank's process group in each partition that ``select_subgroup`` used, to use it again."""

    def recalibrate_stale_clock(self) -> None:
        """Measure the clock offsets of the ranks again if they are older than 5 s.

        Every rank of the world calls it. The largest change of an offset is added to the
        uncertainty, because the clocks will drift on. A world of only some ranks of the run keeps
        its offsets.
        """
        if self.clock.method == _SINGLE_CLOCK or self.size < len(self.hosts):
            return
        age_ns = time.perf_counter_ns() - self.clock.taken_ns  # valid on rank 0, which decides
        [is_stale] = self.broadcast_from_rank_0([float(age_ns > _STALE_SECONDS * 1e9)])
        if not is_stale:
            return
        clock = calibrate_clocks(self.rank, self.size, self.control)
        pairs = zip(clock.offsets_ns, self.clock.offsets_ns, strict=True)
        drift_ns = max(abs(offset - earlier) for offset, earlier in pairs)
        self.clock = replace(clock, uncertainty_ns=clock.uncertainty_ns + drift_ns)

    def sync(self) -> None:
        """Wait until all work on this rank's CUDA device is done. It does nothing on a CPU."""
        if self.device.type == "cuda":
            accelerator.synchronize(self.device)

    def sync_stream(self) -> None:
        """Wait on the host until the work on this thread's current CUDA stream is done.

        It does not wait for a background load, which runs on another stream. It does nothing on a
        CPU.
        """
        if self.device.type == "cuda":
            accelerator.synchronize_stream(self.device)

    def barrier(self) -> None:
        """Wait on the host until all ranks of the run have arrived, by the group ``control``."""
        dist.barrier(group=self.control)

    def broadcast_from_rank_0(self, values: Sequence[float]) -> list[float]:
        """Return the values of global rank 0 on every rank of the run.

        Every rank calls it. Other ranks pass the same number of arbitrary values.
        """
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, group=self.control, group_src=0)
        return [float(value) for value in shared]

    def is_any_true(self, value: bool) -> bool:
        """Return True on every rank if ``value`` is true on any rank of the run.

        Every rank calls it. It is cheaper than ``gather``, which pickles.
        """
        flag = torch.tensor([int(value)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flag.item())

    def gather(self, item: T) -> list[T]:
        """Return the items of all ranks of the run on every rank, in order of global rank.

        Every rank calls it with its own item, which is pickled.
        """
        items = [item] * len(self.hosts)
        dist.all_gather_object(items, item, group=self.control)
        return items


@contextmanager
def open_world(
    backend: str, device: str, seed: int, timeout_seconds: float, store: Store | None = None
) -> Iterator[World]:
    """Initialize torch.distributed for this rank during the block, and yield a world of all ranks.

    All process groups are destroyed at the end of the block. The environment variables RANK and
    WORLD_SIZE are required. Ranks meet in ``store``, or at MASTER_ADDR and MASTER_PORT if it is
    None. ``timeout_seconds`` limits the collectives of every group. It must exceed a case's
    timeout, so that the driver reports a hang. ``seed`` becomes the seed of the world.
    """
    own_device = _select_device(device)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    device_id = own_device if backend == "nccl" else None
    with replace_default_timeout(timedelta(seconds=timeout_seconds)), ExitStack() as stack:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            device_id=device_id,
        )
        stack.callback(dist.destroy_process_group)
        group = dist.group.WORLD
        assert group is not None
        control = dist.new_group(backend="gloo")
        hosts: list[str] = [""] * size
        dist.all_gather_object(hosts, socket.gethostname(), group=control)
        yield World(
            rank=rank,
            size=size,
            global_rank=rank,
            hosts=tuple(hosts),
            device=own_device,
            backend=backend,
            group=group,
            control=control,
            clock=calibrate_clocks(rank, size, control),
            seed=seed,
        )


def disable_tf32() -> str:
    """Let torch multiply float32 matrices in full precision, without TF32.

    Returns torch's name of the precision, which is ``highest``. This overrides the environment
    variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return torch.get_float32_matmul_precision()


def _select_device(name: str) -> torch.device:
    """Return the device of this rank: the CPU if ``name`` is ``cpu``, otherwise one of the GPUs.

    A GPU becomes torch's current device, and TF32 is disabled.
    """
    if name == "cpu":
        return torch.device("cpu")
    disable_tf32()
    return accelerator.select_device(choose_gpu_index(os.environ, accelerator.count_devices()))


def make_group(world: World, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a process group for each part of a partition, and return the group of this rank.

    ``partition`` holds the global ranks of each part, and each rank is in exactly one part. Every
    rank of the run calls this function.

    NCCL groups are made by ``split_group``, because it splits the communicator of all ranks once
    for all parts. ``new_group`` would split it once for each part.
    """
    parts = [list(ranks) for ranks in partition]
    if world.backend == "nccl":
        own_group = dist.split_group(split_ranks=parts)
    else:
        make_groups = dist.new_subgroups_by_enumeration
        own_group, _ = make_groups(parts, backend=world.backend)  # type: ignore[no-untyped-call]
    assert own_group is not None, "every rank is in a part"
    return own_group


class IdleBenchmark(Benchmark):
    """A benchmark without effect, for ranks outside of the process groups that run in a case."""

    def step(self) -> None:
        """Do nothing."""
        return


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """The process group that a case measures, and the ranks that run the benchmark in the case."""

    ranks: Ranks
    """The global ranks that are measured."""
    active: Ranks
    """The global ranks that take steps: the measured ranks, or all if all groups run at once."""
    world: World | None
    """The world of this rank's process group, None if this rank takes no steps."""


def select_subgroup(world: World, params: Params) -> Subgroup:
    """Return the process group that a case measures, and make it if necessary.

    ``params`` are the parameters of the case: ``group`` is the kind of groups, ``group_index`` the
    measured one, and ``concurrent`` true if all groups run at once. Every rank of the run calls it.
    Raises ``UserError`` if the groups cannot be formed.
    """
    text = str(params.get("group", "world"))
    all_ranks = tuple(range(len(world.hosts)))
    if text == "world":
        return Subgroup(ranks=all_ranks, active=all_ranks, world=world)
    parts = form_groups(text, len(all_ranks), world.hosts)
    groups = world.process_groups
    if len(parts) == 1:
        groups[parts] = world.group
    elif parts not in groups:
        groups[parts] = make_group(world, parts)
    [own_ranks] = [ranks for ranks in parts if world.global_rank in ranks]
    own_rank = own_ranks.index(world.global_rank)
    own_world = replace(world, rank=own_rank, size=len(own_ranks), group=groups[parts])
    measured_ranks = parts[int(params.get("group_index", 0))]
    active = all_ranks if params.get("concurrent", False) else measured_ranks
    is_active = world.global_rank in active
    return Subgroup(ranks=measured_ranks, active=active, world=own_world if is_active else None)
