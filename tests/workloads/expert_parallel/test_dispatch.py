"""Dispatch brings each pair of token and expert to its expert, and the results back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import (
    DispatchPlan,
    make_exchange,
    plan_dispatch,
)
from parbench.workloads.expert_parallel.dispatchers import DISPATCHERS
from parbench.workloads.expert_parallel.routing import NO_EXPERT
from tests.support.ranks import Ranks

NUM_EXPERTS = 5
Pair = tuple[int, int, int]


def list_pairs(plan: DispatchPlan) -> list[Pair]:
    """Return the pairs of a plan that travel as expert, token and choice."""
    pairs = plan.trim()
    top_k = plan.expert_ids.shape[1]
    experts = plan.expert_ids.flatten()[pairs].tolist()
    tokens = (pairs // top_k).tolist()
    choices = (pairs % top_k).tolist()
    return list(zip(experts, tokens, choices, strict=True))


@given(
    st.lists(st.permutations(range(NO_EXPERT, NUM_EXPERTS)), min_size=1, max_size=20),
    st.integers(1, NUM_EXPERTS),
    st.integers(1, 25),
)
@settings(max_examples=50, deadline=None)
def test_plan_fills_experts_in_order_of_tokens(
    permutations: list[list[int]], top_k: int, slots: int
) -> None:
    routes = torch.tensor(permutations)[:, :top_k]
    pairs: list[Pair] = []
    counts = [0] * NUM_EXPERTS
    for token, experts in enumerate(routes.tolist()):
        for choice, expert in enumerate(experts):
            if expert != NO_EXPERT and counts[expert] < slots:
                pairs.append((expert, token, choice))
                counts[expert] += 1
    plan = plan_dispatch(routes, NUM_EXPERTS, slots)
    assert list_pairs(plan) == sorted(pairs)
    assert plan.counts.tolist() == counts


UNROUTED = torch.full((6, 2), NO_EXPERT)
ROUTES_BY_RANK = {
    "mixed": [
        torch.tensor([[0, 2], [3, 1], [2, 0], [1, 3], [0, 1], [3, 2]]),
        torch.tensor([[1, 0], [2, 3], [0, 3], [1, 2], [2, 0], [3, 1]]),
    ],
    "all to rank 0": [torch.tensor([[0, 1]] * 6), torch.tensor([[0, 1]] * 6)],
    "only rank 1 sends": [UNROUTED, torch.tensor([[3, 0]] * 6)],
}
"""Routes (6, 2) of both ranks to four experts, of which each rank has two."""


def dispatch_once(
    world: World, variant: str, routes: Tensor, is_remote: bool
) -> tuple[list[int], list[Tensor]]:
    """Let expert e multiply by e + 1; return rows by expert, and the sums and gradients."""
    generator = torch.Generator().manual_seed(7 + world.rank)
    x = torch.randn(6, 3, generator=generator).requires_grad_()
    weights = torch.rand(6, 2, generator=generator).requires_grad_()
    plan = plan_dispatch(routes, 4, slots=4)
    exchange = make_exchange(variant, x, weights, plan, world.group if is_remote else None)
    rows = exchange.dispatch()
    first = 2 * world.rank if is_remote else 0
    experts = torch.arange(first, first + len(rows.counts))
    factors = experts.repeat_interleave(rows.counts) + 1
    out = exchange.combine(rows.tokens * factors[:, None])
    upstream = torch.randn(6, 3, generator=generator)
    out.backward(upstream)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.grad is not None
    return rows.counts.tolist(), [out.detach(), x.grad, weights.grad]


def compare_dispatch(world: World, variant: str, kind: str) -> tuple[list[int], list[int]]:
    """Compare with one process; return this rank's rows by expert, and its pairs by expert."""
    routes = ROUTES_BY_RANK[kind][world.rank]
    rows, actual = dispatch_once(world, variant, routes, is_remote=True)
    pairs, expected = dispatch_once(world, variant, routes, is_remote=False)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    return rows, pairs


@pytest.mark.parametrize("variant", DISPATCHERS)
@pytest.mark.parametrize("kind", ROUTES_BY_RANK)
def test_dispatch_matches_one_process(two_ranks: Ranks, variant: str, kind: str) -> None:
    arguments = {"variant": variant, "kind": kind}
    first, second = two_ranks.call(f"{__name__}:compare_dispatch", **arguments)
    pairs = [a + b for a, b in zip(first[1], second[1], strict=True)]
    assert first[0] == pairs[:2]
    assert second[0] == pairs[2:]
