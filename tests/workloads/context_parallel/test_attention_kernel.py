"""Kernels, their blocks and merged blocks give attention, its log-sum-exp and its gradients."""

import math

import pytest
import torch

from parbench.bench.world import accelerator
from parbench.workloads.context_parallel.attention_kernel import (
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    OnlineSoftmax,
    SavedQueries,
    choose_kernel,
)
from tests.support.workloads.cp_ranks import BLOCKS, AttentionBlock, compute_attention


@pytest.mark.parametrize("block", BLOCKS)
def test_cpu_kernel_matches_formula(block: AttentionBlock) -> None:
    kernel = CpuFlash()
    q, k, v, gradient = block.draw()
    expected = compute_attention(q, k, v, block.allowed_pairs(), gradient)

    output, lse = kernel.forward(q, k, v, block.causal)
    gradients = kernel.backward(SavedQueries(q, output, lse, gradient), k, v, block.causal)

    torch.testing.assert_close(output.double(), expected.output, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=2e-6)
    for result, right in zip(gradients, expected.gradients, strict=True):
        torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "kind"),
    [
        ((7, 5), torch.bfloat16, 64, CudaEfficient),
        ((9, 0), torch.float32, 64, CudaEfficient),
        ((9, 0), torch.bfloat16, 20, CudaEfficient),
        ((9, 0), torch.bfloat16, 512, CudaEfficient),
        ((8, 0), torch.float16, 256, CudaFlash),
    ],
)
def test_gpu_uses_flash_where_possible(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_size: int,
    kind: type,
) -> None:
    monkeypatch.setattr(accelerator, "get_capability", lambda device: capability)
    assert isinstance(choose_kernel(torch.device("cuda"), dtype, head_size), kind)


@pytest.mark.parametrize("shift", [0.0, 500.0, -500.0])
def test_merged_blocks_are_attention(shift: float) -> None:
    """Float32 represents a log-sum-exp of 500 with an error of 6e-5."""
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5, 12) * 4 + shift
    values = torch.randn(2, 3, 12, 8)
    softmax = OnlineSoftmax(torch.empty(2, 3, 5, 8))
    for columns in (slice(9, 12), slice(2, 9), slice(1, 2), slice(0, 1)):
        block = scores[..., columns]
        output = block.softmax(dim=-1) @ values[..., columns, :]
        softmax.add(slice(0, 5), output, block.logsumexp(dim=-1))
    scores, values = scores.double(), values.double()
    expected = scores.softmax(dim=-1) @ values
    assert (softmax.output() - expected).abs().max() < 2e-4
    assert (softmax.lse - scores.logsumexp(dim=-1)).abs().max() < 2e-4


def test_merged_bfloat16_blocks_round_once() -> None:
    """In bfloat16, 1 + 1/256 would be 1 at each of many additions."""
    value = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    small_lse = torch.full((1, 1, 1), -math.log(256))
    softmax = OnlineSoftmax(value)
    softmax.add(slice(0, 1), value, torch.zeros(1, 1, 1))
    for _ in range(256):
        softmax.add(slice(0, 1), 2 * value, small_lse)
    assert softmax.output().item() == pytest.approx(1.5, abs=0.004)
    assert softmax.lse.item() == pytest.approx(math.log(2), abs=1e-4)
