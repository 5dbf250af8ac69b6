"""Kernels, the blocks they compute and their merging are attention, its log-sum-exp and its gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from parbench.workloads.context_parallel.attention_kernel import (
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    Merged,
    Timed,
    kernel_for,
    num_pairs,
)
from parbench.workloads.context_parallel.context_step import attend_to_all
from tests.support.cp_ranks import formula
from tests.support.fake_time import FakeTime

# rows, keys, causal, query heads, heads of keys, head size
SIZES = [
    (8, 8, True, 4, 4, 16),
    (7, 7, True, 6, 2, 5),
    (1, 1, True, 3, 1, 8),
    (5, 9, False, 6, 3, 8),
    (9, 2, False, 3, 3, 4),
]


def drawn(
    rows: int, keys: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return queries, keys and values that are slices of larger tensors, as blocks are."""
    torch.manual_seed(rows * keys)
    sizes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, n, size + 3, d).to(dtype)[:, :, 2:-1] for n, size in sizes]


def expected_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return formula(
        q,
        k,
        v,
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(0 if causal else k.shape[2]),
    )


def test_output_log_sum_exp_and_gradients_are_the_formulas() -> None:
    kernel = CpuFlash()
    for rows, keys, causal, heads, kv_heads, d in SIZES:
        given, where = drawn(rows, keys, heads, kv_heads, d), (rows, keys)
        q, k, v = given
        out, lse = kernel.forward(q, k, v, causal)
        leaves = [x.double().requires_grad_() for x in given]
        expected, expected_lse = expected_of(leaves[0], leaves[1], leaves[2], causal)
        assert (out - expected).abs().max() < 2e-6, where
        assert (lse - expected_lse).abs().max() < 2e-6, where
        assert (out.dtype, lse.dtype, lse.shape) == (torch.float32, torch.float32, q.shape[:3]), (
            where
        )
        gradient = torch.randn_like(q)
        found = kernel.backward(gradient, q, k, v, out, lse, causal)
        for ours, theirs in zip(
            found, torch.autograd.grad(expected, leaves, gradient.double()), strict=True
        ):
            assert ours.shape == theirs.shape, where
            assert (ours - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), where


def test_with_the_log_sum_exp_of_all_blocks_gradients_of_blocks_add_up() -> None:
    kernel = CpuFlash()
    q, k, v = drawn(6, 10, 4, 2, 8)
    gradient = torch.randn_like(q)
    out, lse = (x.float() for x in expected_of(q, k, v, causal=False))
    blocks = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 3), (3, 10))]
    one, other = (
        kernel.backward(gradient, q, keys, values, out, lse, False) for keys, values in blocks
    )
    whole = kernel.backward(gradient, q, k, v, out, lse, False)
    added = (
        one[0] + other[0],
        torch.cat((one[1], other[1]), dim=2),
        torch.cat((one[2], other[2]), dim=2),
    )
    torch.testing.assert_close(added, whole, rtol=1e-5, atol=1e-5)


def test_bfloat16_comes_back_in_bfloat16_and_its_log_sum_exp_in_float32() -> None:
    kernel = CpuFlash()
    q, k, v = drawn(8, 8, 4, 2, 16, torch.bfloat16)
    out, lse = kernel.forward(q, k, v, True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - expected_of(q, k, v, True)[0]).abs().max() < 0.02
    gradients = kernel.backward(torch.ones_like(q), q, k, v, out, lse, True)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def test_timed_attention_waits_by_the_pair_twice_as_long_backward_and_has_a_real_ones_shapes() -> (
    None
):
    clock = FakeTime()
    kernel, (q, k, v) = Timed(clock.waiter(), seconds_per_pair=1e-3), drawn(4, 4, 2, 1, 4)
    out, lse = kernel.forward(q, k, v, True)
    gradients = kernel.backward(out, q, k, v, out, lse, False)
    assert clock.sleeps == pytest.approx([2 * 2 * 10 * 1e-3, 2 * 2 * 2 * 16 * 1e-3])
    real = CpuFlash().forward(q, k, v, True)
    assert [(x.shape, x.dtype) for x in (out, lse)] == [(x.shape, x.dtype) for x in real]
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert (num_pairs(q, k, True), num_pairs(q, k[:, :, :3], False)) == (2 * 2 * 10, 2 * 2 * 12)


