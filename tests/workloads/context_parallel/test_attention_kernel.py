"""Kernels, their blocks and the merging of blocks give attention, its log-sum-exp and gradients."""

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
)
from tests.support.cp_ranks import formula
from tests.support.fake_time import FakeTime

SIZES = [
    (8, 8, True, 4, 4, 16),
    (7, 7, True, 6, 2, 5),
    (1, 1, True, 3, 1, 8),
    (5, 9, False, 6, 3, 8),
    (9, 2, False, 3, 3, 4),
]
"""Rows, keys, causal, heads, key heads, head size."""


def drawn(
    rows: int, keys: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return queries, keys and values that are slices of larger tensors, as blocks are."""
    torch.manual_seed(rows * keys)
    sizes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, n, size + 3, d).to(dtype)[:, :, 2:-1] for n, size in sizes]


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return formula(q, k, v, allowed.tril() if causal else allowed)


@pytest.mark.parametrize(("rows", "keys", "causal", "heads", "kv_heads", "head_size"), SIZES)
def test_cpu_kernel_matches_formula(
    rows: int, keys: int, causal: bool, heads: int, kv_heads: int, head_size: int
) -> None:
    kernel = CpuFlash()
    q, k, v = drawn(rows, keys, heads, kv_heads, head_size)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = reference(leaves[0], leaves[1], leaves[2], causal)
    gradient = torch.randn_like(q)

    out, lse = kernel.forward(q, k, v, causal)
    gradients = kernel.backward(gradient, q, k, v, out, lse, causal)

    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-6)
    right = torch.autograd.grad(expected, leaves, gradient.double())
    for result, expected_gradient in zip(gradients, right, strict=True):
        torch.testing.assert_close(result.double(), expected_gradient, rtol=1e-5, atol=1e-5)


def test_timed_kernel_waits_per_pair() -> None:
    """A backward pass takes twice as long as a forward pass."""
    clock = FakeTime()
    kernel = Timed(clock.waiter(), seconds_per_pair=1e-3)
    q, k, v = drawn(4, 4, 2, 1, 4)
    out, lse = kernel.forward(q, k, v, True)
    gradients = kernel.backward(out, q, k, v, out, lse, False)
    assert clock.sleeps == pytest.approx([2 * 2 * 10 * 1e-3, 2 * 2 * 2 * 16 * 1e-3])
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "kernel"),
    [
        ((8, 0), torch.bfloat16, 64, CudaFlash),
        ((9, 0), torch.float16, 256, CudaFlash),
        ((7, 5), torch.bfloat16, 64, CudaEfficient),
        ((9, 0), torch.float32, 64, CudaEfficient),
        ((9, 0), torch.bfloat16, 20, CudaEfficient),
        ((9, 0), torch.bfloat16, 512, CudaEfficient),
    ],
)
def test_flash_kernel_is_selected_where_possible(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_size: int,
    kernel: type,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert type(kernel_for(torch.device("cuda"), dtype, head_size)) is kernel
    assert type(kernel_for(torch.device("cpu"), dtype, head_size)) is CpuFlash


@pytest.mark.parametrize(("shift", "limit"), [(0.0, 2e-6), (500.0, 2e-4), (-500.0, 2e-4)])
def test_merged_blocks_are_attention(shift: float, limit: float) -> None:
    """Float32 represents a log-sum-exp of 500 with an error of 6e-5."""
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5, 12) * 4 + shift
    values = torch.randn(2, 3, 12, 8)
    merged = Merged(torch.empty(2, 3, 5, 8))
    for start, stop in reversed(list(pairwise((0, 1, 2, 9, 12)))):
        block = scores[..., start:stop]
        out = block.softmax(dim=-1) @ values[..., start:stop, :]
        merged.add(slice(0, 5), out, block.logsumexp(dim=-1))
    expected = scores.double().softmax(dim=-1) @ values.double()
    assert (merged.output() - expected).abs().max() < limit
    assert (merged.lse - scores.double().logsumexp(dim=-1)).abs().max() < limit


def test_merged_rows_without_blocks_are_zero() -> None:
    merged = Merged(torch.empty(1, 1, 3, 2))
    merged.add(slice(1, 2), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    merged.add(slice(1, 2), torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -200.0))
    assert merged.output()[0, 0].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert merged.lse[0, 0].tolist() == [-math.inf, 0, -math.inf]


def test_merged_bfloat16_blocks_round_once() -> None:
    """In bfloat16, 1 + 1/256 would be 1 at each of many additions."""
    value = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    merged = Merged(value)
    merged.add(slice(0, 1), value, torch.zeros(1, 1, 1))
    for _ in range(256):
        merged.add(slice(0, 1), 2 * value, torch.full((1, 1, 1), -math.log(256)))
    assert merged.output().item() == pytest.approx(1.5, abs=0.004)
    assert merged.lse.item() == pytest.approx(math.log(2), abs=1e-4)
