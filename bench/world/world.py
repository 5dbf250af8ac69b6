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
"""Disjoint groups that together contain every rank of a world."""

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_NUM_ROUND_TRIPS = 50
_SINGLE_CLOCK = "one host, one monotonic clock"
_STALE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Converts the time of every rank to the clock of rank 0."""

    offsets_ns: tuple[int, ...]
    """The time by which ``perf_counter_ns()`` of each rank is ahead of that clock on rank 0."""
    uncertainty_ns: int
    method: str
    """A phrase about how the clocks were compared."""
    taken_ns: int = 0
    """The time of the calibration on the clock of rank 0, 0 if all ranks share one clock."""


def calibrate_clocks(rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    """Measure and return each rank's clock offset from rank 0 (ns), and the uncertainty.

    Every rank calls it. Ranks of one host share a clock, so one rank of each host is measured.
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
    """Measure how many ns the clock of ``peer`` is ahead of rank 0's clock, by round trips.

    Returns the offset and half of the shortest round trip on rank 0, and zeros on other ranks.
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
    """The ranks of one repetition, or a group of them, as one rank sees them."""

    rank: int  # the rank in ``group``
    size: int  # the number of ranks in ``group``
    global_rank: int  # the rank among all ranks
    hosts: tuple[str, ...]  # the host of each of all ranks
    device: torch.device
    backend: str
    group: dist.ProcessGroup  # the group that carries the measured traffic
    control: dist.ProcessGroup
    """A gloo group of all ranks for decisions and checks, apart from the measured traffic."""
    clock: Clock
    seed: int
    process_groups: dict[tuple[str, str, Partition], dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Groups by purpose, backend and partition; see ``get_process_group``."""

    def get_process_group(
        self,
        partition: Partition,
        purpose: str,
        backend: str | None = None,
    ) -> dist.ProcessGroup:
        """Return the process group of the part that contains this rank.

        Every rank of the world calls it. A group is made once, reused by later cases and destroyed
        with the world. Calls with the same partition and another ``purpose`` or ``backend`` make
        another group.
        """
        backend = backend or self.backend
        key = (purpose, backend, partition)
        if key not in self.process_groups:
            self.process_groups[key] = make_group(self, partition, backend)
        return self.process_groups[key]

    def recalibrate_stale_clock(self) -> None:
        """Calibrate the clocks again if the last calibration is old.

        Every rank of the world calls it. The clocks will drift on, so the drift since the last
        calibration is added to the uncertainty. A world of only some ranks keeps its clock.
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
        """Wait for all work on this rank's device. It does nothing on a CPU."""
        if self.device.type == "cuda":
            accelerator.synchronize(self.device)

    def sync_stream(self) -> None:
        """Wait for the work on this thread's stream. A background load is on another stream."""
        if self.device.type == "cuda":
            accelerator.synchronize_stream(self.device)

    def barrier(self) -> None:
        """Wait on the host until all ranks have arrived. The measured group is not used."""
        dist.barrier(group=self.control)

    def broadcast_from_rank_0(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's values on every rank.

        Other ranks pass the same number of arbitrary values.
        """
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, group=self.control, group_src=0)
        return [float(value) for value in shared]

    def is_any_true(self, value: bool) -> bool:
        """Return True if ``value`` is true on any rank. Every rank calls it.

        This is cheaper than ``gather``, which pickles.
        """
        flag = torch.tensor([int(value)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flag.item())

    def gather(self, item: T) -> list[T]:
        """Return every rank's item on every rank, in order of global rank."""
        items = [item] * len(self.hosts)
        dist.all_gather_object(items, item, group=self.control)
        return items


@contextmanager
def open_world(
    backend: str, device: str, seed: int, timeout_seconds: float, store: Store | None = None
) -> Iterator[World]:
    """Initialize torch.distributed and yield the world of this rank; destroy all groups at the end.

    RANK and WORLD_SIZE are environment variables. Ranks meet in ``store``, or at MASTER_ADDR and
    MASTER_PORT. ``timeout_seconds`` limits the collectives of every group. It must exceed a case's
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
    """Let torch compute float32 in full precision, and return torch's name of that setting.

    This overrides TORCH_ALLOW_TF32_CUBLAS_OVERRIDE of the environment.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return torch.get_float32_matmul_precision()


def _select_device(name: str) -> torch.device:
    """Return the CPU for ``cpu``, otherwise select and return this rank's GPU, without TF32."""
    if name == "cpu":
        return torch.device("cpu")
    disable_tf32()
    return accelerator.select_device(choose_gpu_index(os.environ, accelerator.count_devices()))


def make_group(
    world: World,
    partition: Sequence[Sequence[int]],
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a process group for each part of ``partition`` and return the group of this rank.

    Every rank calls it. NCCL splits the world's communicator once for all parts, as torch's meshes
    do. ``new_group`` would split it once for each part, because the ranks outside of a part take
    part in its split.
    """
    parts = [list(ranks) for ranks in partition]
    backend = backend or world.backend
    if backend == "nccl":
        group = dist.split_group(split_ranks=parts)
        assert group is not None, "every rank is in a part"
        return group
    groups: list[dist.ProcessGroup] = [dist.new_group(part, backend=backend) for part in parts]
    [own_index] = [index for index, part in enumerate(parts) if world.global_rank in part]
    return groups[own_index]


class IdleBenchmark(Benchmark):
    """A benchmark without effect, for ranks that take no steps in a case."""

    def step(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """The ranks that a case measures and the ranks that take steps in it."""

    ranks: Ranks
    """The ranks that are measured."""
    active: Ranks
    """The ranks that take steps: the measured ranks, or all if all groups run concurrently."""
    world: World | None
    """The world of this rank's group, None if this rank takes no steps."""


def select_subgroup(world: World, params: Params) -> Subgroup:
    """Return the ranks of a case from its ``group``, ``group_index`` and ``concurrent``.

    Every rank of the world calls it. Raises ``UserError`` if the group cannot be formed.
    """
    text = str(params.get("group", "world"))
    all_ranks = tuple(range(len(world.hosts)))
    if text == "world":
        return Subgroup(ranks=all_ranks, active=all_ranks, world=world)
    parts = form_groups(text, len(all_ranks), world.hosts)
    group = world.group if len(parts) == 1 else world.get_process_group(parts, "measured")
    [own_ranks] = [ranks for ranks in parts if world.global_rank in ranks]
    own_rank = own_ranks.index(world.global_rank)
    own_world = replace(world, rank=own_rank, size=len(own_ranks), group=group)
    measured_ranks = parts[int(params.get("group_index", 0))]
    active = all_ranks if params.get("concurrent", False) else measured_ranks
    is_active = world.global_rank in active
    return Subgroup(ranks=measured_ranks, active=active, world=own_world if is_active else None)
