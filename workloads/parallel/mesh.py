"""The process groups of a step by axis, and the device meshes of FSDP, DTensor and experts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parbench.bench.world.world import World, make_group
from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.torch_internals import forget_meshes

Partition = Sequence[Sequence[int]]
"""Disjoint groups that together contain every rank."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The process groups and device meshes of a rank, by axis.

    An axis never shares the group of the world, because bytes are counted by group.
    """

    dims: ParallelDims
    groups: Mapping[str, dist.ProcessGroup]
    """This rank's group of each axis that communicates: dp, fsdp, pp, tp, ep, etp, edp or efsdp,
    and cp, or ulysses and ring."""
    shards: DeviceMesh | None
    """The mesh (dp, fsdp), or (fsdp), over which FSDP shards parameters, None without FSDP."""
    tensor: DeviceMesh | None
    """The mesh (tp), None with one ``tp`` rank."""
    experts: DeviceMesh | None
    """The mesh (ep, etp), (ep) or (etp), over which experts are distributed, or None."""
    expert_shards: DeviceMesh | None
    """The mesh (dp, efsdp), or (efsdp), that FSDP shards experts over, None if it does not."""

    def close(self) -> None:
        """Destroy the groups. Every rank must call this method."""
        destroy_groups(self.groups.values())


def build_mesh(
    world: World,
    dims: ParallelDims,
    *,
    has_experts: bool = False,
    context_groups: Mapping[str, Partition] | None = None,
    unused_axes: Sequence[str] = (),
) -> Mesh:
    """Create the process groups and device meshes of all axes, in the same order on every rank.

    ``context_groups`` are the groups of context parallelism by axis. ``unused_axes`` get no group,
    because a group without communication costs memory and start-up time of NCCL.
    """
    partitions = {**_list_partitions(dims, has_experts=has_experts), **(context_groups or {})}
    partitions = {axis: parts for axis, parts in partitions.items() if axis not in unused_axes}
    groups = {name: make_group(world, parts) for name, parts in partitions.items()}
    # A group that one rank destroys while another rank still connects breaks on that rank.
    world.barrier()
    table = _MeshTable(world, partitions, groups)
    shards, tensor = table.build_pair("fsdp", ["tp"])
    expert_shards, experts = table.build_pair("efsdp", ["ep", "etp"])
    return Mesh(
        dims=dims,
        groups=groups,
        shards=shards,
        tensor=tensor,
        experts=experts,
        expert_shards=expert_shards,
    )


def _list_partitions(dims: ParallelDims, *, has_experts: bool) -> dict[str, Partition]:
    """Return the groups of all ranks, keyed by axis, for each axis with more than one rank."""
    partitions: dict[str, Partition] = {
        "dp": dims.groups(*dims.replica_axes),
        "fsdp": dims.groups(*dims.shard_axes),
        "pp": dims.groups("pp"),
        "tp": dims.groups("tp"),
    }
    if has_experts:
        replicas = "efsdp" if dims.is_sharded else "edp"
        partitions |= {axis: dims.expert_groups(axis) for axis in ("ep", "etp", replicas)}
    return {name: parts for name, parts in partitions.items() if parts and len(parts[0]) > 1}


@dataclass(frozen=True)
class _MeshTable:
    """Builds device meshes of this rank's stage from groups that exist."""

    world: World
    partitions: Mapping[str, Partition]
    groups: Mapping[str, dist.ProcessGroup]

    def build_pair(
        self, sharding: str, inner: Sequence[str]
    ) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """Return the mesh of dp and a ``sharding`` axis, and the mesh of ``inner`` axes.

        Both are slices of one mesh if parameters are sharded. A mesh without ranks is None.
        """
        inner = [axis for axis in inner if axis in self.groups]
        if sharding not in self.groups:
            return None, (self._build(inner) if inner else None)
        outer = [axis for axis in ("dp", sharding) if axis in self.groups]
        root = self._build([*outer, *inner])
        return root[tuple(outer)], (root[tuple(inner)] if inner else None)

    def _build(self, axes: Sequence[str]) -> DeviceMesh:
        """Return the device mesh over some axes that contains this rank."""
        ranks = {self.world.rank}
        for axis in axes:
            parts = self.partitions[axis]
            ranks = {peer for part in parts if ranks.intersection(part) for peer in part}
        in_order = sorted(ranks, key=lambda rank: [self._index(rank, axis) for axis in axes])
        sizes = [self.groups[axis].size() for axis in axes]
        return DeviceMesh.from_group(
            [self.groups[axis] for axis in axes],
            self.world.device.type,
            mesh=torch.tensor(in_order, dtype=torch.int).view(sizes),
            mesh_dim_names=tuple(axes),
        )

    def _index(self, rank: int, axis: str) -> int:
        """Return the position of a rank in its group of an axis. Torch sorts a group's ranks."""
        [ranks] = [part for part in self.partitions[axis] if rank in part]
        return sorted(ranks).index(rank)


def destroy_groups(groups: Collection[dist.ProcessGroup]) -> None:
    """Destroy groups and make DTensor forget their meshes.

    For DTensor, meshes of the same ranks and names are equal, so that a later mesh would get the
    destroyed groups.
    """
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        forget_meshes()


def get_full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor on every rank of its mesh and return the full tensor.

    Other tensors are returned as they are.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
