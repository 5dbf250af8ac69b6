"""Attention that is split over ranks computes the same as attention of one process."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.torch_compat import forget_meshes
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.groups import make_axes, split_attention
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import build
from parbench.workloads.step.layout import whole
from parbench.workloads.step.sent_bytes import counted
from tests.support.ranks import Ranks

SHAPE = Shape(
    recipe="llama", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=8, vocabulary=64
)
ACTIVATION = 3 * 8 * 32 * 4  # bytes of (batch, sequence, hidden) in float32


def attend(attention: Any, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    leaf = x.detach().clone().requires_grad_()
    out = attention(leaf)
    out.backward(upstream)
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in attention.named_parameters()}
    return {"out": out.detach(), "input": leaf.grad, **gradients}


def compare_split_attention(world: World) -> dict[tuple[str, int], int]:
    """Compare with one process, and count the calls of split attention by operation and bytes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, 32, generator=generator)
    upstream = torch.randn(3, 8, 32, generator=generator)
    expected = attend(build(SHAPE, 0, world.device).layers[0].attention, x, upstream)
    start = 4 * world.rank
    for name in ("out", "input"):
        expected[name] = expected[name][:, start : start + 4]
    moe = moe_of({"tp": world.size, "ep": 1, "fsdp": False}, SHAPE, world.size)
    groups = make_axes(world, moe).groups
    model = build(SHAPE, 0, world.device)
    split_attention(model, groups["tp"], range(start, start + 4), world.device)
    x_part = x[:, start : start + 4]
    upstream_part = upstream[:, start : start + 4]
    actual: dict[str, Tensor] = {}

    def step() -> None:
        actual.update(attend(model.layers[0].attention, x_part, upstream_part))

    calls = counted(step, {"tp": groups["tp"]})
    for name, tensor in expected.items():
        torch.testing.assert_close(whole(actual[name]), tensor, rtol=0, atol=1e-5)
    world.barrier()  # a group must not be destroyed while another rank connects
    for group in groups.values():
        dist.destroy_process_group(group)
    forget_meshes()
    return Counter((call.op, call.num_bytes) for call in calls)


def test_split_attention_matches_one_process(two_ranks: Ranks) -> None:
    """Each rank gathers the sequence and scatters the output, forward and backward."""
    calls, _ = two_ranks.call(f"{__name__}:compare_split_attention")
    assert calls == {("all_gather", ACTIVATION): 2, ("reduce_scatter", ACTIVATION): 2}
