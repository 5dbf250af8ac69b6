"""A ring's attention is a single process's, to the last gradient, and its hops are under its blocks."""

import time
from dataclasses import replace

import pytest
import torch
from cp_ranks import Sizes, assert_right
from ranks import Ranks
from torch import Tensor

from bench.world import World
from workloads.context.attention_block import Blocks
from workloads.context.attention_kernel import CpuFlash, Gradients
from workloads.context.cp_plan import ContextPlan
from workloads.context.cp_recorder import Recorder
from workloads.context.ring import Ring, RingAttention

RINGS = ["ring", "striped", "zigzag"]
GQA = Sizes(heads=6, kv_heads=2)


def passed_on(world: World) -> list[list[float]]:
    """Return what this rank receives in each hop of a whole round."""
    ring = Ring(world.group, Recorder(world.device), "blocks", tag=3)
    block, received = torch.full((2, 3), float(world.rank)), []
    for _ in range(world.size):
        ring.start(block)
        block = ring.wait()
        received.append(sorted(set(block.flatten().tolist())))
    return received


def crossing(world: World) -> tuple[float, float]:
    """Return what comes of two rings that are under way at the same time, waited for in the other order."""
    recorder = Recorder(world.device)
    one, other = Ring(world.group, recorder, "one", tag=1), Ring(world.group, recorder, "other", tag=2)
    one.start(torch.full((4,), 10.0 + world.rank))
    other.start(torch.full((4,), 20.0 + world.rank))
    second = other.wait()
    return float(one.wait()[0]), float(second[0])


class Slow(CpuFlash):
    """Takes its time for each block, and notes when it was at work."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        time.sleep(0.02)
        return super().forward(q, k, v, causal)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        self.calls.append("backward")
        time.sleep(0.02)
        return super().backward(gradient, q, k, v, out, lse, causal)


class Noted(Ring):
    """Notes among a kernel's calls when hops start and when they are waited for."""

    calls: list[str]

    def start(self, block: Tensor) -> None:
        self.calls.append(f"start {self._what}")
        super().start(block)

    def wait(self) -> Tensor:
        self.calls.append(f"wait {self._what}")
        return super().wait()


def order_of_work(world: World) -> tuple[list[str], list[str]]:
    """Return in which order kernels and hops come, forward and backward, under a full mask."""
    plan = ContextPlan(method="ring", mask="full", sequence=4 * world.size, ranks=world.size, ulysses=1)
    kernel, recorder = Slow(), Recorder(world.device)
    tiles = [plan.tiles(world.rank, step) for step in range(plan.num_steps)]
    core = RingAttention(world.group, Blocks(kernel=kernel, recorder=recorder, tiles=tiles))
    for ring in (core.keys, core.gradients):
        ring.__class__ = Noted
        ring.calls = kernel.calls  # type: ignore[attr-defined]
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    out = core(x, x, x)
    forward = list(kernel.calls)
    out.sum().backward()  # type: ignore[no-untyped-call]
    return forward, kernel.calls[len(forward) :]


# ---- tests


def test_blocks_go_round_and_come_home(two_ranks: Ranks, four_ranks: Ranks) -> None:
    assert two_ranks.call("test_ring:passed_on") == [[[1.0], [0.0]], [[0.0], [1.0]]]
    assert four_ranks.call("test_ring:passed_on")[1] == [[0.0], [3.0], [2.0], [1.0]]


def test_two_rings_at_once_do_not_mix(four_ranks: Ranks) -> None:
    assert four_ranks.call("test_ring:crossing") == [(13.0, 23.0), (10.0, 20.0), (11.0, 21.0), (12.0, 22.0)]


def test_each_hop_starts_before_a_block_and_is_waited_for_after_it(four_ranks: Ranks) -> None:
    keys, gradients = "keys and values", "gradients"
    hop = [f"start {keys}", "forward", f"wait {keys}"]
    for forward, backward in four_ranks.call("test_ring:order_of_work"):
        assert forward == [*hop, *hop, *hop, "forward"]
        assert backward == [
            *(f"start {keys}", "backward", f"wait {keys}"),  # half of its own block
            *(f"start {keys}", "backward", f"start {gradients}"),
            *(f"wait {keys}", f"start {keys}", "backward", f"wait {gradients}", f"start {gradients}"),
            *(f"wait {keys}", "backward", f"wait {gradients}", f"start {gradients}"),
            *("backward", f"wait {gradients}"),  # the other half
        ]


@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
@pytest.mark.parametrize("method", RINGS)
def test_two_ranks_attend_as_one(two_ranks: Ranks, method: str, mask: str) -> None:
    sizes = [Sizes(), GQA, Sizes(heads=3, kv_heads=1, sequence=12)]
    cases = [(method, mask, size, 0) for size in sizes]
    for found in two_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)


@pytest.mark.parametrize("method", RINGS)
def test_four_ranks_attend_as_one(four_ranks: Ranks, method: str) -> None:
    """Seven tokens a rank where the order allows it."""
    sequence = 56 if method == "zigzag" else 28
    cases = [(method, mask, replace(GQA, sequence=sequence), 0) for mask in ("causal", "full", "packed")]
    for found in four_ranks.call("cp_ranks:all_attended", cases=cases):
        for each in found:
            assert_right(each)


@pytest.mark.parametrize("method", RINGS)
def test_bfloat16_is_as_near_as_its_elements_allow(two_ranks: Ranks, method: str) -> None:
    cases = [(method, "causal", replace(GQA, dtype="bfloat16"), 0)]
    for [found] in two_ranks.call("cp_ranks:all_attended", cases=cases):
        assert_right(found, limit=0.02)
        assert found.sent["backward"]["cp"] == 3 * found.sent["forward"]["cp"]


def test_kernels_are_given_the_pairs_of_the_plan_in_both_directions(two_ranks: Ranks) -> None:
    plan = ContextPlan(method="ring", mask="causal", sequence=28, ranks=2, ulysses=1)
    cases = [("ring", "causal", Sizes(), 0)]
    for rank, [found] in enumerate(two_ranks.call("cp_ranks:all_attended", cases=cases)):
        for direction in ("forward", "backward"):
            counted = [found.pairs.get((direction, step), 0) for step in range(2)]
            assert counted == [2 * 6 * plan.pairs(rank, step) for step in range(2)]


def test_a_rank_alone_needs_no_group() -> None:
    plan = ContextPlan(method="ring", mask="causal", sequence=6, ranks=1, ulysses=1)
    blocks = Blocks(kernel=CpuFlash(), recorder=Recorder(torch.device("cpu")), tiles=[plan.tiles(0, 0)])
    x = torch.randn(1, 2, 6, 4, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    out = RingAttention(None, blocks)(x, x, x)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert blocks.recorder.moves == {}
