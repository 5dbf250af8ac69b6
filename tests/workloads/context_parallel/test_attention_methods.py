"""Attention over ranks equals attention of one process, and sends and computes what is planned."""

from dataclasses import replace

import torch
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import CpuFlash, Grads
from parbench.workloads.context_parallel.attention_methods import Ring, RingAttention
from parbench.workloads.context_parallel.context_case import METHODS, ContextPlan
from tests.support.cp_ranks import Sizes
from tests.support.ranks import Ranks

Case = tuple[str, str, Sizes, int]
"""A method, a mask, sizes, and the size of the inner axis, of which 0 is the default."""


def make_cases(
    ranks: int, masks: tuple[str, ...] = ("causal",), dtype: str = "float32"
) -> list[Case]:
    """Return every method under every mask, with fewer key heads and odd chunks of tokens."""
    sizes = Sizes(sequence=14 * ranks, dtype=dtype)
    cases: list[Case] = []
    for mask in masks:
        for method in METHODS:
            if method == "ulysses":
                sizes = replace(sizes, heads=3 * ranks, kv_heads=ranks)
            cases.append((method, mask, sizes, 0))
    return cases


def assert_attended(ranks: Ranks, cases: list[Case], limit: float = 1e-5) -> None:
    for by_case in ranks.call("tests.support.cp_ranks:attend_all", cases=cases):
        for case, attended in zip(cases, by_case, strict=True):
            assert len(attended.errors) == 4, case
            assert max(attended.errors) <= limit, case
            assert attended.sent_bytes == attended.expected_bytes, case
            assert set(attended.pairs.values()) == {attended.expected_pairs}, case


def test_two_ranks_attend_as_one(two_ranks: Ranks) -> None:
    cases = make_cases(2, masks=("causal", "full"))
    cases.append(("usp", "causal", Sizes(sequence=28), 2))
    assert_attended(two_ranks, cases)


def test_two_ranks_attend_in_bfloat16(two_ranks: Ranks) -> None:
    assert_attended(two_ranks, make_cases(2, dtype="bfloat16"), limit=0.02)


def test_four_ranks_attend_as_one(four_ranks: Ranks) -> None:
    assert_attended(four_ranks, make_cases(4))


class LoggingKernel(CpuFlash):
    """Adds its calls to a log."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        self.log.append("forward")
        return super().forward(q, k, v, causal)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        self.log.append("backward")
        return super().backward(dout, q, k, v, out, lse, causal)


class LoggingRing(Ring):
    """Adds the starts and waits of its hops to a log."""

    log: list[str]
    name: str

    def start(self, block: Tensor) -> None:
        self.log.append(f"start {self.name}")
        super().start(block)

    def wait(self) -> Tensor:
        self.log.append(f"wait {self.name}")
        return super().wait()


def log_work(world: World) -> tuple[list[str], list[str]]:
    """Return the order of kernels and hops under a full mask, forward and backward."""
    plan = ContextPlan(
        method="ring", mask="full", sequence=4 * world.size, ranks=world.size, ulysses=1
    )
    log: list[str] = []
    tiles = [plan.tiles(world.rank, step) for step in range(plan.num_steps)]
    core = RingAttention(world.group, LoggingKernel(log), tiles)
    for name in ("keys", "gradients"):
        ring = getattr(core, name)
        ring.__class__ = LoggingRing
        ring.log = log
        ring.name = name
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    output = core(x, x, x)
    forward = list(log)
    log.clear()
    output.sum().backward()  # type: ignore[no-untyped-call]
    return forward, log


def test_ring_hops_during_blocks(four_ranks: Ranks) -> None:
    """Each hop starts before a block and is waited for after it.

    The backward pass computes the rank's own block in two halves, first and last.
    """
    hop = ["start keys", "forward", "wait keys"]
    for forward, backward in four_ranks.call(
        "tests.workloads.context_parallel.test_attention_methods:log_work"
    ):
        assert forward == [*hop, *hop, *hop, "forward"]
        assert backward == [
            *("start keys", "backward", "wait keys"),
            *("start keys", "backward", "start gradients", "wait keys"),
            *("start keys", "backward", "wait gradients", "start gradients", "wait keys"),
            *("backward", "wait gradients", "start gradients"),
            *("backward", "wait gradients"),
        ]
