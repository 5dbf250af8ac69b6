"""One device mesh for all axes of a step, and the groups that lie across or inside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench.world.world import World
from workloads.expert_parallel.groups import Held, group_of_mine, held_by
from workloads.mesh.axes import expert_copies, expert_groups, expert_parts, groups_along, multiplied
from workloads.mesh.mesh_case import Hybrid
from workloads.step.layout import make_mesh


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The mesh of all axes with several ranks, and this rank's group of each axis that carries something.

    ``dp`` are all ranks that hold the same shards for other tokens, those of ``cp`` too; ``ep`` deal out experts,
    ``etp`` split each, ``edp`` hold the same ones. ``replica_group`` hold the same layers.
    """

    mesh: DeviceMesh
    axes: Mapping[str, dist.ProcessGroup]
    replica_group: dist.ProcessGroup
    held: Held
    made: tuple[dist.ProcessGroup, ...]


def make_groups(world: World, hybrid: Hybrid) -> Groups:
    """Make the mesh and the groups; every rank of the world makes every one."""
    axes = {name: size for name, size in multiplied(hybrid.mesh).items() if size > 1} or {"dp": world.size}
    mesh, made = make_mesh(world, **axes)
    found = {name: mesh.get_group(name) for name in axes}
    further: list[dist.ProcessGroup] = []

    def further_group(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        further.append(group_of_mine(world, partition))
        return further[-1]

    if hybrid.size("cp") > 1:
        found["dp"] = further_group(groups_along(hybrid.mesh, "dp", "cp"))
    replica_group = further_group(groups_along(hybrid.mesh, "dp", "fsdp", "cp", "tp")) if "pp" in axes else world.group
    held = Held()
    if hybrid.moe is not None:
        if hybrid.moe.ep > 1:
            found["ep"] = further_group(expert_groups(hybrid.mesh))
        if hybrid.moe.etp > 1:
            found["etp"] = further_group(expert_parts(hybrid.mesh))
        [column] = [ranks for ranks in expert_groups(hybrid.mesh) if world.rank in ranks]
        copy = [next(part for part in expert_parts(hybrid.mesh) if rank in part) for rank in column]
        held = held_by(found, copy, world.device)
        copies = expert_copies(hybrid.mesh)
        if len(copies[0]) > 1:
            found["edp"] = further_group(copies)
    return Groups(mesh=mesh, axes=found, replica_group=replica_group, held=held, made=(*made, *further))
