"""The table of parameters is the model's own, cut by every axis."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from workloads.experts.moe import exchange_ffns
from workloads.experts.moe_case import Moe, moe_of, num_moe_parameters
from workloads.hybrid.hybrid_tensors import ParameterPart, numel_by_kind, parts_of_rank, stages_of_rank
from workloads.model import build
from workloads.pipeline.schedules import NAMES, default_chunks, make_schedule
from workloads.shapes import SHAPES, Shape, num_parameters

SMALL = replace(SHAPES["tiny"], hidden=32, ffn=64, sequence=16, vocabulary=50)
LLAMA = replace(SHAPES["tiny-llama"], hidden=32, ffn=64, sequence=16, vocabulary=50)


def mixture(shape: Shape, ep: int = 1, **more: Any) -> Moe:
    return moe_of({"ep": ep, "experts": 4, **more}, shape, ep)


def whole(shape: Shape, moe: Moe | None = None) -> list[ParameterPart]:
    return parts_of_rank(shape, (0,), (shape.layers,), moe=moe)


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=lambda shape: shape.recipe)
@pytest.mark.parametrize("experts", [False, True])
def test_names_and_sizes_are_those_of_the_model(shape: Shape, experts: bool) -> None:
    moe = mixture(shape) if experts else None
    model = build(shape, 0, torch.device("cpu"))
    if moe is not None:
        exchange_ffns(model, shape, moe, 0)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {part.name: part.size for part in whole(shape, moe)} == expected


@pytest.mark.parametrize("name", SHAPES)
def test_all_parts_together_are_the_parameters(name: str) -> None:
    shape = SHAPES[name]
    assert sum(part.numel for part in whole(shape)) == num_parameters(shape)
    moe = mixture(shape)
    assert sum(part.numel for part in whole(shape, moe)) == num_moe_parameters(shape, moe)


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=lambda shape: shape.recipe)
def test_stages_together_have_every_parameter_once(shape: Shape) -> None:
    names = [part.name for stage in range(4) for part in parts_of_rank(shape, (stage,), (1, 1, 1, 1))]
    assert sorted(names) == sorted(part.name for part in whole(shape))


def test_a_stage_has_the_layers_that_the_split_gives_it() -> None:
    names = {part.name.split(".")[1] for part in parts_of_rank(SMALL, (1,), (1, 2, 1)) if "layers" in part.name}
    assert names == {"1", "2"}


@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=lambda shape: shape.recipe)
def test_tp_divides_matrices_of_layers_and_leaves_the_rest_whole(shape: Shape) -> None:
    parts = {part.name: part for part in parts_of_rank(shape, (0,), (shape.layers,), tp=2)}
    for part in whole(shape):
        split = "attention." in part.name or "ffn." in part.name
        one_for_all = part.name.endswith(("out.bias", "down.bias"))
        assert parts[part.name].numel * (2 if split and not one_for_all else 1) == part.numel
        assert parts[part.name].kind == ("split" if split else "whole")


def test_ep_divides_routed_experts_alone() -> None:
    alone = numel_by_kind(whole(SMALL, mixture(SMALL)))
    dealt = numel_by_kind(whole(SMALL, mixture(SMALL, 4)))
    assert dealt == {**alone, "routed": alone["routed"] // 4}
    assert dealt["routed"] > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_shards_together_are_the_parameter(ranks: int) -> None:
    for size in ((50, 32), (32,), (1, 3)):
        part = ParameterPart(name="x", size=size, kind="whole")
        assert sum(part.shard(ranks, rank) for rank in range(ranks)) == math.prod(size)


@pytest.mark.parametrize(("rows", "ranks"), [(50, 4), (3, 4), (5, 4), (8, 3)])
def test_shards_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    part = ParameterPart(name="x", size=(rows, 2), kind="whole")
    chunks = [len(chunk) * 2 for chunk in torch.chunk(torch.empty(rows, 2), ranks)]
    assert [part.shard(ranks, rank) for rank in range(ranks)] == chunks + [0] * (ranks - len(chunks))


def test_experts_are_not_sharded() -> None:
    parts = whole(SMALL, mixture(SMALL))
    assert numel_by_kind(parts, 2)["routed"] == numel_by_kind(parts)["routed"]
    assert numel_by_kind(parts, 2)["whole"] == pytest.approx(numel_by_kind(parts)["whole"] / 2, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_a_rank_are_the_schedule_s(name: str, pp: int) -> None:
    schedule = make_schedule(name, ranks=pp, microbatches=8)
    for rank in range(pp):
        assert stages_of_rank(name, pp, default_chunks(name), rank) == schedule.stages_of(rank)


def test_parts_of_experts_are_of_their_inner_size() -> None:
    moe = moe_of({"ep": 1, "etp": 2, "experts": 4}, SMALL, 2)
    sizes = {part.name: part.size for part in parts_of_rank(SMALL, (0,), (1,), moe=moe) if part.kind == "routed"}
    assert moe.expert_ffn == 32
    assert sizes == {"layers.0.ffn.experts.up": (4, 32, 16), "layers.0.ffn.experts.down": (4, 16, 32)}
