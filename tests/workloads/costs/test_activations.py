"""Analytical activations are close to the bytes that a forward pass saves on a CPU."""

from dataclasses import replace

import pytest
import torch

from parbench.workloads.costs.memory import activations_equation
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES, Checkpointing
from parbench.workloads.model.transformer import build, checkpoint, cross_entropy
from parbench.workloads.step.memory import SavedTensors

MICROBATCH = 3
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def measure_saved_bytes(spec: StepSpec) -> int:
    model = build(spec.shape, 0, torch.device("cpu"), DTYPES[spec.bytes_per_element])
    checkpoint(model, spec.checkpointing)
    tokens = torch.zeros((MICROBATCH, spec.shape.sequence), dtype=torch.long)
    targets = torch.zeros_like(tokens)
    with SavedTensors(model) as saved:
        cross_entropy(model(tokens), targets)
    return saved.num_bytes


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
@pytest.mark.parametrize(
    ("checkpointing", "bytes_per_element"),
    [("none", 4), ("none", 2), ("selective", 2), ("full", 4)],
)
def test_activations_are_near_saved_bytes(
    shape: str, checkpointing: Checkpointing, bytes_per_element: int
) -> None:
    """The CPU's RMSNorm saves float32 copies, and RoPE a transposed result of attention."""
    spec = StepSpec(
        shape=replace(SHAPES[shape], sequence=16, vocabulary=64),
        microbatch=MICROBATCH,
        bytes_per_element=bytes_per_element,
        checkpointing=checkpointing,
    )
    planned = activations_equation(spec.rank_view(0)).value
    tolerance = 0.15 if shape == "tiny" else 0.3
    assert planned == pytest.approx(measure_saved_bytes(spec), rel=tolerance)
