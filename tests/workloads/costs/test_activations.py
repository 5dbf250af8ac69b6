"""Analytical activations equal the bytes that a stage's forward pass saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.workloads.costs.memory import layer_equation, stage_equation
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns, mixtures
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import Transformer, build, checkpoint, cross_entropy
from parbench.workloads.pipeline_parallel.stages import Chunk
from parbench.workloads.step.memory import count_saved_bytes

MICROBATCH = 3
GPT = replace(SHAPES["tiny"], sequence=16, vocabulary=64)
LLAMA = replace(SHAPES["tiny-llama"], sequence=16, vocabulary=64)
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def position_of(shape: Shape, **params: Any) -> RankView:
    defaults = {
        "microbatch": MICROBATCH,
        "bytes_per_element": 4,
        "device": "cpu",
        "microbatches": 4,
    }
    return StepSpec(shape=shape, ends="tokens", **{**defaults, **params}).rank_view(0)


def build_model(spec: StepSpec) -> Transformer:
    model = build(spec.shape, 0, torch.device("cpu"), DTYPES[spec.bytes_per_element])
    if spec.moe is not None:
        exchange_ffns(model, spec.shape, spec.moe, 0)
        tokens = torch.arange(spec.local_tokens)
        for mixture in mixtures(model):
            mixture.given = torch.stack([tokens % 4, (tokens + 1) % 4], dim=1)
    checkpoint(model, spec.checkpointing)
    return model


def measure_saved_bytes(position: RankView, stage: int) -> int:
    spec = position.spec
    layers = position.layers_by_stage
    chunk = Chunk(build_model(spec), sum(layers[:stage]), layers[stage])
    size = (MICROBATCH, spec.shape.sequence)
    tokens = torch.zeros(size, dtype=torch.long)
    targets = torch.zeros_like(tokens)
    hidden = torch.zeros(*size, spec.shape.hidden, dtype=DTYPES[spec.bytes_per_element])
    hidden.requires_grad_()

    def forward() -> torch.Tensor:
        output: torch.Tensor = chunk(tokens if stage == 0 else hidden)
        return output if chunk.head is None else cross_entropy(output, targets)

    return count_saved_bytes(chunk, forward)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("checkpointing", "bytes_per_element"),
    [("none", 4), ("none", 2), ("selective", 2), ("full", 4)],
)
def test_stage_saves_analytical_activations(
    shape: Shape, checkpointing: str, bytes_per_element: int
) -> None:
    params = {"checkpointing": checkpointing, "bytes_per_element": bytes_per_element}
    position = position_of(shape, mesh={"pp": 3}, split="1+2+1", **params)
    for stage in range(3):
        expected = stage_equation(position, stage).value
        assert measure_saved_bytes(position, stage) == expected, stage


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_save_analytical_activations(shared: int) -> None:
    shape = replace(LLAMA, layers=1)
    moe = moe_of({"ep": 1, "experts": 4, "top_k": 2, "shared": shared}, shape, 1)
    position = position_of(shape, moe=moe)
    assert measure_saved_bytes(position, 0) == stage_equation(position, 0).value


@pytest.mark.parametrize("bytes_per_element", [2, 4])
def test_cuda_norms_save_only_their_input(bytes_per_element: int) -> None:
    """Attention in float32 also returns its output once more on a CPU."""
    cpu = position_of(LLAMA, bytes_per_element=bytes_per_element)
    cuda = position_of(LLAMA, bytes_per_element=bytes_per_element, device="cuda")
    num_elements = MICROBATCH * 16 * LLAMA.hidden
    norms = 2 * num_elements * (8 - bytes_per_element)
    attention = num_elements * 4 if bytes_per_element == 4 else 0
    difference = layer_equation(cpu, "none").value - layer_equation(cuda, "none").value
    assert difference == norms + attention
