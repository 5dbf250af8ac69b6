"""The ranks that share one copy of the experts, and those that hold the same ones in other copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench.world.torch_compat import forget_meshes
from bench.world.world import World
from workloads.expert_parallel.moe_layer import Held


@dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """This rank's place among experts; a group is None where it would be of one rank.

    A copy are ``ep`` times ``etp`` neighbouring ranks, ``sources`` their global ranks in order: blocks of ``etp``
    (``split``) hold the same experts, a part of each; ranks of the same place in their blocks exchange tokens
    (``group``), ``place`` counts the blocks. ``replicas`` hold the same part of the same experts in other copies.
    """

    sources: tuple[int, ...]
    place: int
    group: dist.ProcessGroup | None
    split: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    mesh: DeviceMesh | None

    @property
    def held(self) -> Held:
        """Who holds the experts of this copy."""
        return Held(group=self.group, split=self.split, mesh=self.mesh)

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process groups by the name of their axis."""
        named = (("ep", self.group), ("etp", self.split), ("edp", self.replicas))
        return {name: group for name, group in named if group is not None}

    def close(self) -> None:
        """Give back the groups."""
        for group in self.groups.values():
            dist.destroy_process_group(group)
        if self.groups:
            forget_meshes()


def make_axis(world: World, ep: int, etp: int = 1) -> ExpertAxis:
    """Return the axes of copies of ``ep`` times ``etp`` ranks; every rank makes every group, never the world's own."""
    ranks = torch.arange(world.size).view(-1, ep, etp)
    copy = ranks[world.rank // (ep * etp)]
    group = group_of_mine(world, ranks.transpose(1, 2).reshape(-1, ep).tolist())
    split = group_of_mine(world, ranks.reshape(-1, etp).tolist())
    replicas = group_of_mine(world, ranks.permute(1, 2, 0).reshape(ep * etp, -1).tolist())
    return ExpertAxis(
        sources=tuple(copy.flatten().tolist()),
        place=world.rank // etp % ep,
        group=group,
        split=split,
        replicas=replicas,
        mesh=_mesh(world, copy, group, split),
    )


def _mesh(
    world: World, copy: torch.Tensor, group: dist.ProcessGroup | None, split: dist.ProcessGroup | None
) -> DeviceMesh | None:
    """Return the mesh that experts are laid out on, of those axes that have several ranks."""
    axes = {name: made for name, made in (("ep", group), ("etp", split)) if made is not None}
    kind, names = world.device.type, tuple(axes)
    if len(axes) == 2:
        return DeviceMesh.from_group(list(axes.values()), kind, mesh=copy, mesh_dim_names=names)
    return DeviceMesh.from_group(next(iter(axes.values())), kind, mesh_dim_names=names) if axes else None


def group_of_mine(world: World, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make each group, and return this rank's; None where it would be alone."""
    if len(groups[0]) == 1:
        return None
    made: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if world.rank in ranks)
