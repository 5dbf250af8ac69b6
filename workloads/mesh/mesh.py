"""The process groups of a step by axis, and the device meshes of FSDP, DTensor and experts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parbench.bench.world.world import World, make_group
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.torch_internals import forget_meshes

Partition = Sequence[Sequence[int]]
"""Disjoint groups of global ranks, which together contain every rank."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The process groups and device meshes of this rank, for the axes of a training step.

    An axis never shares the process group of the world, because sent bytes are counted by group.
    """

    dims: ParallelDims
    """The number of ranks along each axis."""
    groups: Mapping[str, dist.ProcessGroup]
    """This rank's process group of each axis with more than one rank, keyed by name of the axis.

    Possible axes are dp, fsdp, pp, tp, ep and etp. Replicas of routed experts differ along edp.
    With FSDP, efsdp replaces edp and has the shards of routed experts. Context parallelism has the
    axis cp, or the two axes ulysses and ring.
    """
    shards: DeviceMesh | None
    """The mesh over which FSDP shards parameters, with axes (dp, fsdp) or (fsdp).

    It is None without FSDP.
    """
    tensor: DeviceMesh | None
    """The mesh of tensor parallelism with the axis (tp), None with one ``tp`` rank."""
    experts: DeviceMesh | None
    """The mesh over which routed experts are distributed, with axes (ep, etp), (ep) or (etp).

    It is None if every rank holds all routed experts, and for a dense model.
    """
    expert_shards: DeviceMesh | None
    """The mesh over which FSDP shards routed experts, with axes (dp, efsdp) or (efsdp).

    It is None if FSDP does not shard routed experts.
    """

    def close(self) -> None:
        """Destroy the process groups. Every rank must call this method."""
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

    Every rank must call this function. ``has_experts`` is True for a MoE model, which also needs
    the axes ``ep``, ``etp``, and ``edp`` or ``efsdp``.
    ``context_groups`` are the groups of all ranks along the axes of context parallelism, keyed by
    axis. ``unused_axes`` get no group, because a group without communication costs memory and
    start-up time of NCCL.
    """
    partitions = {**_list_partitions(dims, has_experts=has_experts), **(context_groups or {})}
    partitions = {axis: parts for axis, parts in partitions.items() if axis not in unused_axes}
    forget_meshes()  # A custom step may have used DTensors on other groups of these ranks.
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
    """Return the groups of all ranks along each axis with more than one rank, keyed by axis.

    With ``has_experts``, for a MoE model, the axes ``ep``, ``etp``, and ``edp`` or ``efsdp`` are
    included. A group is a list of global ranks.
    """
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
    """Builds torch's device meshes from existing process groups, for this rank's pipeline stage."""

    world: World
    """All ranks, of which this process is one."""
    partitions: Mapping[str, Partition]
    """The groups of all ranks along each axis, keyed by axis."""
    groups: Mapping[str, dist.ProcessGroup]
    """This rank's process group along each axis, keyed by axis."""

    def build_pair(
        self, sharding: str, inner: Sequence[str]
    ) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """Return the mesh with the axes (dp, ``sharding``), and the mesh with the ``inner`` axes.

        ``sharding`` is the axis over which FSDP shards parameters. Axes with one rank are left out.
        If FSDP shards parameters, both are slices of one mesh. Otherwise the first is None. The
        second is None if all of its axes have one rank.
        """
        inner = [axis for axis in inner if axis in self.groups]
        if sharding not in self.groups:
            return None, (self._build(inner) if inner else None)
        outer = [axis for axis in ("dp", sharding) if axis in self.groups]
        root = self._build([*outer, *inner])
        return root[tuple(outer)], (root[tuple(inner)] if inner else None)

    def _build(self, axes: Sequence[str]) -> DeviceMesh:
        """Return the device mesh with the named axes that contains this rank.

        Each axis uses the existing process group.
        """
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
        """Return the index of a global rank in its group along an axis.

        Ranks are counted in ascending order, because torch sorts the ranks of a group.
        """
        [ranks] = [part for part in self.partitions[axis] if rank in part]
        return sorted(ranks).index(rank)


def destroy_groups(groups: Collection[dist.ProcessGroup]) -> None:
    """Destroy process groups, and remove their device meshes from the caches of DTensor.

    Every rank must call this function. Without the removal, DTensor would take a cached mesh with
    destroyed groups for a later mesh of the same ranks and axis names.
    """
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        forget_meshes()


def get_full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor on every rank of its mesh, and return the full tensor.

    All ranks of the mesh must call this function. Other tensors are returned as they are.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
