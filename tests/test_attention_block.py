"""Blocks, tile by tile, are attention under the mask, forward and backward, and count what kernels are given."""

import pytest
import torch
from test_dense_attention import formula
from torch import Tensor

from workloads.context.attention_block import Blocks, Saved
from workloads.context.attention_kernel import CpuFlash, Dense
from workloads.context.cp_plan import ContextPlan
from workloads.context.cp_recorder import Recorder
from workloads.context.online_softmax import Merged

RANKS, SEQUENCE = 3, 18


def drawn(heads: int = 6, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    """Return the queries of the whole sequence, and its keys and values in one."""
    torch.manual_seed(2)
    return torch.randn(2, heads, SEQUENCE, 8), torch.randn(2, 2, kv_heads, SEQUENCE, 8)


def mask_of(plan: ContextPlan) -> Tensor:
    positions = torch.arange(SEQUENCE)
    if plan.mask == "full":
        return torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool)
    document = torch.searchsorted(torch.tensor(plan.starts), positions, right=True)
    return (positions[:, None] >= positions) & (document[:, None] == document)


def plan_of(method: str, mask: str) -> ContextPlan:
    return ContextPlan(method=method, mask=mask, sequence=SEQUENCE, ranks=RANKS, ulysses=1, seed=4)


def blocks_of(plan: ContextPlan, rank: int, kernel: CpuFlash | Dense, recorder: Recorder) -> Blocks:
    tiles = [plan.tiles(rank, step) for step in range(plan.num_steps)]
    return Blocks(kernel=kernel, recorder=recorder, tiles=tiles)


@pytest.mark.parametrize("kernel", [CpuFlash(), Dense()])
@pytest.mark.parametrize("mask", ["causal", "full", "packed"])
@pytest.mark.parametrize("method", ["ring", "striped", "zigzag", "allgather_kv"])
def test_all_blocks_of_a_rank_are_its_attention_and_its_gradients(
    method: str, mask: str, kernel: CpuFlash | Dense
) -> None:
    plan, (q, kv) = plan_of(method, mask), drawn()
    leaf_q, leaf_kv = q.double().requires_grad_(), kv.double().requires_grad_()
    expected = formula(leaf_q, leaf_kv[0], leaf_kv[1], mask_of(plan))
    gradient = torch.randn_like(q)
    summed = torch.zeros_like(kv)
    [of_q, of_kv] = torch.autograd.grad(expected, [leaf_q, leaf_kv], gradient.double())
    for rank in range(RANKS):
        mine, recorder = plan.tokens(rank), Recorder(torch.device("cpu"))
        blocks, merged = blocks_of(plan, rank, kernel, recorder), Merged(q[:, :, mine])
        with recorder.recording():
            for step in range(plan.num_steps):
                blocks.forward(step, q[:, :, mine], kv[..., plan.keys(rank, step), :], merged)
        assert (merged.output() - expected[:, :, mine]).abs().max() < 1e-5
        found = [recorder.pairs["forward", step] for step in range(plan.num_steps)]
        assert found == [2 * 6 * plan.pairs(rank, step) for step in range(plan.num_steps)]
        saved = Saved(q=q[:, :, mine], out=merged.output(), lse=merged.lse(), gradient=gradient[:, :, mine])
        dq = torch.zeros_like(saved.q)
        for step in range(plan.num_steps):
            keys = plan.keys(rank, step)
            summed[..., keys, :] += blocks.backward(step, blocks.tiles[step], saved, kv[..., keys, :], dq)
        assert (dq - of_q[:, :, mine]).abs().max() < 1e-5 * of_q.abs().max()
    assert (summed - of_kv).abs().max() < 1e-5 * of_kv.abs().max()


def test_a_block_without_pairs_is_not_computed() -> None:
    plan, (q, kv) = plan_of("ring", "causal"), drawn()
    recorder = Recorder(torch.device("cpu"))
    blocks, merged = blocks_of(plan, 0, CpuFlash(), recorder), Merged(q[:, :, :6])
    with recorder.recording():
        blocks.forward(1, q[:, :, :6], kv[..., 12:, :], merged)
    assert recorder.pairs == {}
    assert not merged.output().any()


def test_gradients_of_narrow_blocks_are_summed_in_float32() -> None:
    plan, (q, kv) = plan_of("zigzag", "packed"), drawn()
    blocks, mine = blocks_of(plan, 1, CpuFlash(), Recorder(torch.device("cpu"))), plan.tokens(1)
    narrow = q[:, :, mine].bfloat16()
    saved = Saved(q=narrow, out=narrow, lse=torch.zeros(2, 6, 6), gradient=narrow)
    found = blocks.backward(0, blocks.tiles[0], saved, kv[..., mine, :].bfloat16(), torch.zeros(2, 6, 6, 8))
    assert found.dtype == torch.float32
