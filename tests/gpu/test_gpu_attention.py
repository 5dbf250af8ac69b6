"""Fused attention kernels on a GPU match the formula, forward and backward."""

import pytest
import torch

from parbench.workloads.context_parallel.attention_kernel import (
    CudaEfficient,
    CudaFlash,
    SavedQueries,
)
from tests.support.workloads.cp_ranks import BLOCKS, AttentionBlock, compute_attention

pytestmark = pytest.mark.gpu

GPU_BLOCKS = [
    *BLOCKS,
    AttentionBlock(40, 40, True, 4, 2, 64),
    AttentionBlock(33, 70, False, 4, 2, 64),
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        (CudaFlash(), torch.bfloat16, 0.05),
        (CudaEfficient(), torch.bfloat16, 0.05),
        (CudaEfficient(), torch.float32, 1e-2),
    ],
)
@pytest.mark.parametrize("block", GPU_BLOCKS)
def test_gpu_kernel_matches_formula(
    kernel: CudaFlash | CudaEfficient,
    dtype: torch.dtype,
    tolerance: float,
    block: AttentionBlock,
) -> None:
    block = AttentionBlock(
        block.rows, block.keys, block.causal, block.heads, block.kv_heads, 64
    )
    q, k, v, gradient = (tensor.cuda() for tensor in block.draw(dtype))
    gradient = gradient.contiguous()
    expected = compute_attention(q, k, v, block.allowed_pairs().cuda(), gradient)

    output, lse = kernel.forward(q, k, v, block.causal)
    saved = SavedQueries(q, expected.output.to(dtype), expected.lse.float(), gradient)
    gradients = kernel.backward(saved, k, v, block.causal)

    assert (output - expected.output).abs().max() < tolerance
    assert (lse - expected.lse).abs().max() < tolerance
    for result, right in zip(gradients, expected.gradients, strict=True):
        limit = tolerance * max(1.0, float(right.abs().max()))
        assert (result - right).abs().max() < limit
