"""Plans say which pairs travel, and every way of travelling brings each token's experts the same."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor

from bench.world import World
from workloads.experts.moe_dispatch import TRIPS, AtHome, Plan, chunks_of, make_plan, start_trip, weighted_sum
from workloads.experts.routing import NOWHERE

ROUTES = torch.tensor([[0, 2], [2, 1], [2, 0], [NOWHERE, NOWHERE], [1, 2]])
EXPERTS = 4
SLOTS = 2
each_variant = pytest.mark.parametrize("variant", TRIPS)


def pairs_of(plan: Plan) -> list[tuple[int, int, int]]:
    """Return expert, token and choice of each pair, in the plan's order."""
    return list(zip(plan.experts.tolist(), plan.tokens.tolist(), plan.choices.tolist(), strict=True))


# ---- plans


def test_pairs_are_by_expert_and_then_by_token() -> None:
    plan = make_plan(ROUTES, EXPERTS)
    assert pairs_of(plan) == [(0, 0, 0), (0, 2, 1), (1, 1, 1), (1, 4, 0), (2, 0, 1), (2, 1, 0), (2, 2, 0), (2, 4, 1)]
    assert plan.counts.tolist() == [2, 2, 4, 0]
    assert plan.places.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert torch.equal(plan.experts_of, ROUTES)


def test_what_comes_over_the_capacity_does_not_travel() -> None:
    plan = make_plan(ROUTES, EXPERTS, 3)
    assert (2, 4, 1) not in pairs_of(plan)
    assert plan.counts.tolist() == [2, 2, 3, 0]
    assert plan.experts_of.tolist() == [[0, 2], [2, 1], [2, 0], [-1, -1], [1, -1]]


@given(
    st.lists(st.permutations(range(5)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_what_counting_in_the_order_of_tokens_keeps(
    drawn: list[list[int]], top_k: int, slots: int | None, num_chunks: int
) -> None:
    routes = torch.tensor(drawn)[:, :top_k]
    kept, taken = [], [0] * 5
    for token, of in enumerate(routes.tolist()):
        for choice, expert in enumerate(of):
            taken[expert] += 1
            if slots is None or taken[expert] <= slots:
                kept.append((expert, token, choice))
    plan = make_plan(routes, 5, slots)
    assert pairs_of(plan) == sorted(kept)
    chunks = chunks_of(plan, min(num_chunks, len(drawn)))
    assert sorted(pair for chunk in chunks for pair in pairs_of(chunk)) == sorted(kept)


def test_chunks_are_parts_of_the_tokens_one_after_the_other() -> None:
    chunks = chunks_of(make_plan(ROUTES, EXPERTS, 3), 2)
    assert [sorted(set(chunk.tokens.tolist())) for chunk in chunks] == [[0, 1, 2], [4]]
    assert chunks[1].counts.tolist() == [0, 1, 0, 0]  # expert 2 was full: capacity is the whole microbatch's
    plan = make_plan(ROUTES, EXPERTS)
    assert chunks_of(plan, 1)[0] is plan


def test_a_token_gets_the_sum_of_its_experts_times_its_weights() -> None:
    plan = make_plan(ROUTES, EXPERTS, 3)
    weights = torch.arange(10.0).view(5, 2)
    made = torch.tensor([[1.0], [1.0], [10.0], [10.0], [100.0], [100.0], [100.0]])
    assert weighted_sum(made, weights, plan, 5).flatten().tolist() == [100, 230, 405, 0, 80]


def test_at_home_rows_come_by_expert() -> None:
    x = torch.arange(5.0)[:, None]
    trip = AtHome(x, torch.ones(5, 2), make_plan(ROUTES, EXPERTS))
    rows = trip.arrive()
    assert rows.tokens.flatten().tolist() == [0, 2, 1, 4, 0, 1, 2, 4]
    assert rows.counts.tolist() == [2, 2, 4, 0]
    trip.give_back(rows.tokens * 10)
    assert trip.receive().flatten().tolist() == [0, 20, 40, 0, 80]


# ---- trips


def routes_of(rank: int, kind: str) -> Tensor:
    """Return routes (6, 2) of a rank to four experts, of which rank 0 holds two."""
    if kind == "all to rank 0":
        return torch.tensor([[0, 1]] * 6)
    if kind == "nowhere":
        return torch.full((6, 2), NOWHERE)
    if kind == "one rank sends nothing":
        return torch.tensor([[3, 0]] * 6) if rank else torch.full((6, 2), NOWHERE)
    drawn = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randperm(EXPERTS, generator=drawn)[:2] for _ in range(6)])


KINDS = ("mixed", "all to rank 0", "nowhere", "one rank sends nothing")


def travelled(world: World, variant: str, kind: str, slots: int | None) -> dict[str, Any]:
    """Let expert e multiply by e + 1; return rows by expert, the sums, and gradients, beside those made at home."""
    found: dict[str, Any] = {}
    for where in ("here", "home"):
        chance = torch.Generator().manual_seed(7 + world.rank)
        x = torch.randn(6, 3, generator=chance).requires_grad_()
        weights = torch.rand(6, 2, generator=chance).requires_grad_()
        plan = make_plan(routes_of(world.rank, kind), EXPERTS, slots)
        trip = start_trip(variant, x, weights, plan, world.group if where == "here" else None)
        rows = trip.arrive()
        first = 2 * world.rank if where == "here" else 0
        numbers = torch.arange(first, first + len(rows.counts)).repeat_interleave(rows.counts) + 1
        assert len(numbers) == len(rows.tokens)
        trip.give_back(rows.tokens * numbers[:, None])
        out = trip.receive()
        out.backward(torch.randn(6, 3, generator=chance))  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert weights.grad is not None
        found[where] = {"out": out.tolist(), "x": x.grad.tolist(), "weights": weights.grad.tolist()}
        found[f"{where} counts"] = rows.counts.tolist()
    return found


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [SLOTS, 6])
def test_every_way_brings_what_staying_at_home_does(two_ranks: Ranks, variant: str, kind: str, slots: int) -> None:
    """Sums and gradients, where ranks get nothing, send nothing and drop too."""
    found = two_ranks.call("test_moe_dispatch:travelled", variant=variant, kind=kind, slots=slots)
    for one in found:
        for name, expected in one["home"].items():
            torch.testing.assert_close(torch.tensor(one["here"][name]), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    at_home = [one["home counts"] for one in found]
    asked = [sum(counts[expert] for counts in at_home) for expert in range(EXPERTS)]
    if variant == "padded":
        assert [one["here counts"] for one in found] == [[2 * slots] * 2] * 2
    else:
        assert [one["here counts"] for one in found] == [asked[:2], asked[2:]]


@pytest.mark.parametrize("variant", ["all_to_all", "allgather", "dedup"])
def test_without_capacity_nothing_drops(two_ranks: Ranks, variant: str) -> None:
    found = two_ranks.call("test_moe_dispatch:travelled", variant=variant, kind="all to rank 0", slots=None)
    assert [one["here counts"] for one in found] == [[12, 12], [0, 0]]


def test_padded_needs_a_capacity(two_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="padded needs a capacity"):
        two_ranks.call("test_moe_dispatch:travelled", variant="padded", kind="mixed", slots=None)
