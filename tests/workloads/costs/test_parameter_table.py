"""The table of parameters is that of the model as axes cut it: names, sizes, stages, shards."""

from dataclasses import replace
from itertools import product
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
from parbench.workloads.pipeline_parallel.schedules import NAMES, make_schedule

RECIPES = [
    replace(SHAPES[name], hidden=32, ffn=64, sequence=16, vocabulary=50)
    for name in ("tiny", "tiny-llama")
]
SMALL = RECIPES[0]


def mixture(shape: Shape, ep: int = 1) -> Moe:
    return moe_of({"ep": ep, "experts": 4}, shape, ep)


def at(shape: Shape, rank: int = 0, **more: Any) -> Position:
    return StepSpec(shape=shape, device="cpu", ends="tokens", **more).at_stage(rank)


def test_names_and_sizes_are_those_of_the_model() -> None:
    for shape, moe in product(RECIPES, (None, mixture(SMALL))):
        model = build(shape, 0, torch.device("cpu"))
        if moe is not None:
            exchange_ffns(model, shape, moe, 0)
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {part.name: part.size for part in parts_of(at(shape, moe=moe))} == expected
        assert num_parameters(shape, moe) == sum(
            parameter.numel() for parameter in model.parameters()
        )


def test_stages_together_have_every_parameter_once_by_the_split_and_the_schedule() -> None:
    for shape in RECIPES:
        names = [
            part.name for rank in range(4) for part in parts_of(at(shape, rank, mesh={"pp": 4}))
        ]
        assert sorted(names) == sorted(part.name for part in parts_of(at(shape)))
    uneven = at(SMALL, 1, mesh={"pp": 3}, split="1+2+1")
    assert {part.name.split(".")[1] for part in parts_of(uneven) if "layers" in part.name} == {
        "1",
        "2",
    }
    for name, pp in product(NAMES, (2, 4)):
        schedule = make_schedule(name, ranks=pp, microbatches=8)
        shape = replace(SMALL, layers=schedule.num_stages)
        for rank in range(pp):
            assert at(shape, rank, mesh={"pp": pp}, schedule=name).stages == schedule.stages_of(
                rank
            )


def test_tp_divides_matrices_of_layers_and_ep_and_etp_routed_experts_alone() -> None:
    for shape in RECIPES:
        parts = {part.name: part for part in parts_of(at(shape, mesh={"tp": 2}))}
        for part in parts_of(at(shape)):
            split = "attention." in part.name or "ffn." in part.name
            one_for_all = part.name.endswith(("out.bias", "down.bias"))
            assert parts[part.name].numel * (2 if split and not one_for_all else 1) == part.numel, (
                part
            )
            assert parts[part.name].kind == ("split" if split else "whole"), part
    alone, dealt = (at(SMALL, moe=mixture(SMALL, ep)) for ep in (1, 4))
    assert elements_of(dealt, "routed") == elements_of(alone, "routed") / 4
    assert elements_of(dealt, "whole", "split") == elements_of(alone, "whole", "split")
    moe = moe_of({"ep": 1, "etp": 2, "experts": 4}, SMALL, 2)
    sizes = {
        part.name: part.size
        for part in parts_of(at(replace(SMALL, layers=1), moe=moe))
        if part.kind == "routed"
    }
    assert sizes == {
        "layers.0.ffn.experts.up": (4, 32, 16),
        "layers.0.ffn.experts.down": (4, 16, 32),
    }


def test_shards_are_those_of_torch_chunk() -> None:
    for rows, ranks in ((50, 4), (3, 4), (5, 4), (8, 3), (1, 64), (32, 1)):
        part = ParameterPart(name="x", size=(rows, 2), kind="whole")
        chunks = [len(chunk) * 2 for chunk in torch.chunk(torch.empty(rows, 2), ranks)]
        assert [part.shard(ranks, rank) for rank in range(ranks)] == chunks + [0] * (
            ranks - len(chunks)
        )
        assert part.padded(ranks) == -(-rows // ranks) * ranks * 2
    one = at(SMALL)
    assert sum(elements_of(one, ranks=4, rank=rank) for rank in range(4)) == pytest.approx(
        elements_of(one), rel=0.01
    )
