"""Blocks merged by log-sum-exp are attention over all their keys, in any order, and stable."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from workloads.context.online_softmax import Merged


def block(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return scores.softmax(dim=-1) @ values, scores.logsumexp(dim=-1)


def drawn(shift: float = 0.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 5, 12) * 4 + shift, torch.randn(2, 3, 12, 8)


@pytest.mark.parametrize("shift", [0.0, 500.0, -500.0])
@pytest.mark.parametrize("cuts", [(0, 12), (0, 4, 12), (0, 1, 2, 9, 12)])
def test_merged_blocks_are_attention_over_all_keys(cuts: tuple[int, ...], shift: float) -> None:
    scores, values = drawn(shift)
    merged = Merged(torch.empty(2, 3, 5, 8))
    for start, stop in reversed(list(pairwise(cuts))):
        merged.add(slice(0, 5), *block(scores[..., start:stop], values[..., start:stop, :]))
    out, lse = block(scores.double(), values.double())
    # a log-sum-exp of 500 is known to 6e-5 in float32, and its power as well
    assert (merged.output() - out).abs().max() < (2e-6 if shift == 0 else 2e-4)
    assert (merged.lse() - lse).abs().max() < 1e-6 * max(1.0, abs(shift))


def test_a_far_smaller_block_changes_nothing() -> None:
    merged = Merged(torch.empty(1, 1, 1, 2))
    merged.add(slice(0, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    merged.add(slice(0, 1), torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -200.0))
    assert merged.output().tolist() == [[[[1.0, 1.0]]]]


def test_rows_that_no_block_had_are_left_alone() -> None:
    merged = Merged(torch.empty(1, 1, 3, 2))
    merged.add(slice(1, 2), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    assert merged.output()[0, 0].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert merged.lse()[0, 0].tolist() == [-math.inf, 0, -math.inf]


def test_narrow_blocks_are_merged_in_float32_and_rounded_once() -> None:
    """In bfloat16 1 + 1/256 would be 1 at every one of many additions."""
    merged = Merged(torch.empty(1, 1, 1, 1, dtype=torch.bfloat16))
    merged.add(slice(0, 1), torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    for _ in range(256):
        merged.add(
            slice(0, 1), torch.full((1, 1, 1, 1), 2.0, dtype=torch.bfloat16), torch.full((1, 1, 1), -math.log(256))
        )
    assert merged.output().dtype == torch.bfloat16
    assert merged.output().item() == pytest.approx(1.5, abs=0.004)
    assert merged.lse().dtype == torch.float32
    assert merged.lse().item() == pytest.approx(math.log(2), abs=1e-4)
