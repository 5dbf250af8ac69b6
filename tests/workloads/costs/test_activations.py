"""Analytical activations equal the bytes that a stage's forward pass saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.workloads.costs.memory import layer_equation, stage_equation
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.expert_parallel.moe_layer import find_moe_layers, replace_ffns_with_moe
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import Transformer, build, checkpoint, cross_entropy
from parbench.workloads.pipeline_parallel.stages import Chunk
from parbench.workloads.step.memory import SavedTensors

MICROBATCH = 3
GPT = replace(SHAPES["tiny"], sequence=16, vocabulary=64)
LLAMA = replace(SHAPES["tiny-llama"], sequence=16, vocabulary=64)
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def position_of(shape: Shape, **params: Any) -> Position:
    defaults = {
        "microbatch": MICROBATCH,
        "element_bytes": 4,
        "device": "cpu",
        "microbatches": 4,
    }
    return StepSpec(shape=shape, ends="tokens", **{**defaults, **params}).at(0)


def build_model(spec: StepSpec) -> Transformer:
    model = build(spec.shape, 0, torch.device("cpu"), DTYPES[spec.element_bytes])
    if spec.moe is not None:
        replace_ffns_with_moe(model, spec.shape, spec.moe, 0)
        tokens = torch.arange(spec.local_tokens)
        for mixture in find_moe_layers(model):
            mixture.assigned_ids = torch.stack([tokens % 4, (tokens + 1) % 4], dim=1)
    checkpoint(model, spec.checkpointing)
    return model


def measure_saved_bytes(position: Position, stage: int) -> int:
    spec = position.spec
    layers = position.layers_by_stage
    chunk = Chunk(build_model(spec), sum(layers[:stage]), layers[stage])
    size = (MICROBATCH, spec.shape.sequence)
    tokens = torch.zeros(size, dtype=torch.long)
    targets = torch.zeros_like(tokens)
    hidden = torch.zeros(*size, spec.shape.hidden, dtype=DTYPES[spec.element_bytes])
    hidden.requires_grad_()
    with SavedTensors(chunk) as saved:
        output = chunk(tokens if stage == 0 else hidden)
        if chunk.head is not None:
            cross_entropy(output, targets)
    return saved.num_bytes


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("checkpointing", "element_bytes"),
    [("none", 4), ("none", 2), ("selective", 2), ("full", 4)],
)
def test_stage_saves_analytical_activations(
    shape: Shape, checkpointing: str, element_bytes: int
) -> None:
    params = {"checkpointing": checkpointing, "element_bytes": element_bytes}
    position = position_of(shape, mesh={"pp": 3}, split="1+2+1", **params)
    for stage in range(3):
        expected = stage_equation(position, stage).value
        assert measure_saved_bytes(position, stage) == expected, stage


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_save_analytical_activations(shared: int) -> None:
    shape = replace(LLAMA, layers=1)
    moe = make_moe({"ep": 1, "experts": 4, "top_k": 2, "shared": shared}, shape, 1)
    position = position_of(shape, moe=moe)
    assert measure_saved_bytes(position, 0) == stage_equation(position, 0).value


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_cuda_norms_save_only_their_input(element_bytes: int) -> None:
    """Attention in float32 also returns its output once more on a CPU."""
    cpu = position_of(LLAMA, element_bytes=element_bytes)
    cuda = position_of(LLAMA, element_bytes=element_bytes, device="cuda")
    num_elements = MICROBATCH * 16 * LLAMA.hidden
    norms = 2 * num_elements * (8 - element_bytes)
    attention = num_elements * 4 if element_bytes == 4 else 0
    difference = layer_equation(cpu, "none").value - layer_equation(cuda, "none").value
    assert difference == norms + attention
