"""The world a subject runs in: ranks, device, groups, clock, seed. Passed as an argument; there are no globals."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from bench.world.clock import Clock, calibrate, recalibrate


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
    nodes: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    clock: Clock
    seed: int

    def narrowed(self, ranks: Sequence[int], group: dist.ProcessGroup) -> "World":
        """Return the world of one group of global ``ranks``, this one among them."""
        return replace(self, rank=list(ranks).index(self.global_rank), size=len(ranks), group=group)

    def retimed(self) -> "World":
        """Return this world of all ranks, its clock found anew if hosts may have drifted apart; collective."""
        if not self.clock.drifts or not self.decide([float(self.clock.stale())])[0]:
            return self
        return replace(self, clock=recalibrate(self.clock, self.rank, self.size, self.control))

    def sync(self) -> None:
        """Wait until the device has done what was given to it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.control)

    def sum(self, value: int) -> int:
        """Return the sum of a number over ranks."""
        total = torch.tensor([value])
        dist.all_reduce(total, group=self.control)
        return int(total)

    def decide(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's values on every rank; other ranks give as many of any value."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, group=self.control, group_src=0)
        return [float(value) for value in shared]

    def gather(self, item: object) -> list[object]:
        """Return every rank's item, in order of global rank, on every rank."""
        items: list[object] = [None] * len(self.hosts)
        dist.all_gather_object(items, item, group=self.control)
        return items


@contextmanager
def open_world(
    backend: str, device: str, seed: int, timeout_seconds: float, store: Store | None = None
) -> Iterator[World]:
    """Join the process group told by RANK, WORLD_SIZE and ``store`` (else MASTER_ADDR and MASTER_PORT), and leave it at
    the end.

    ``timeout_seconds`` bounds a collective; make it longer than a case's, so that the driver sees a hang first.
    """
    timeout = timedelta(seconds=timeout_seconds)
    place = _device(device)
    bound = place if backend == "nccl" else None
    if store is None:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    group = dist.group.WORLD
    assert group is not None
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        rank, size = dist.get_rank(), dist.get_world_size()
        hosts: list[str] = [""] * size
        dist.all_gather_object(hosts, socket.gethostname(), group=control)
        yield World(
            rank=rank,
            size=size,
            global_rank=rank,
            hosts=tuple(hosts),
            nodes=len(set(hosts)),
            device=place,
            backend=backend,
            group=group,
            control=control,
            clock=calibrate(rank, size, control),
            seed=seed,
        )
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
