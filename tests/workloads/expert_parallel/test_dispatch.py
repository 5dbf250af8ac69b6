"""Dispatch brings each pair of token and expert to its expert, and the results back."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import (
    Flight,
    Plan,
    chunks_of,
    make_plan,
    start_trip,
    swap_now,
)
from parbench.workloads.expert_parallel.routing import NOWHERE
from parbench.workloads.step.sent_bytes import Silenced, fake_twins
from tests.support.ranks import Ranks

ROUTES = torch.tensor([[0, 2], [2, 1], [2, 0], [NOWHERE, NOWHERE], [1, 2]])
NOBODY = torch.full((6, 2), NOWHERE)
Pair = tuple[int, int, int]


def list_pairs(plan: Plan) -> list[Pair]:
    """Return the pairs of a plan as expert, token and choice."""
    columns = (plan.experts.tolist(), plan.tokens.tolist(), plan.choices.tolist())
    return list(zip(*columns, strict=True))


@given(
    st.lists(st.permutations(range(NOWHERE, 5)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
    st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_plan_fills_experts_in_order_of_tokens(
    permutations: list[list[int]], top_k: int, slots: int | None, num_chunks: int
) -> None:
    routes = torch.tensor(permutations)[:, :top_k]
    pairs: list[Pair] = []
    counts = [0] * 5
    for token, experts in enumerate(routes.tolist()):
        for choice, expert in enumerate(experts):
            if expert != NOWHERE and (slots is None or counts[expert] < slots):
                pairs.append((expert, token, choice))
                counts[expert] += 1
    plan = make_plan(routes, 5, slots)
    assert list_pairs(plan) == sorted(pairs)
    assert plan.counts.tolist() == counts
    assert int((plan.experts_of != NOWHERE).sum()) == len(pairs)
    chunks = chunks_of(plan, min(num_chunks, len(permutations)))
    assert sorted(pair for chunk in chunks for pair in list_pairs(chunk)) == sorted(pairs)


def test_chunks_share_capacity_of_microbatch() -> None:
    first, second = chunks_of(make_plan(ROUTES, 4, slots=3), 2)
    assert sorted(set(first.tokens.tolist())) == [0, 1, 2]
    assert sorted(set(second.tokens.tolist())) == [4]
    assert second.counts.tolist() == [0, 1, 0, 0]  # the first chunk fills expert 2


def test_dispatch_in_one_process() -> None:
    plan = make_plan(ROUTES, 4)
    weights = torch.arange(10.0).view(5, 2)
    trip = start_trip("", torch.arange(5.0)[:, None], weights, plan, None)
    rows = trip.arrive()
    assert rows.tokens.flatten().tolist() == [0, 2, 1, 4, 0, 1, 2, 4]  # by expert, then by token
    assert rows.counts.tolist() == [2, 2, 4, 0]
    trip.give_back(rows.tokens * 10)
    assert trip.receive().flatten().tolist() == [0, 50, 180, 0, 680]


ROUTES_BY_RANK = {
    "mixed": [
        torch.tensor([[0, 2], [3, 1], [2, 0], [1, 3], [0, 1], [3, 2]]),
        torch.tensor([[1, 0], [2, 3], [0, 3], [1, 2], [2, 0], [3, 1]]),
    ],
    "all to rank 0": [torch.tensor([[0, 1]] * 6)] * 2,
    "nowhere": [NOBODY, NOBODY],
    "only rank 1 sends": [NOBODY, torch.tensor([[3, 0]] * 6)],
}
"""Routes (6, 2) of both ranks to four experts, of which each rank has two."""


def dispatch_once(
    world: World, variant: str, routes: Tensor, slots: int | None, is_remote: bool
) -> tuple[Tensor, list[Tensor]]:
    """Let expert e multiply by e + 1; return rows by expert, and the sums and gradients."""
    generator = torch.Generator().manual_seed(7 + world.rank)
    x = torch.randn(6, 3, generator=generator).requires_grad_()
    weights = torch.rand(6, 2, generator=generator).requires_grad_()
    plan = make_plan(routes, 4, slots)
    trip = start_trip(variant, x, weights, plan, world.group if is_remote else None)
    rows = trip.arrive()
    first = 2 * world.rank if is_remote else 0
    experts = torch.arange(first, first + len(rows.counts)).repeat_interleave(rows.counts)
    trip.give_back(rows.tokens * (experts + 1)[:, None])
    out = trip.receive()
    out.backward(torch.randn(6, 3, generator=generator))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.grad is not None
    return rows.counts, [out.detach(), x.grad, weights.grad]


def compare_dispatch(
    world: World, variant: str, kind: str, slots: int | None
) -> tuple[list[int], list[int], float]:
    """Return this rank's rows by expert, its pairs by expert, and the error of the results."""
    routes = ROUTES_BY_RANK[kind][world.rank]
    rows, actual = dispatch_once(world, variant, routes, slots, is_remote=True)
    pairs, expected = dispatch_once(world, variant, routes, slots, is_remote=False)
    errors = [float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True)]
    return rows.tolist(), pairs.tolist(), max(errors)


@pytest.mark.parametrize("variant", ["all_to_all", "allgather"])
@pytest.mark.parametrize("kind", ROUTES_BY_RANK)
@pytest.mark.parametrize("slots", [2, None])
def test_dispatch_matches_one_process(
    two_ranks: Ranks, variant: str, kind: str, slots: int | None
) -> None:
    arguments = {"variant": variant, "kind": kind, "slots": slots}
    first, second = two_ranks.call(f"{__name__}:compare_dispatch", **arguments)
    assert max(first[2], second[2]) <= 1e-5
    pairs = [sum(counts) for counts in zip(first[1], second[1], strict=True)]
    assert first[0] == pairs[:2]
    assert second[0] == pairs[2:]
    if kind == "all to rank 0":
        assert pairs == ([4, 4, 0, 0] if slots == 2 else [12, 12, 0, 0])


def fly(world: World) -> tuple[list[int], int]:
    """Return the shape of an empty flight, and the number of flights that are not freed."""
    flights = []
    shapes = []
    for rows in (0, 1, 1, 1):
        x = torch.ones(2 * rows, 3, requires_grad=True)
        flight = Flight(x, [rows, rows], [rows, rows], world.group)
        flights.append(weakref.ref(flight))
        output = flight.wait()
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        shapes.append(list(output.shape))
    del output, flight
    gc.collect()
    return shapes[0], sum(reference() is not None for reference in flights)


def test_flight_may_be_empty_and_is_freed(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{__name__}:fly") == [([0, 3], 0)] * 2


def fly_silenced(world: World) -> tuple[list[list[int]], list[int], bool]:
    """Return counts, and the shape and finiteness of tokens, without communication."""
    tokens = torch.ones(4, 2)
    with Silenced(fake_twins({"dp": world.group})):
        counts = swap_now(torch.tensor([[1], [3]]), [], [], world.group)
        output = Flight(tokens, [1, 3], [1, 3], world.group).wait()
    return counts.tolist(), list(output.shape), bool(output.isfinite().all())


def test_silenced_flight_returns_own_rows(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{__name__}:fly_silenced") == [([[1], [3]], [4, 2], True)] * 2
