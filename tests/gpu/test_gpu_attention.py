"""Attention's fused kernel, and torch's own context parallel, on one GPU."""

import pytest
import torch
import torch.distributed as dist
from test_attention_kernel import SIZES, drawn

from parbench.workloads.context_parallel.attention_kernel import CudaFlash, Dense
from parbench.workloads.context_parallel.attention_methods import TorchContextParallel
from parbench.workloads.model.transformer import attend

pytestmark = pytest.mark.gpu


def test_the_fused_kernel_of_gpus_agrees_with_the_formula() -> None:
    for rows, keys, causal, heads, kv_heads, _ in SIZES:
        q, k, v = (x.cuda() for x in drawn(rows, keys, heads, kv_heads, 64, torch.bfloat16))
        gradient = torch.randn_like(q)
        out, lse = CudaFlash().forward(q, k, v, causal)
        expected, expected_lse = Dense().forward(q, k, v, causal)
        assert (out - expected).abs().max() < 0.02
        assert (lse - expected_lse).abs().max() < 0.01
        found = CudaFlash().backward(gradient, q, k, v, expected, expected_lse, causal)
        right = Dense().backward(gradient, q, k, v, expected, expected_lse, causal)
        for ours, theirs in zip(found, right, strict=True):
            assert (ours - theirs).abs().max() < 0.05


def test_torchs_own_is_attention_on_one_gpu() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        group = dist.group.WORLD
        assert group is not None
        x = torch.randn(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
        core = TorchContextParallel(group, "cuda")
        found = core(x, x, x)
        core.close()
        assert float((found - attend(x, x, x)).abs().max()) < 0.02
    finally:
        dist.destroy_process_group()
