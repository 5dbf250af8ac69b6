"""A case is measured on the ranks that its group, member and together say."""

from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks

from bench.errors import UserError
from bench.parts import Idle, Parts
from bench.subject import Description
from bench.world import World

BOTH = (0, 1)


def part_of(world: World, **params: Any) -> tuple[Any, ...]:
    """Return who is measured, who is active, and this rank's place and the size of its group, None if idle."""
    part = Parts(world).of(params)
    return part.ranks, part.active, None if part.world is None else (part.world.rank, part.world.size)


def sum_within(world: World, group: str) -> float:
    """Return the sum of global ranks, each plus 1, over this rank's group."""
    part = Parts(world).of({"group": group, "together": True})
    assert part.world is not None
    one = torch.full((1,), float(world.global_rank + 1))
    dist.all_reduce(one, group=part.world.group)
    return float(one)


def made_once(world: World) -> tuple[bool, bool, bool]:
    """Return whether the same text means the same process group, another another, and the world none of its own."""
    parts = Parts(world)
    handles = []
    for text in ("pairs", "pairs", "contiguous:2", "world"):
        part = parts.of({"group": text})
        assert part.world is not None
        handles.append(part.world.group)
    return handles[0] is handles[1], handles[0] is not handles[2], handles[3] is world.group


def refusal(world: World) -> str:
    try:
        Parts(world).of({"group": "contiguous:3"})
    except UserError as error:
        return str(error)
    return ""


def test_without_a_group_the_whole_world_is_measured(two_ranks: Ranks) -> None:
    whole = [(BOTH, BOTH, (0, 2)), (BOTH, BOTH, (1, 2))]
    assert two_ranks.call("test_parts:part_of") == whole
    assert two_ranks.call("test_parts:part_of", group="world") == whole


def test_two_ranks_are_one_pair(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_parts:part_of", group="pairs") == [(BOTH, BOTH, (0, 2)), (BOTH, BOTH, (1, 2))]


def test_a_rank_outside_the_measured_group_stands_by(two_ranks: Ranks) -> None:
    found = two_ranks.call("test_parts:part_of", group="contiguous:1", member=1)
    assert found == [((1,), (1,), None), ((1,), (1,), (0, 1))]


def test_the_first_group_is_measured_where_none_is_named(two_ranks: Ranks) -> None:
    found = two_ranks.call("test_parts:part_of", group="contiguous:1")
    assert found == [((0,), (0,), (0, 1)), ((0,), (0,), None)]


def test_together_all_groups_are_active_and_one_is_measured(two_ranks: Ranks) -> None:
    found = two_ranks.call("test_parts:part_of", group="contiguous:1", member=1, together=True)
    assert found == [((1,), BOTH, (0, 1))] * 2


def test_traffic_stays_within_a_group(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_parts:sum_within", group="pairs") == [3.0, 3.0]
    assert two_ranks.call("test_parts:sum_within", group="contiguous:1") == [1.0, 2.0]


def test_a_process_group_is_made_once(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_parts:made_once") == [(True, True, True)] * 2


def test_a_group_that_cannot_be_formed_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_parts:refusal")
    assert first == second
    assert "3" in first


def test_an_idle_rank_is_never_wrong_and_moves_nothing() -> None:
    idle = Idle()
    idle.reset()
    idle.step()
    assert idle.check() == 0
    assert idle.describe() == Description()
    idle.close()
