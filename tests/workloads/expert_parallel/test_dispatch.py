"""Dispatch brings each pair of token and expert to its expert, and the results back."""

import pytest
import torch
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import make_exchange, plan_dispatch
from parbench.workloads.expert_parallel.dispatchers import DISPATCHERS
from parbench.workloads.expert_parallel.routing import NO_EXPERT
from tests.support.ranks import Ranks

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
    output = exchange.combine(rows.tokens * factors[:, None])
    upstream = torch.randn(6, 3, generator=generator)
    output.backward(upstream)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.grad is not None
    return rows.counts.tolist(), [output.detach(), x.grad, weights.grad]


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
