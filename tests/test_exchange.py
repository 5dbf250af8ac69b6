"""Flights carry rows and their gradients; gathers and sums are each other's backward."""

import gc
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from bench.world import World
from workloads.communication import Silenced, fake_twins
from workloads.experts.exchange import Flight, gather_rows, gathered, sum_rows, summed, swap_counts, swap_now

COUNTS = [[1, 3], [0, 2]]
"""Rows that each rank sends to each."""


def rows_of(source: int, target: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what one rank sends to another: numbers that tell both, in two columns."""
    first = 100.0 * source + 10 * target
    return torch.arange(2 * COUNTS[source][target], dtype=dtype).view(-1, 2) + first


def flown(world: World, *, dtype: str, in_turn: bool) -> tuple[list[Any], list[Any]]:
    """Return what a flight brings, and the gradients that come back where those sent off tell whose they are."""
    kind, sends = getattr(torch, dtype), COUNTS[world.rank]
    receives = [row[world.rank] for row in COUNTS]
    x = torch.cat([rows_of(world.rank, target, kind) for target in (0, 1)]).requires_grad_()
    flights = [Flight(x, receives, sends, world.group) for _ in range(2)]
    if in_turn:
        flights.reverse()
    arrived = flights[0].wait() + 0 * flights[1].wait()
    arrived.backward(torch.full_like(arrived, 1.0 + world.rank))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return arrived.tolist(), x.grad.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_rows_arrive_by_source_and_gradients_return_to_their_rows(two_ranks: Ranks, dtype: str, in_turn: bool) -> None:
    found = two_ranks.call("test_exchange:flown", dtype=dtype, in_turn=in_turn)
    for rank, (arrived, gradients) in enumerate(found):
        expected = torch.cat([rows_of(source, rank, getattr(torch, dtype)) for source in (0, 1)])
        assert arrived == expected.tolist()
        assert gradients == [[1.0 + target] * 2 for target in (0, 1) for _ in range(COUNTS[rank][target])]


def flown_empty(world: World) -> tuple[list[int], bool]:
    """Send nothing anywhere, in both directions; return the size of what comes, and whether a gradient does."""
    x = torch.empty(0, 3, requires_grad=True)
    arrived = Flight(x, [0, 0], [0, 0], world.group).wait()
    arrived.sum().backward()  # type: ignore[no-untyped-call]
    return list(arrived.shape), x.grad is not None


def test_a_flight_may_be_empty(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_exchange:flown_empty") == [([0, 3], True)] * 2


def flights_kept(world: World) -> int:
    """Return how many flights are still known after three passes through autograd."""
    for _ in range(3):
        x = torch.ones(2, 3, requires_grad=True)
        Flight(x, [1, 1], [1, 1], world.group).wait().sum().backward()  # type: ignore[no-untyped-call]
    gc.collect()
    return sum(type(one) is Flight for one in gc.get_objects())


def test_flights_that_have_arrived_are_forgotten(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_exchange:flights_kept") == [0, 0]


def swapped(world: World) -> tuple[list[Any], list[Any]]:
    counts = torch.tensor([[1, 2], [3, 4]]) + 10 * world.rank
    x = torch.cat([rows_of(world.rank, target) for target in (0, 1)])
    return (
        swap_counts(counts, world.group).tolist(),
        swap_now(x, [row[world.rank] for row in COUNTS], COUNTS[world.rank], world.group).tolist(),
    )


def test_counts_and_rows_are_swapped_without_gradients(two_ranks: Ranks) -> None:
    found = two_ranks.call("test_exchange:swapped")
    assert [counts for counts, _ in found] == [[[1, 2], [11, 12]], [[3, 4], [13, 14]]]
    for rank, (_, rows) in enumerate(found):
        assert rows == torch.cat([rows_of(source, rank) for source in (0, 1)]).tolist()


def gathered_and_summed(world: World) -> dict[str, Any]:
    x = torch.full((1, 2), 1.0 + world.rank, requires_grad=True)
    whole = gather_rows(x, world.group)
    whole.backward(torch.tensor([[1.0, 1.0], [10.0, 10.0]]) * (1 + world.rank))  # type: ignore[no-untyped-call]
    parts = torch.tensor([[1.0], [2.0]]).mul(1 + world.rank).requires_grad_()
    part = sum_rows(parts, world.group)
    part.backward(torch.full((1, 1), 5.0 + world.rank))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert parts.grad is not None
    return {
        "gathered": whole.tolist(),
        "gradient": x.grad.tolist(),
        "summed": part.tolist(),
        "gradients": parts.grad.tolist(),
        "plain": (gathered(x.detach(), world.group).tolist(), summed(parts.detach(), world.group).tolist()),
    }


def test_gathers_and_sums_are_each_others_backward(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("test_exchange:gathered_and_summed")
    assert first["gathered"] == second["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
    # rank 0's row has gradients 1 and 2, rank 1's 10 and 20
    assert (first["gradient"], second["gradient"]) == ([[3.0, 3.0]], [[30.0, 30.0]])
    assert (first["summed"], second["summed"]) == ([[3.0]], [[6.0]])
    assert first["gradients"] == second["gradients"] == [[5.0], [6.0]]
    assert first["plain"] == ([[1.0, 1.0], [2.0, 2.0]], [[3.0]])


def silenced(world: World) -> tuple[list[Any], list[Any], list[int], bool]:
    """Return what is found where nothing moves: counts, routes, and the size of tokens and whether they are numbers."""
    counts = torch.tensor([[1], [3]])
    x = torch.ones(4, 2)
    with Silenced(fake_twins({"dp": world.group})):
        found = swap_counts(counts, world.group)
        routes = swap_now(x.int(), [1, 3], [1, 3], world.group)
        rows = Flight(x, [1, 3], [1, 3], world.group).wait()
    return found.tolist(), routes.tolist(), list(rows.shape), bool(rows.isfinite().all())


def test_without_communication_a_rank_finds_its_own_counts_and_routes_and_numbers(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_exchange:silenced"):
        assert found == ([[1], [3]], [[1, 1]] * 4, [4, 2], True)
