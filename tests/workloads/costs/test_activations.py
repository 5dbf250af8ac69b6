"""Analytical activations are close to the bytes that a forward pass saves on a CPU."""

import gc
from dataclasses import replace

import pytest
import torch

from parbench.workloads.costs.memory import make_activations_equation
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES, Checkpointing
from parbench.workloads.model.transformer import (
    DTYPES,
    Transformer,
    checkpoint_layers,
    compute_loss,
    cross_entropy,
    draw_tokens,
    initialize,
    make_meta_model,
)
from parbench.workloads.probes.memory_probe import count_saved_bytes
from parbench.workloads.torch_internals import list_allocations, open_profiler

MICROBATCH = 3


CPU = torch.device("cpu")


def make_model(spec: StepSpec) -> Transformer:
    model = make_meta_model(spec.shape, DTYPES[spec.bytes_per_element])
    initialize(model, 0, CPU)
    checkpoint_layers(model, spec.checkpointing)
    return model


def measure_saved_bytes(spec: StepSpec) -> int:
    model = make_model(spec)
    tokens = torch.zeros((MICROBATCH, spec.shape.sequence), dtype=torch.long)
    targets = torch.zeros_like(tokens)
    return count_saved_bytes(model, lambda: cross_entropy(model(tokens), targets))


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
    planned = make_activations_equation(spec.make_rank_view(0)).value
    tolerance = 0.15 if shape == "tiny" else 0.3
    assert planned == pytest.approx(measure_saved_bytes(spec), rel=tolerance)


@pytest.mark.parametrize(
    ("shape", "checkpointing"), [("tiny-llama", "selective"), ("tiny", "full")]
)
def test_counted_activations_match_allocator(shape: str, checkpointing: Checkpointing) -> None:
    """The allocator also keeps the loss."""
    spec = StepSpec(shape=SHAPES[shape], checkpointing=checkpointing, bytes_per_element=4)
    model = make_model(spec)
    tokens = draw_tokens(spec.shape, 2, 0, 0)
    saved = count_saved_bytes(model, lambda: compute_loss(model, tokens))
    gc.collect()  # The collection of earlier passes must not fall into the profile.
    with open_profiler(CPU, memory=True) as profiler:
        loss = compute_loss(model, tokens)
    sizes = [num_bytes for _, num_bytes in list_allocations(profiler, CPU)]
    allocated = sum(sizes) - loss.nbytes
    assert saved == allocated
