"""The parameter table has the parameters of the model as axes divide it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.workloads.costs.parameter_table import (
    ParameterPart,
    elements_of,
    num_parameters,
    parts_of,
)
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import build

GPT = replace(SHAPES["tiny"], hidden=32, ffn=64, sequence=16, vocabulary=50)
LLAMA = replace(SHAPES["tiny-llama"], hidden=32, ffn=64, sequence=16, vocabulary=50)


def make_mixture(ep: int = 1, etp: int = 1) -> Moe:
    return moe_of({"ep": ep, "etp": etp, "experts": 4}, GPT, ep * etp)


def position_of(shape: Shape, rank: int = 0, **params: Any) -> Position:
    return StepSpec(shape=shape, device="cpu", ends="tokens", **params).at_stage(rank)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("moe", [None, make_mixture()], ids=["dense", "experts"])
def test_parts_are_parameters_of_the_model(shape: Shape, moe: Moe | None) -> None:
    model = build(shape, 0, torch.device("cpu"))
    if moe is not None:
        exchange_ffns(model, shape, moe, 0)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = parts_of(position_of(shape, moe=moe))
    assert {part.name: part.size for part in parts} == expected
    assert num_parameters(shape, moe) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_stages_have_each_parameter_once(shape: Shape) -> None:
    names = []
    for rank in range(4):
        names += [part.name for part in parts_of(position_of(shape, rank, mesh={"pp": 4}))]
    assert sorted(names) == sorted(part.name for part in parts_of(position_of(shape)))


def test_stages_follow_the_split() -> None:
    stage = position_of(GPT, 1, mesh={"pp": 3}, split="1+2+1")
    assert {part.name.split(".")[1] for part in parts_of(stage)} == {"1", "2"}


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_tp_divides_matrices_of_layers(shape: Shape) -> None:
    numel_by_name = {part.name: part.numel for part in parts_of(position_of(shape, mesh={"tp": 2}))}
    for part in parts_of(position_of(shape)):
        is_replicated_bias = part.name.endswith(("out.bias", "down.bias"))
        is_split = ("attention." in part.name or "ffn." in part.name) and not is_replicated_bias
        assert numel_by_name[part.name] * (2 if is_split else 1) == part.numel, part.name


def test_ep_divides_only_routed_experts() -> None:
    single = position_of(GPT, moe=make_mixture())
    divided = position_of(GPT, moe=make_mixture(ep=4))
    assert elements_of(divided, "routed") == elements_of(single, "routed") / 4
    assert elements_of(divided, "whole", "split") == elements_of(single, "whole", "split")


def test_etp_divides_each_expert() -> None:
    position = position_of(replace(GPT, layers=1), moe=make_mixture(etp=2))
    sizes = {part.name: part.size for part in parts_of(position) if part.kind == "routed"}
    assert sizes == {
        "layers.0.ffn.experts.up": (4, 32, 16),
        "layers.0.ffn.experts.down": (4, 16, 32),
    }


@pytest.mark.parametrize(("rows", "ranks"), [(50, 4), (3, 4), (8, 3), (1, 64)])
def test_shards_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    part = ParameterPart(name="x", size=(rows, 2), kind="whole")
    chunks = [chunk.numel() for chunk in torch.chunk(torch.empty(rows, 2), ranks)]
    shards = [part.shard(ranks, rank) for rank in range(ranks)]
    assert shards[: len(chunks)] == chunks
    assert sum(shards) == part.numel
    assert part.padded(ranks) == ranks * chunks[0]
