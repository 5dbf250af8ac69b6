"""The world a benchmark runs in: ranks, device, groups, clock, seed. Passed as an argument; there are no globals."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from parbench.bench.machine.gpu import local_gpu_index
from parbench.bench.plan.cases import Params
from parbench.bench.plan.groups import Ranks, groups_of
from parbench.bench.world.benchmark import Benchmark
from parbench.bench.world.torch_compat import default_timeout

T = TypeVar("T")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 50
_ONE_HOST = "one host, one monotonic clock"
_STALE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Rank r's time on rank 0's clock is ``perf_counter_ns() - offsets_ns[r]``, right within ``uncertainty_ns``."""

    offsets_ns: tuple[int, ...]
    uncertainty_ns: int
    method: str
    taken_ns: int = 0  # when it was found, on rank 0's clock; 0 on one host, whose clock holds for ever


def calibrate(rank: int, size: int, control: dist.ProcessGroup) -> Clock:
    boots: list[str | None] = [None] * size
    dist.all_gather_object(boots, _boot_id(rank), group=control)
    if len(set(boots)) == 1:
        return Clock(offsets_ns=(0,) * size, uncertainty_ns=0, method=_ONE_HOST)
    found = [(0, 0)]
    for peer in range(1, size):
        first = boots.index(boots[peer])
        found.append(_ping_pong(rank, peer, control) if first == peer else found[first])
    shared = torch.tensor([*found, (time.perf_counter_ns(), 0)])
    dist.broadcast(shared, group=control, group_src=0)
    return Clock(
        offsets_ns=tuple(int(offset) for offset in shared[:size, 0]),
        uncertainty_ns=int(shared[:size, 1].max()),
        method=f"ping-pong with rank 0, least round trip of {_ROUNDS}",
        taken_ns=int(shared[size, 0]),
    )


