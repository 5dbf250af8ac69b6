"""Ulysses gives each rank whole sequences of some heads and back, and around a ring it is USP."""

import pytest
import torch
from cp_ranks import Sizes, assert_right
from ranks import Ranks
from torch import Tensor

from bench.world import World
from workloads.context.cp_recorder import Recorder
from workloads.context.ulysses import Ulysses


def labelled(world: World, heads: int, first: int) -> Tensor:
    """Return (1, heads, 2, 1) of numbers that tell the head, and the position of this rank's two tokens."""
    head = torch.arange(heads).view(1, -1, 1, 1) + first
    position = torch.arange(2).view(1, 1, -1, 1) + 2 * world.rank
    return (100.0 * head + position).requires_grad_()


def exchanged(world: World) -> tuple[list[list[float]], list[list[float]], bool]:
    """Return what the inner core sees as q and as v on this rank, and whether all come back to where they were."""
    seen: list[Tensor] = []

    def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, v))
        return q * 1.0

    core = Ulysses(world.group, inner, Recorder(world.device))
    q, k, v = labelled(world, 4, 0), labelled(world, 2, 10), labelled(world, 2, 20)
    out = core(q, k, v)
    weights = torch.arange(8.0).view(1, 4, 2, 1) + world.rank
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    back = torch.equal(out, q) and q.grad is not None and torch.equal(q.grad, weights)
    return seen[0][0, :, :, 0].tolist(), seen[1][0, :, :, 0].tolist(), back


def waited(world: World) -> list[tuple[str, str]]:
    recorder = Recorder(world.device)
    core = Ulysses(world.group, lambda q, k, v: q + k + v, recorder)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    with recorder.recording():
        core(x, x, x).sum().backward()  # type: ignore[no-untyped-call]
    assert set(recorder.moves) == {"heads", "output"}
    return [(wait.direction, wait.what) for wait in recorder.waits()]


def test_each_rank_sees_whole_sequences_of_its_heads_and_gives_them_back(two_ranks: Ranks) -> None:
    (q0, v0, back0), (q1, v1, back1) = two_ranks.call("test_ulysses:exchanged")
    assert q0 == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert q1 == [[200, 201, 202, 203], [300, 301, 302, 303]]
    assert (v0, v1) == ([[2000, 2001, 2002, 2003]], [[2100, 2101, 2102, 2103]])
    assert back0
    assert back1


def test_there_is_one_exchange_before_and_one_after_each_way(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_ulysses:waited"):
        assert found == [("forward", "heads"), ("forward", "output"), ("backward", "output"), ("backward", "heads")]


@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
def test_two_ranks_attend_as_one(two_ranks: Ranks, mask: str) -> None:
    """Three heads a rank, seven tokens a rank; USP with its ring on one axis or the other."""
    sizes = [Sizes(sequence=14), Sizes(sequence=14, heads=6, kv_heads=2)]
    cases = [("ulysses", mask, size, 0) for size in sizes]
    cases += [("usp", mask, Sizes(heads=6, kv_heads=2), ulysses) for ulysses in (1, 2)]
    for found in two_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)


@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
def test_four_ranks_attend_as_one(four_ranks: Ranks, mask: str) -> None:
    cases = [
        ("ulysses", mask, Sizes(heads=12, kv_heads=4), 0),
        ("usp", mask, Sizes(heads=6, kv_heads=2), 0),
        ("usp", mask, Sizes(heads=6, kv_heads=2), 2),
    ]
    for found in four_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)
        assert set(found[1].sent["forward"]) == {"ulysses", "ring"}


@pytest.mark.parametrize("method", ["ulysses", "usp"])
def test_bfloat16_is_as_near_as_its_elements_allow(two_ranks: Ranks, method: str) -> None:
    cases = [(method, "causal", Sizes(dtype="bfloat16", heads=6, kv_heads=2), 0)]
    for [found] in two_ranks.call("cp_ranks:all_attended", cases=cases):
        assert_right(found, limit=0.02)
