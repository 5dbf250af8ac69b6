"""Attention over ranks equals attention of one process, and sends and computes what is planned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.context_parallel import attention_methods
from parbench.workloads.context_parallel.attention_kernel import CpuFlash
from parbench.workloads.context_parallel.attention_methods import (
    GRADIENTS,
    KEYS,
    RingAttention,
)
from parbench.workloads.context_parallel.context_methods import CONTEXT_METHODS
from parbench.workloads.context_parallel.sequence_split import split_sequence
from parbench.workloads.model.shapes import SHAPES
from tests.support.ranks import Ranks
from tests.support.workloads.cp_ranks import AttentionCase


def make_case(method: str, ranks: int, **params: Any) -> AttentionCase:
    """Return attention with fewer key heads than heads and odd numbers of tokens."""
    # Ulysses divides the key heads by the ranks.
    kv_heads = ranks if method == "ulysses" else 2
    sizes: dict[str, Any] = {
        "sequence": 14 * ranks,
        "heads": 3 * kv_heads,
        "kv_heads": kv_heads,
    }
    return AttentionCase(method=method, **sizes, **params)


def assert_right(ranks: Ranks, cases: list[AttentionCase], tolerance: float = 1e-5) -> None:
    for results in ranks.call("tests.support.workloads.cp_ranks:attend_all", cases=cases):
        for case, result in zip(cases, results, strict=True):
            assert max(result.errors) <= tolerance, case
            assert result.sent_bytes == result.expected_bytes, case
            assert result.forward_pairs == result.expected_pairs, case
            assert result.backward_pairs == result.expected_pairs, case


def test_two_ranks_attend_as_one(two_ranks: Ranks) -> None:
    cases = [make_case(method, 2) for method in CONTEXT_METHODS]
    assert_right(two_ranks, [*cases, make_case("usp", 2, ulysses=2)])


def test_two_ranks_attend_in_bfloat16(two_ranks: Ranks) -> None:
    cases = [make_case(method, 2, dtype="bfloat16") for method in ("zigzag", "ulysses")]
    assert_right(two_ranks, cases, tolerance=0.02)


@pytest.mark.full
def test_four_ranks_attend_as_one(four_ranks: Ranks) -> None:
    assert_right(four_ranks, [make_case(method, 4) for method in CONTEXT_METHODS])


class LoggingKernel(CpuFlash):
    """Adds its calls to a log."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append("forward")
        return super().forward(*args)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append("backward")
        return super().backward(*args)


def log_work(world: World) -> tuple[list[str], list[str]]:
    """Return the order of kernels and hops of the last rank, which sees all keys."""
    shape = replace(SHAPES["tiny"], sequence=4 * world.size)
    split = split_sequence("ring", shape, ranks=world.size)
    log: list[str] = []
    kernel = LoggingKernel(log)
    attention = RingAttention(world.group, kernel, split, world.rank, world.device)
    start_hop = attention_methods.start_hop

    def log_hop(group: dist.ProcessGroup, block: Tensor, tag: int) -> Callable[[], Tensor]:
        name = {KEYS: "keys", GRADIENTS: "gradients"}[tag]
        log.append(f"start {name}")
        wait = start_hop(group, block, tag)

        def log_wait() -> Tensor:
            log.append(f"wait {name}")
            return wait()

        return log_wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_methods, "start_hop", log_hop)
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        output = attention(x, x, x)
        forward = list(log)
        log.clear()
        output.sum().backward()  # type: ignore[no-untyped-call]
    return forward, log


def test_ring_hops_during_blocks(four_ranks: Ranks) -> None:
    """Each hop starts before a block and is waited for after it."""
    hop = ["start keys", "forward", "wait keys"]
    target = "tests.workloads.context_parallel.test_attention_methods:log_work"
    forward, backward = four_ranks.call(target)[-1]
    assert forward == [*hop, *hop, *hop, "forward"]
    assert backward == [
        *("start keys", "backward", "wait keys"),
        *("start keys", "backward", "start gradients", "wait keys"),
        *("start keys", "backward", "wait gradients", "start gradients", "wait keys"),
        *("backward", "wait gradients", "start gradients"),
        "wait gradients",
    ]
