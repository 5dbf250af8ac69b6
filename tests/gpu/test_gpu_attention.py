"""Attention's fused kernels on one GPU agree with the formula, forward and backward, block by block."""

import pytest
import torch

from parbench.workloads.context_parallel.attention_kernel import CudaEfficient, CudaFlash
from tests.support.cp_ranks import formula
from tests.workloads.context_parallel.test_attention_kernel import SIZES, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kernel", "dtype", "limit"),
    [
        (CudaFlash(), torch.bfloat16, 0.05),
        (CudaEfficient(), torch.bfloat16, 0.05),
        (CudaEfficient(), torch.float32, 1e-2),
    ],
)
def test_kernel_agrees_with_the_formula(
    kernel: CudaFlash | CudaEfficient, dtype: torch.dtype, limit: float
) -> None:
    for rows, keys, causal, heads, kv_heads, _ in [
        *SIZES,
        (40, 40, True, 4, 2, 64),
        (33, 70, False, 4, 2, 64),
    ]:
        q, k, v = (x.cuda() for x in drawn(rows, keys, heads, kv_heads, 64, dtype))
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(0 if causal else keys)
        expected, expected_lse = formula(leaves[0], leaves[1], leaves[2], seen)
        gradient = torch.randn_like(q)
        out, lse = kernel.forward(q, k, v, causal)
        assert (out - expected).abs().max() < limit
        assert (lse - expected_lse).abs().max() < limit
        given = expected.detach().to(dtype), expected_lse.detach().float()
        found = kernel.backward(gradient, q, k, v, *given, causal)
        right = torch.autograd.grad(expected, leaves, gradient.double())
        for ours, theirs in zip(found, right, strict=True):
            assert (ours - theirs).abs().max() < limit * max(1.0, float(theirs.abs().max()))
