"""Attention over ranks is a single process's to the last gradient, and keeps, sends and waits for what it should."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Grads
from parbench.workloads.context_parallel.attention_methods import Ring, RingAttention
from parbench.workloads.context_parallel.context_case import MASKS, ContextPlan
from tests.support.cp_ranks import Sizes
from tests.support.ranks import Ranks

METHODS = ["ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp"]
GQA = Sizes(heads=6, kv_heads=2)


def cases_of(ranks: int) -> list[tuple[str, str, Sizes, int]]:
    """Return every method under every mask, with fewer heads of keys and an odd number of tokens per chunk."""
    found: list[tuple[str, str, Sizes, int]] = []
    for method in METHODS:
        size = (
            Sizes(heads=3 * ranks, kv_heads=ranks)
            if method == "ulysses"
            else replace(GQA, sequence=14 * ranks)
        )
        inner = (1, 2) if method == "usp" and ranks == 2 else (0,)
        found += [(method, mask, size, ulysses) for mask in MASKS for ulysses in inner]
    return found


def test_two_ranks_attend_as_one_and_send_and_compute_what_is_planned(two_ranks: Ranks) -> None:
    assert two_ranks.call("tests.support.cp_ranks:wrong_of", cases=cases_of(2)) == [[], []]
    narrow = [(method, "causal", replace(GQA, dtype="bfloat16"), 0) for method in METHODS]
    assert two_ranks.call("tests.support.cp_ranks:wrong_of", cases=narrow, limit=0.02) == [[], []]


def test_four_ranks_attend_as_one_and_send_and_compute_what_is_planned(four_ranks: Ranks) -> None:
    cases = [case for case in cases_of(4) if case[1] == "causal"]
    assert four_ranks.call("tests.support.cp_ranks:wrong_of", cases=cases) == [[]] * 4


class Slow(CpuFlash):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        time.sleep(0.02)
        return super().forward(q, k, v, causal)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        self.calls.append("backward")
        time.sleep(0.02)
        return super().backward(dout, q, k, v, out, lse, causal)


HOPS = {1: "keys and values", 2: "gradients"}


class Noted(Ring):
    """Notes among a kernel's calls when hops start and when they are waited for."""

    calls: list[str]

    def start(self, block: Tensor) -> None:
        self.calls.append(f"start {HOPS[self._tag]}")
        super().start(block)

    def wait(self) -> Tensor:
        self.calls.append(f"wait {HOPS[self._tag]}")
        return super().wait()


def order_of_work(world: World) -> tuple[list[str], list[str]]:
    """Return in which order kernels and hops come, forward and backward, under a full mask."""
    plan = ContextPlan(
        method="ring", mask="full", sequence=4 * world.size, ranks=world.size, ulysses=1
    )
    kernel = Slow()
    tiles = [plan.tiles(world.rank, step) for step in range(plan.num_steps)]
    core = RingAttention(world.group, kernel, tiles)
    for ring in (core.keys, core.gradients):
        ring.__class__ = Noted
        ring.calls = kernel.calls  # type: ignore[attr-defined]
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    out = core(x, x, x)
    forward = list(kernel.calls)
    out.sum().backward()  # type: ignore[no-untyped-call]
    return forward, kernel.calls[len(forward) :]


def test_each_hop_starts_before_a_block_and_is_waited_for_after_it(four_ranks: Ranks) -> None:
    keys, gradients = "keys and values", "gradients"
    hop = [f"start {keys}", "forward", f"wait {keys}"]
    for forward, backward in four_ranks.call(
        "tests.workloads.context_parallel.test_attention_methods:order_of_work"
    ):
        assert forward == [*hop, *hop, *hop, "forward"]
        assert backward == [
            *(f"start {keys}", "backward", f"wait {keys}"),  # half of its own block
            *(f"start {keys}", "backward", f"start {gradients}"),
            *(
                f"wait {keys}",
                f"start {keys}",
                "backward",
                f"wait {gradients}",
                f"start {gradients}",
            ),
            *(f"wait {keys}", "backward", f"wait {gradients}", f"start {gradients}"),
            *("backward", f"wait {gradients}"),  # the other half
        ]
