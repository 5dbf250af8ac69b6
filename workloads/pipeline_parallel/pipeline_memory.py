"""What each rank of a pipeline holds: its stages' state, and the activations of the microbatches in flight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.world.world import World
from workloads.costs.communication_pattern import state_bytes
from workloads.model.shapes import Shape, num_head_parameters, num_layer_parameters, num_parameters
from workloads.pipeline_parallel.pipeline_case import Pipeline
from workloads.pipeline_parallel.schedules import peak_held
from workloads.pipeline_parallel.stages import Chunk
from workloads.step.layout import Layout
from workloads.step.memory import (
    Batch,
    Held,
    SavedTensors,
    gradients,
    layer_activation_bytes,
    peak_during,
    state_tensors,
    storage_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is to look at on this rank; ``chunks`` are its stages by number."""

    layout: Layout
    chunks: Mapping[int, Chunk]
    pipeline: Pipeline
    shape: Shape
    batch: Batch
    timed_seconds: float | None


def formula(look: Look, rank: int) -> Held:
    """Return the closed forms of this rank's state, and of its layers' activations."""
    schedule, counts = look.pipeline.schedule, look.pipeline.layers_by_stage
    state = state_bytes("ddp", stage_parameters(look, schedule.stages_of(rank)), 1, mixed=look.batch.element_bytes < 4)
    each = layer_activation_bytes(look.shape, look.batch)
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": peak_held(schedule, rank, lambda stage: each * counts[stage]),
    }


def stage_parameters(look: Look, stages: Sequence[int]) -> int:
    """Return the parameters of some stages: layers, the embeddings of the first, the norm and head of the last."""
    shape, counts = look.shape, look.pipeline.layers_by_stage
    total = sum(counts[stage] for stage in stages) * num_layer_parameters(shape)
    ends = num_parameters(shape) - shape.layers * num_layer_parameters(shape)
    head = num_head_parameters(shape)
    return total + (ends - head if 0 in stages else 0) + (head if len(counts) - 1 in stages else 0)


def saved_by_stage(look: Look, device: torch.device) -> dict[int, int]:
    """Return the bytes that a microbatch's forward saves for backward in each of this rank's stages, as counted."""
    return {stage: _saved(chunk, look, device) for stage, chunk in look.chunks.items()}


def _saved(chunk: Chunk, look: Look, device: torch.device) -> int:
    size = (look.batch.microbatch, look.shape.sequence)
    tokens = torch.zeros(size, dtype=torch.long, device=device)
    dtype = next(chunk.parameters()).dtype
    given = tokens if chunk.tokens is not None else torch.zeros(*size, look.shape.hidden, device=device, dtype=dtype)
    with SavedTensors(chunk) as saved:
        output = chunk(given if chunk.tokens is not None else given.requires_grad_())
        if chunk.head is not None:
            output = F.cross_entropy(output.flatten(0, 1), tokens.flatten())
    chunk.embedded = None
    return saved.num_bytes


def measured(layout: Layout, world: World, train: Callable[[], object], begin: Callable[[], None]) -> Held:
    """Return what this rank's storages hold, and the peak of a step's activations; ``train`` is without the update.

    Gradients are kept from one step to the next meanwhile, so that they are no part of that peak.
    """
    model, optimizer = layout.model, layout.optimizer
    begin()
    train()
    held = {
        "parameters": storage_bytes(list(model.parameters())),
        "gradients": storage_bytes(gradients(model.parameters())),
        "optimizer": storage_bytes(state_tensors(optimizer)),
        "buffers": storage_bytes(list(model.buffers())),
    }
    begin()
    peak = peak_during(lambda: _run(train), world.device)
    return {**held, "activations": 0 if peak is None else peak}


def counted(look: Look, rank: int, device: torch.device) -> Held:
    """Return the bytes of this rank's tensors, and of what the microbatches in flight have saved for backward.

    What selective checkpointing keeps is not saved as other tensors are: activations are left out then.
    """
    model = look.layout.model
    state = {
        "parameters": tensor_bytes(list(model.parameters())),
        "gradients": tensor_bytes(gradients(model.parameters())),
        "optimizer": tensor_bytes(state_tensors(look.layout.optimizer)),
        "buffers": tensor_bytes(list(model.buffers())),
    }
    if look.batch.checkpointing == "selective":
        return state
    saved = saved_by_stage(look, device)
    return {**state, "activations": peak_held(look.pipeline.schedule, rank, lambda stage: saved[stage])}


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _run(train: Callable[[], object]) -> None:
    train()
