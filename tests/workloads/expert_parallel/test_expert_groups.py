"""Attention over ranks is attention: each gives the part of its own positions, and the gradients of its heads."""

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
from parbench.workloads.model.transformer import Attention, Transformer, build
from parbench.workloads.step.layout import whole
from parbench.workloads.step.sent_bytes import counted
from tests.support.ranks import Ranks

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=8, vocabulary=64
)
SHAPES = {"gpt": GPT, "llama": replace(GPT, recipe="llama")}


def attended(attention: Attention, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    given = x.detach().clone().requires_grad_()
    out = attention(given)
    out.backward(upstream)
    assert given.grad is not None
    named = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
    assert len(named) == len(list(attention.parameters()))
    return {
        "out": out.detach(),
        "input": given.grad,
        **{name: whole(g) for name, g in named.items()},
    }


def drawn(recipe: str) -> tuple[Transformer, Tensor, Tensor]:
    chance, shape = torch.Generator().manual_seed(1), SHAPES[recipe]
    x, upstream = (torch.randn(3, shape.sequence, shape.hidden, generator=chance) for _ in range(2))
    return build(shape, 0, CPU), x, upstream


def apart(
    world: World, recipe: str
) -> tuple[dict[str, float], Any, dict[tuple[str, str, int], int]]:
    """Return how far split attention is from whole attention's part, learned places, and a layer's calls by kind."""
    model, x, upstream = drawn(recipe)
    expected = attended(model.layers[1].attention, x, upstream)  # type: ignore[arg-type]
    groups = make_axes(
        world, moe_of({"tp": world.size, "ep": 1, "fsdp": False}, SHAPES[recipe], world.size)
    ).groups
    model = drawn(recipe)[0]
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    parameters = split_attention(model, groups["tp"], range(mine.start, mine.stop), CPU)
    assert len(parameters) == sum(".attention." in name for name, _ in model.named_parameters())
    found = attended(model.layers[1].attention, x[:, mine], upstream[:, mine])  # type: ignore[arg-type]
    expected |= {name: expected[name][:, mine] for name in ("out", "input")}
    distances = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    given = x[:, mine].clone().requires_grad_()
    calls = counted(
        lambda: model.layers[0].attention(given).backward(upstream[:, mine]),  # type: ignore[operator]
        {"tp": groups["tp"]},
    )
    world.barrier()  # a group that one rank gives back while another still connects fails there
    for group in groups.values():
        dist.destroy_process_group(group)
    forget_meshes()
    places = None if model.places is None else model.places.tolist()
    return distances, places, dict(Counter((call.axis, call.op, call.num_bytes) for call in calls))


@pytest.mark.parametrize("recipe", SHAPES)
def test_split_attention_is_attention_of_a_ranks_positions_gathered_and_scattered_once_each_way(
    two_ranks: Ranks, recipe: str
) -> None:
    activation = 3 * 8 * 32 * 4
    for rank, (distances, places, calls) in enumerate(
        two_ranks.call("tests.workloads.expert_parallel.test_expert_groups:apart", recipe=recipe)
    ):
        assert len(distances) == 2 + (7 if recipe == "gpt" else 4)
        assert max(distances.values()) < 1e-5, distances
        assert places == (list(range(4 * rank, 4 * rank + 4)) if recipe == "gpt" else None)
        assert calls == {
            ("tp", "all_gather", activation): 2,
            ("tp", "reduce_scatter", activation): 2,
        }
