"""The part of the world that a case measures: which ranks, on which process group, and what the others do."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from bench.plan.cases import Params
from bench.plan.groups import Ranks, groups_of
from bench.world.subject import Subject
from bench.world.world import World


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """``ranks`` are measured; ``active`` ones take steps, they too and, if all groups run at once, all others."""

    ranks: Ranks
    active: Ranks
    world: World | None  # this rank's own group, None where it stands by


class StandBy(Subject):
    """What a rank does that is not in the group: nothing, as often as the others do something."""

    def step(self) -> None:
        return


class Subgroups:
    """Makes the process groups that cases ask for, each once, on every rank in the same order; ``world`` is of all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: dict[str, tuple[tuple[Ranks, ...], list[dist.ProcessGroup]]] = {}

    def of(self, params: Params) -> Subgroup:
        """Return the part for a case's group, its index and ``concurrent``; ``UserError`` if it cannot be formed."""
        world, hosts = self.world, self.world.hosts
        everyone, text = tuple(range(len(hosts))), str(params.get("group", "world"))
        if text == "world":
            return Subgroup(ranks=everyone, active=everyone, world=world)
        if text not in self._made:
            made = groups_of(text, len(hosts), hosts)
            self._made[text] = made, [dist.new_group(list(ranks), backend=world.backend) for ranks in made]
        groups, handles = self._made[text]
        measured, concurrent = groups[int(params.get("group_index", 0))], bool(params.get("concurrent", False))
        mine, handle = next(found for found in zip(groups, handles, strict=True) if world.global_rank in found[0])
        narrowed = replace(world, rank=mine.index(world.global_rank), size=len(mine), group=handle)
        active = everyone if concurrent else measured
        return Subgroup(ranks=measured, active=active, world=narrowed if world.global_rank in active else None)
