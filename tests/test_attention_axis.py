"""Attention over ranks is attention: each rank gives its positions' part, and the gradients of its heads."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.compat import forget_meshes
from bench.world import World
from workloads.communication import counted
from workloads.costs import tp_sent_bytes
from workloads.experts.attention_axis import (
    AttentionAxis,
    attention_sent_bytes,
    fill_sums,
    make_attention_axis,
    split_attention,
)
from workloads.layout import whole
from workloads.model import Attention, Transformer, build
from workloads.shapes import Shape
from workloads.timed import TimedLinear, Waiter, make_timed
from workloads.training import Options

CPU = torch.device("cpu")
GPT = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence=8, vocabulary=64)
SHAPES = {"gpt": GPT, "llama": replace(GPT, recipe="llama")}
OPTIONS = Options(
    shape=GPT, microbatch=3, accumulation=5, dtype=torch.bfloat16, checkpointing="none", timed_seconds=None
)


def alone(size: int, place: int) -> AttentionAxis:
    return AttentionAxis(size=size, place=place, group=None, replicas=None)


# ---- without ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_positions_are_dealt_out_in_runs(size: int) -> None:
    assert [p for place in range(size) for p in alone(size, place).positions(16)] == list(range(16))
    assert alone(4, 2).positions(16) == range(8, 12)


def test_a_part_has_the_token_after_it_to_predict() -> None:
    tokens = torch.arange(18).view(2, 9)
    assert alone(2, 0).part_of(tokens).tolist() == [[0, 1, 2, 3, 4], [9, 10, 11, 12, 13]]
    assert alone(2, 1).part_of(tokens).tolist() == [[4, 5, 6, 7, 8], [13, 14, 15, 16, 17]]
    assert alone(1, 0).part_of(tokens).equal(tokens)


def test_bytes_are_half_of_those_of_split_attention_and_ffn() -> None:
    both = tp_sent_bytes(layers=2, microbatch=3, sequence=8, hidden=32, element_bytes=2, tp=4, num_microbatches=5)["tp"]
    assert attention_sent_bytes(OPTIONS, 4) == both / 2 == 4 * 2 * 5 * (3 * 8 * 32 * 2) * 3 / 4
    assert attention_sent_bytes(replace(OPTIONS, checkpointing="full"), 4) == 1.5 * both / 2
    assert attention_sent_bytes(OPTIONS, 1) == 0


def test_nothing_is_split_over_one_rank() -> None:
    model = build(GPT, 0, CPU)
    assert split_attention(model, alone(1, 0), CPU) == []
    assert model.places is None
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_timed_attention_fills_in_a_sum_and_nothing_else_does() -> None:
    model = build(GPT, 0, CPU)
    make_timed(model, 0.0, Waiter(CPU))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, TimedLinear)}
    for module in linears.values():
        module.fill = 3.0
    fill_sums(model, alone(2, 0))
    found = {name: module.fill for name, module in linears.items()}
    assert found == {name: 6.0 if ".attention." in name else 3.0 for name in linears}
    assert {*found.values()} == {3.0, 6.0}


# ---- ranks


def groups_of(world: World, tp: int) -> tuple[dict[str, list[int]], int, bool]:
    axis = make_attention_axis(world, tp)
    found = {name: dist.get_process_group_ranks(group) for name, group in axis.groups.items()}
    own = all(group is not world.group for group in axis.groups.values())
    close(world, axis)
    return found, axis.place, own


def close(world: World, axis: AttentionAxis) -> None:
    world.barrier()  # a group that one rank gives back while another still connects fails there
    for group in axis.groups.values():
        dist.destroy_process_group(group)
    forget_meshes()


@pytest.mark.parametrize(
    ("tp", "groups"),
    [
        (1, [{}] * 4),
        (
            2,
            [
                {"tp": [0, 1], "adp": [0, 2]},
                {"tp": [0, 1], "adp": [1, 3]},
                {"tp": [2, 3], "adp": [0, 2]},
                {"tp": [2, 3], "adp": [1, 3]},
            ],
        ),
        (4, [{"tp": [0, 1, 2, 3]}] * 4),
    ],
)
def test_neighbours_split_attention_and_ranks_of_one_place_are_its_copies(
    four_ranks: Ranks, tp: int, groups: list[dict[str, list[int]]]
) -> None:
    found = four_ranks.call("test_attention_axis:groups_of", tp=tp)
    assert found == [(group, rank % tp, True) for rank, group in enumerate(groups)]


def attended(attention: Attention, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of input and parameters."""
    given = x.detach().clone().requires_grad_()
    out = attention(given)
    out.backward(upstream)
    assert given.grad is not None
    named = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
    assert len(named) == len(list(attention.parameters()))
    return {"out": out.detach(), "input": given.grad, **{name: whole(g) for name, g in named.items()}}


def drawn(recipe: str) -> tuple[Transformer, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    shape = SHAPES[recipe]
    x, upstream = (torch.randn(3, shape.sequence, shape.hidden, generator=chance) for _ in range(2))
    return build(shape, 0, CPU), x, upstream


def apart(world: World, recipe: str) -> dict[str, float]:
    """Return how far a rank's part of split attention is from whole attention's."""
    model, x, upstream = drawn(recipe)
    expected = attended(model.layers[1].attention, x, upstream)  # type: ignore[arg-type]
    axis = make_attention_axis(world, world.size)
    model = drawn(recipe)[0]
    parameters = split_attention(model, axis, CPU)
    assert len(parameters) == sum(".attention." in name for name, _ in model.named_parameters())
    mine = slice(axis.positions(8).start, axis.positions(8).stop)
    found = attended(model.layers[1].attention, x[:, mine], upstream[:, mine])  # type: ignore[arg-type]
    expected |= {name: expected[name][:, mine] for name in ("out", "input")}
    distances = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    close(world, axis)
    return distances


@pytest.mark.parametrize("recipe", SHAPES)
def test_split_attention_is_attention_of_a_ranks_positions(two_ranks: Ranks, recipe: str) -> None:
    for found in two_ranks.call("test_attention_axis:apart", recipe=recipe):
        assert len(found) == 2 + (7 if recipe == "gpt" else 4)
        assert max(found.values()) < 1e-5, found


def places_of(world: World) -> Any:
    model, axis = build(GPT, 0, CPU), make_attention_axis(world, 2)
    split_attention(model, axis, CPU)
    close(world, axis)
    return None if model.places is None else model.places.tolist()


def test_learned_positions_are_a_ranks_own(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_attention_axis:places_of") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def calls_of(world: World) -> dict[tuple[str, str, int], int]:
    """Return how often one layer's attention, forward and backward, makes each call, by axis, operation and bytes."""
    model, x, upstream = drawn("gpt")
    axis = make_attention_axis(world, 2)
    split_attention(model, axis, CPU)
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    given = x[:, mine].clone().requires_grad_()
    calls = counted(
        lambda: model.layers[0].attention(given).backward(upstream[:, mine]),  # type: ignore[operator]
        {"tp": axis.groups["tp"]},
    )
    close(world, axis)
    return dict(Counter((call.axis, call.op, call.num_bytes) for call in calls))


def test_a_layer_gathers_and_scatters_once_each_way(two_ranks: Ranks) -> None:
    activation = 3 * 8 * 32 * 4
    for found in two_ranks.call("test_attention_axis:calls_of"):
        assert found == {("tp", "all_gather", activation): 2, ("tp", "reduce_scatter", activation): 2}
