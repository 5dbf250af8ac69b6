"""The part of the world that a case measures: which ranks, on which process group, and what the others do."""

from dataclasses import dataclass

import torch.distributed as dist

from bench.plan.cases import Params
from bench.plan.groups import Ranks, groups_of
from bench.world.subject import Subject
from bench.world.world import World


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """``ranks`` are measured; ``active`` ones take steps, they too and, if all groups run at once, all others.

    ``world`` is this rank's own group, None where it stands by.
    """

    ranks: Ranks
    active: Ranks
    world: World | None


class StandBy(Subject):
    """What a rank does that is not in the group: nothing, as often as the others do something."""

    def step(self) -> None:
        return


class Subgroups:
    """Makes the process groups that cases ask for, each once, on every rank in the same order; ``world`` is of all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: dict[str, tuple[tuple[Ranks, ...], list[dist.ProcessGroup]]] = {}

    def retime(self) -> None:
        """Let the cases to come have a clock that is no older than seconds; collective."""
        self.world = self.world.retimed()

    def of(self, params: Params) -> Subgroup:
        """Return the part for a case's group, its index and ``concurrent``; ``UserError`` if it cannot be formed."""
        everyone = tuple(range(len(self.world.hosts)))
        text = str(params.get("group", "world"))
        if text == "world":
            return Subgroup(ranks=everyone, active=everyone, world=self.world)
        if text not in self._made:
            made = groups_of(text, len(self.world.hosts), self.world.hosts)
            self._made[text] = made, [dist.new_group(list(ranks), backend=self.world.backend) for ranks in made]
        groups, handles = self._made[text]
        index = int(params.get("group_index", 0))
        mine = next(index for index, ranks in enumerate(groups) if self.world.global_rank in ranks)
        concurrent = bool(params.get("concurrent", False))
        world = self.world.narrowed(groups[mine], handles[mine]) if concurrent or mine == index else None
        return Subgroup(ranks=groups[index], active=everyone if concurrent else groups[index], world=world)
