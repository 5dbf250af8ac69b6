"""Attention that is split over ranks computes the same as attention of one process."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
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

GPT = Shape(
    recipe="gpt", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=8, vocabulary=64
)
SHAPES = {"gpt": GPT, "llama": replace(GPT, recipe="llama")}
ACTIVATION = 3 * 8 * 32 * 4  # bytes of (batch, sequence, hidden) in float32


def attend(attention: Any, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    leaf = x.detach().clone().requires_grad_()
    out = attention(leaf)
    out.backward(upstream)
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in attention.named_parameters()}
    return {"out": out.detach(), "input": leaf.grad, **gradients}


def split(world: World, recipe: str) -> tuple[float, dict[tuple[str, str, int], int]]:
    """Return the largest error of split attention, and its calls."""
    shape = SHAPES[recipe]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, 32, generator=generator)
    upstream = torch.randn(3, 8, 32, generator=generator)
    positions = slice(4 * world.rank, 4 * world.rank + 4)
    expected = attend(build(shape, 0, world.device).layers[0].attention, x, upstream)
    for name in ("out", "input"):
        expected[name] = expected[name][:, positions]
    moe = moe_of({"tp": world.size, "ep": 1, "fsdp": False}, shape, world.size)
    groups = make_axes(world, moe).groups
    model = build(shape, 0, world.device)
    split_attention(model, groups["tp"], range(positions.start, positions.stop), world.device)
    attention = model.layers[0].attention
    actual: dict[str, Tensor] = {}

    def step() -> None:
        actual.update(attend(attention, x[:, positions], upstream[:, positions]))

    calls = counted(step, {"tp": groups["tp"]})
    errors = [float((whole(actual[name]) - expected[name]).abs().max()) for name in expected]
    world.barrier()  # a group must not be destroyed while another rank connects
    for group in groups.values():
        dist.destroy_process_group(group)
    forget_meshes()
    return max(errors), Counter((call.axis, call.op, call.num_bytes) for call in calls)


@pytest.mark.parametrize("recipe", SHAPES)
def test_split_attention_matches_one_process(two_ranks: Ranks, recipe: str) -> None:
    """Each rank gathers the sequence and scatters the output, forward and backward."""
    for error, calls in two_ranks.call(f"{__name__}:split", recipe=recipe):
        assert error < 1e-5
        assert calls == {
            ("tp", "all_gather", ACTIVATION): 2,
            ("tp", "reduce_scatter", ACTIVATION): 2,
        }
