"""Plans say which pairs travel, exchanges carry rows and gradients, and every way of travelling brings the same."""

import gc
import weakref
from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import (
    TRIPS,
    Flight,
    Plan,
    chunks_of,
    make_plan,
    start_trip,
    swap_now,
    weighted_sum,
)
from parbench.workloads.expert_parallel.routing import NOWHERE
from parbench.workloads.step.sent_bytes import Silenced, fake_twins
from tests.support.ranks import Ranks

ROUTES = torch.tensor([[0, 2], [2, 1], [2, 0], [NOWHERE, NOWHERE], [1, 2]])
EXPERTS = 4


def pairs_of(plan: Plan) -> list[tuple[int, int, int]]:
    return list(
        zip(plan.experts.tolist(), plan.tokens.tolist(), plan.choices.tolist(), strict=True)
    )


@given(
    st.lists(st.permutations(range(NOWHERE, 5)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
    st.integers(1, 4),
)
@settings(max_examples=50, deadline=None)
def test_a_plan_keeps_what_counting_in_the_order_of_tokens_keeps_by_expert_and_then_by_token(
    drawn: list[list[int]], top_k: int, slots: int | None, num_chunks: int
) -> None:
    routes = torch.tensor(drawn)[:, :top_k]
    kept, places, taken = [], torch.full_like(routes, NOWHERE), [0] * 5
    for token, of in enumerate(routes.tolist()):
        for choice, expert in enumerate(of):
            if expert != NOWHERE and (slots is None or taken[expert] < slots):
                kept.append((expert, token, choice))
                places[token, choice] = taken[expert]
                taken[expert] += 1
    plan = make_plan(routes, 5, slots)
    assert pairs_of(plan) == sorted(kept)
    assert plan.counts.tolist() == taken
    assert torch.equal(plan.experts_of, routes.where(places >= 0, NOWHERE))
    chunks = chunks_of(plan, min(num_chunks, len(drawn)))
    assert sorted(pair for chunk in chunks for pair in pairs_of(chunk)) == sorted(kept)


def test_chunks_are_parts_of_the_tokens_one_after_the_other() -> None:
    chunks = chunks_of(make_plan(ROUTES, EXPERTS, 3), 2)
    assert [sorted(set(chunk.tokens.tolist())) for chunk in chunks] == [[0, 1, 2], [4]]
    assert chunks[1].counts.tolist() == [
        0,
        1,
        0,
        0,
    ]  # expert 2 was full: capacity is the whole microbatch's
    plan = make_plan(ROUTES, EXPERTS)
    assert chunks_of(plan, 1)[0] is plan


def test_at_home_rows_come_by_expert_and_a_token_gets_the_sum_of_its_experts_times_its_weights() -> (
    None
):
    weights = torch.arange(10.0).view(5, 2)
    made = torch.tensor([[1.0], [1.0], [10.0], [10.0], [100.0], [100.0], [100.0]])
    found = weighted_sum(made, weights, make_plan(ROUTES, EXPERTS, 3), 5)
    assert found.flatten().tolist() == [100, 230, 405, 0, 80]
    trip = start_trip(
        "", torch.arange(5.0)[:, None], torch.ones(5, 2), make_plan(ROUTES, EXPERTS), None
    )
    rows = trip.arrive()
    assert rows.tokens.flatten().tolist() == [0, 2, 1, 4, 0, 1, 2, 4]
    assert rows.counts.tolist() == [2, 2, 4, 0]
    trip.give_back(rows.tokens * 10)
    assert trip.receive().flatten().tolist() == [0, 20, 40, 0, 80]


KINDS = ("mixed", "all to rank 0", "nowhere", "one rank sends nothing")
CASES: list[tuple[str, str, int | None]] = list(product(TRIPS, KINDS, (2, 6)))
CASES += [(variant, "all to rank 0", None) for variant in TRIPS]


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


def travelled(
    world: World, variant: str, kind: str, slots: int | None, *, away: bool
) -> tuple[list[int], list[Tensor]]:
    """Let expert e multiply by e + 1; return rows by expert, and the sums and gradients."""
    chance = torch.Generator().manual_seed(7 + world.rank)
    x = torch.randn(6, 3, generator=chance).requires_grad_()
    weights = torch.rand(6, 2, generator=chance).requires_grad_()
    plan = make_plan(routes_of(world.rank, kind), EXPERTS, slots)
    trip = start_trip(variant, x, weights, plan, world.group if away else None)
    rows = trip.arrive()
    first = 2 * world.rank if away else 0
    numbers = torch.arange(first, first + len(rows.counts)).repeat_interleave(rows.counts) + 1
    assert len(numbers) == len(rows.tokens)
    trip.give_back(rows.tokens * numbers[:, None])
    out = trip.receive()
    out.backward(torch.randn(6, 3, generator=chance))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.grad is not None
    return rows.counts.tolist(), [out.detach(), x.grad, weights.grad]


def all_travelled(world: World) -> list[tuple[list[int], list[int], float]]:
    """Return rows by expert here and at home, and how far sums and gradients are apart, of every case."""
    found = []
    for case in CASES:
        (here, brought), (home, stayed) = (
            travelled(world, *case, away=away) for away in (True, False)
        )
        apart = max(
            float((one - other).abs().max()) for one, other in zip(brought, stayed, strict=True)
        )
        found.append((here, home, apart))
    return found


def test_every_way_brings_what_staying_at_home_does(two_ranks: Ranks) -> None:
    """Sums and gradients, where ranks get nothing, send nothing and drop too; without capacity nothing drops."""
    for case, of_ranks in zip(
        CASES,
        zip(
            *two_ranks.call("tests.workloads.expert_parallel.test_dispatch:all_travelled"),
            strict=True,
        ),
        strict=True,
    ):
        *_, slots = case
        here, at_home, apart = zip(*of_ranks, strict=True)
        assert max(apart) <= 1e-5, case
        asked = [sum(counts) for counts in zip(*at_home, strict=True)]
        assert here == (asked[:2], asked[2:]), case
        assert slots is not None or asked == [12, 12, 0, 0], case


def flown(
    world: World,
) -> tuple[list[int], bool, int, tuple[list[Any], list[Any], list[int], bool]]:
    """Return the size and gradient of an empty flight, the flights still known, and what comes where nothing moves."""
    found, flights = [], []
    for rows in (0, 1, 1, 1):
        x = torch.ones(2 * rows, 3, requires_grad=True)
        flight = Flight(x, [rows, rows], [rows, rows], world.group)
        flights.append(weakref.ref(flight))
        arrived = flight.wait()
        arrived.sum().backward()  # type: ignore[no-untyped-call]
        found.append((list(arrived.shape), x.grad is not None))
    del arrived, flight
    gc.collect()
    kept, one = sum(known() is not None for known in flights), torch.ones(4, 2)
    with Silenced(fake_twins({"dp": world.group})):
        counts = swap_now(torch.tensor([[1], [3]]), [], [], world.group).tolist()
        routes = swap_now(one.int(), [1, 3], [1, 3], world.group).tolist()
        tokens = Flight(one, [1, 3], [1, 3], world.group).wait()
    return *found[0], kept, (counts, routes, list(tokens.shape), bool(tokens.isfinite().all()))


def test_a_flight_may_be_empty_is_forgotten_once_arrived_and_brings_its_own_where_nothing_moves(
    two_ranks: Ranks,
) -> None:
    silenced = ([[1], [3]], [[1, 1]] * 4, [4, 2], True)
    assert (
        two_ranks.call("tests.workloads.expert_parallel.test_dispatch:flown")
        == [([0, 3], True, 0, silenced)] * 2
    )