def _boot_id(rank: int) -> str:
    """Return what ranks that share a clock have in common; without a boot id, nothing is shared."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"rank {rank}"


def _ping_pong(rank: int, peer: int, control: dist.ProcessGroup) -> tuple[int, int]:
    """Return, on rank 0, the peer's offset and half the least round trip, in ns; zeros on other ranks."""
    stamp = torch.zeros(1, dtype=torch.int64)
    rounds = []
    for _ in range(_ROUNDS):
        if rank == 0:
            sent = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=peer)
            dist.recv(stamp, group=control, group_src=peer)
            back = time.perf_counter_ns()
            rounds.append((back - sent, int(stamp) - (sent + back) // 2))
        elif rank == peer:
            dist.recv(stamp, group=control, group_src=0)
            stamp[0] = time.perf_counter_ns()
            dist.send(stamp, group=control, group_dst=0)
    round_trip, offset = min(rounds, default=(0, 0))
    return offset, round_trip // 2


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one launch.

    ``group`` carries what is measured, ``rank`` and ``size`` are its; it may be a part of all ranks, which
    ``global_rank`` and ``hosts`` count. ``control`` is a gloo group of all ranks on host memory for decisions and
    checks, so that they never mix with the traffic measured.
    """

    rank: int
    size: int
    global_rank: int
    hosts: tuple[str, ...]
    device: torch.device
    backend: str
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    clock: Clock
    seed: int

    def retimed(self) -> "World":
        """Return this world with a clock no older than seconds, if hosts may drift apart; collective.

        The new clock is as uncertain as it has moved since the last, for it will move on; a part of all keeps its own.
        """
        stale = time.perf_counter_ns() - self.clock.taken_ns > _STALE_SECONDS * 1e9  # true on rank 0, whose clock it is
        if self.clock.method == _ONE_HOST or self.size < len(self.hosts) or not self.decide([float(stale)])[0]:
            return self
        last, fresh = self.clock, calibrate(self.rank, self.size, self.control)
        moved = max(abs(now - then) for now, then in zip(fresh.offsets_ns, last.offsets_ns, strict=True))
        return replace(self, clock=replace(fresh, uncertainty_ns=fresh.uncertainty_ns + moved))

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sync_stream(self) -> None:
        """Wait for what this thread has launched, and for no load beside it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def decide(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's values on every rank; other ranks give as many of any value."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, group=self.control, group_src=0)
        return [float(value) for value in shared]

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, in order of global rank, on every rank."""
        items = [item] * len(self.hosts)
        dist.all_gather_object(items, item, group=self.control)
        return items


@contextmanager
def open_world(
    backend: str, device: str, seed: int, timeout_seconds: float, store: Store | None = None
) -> Iterator[World]:
    """Join the ranks told by RANK, WORLD_SIZE and ``store`` (else MASTER_ADDR and MASTER_PORT), and leave at the end.

    ``timeout_seconds`` bounds a collective of any group; make it longer than a case's, so that the driver sees a hang
    first.
    """
    place = _device(device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bound = place if backend == "nccl" else None
    with default_timeout(timedelta(seconds=timeout_seconds)), ExitStack() as stack:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
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
            device=place,
            backend=backend,
            group=group,
            control=control,
            clock=calibrate(rank, size, control),
            seed=seed,
        )


def full_float32() -> str:
    """Let float32 be no TF32, whatever TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says; return torch's word for it."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return torch.get_float32_matmul_precision()


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    full_float32()
    local = local_gpu_index(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """``ranks`` are measured; ``active`` ones take steps, they too and, if all groups run at once, all others."""

    ranks: Ranks
    active: Ranks
    world: World | None  # this rank's own group, None where it stands by


def make_group(world: World, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a process group for each part of all ranks and return this rank's; every rank calls it.

    NCCL splits the world's communicator once for all parts, as torch's meshes do. ``new_group`` would split it once
    for each part, because the ranks outside of a part take part in its split.
    """
    parts = [list(ranks) for ranks in partition]
    if world.backend == "nccl":
        group = dist.split_group(split_ranks=parts)
        assert group is not None, "every rank is in a part"
        return group
    groups: list[dist.ProcessGroup] = [dist.new_group(part, backend=world.backend) for part in parts]
    return next(group for part, group in zip(parts, groups, strict=True) if world.global_rank in part)


class StandBy(Benchmark):
    """What a rank does that is not in the group: nothing, as often as the others do something."""

    def step(self) -> None:
        return


class Subgroups:
    """Makes the process groups that cases ask for, each once, on every rank in the same order; ``world`` is of all.

    They end with the world.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: dict[str, tuple[tuple[Ranks, ...], dist.ProcessGroup]] = {}
        self._load_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    def of(self, params: Params) -> Subgroup:
        """Return the part for a case's group, its index and ``concurrent``; ``UserError`` if it cannot be formed."""
        world, hosts = self.world, self.world.hosts
        everyone, text = tuple(range(len(hosts))), str(params.get("group", "world"))
        if text == "world":
            return Subgroup(ranks=everyone, active=everyone, world=world)
        if text not in self._made:
            parts = groups_of(text, len(hosts), hosts)
            self._made[text] = parts, world.group if len(parts) == 1 else make_group(world, parts)
        parts, group = self._made[text]
        measured, concurrent = parts[int(params.get("group_index", 0))], bool(params.get("concurrent", False))
        mine = next(ranks for ranks in parts if world.global_rank in ranks)
        narrowed = replace(world, rank=mine.index(world.global_rank), size=len(mine), group=group)
        active = everyone if concurrent else measured
        return Subgroup(ranks=measured, active=active, world=narrowed if world.global_rank in active else None)

    def make_load_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the groups of a background load: one for its data, and a gloo group for the agreement to end it."""
        if self._load_groups is None:
            self._load_groups = dist.new_group(backend=self.world.backend), dist.new_group(backend="gloo")
        return self._load_groups