def test_the_fused_kernel_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, head_size in ((torch.float32, 5), (torch.bfloat16, 64)):
        assert type(kernel_for(torch.device("cpu"), dtype, head_size)) is CpuFlash
    for capability, dtype, head_size, kind in (
        ((8, 0), torch.bfloat16, 64, CudaFlash),
        ((9, 0), torch.float16, 256, CudaFlash),
        ((7, 5), torch.bfloat16, 64, CudaEfficient),
        ((7, 0), torch.float16, 64, CudaEfficient),
        ((9, 0), torch.float32, 64, CudaEfficient),
        ((9, 0), torch.bfloat16, 20, CudaEfficient),
        ((9, 0), torch.bfloat16, 512, CudaEfficient),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        assert type(kernel_for(torch.device("cuda"), dtype, head_size)) is kind, (
            capability,
            dtype,
            head_size,
        )


def block(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return scores.softmax(dim=-1) @ values, scores.logsumexp(dim=-1)


def test_merged_blocks_are_attention_over_all_keys_in_any_order_and_stable() -> None:
    for shift in (0.0, 500.0, -500.0):
        torch.manual_seed(0)
        scores, values = torch.randn(2, 3, 5, 12) * 4 + shift, torch.randn(2, 3, 12, 8)
        out, lse = block(scores.double(), values.double())
        for cuts in ((0, 12), (0, 4, 12), (0, 1, 2, 9, 12)):
            merged = Merged(torch.empty(2, 3, 5, 8))
            for start, stop in reversed(list(pairwise(cuts))):
                merged.add(slice(0, 5), *block(scores[..., start:stop], values[..., start:stop, :]))
            # a log-sum-exp of 500 is known to 6e-5 in float32, and its power as well
            assert (merged.output() - out).abs().max() < (2e-6 if shift == 0 else 2e-4), (
                shift,
                cuts,
            )
            assert (merged.lse - lse).abs().max() < 1e-6 * max(1.0, abs(shift)), (shift, cuts)


def test_a_far_smaller_block_changes_nothing_and_rows_that_no_block_had_are_left_alone() -> None:
    merged = Merged(torch.empty(1, 1, 3, 2))
    merged.add(slice(1, 2), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    merged.add(slice(1, 2), torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -200.0))
    assert merged.output()[0, 0].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert merged.lse[0, 0].tolist() == [-math.inf, 0, -math.inf]


def test_narrow_blocks_are_merged_in_float32_and_rounded_once() -> None:
    """In bfloat16 1 + 1/256 would be 1 at every one of many additions."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    merged = Merged(one)
    merged.add(slice(0, 1), one, torch.zeros(1, 1, 1))
    for _ in range(256):
        merged.add(slice(0, 1), 2 * one, torch.full((1, 1, 1), -math.log(256)))
    assert (merged.output().dtype, merged.lse.dtype) == (torch.bfloat16, torch.float32)
    assert merged.output().item() == pytest.approx(1.5, abs=0.004)
    assert merged.lse.item() == pytest.approx(math.log(2), abs=1e-4)


def test_attend_to_all_matches_the_formula() -> None:
    for kv_heads in (6, 3, 1):
        q, k, v = drawn(7, 7, 6, kv_heads, 4)
        expected = formula(q, k, v, torch.ones(7, 7, dtype=torch.bool))[0]
        torch.testing.assert_close(attend_to_all(q, k, v).double(), expected, rtol=0, atol=1e-6)


def test_cuda_efficient_shapes() -> None:
    """The shapes that torch gives for tensors without data; tests/gpu has the numbers."""
    kernel = CudaEfficient()
    q = torch.empty(2, 6, 7, 16, device="meta")
    k, v = (torch.empty(2, 3, 9, 16, device="meta") for _ in range(2))
    out, lse = kernel.forward(q, k, v, causal=False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = kernel.backward(out, q, k, v, out, lse, causal=False)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
