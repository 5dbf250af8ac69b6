"""The parameter table has the parameters of the model as axes divide it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.workloads.costs.parameter_table import (
    ParameterPart,
    count_padded,
    count_parameters,
    list_units,
)
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, make_moe
from parbench.workloads.expert_parallel.moe_layer import replace_ffns_with_moe
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import make_meta_model

GPT = replace(SHAPES["tiny"], hidden=32, ffn=64, sequence=16, vocabulary=50)
LLAMA = replace(SHAPES["tiny-llama"], hidden=32, ffn=64, sequence=16, vocabulary=50)
both_recipes = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])


MIXTURE = make_moe({"ep": 1, "experts": 4}, GPT, 1)


def list_parts(shape: Shape, **params: Any) -> list[ParameterPart]:
    """Return the parameters of the first rank, with their names in the model."""
    units = list_units(StepSpec(shape=shape, **params).make_rank_view(0))
    [(count, layer)] = units.layers
    parts = [*units.embeddings]
    for number in range(count):
        parts += [replace(part, name=f"layers.{number}.{part.name}") for part in layer]
    return [*parts, *units.head]


@both_recipes
@pytest.mark.parametrize("moe", [None, MIXTURE], ids=["dense", "experts"])
def test_parts_are_parameters_of_the_model(shape: Shape, moe: Moe | None) -> None:
    model = make_meta_model(shape, torch.float32)
    if moe is not None:
        replace_ffns_with_moe(model, shape, moe)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = list_parts(shape, moe=moe)
    assert {part.name: part.size for part in parts} == expected
    assert count_parameters(shape, moe) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@both_recipes
def test_tp_divides_matrices_of_layers(shape: Shape) -> None:
    full_parts = list_parts(shape)
    rank_parts = list_parts(shape, dims=ParallelDims(tp=2))
    numel_by_name = {part.name: part.numel for part in rank_parts}
    for part in full_parts:
        is_full_bias = part.name.endswith(("out.bias", "down.bias"))
        ranks = 2 if part.kind == "split" and not is_full_bias else 1
        assert numel_by_name[part.name] == part.numel / ranks, part.name


@pytest.mark.parametrize(("rows", "ranks"), [(50, 4), (3, 4), (8, 3)])
def test_shards_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    part = ParameterPart(name="x", size=(rows, 2), kind="replicated")
    chunks = [chunk.numel() for chunk in torch.empty(rows, 2).chunk(ranks)]
    shards = [part.count_shard(ranks, rank) for rank in range(ranks)]
    assert shards[: len(chunks)] == chunks
    assert sum(shards) == part.numel
    assert count_padded((part,), ranks) == ranks * chunks[0]
