"""What a layer's and a dispatch's steps share: each source's own tokens, the same for whoever draws them."""

from typing import Any

import torch
from ranks import Ranks
from test_ep_layer import layer_of

from bench.world import World
from workloads.experts.ep_scope import Passing
from workloads.experts.moe import DenseMoe
from workloads.experts.moe_dispatch import Rows
from workloads.layout import local


def drawn(world: World) -> tuple[list[Any], list[Any], list[Any]]:
    """Return this rank's tokens in two steps, and what it draws as the other's."""
    step = layer_of(world, {"routing": "zipf"})
    mine, others, routes = [], [], []
    for _ in range(2):
        step.reset()
        mine.append(step.x.tolist())
        others.append(step.drawn_of("tokens", 1 - world.rank).tolist())
        assert step.layer.given is not None
        routes.append(step.layer.given.tolist())
    step.close()
    return mine, others, routes


def test_every_rank_draws_the_same_tokens_of_a_source(two_ranks: Ranks) -> None:
    (mine, others, routes), (other_mine, other_others, other_routes) = two_ranks.call("test_ep_scope:drawn")
    assert mine == other_others
    assert others == other_mine
    assert mine[0] != mine[1]
    assert mine != other_mine
    assert routes[0] != routes[1]
    assert routes != other_routes


def turned(world: World) -> list[list[int]]:
    """Return the loads of experts as the case says, balanced, and as the case says again."""
    step = layer_of(world, {"routing": "idle_rank"})
    found = []
    for balanced in (False, True, False):
        step._balanced(balanced)
        step.reset()
        assert step.layer.given is not None
        found.append(torch.bincount(step.layer.given.flatten(), minlength=8).tolist())
    step.close()
    return found


def test_balanced_routes_come_and_go(two_ranks: Ranks) -> None:
    for before, balanced, after in two_ranks.call("test_ep_scope:turned"):
        assert before[4:] == after[4:] == [0] * 4
        assert balanced == [8] * 8


def weights(world: World) -> bool:
    step = layer_of(world, {})
    alone = step.dense(torch.float32)
    assert isinstance(alone, DenseMoe)
    equal = [
        torch.equal(p.detach()[4 * world.rank :][:4], local(q.detach()))
        for (name, p), q in zip(alone.named_parameters(), step.layer.parameters(), strict=True)
        if name.startswith("experts.")
    ]
    step.close()
    return len(equal) == 2 and all(equal)


def test_the_reference_has_the_weights_of_all_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ep_scope:weights") == [True, True]


def misplaced(world: World) -> list[int]:
    """Return what is counted as misplaced where all is right, and where experts count from another number on."""
    found = []
    for wrong in (False, True):
        step = layer_of(world, {"routing": "lognormal", "capacity": 0.75})
        step.reset()
        if wrong and world.rank == 1:
            numbers = step._numbers
            step._numbers = lambda rows, numbers=numbers: numbers(rows) + 1  # type: ignore[misc,method-assign]
        found.append(step.count_misplaced())
        step.close()
    return found


def test_rows_that_come_to_another_expert_are_counted(two_ranks: Ranks) -> None:
    for right, wrong in two_ranks.call("test_ep_scope:misplaced"):
        assert right == 0
        assert wrong > 0


def test_passing_experts_give_back_what_they_get() -> None:
    tokens = torch.randn(3, 4)
    rows = Rows(tokens=tokens, counts=torch.tensor([1, 2]))
    assert torch.equal(Passing()(rows), tokens)
    torch.testing.assert_close(Passing(4)(rows) * 4, tokens)
