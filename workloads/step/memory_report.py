"""What a step holds in memory, by component: by formula, as counted, and as measured, on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.results.details import COMPONENTS
from bench.results.metrics import MetricValue, values
from bench.world.world import World
from workloads.costs.communication_pattern import (
    LayerShape,
    gpt_activation_bytes,
    recompute_activation_bytes,
    state_bytes,
    swiglu_activation_bytes,
)
from workloads.model.shapes import Shape, num_parameters
from workloads.step.layout import Layout, local
from workloads.step.memory import SavedTensors, gradients, peak_during, state_tensors, storage_bytes

UNCOUNTED = "selective checkpointing: the formula of activations is that of none; torch keeps them uncounted"
_HOW = {
    "parameters": "between forward and backward, where FSDP may hold them gathered",
    "gradients": "after backward",
    "optimizer": "after a step",
    "activations": "of a forward pass above its start, parameters gathered meanwhile included",
    "buffers": "buffers, and shards kept beside gathered parameters",
}

Held = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Metrics by component, the largest over ranks, and every rank's in the details."""

    metrics: Mapping[str, MetricValue]
    details: dict[str, Any]
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the formula of activations needs beside the shape."""

    microbatch: int
    element_bytes: int
    checkpointing: str


def footprint(
    world: World,
    layout: Layout,
    shape: Shape,
    batch: Batch,
    forward: Callable[[], Tensor],
    begin: Callable[[], None],
) -> Footprint:
    """Return what each component takes; every rank takes part, and has taken a whole step before."""
    measured, counted = _look(layout, forward, begin, world)
    kept_elsewhere = {"activations"} if batch.checkpointing == "selective" else set()
    told = world.gather((measured, counted))
    formula = _formula(layout, shape, batch)
    metrics: dict[str, MetricValue] = {}
    for name in COMPONENTS:
        metrics |= values({f"memory.{name}": max(rank[0][name] for rank in told)}, f"{_HOW[name]}, largest over ranks")
        if name not in kept_elsewhere:
            metrics |= values({f"memory_counted.{name}": max(rank[1][name] for rank in told)}, "largest over ranks")
        if name in formula:
            metrics |= values({f"memory_formula.{name}": formula[name]})
    by_rank = {name: [rank[0][name] for rank in told] for name in COMPONENTS}
    return Footprint(metrics=metrics, details={"memory_by_rank": by_rank}, notes=_notes(layout, batch))


def largest_of(told: Sequence[Mapping[str, Held]], how: Mapping[str, str]) -> dict[str, MetricValue]:
    """Return each component's bytes on the rank with most of it, from each source of ``how``, which says where from."""
    return {
        name: metric
        for source, words in how.items()
        for name, metric in values(
            {
                f"{source}.{part}": max(one[source][part] for one in told)
                for part in COMPONENTS
                if part in told[0][source]
            },
            f"{words}, largest over ranks".removeprefix(", "),
        ).items()
    }


def _look(layout: Layout, forward: Callable[[], Tensor], begin: Callable[[], None], world: World) -> tuple[Held, Held]:
    """Return what is measured and what is counted on this rank."""
    shards = list(layout.model.parameters())
    layout.optimizer.zero_grad()
    begin()
    with SavedTensors(layout.model) as saved:
        loss = forward()
    between = list(layout.model.parameters())
    parameters = (storage_bytes(between), _size(between))
    _backward(loss)
    layout.optimizer.zero_grad()
    begin()
    losses: list[Tensor] = []
    peak = peak_during(lambda: losses.append(forward()), world.device)
    _backward(losses.pop())
    grads, optimizer = gradients(layout.model.parameters()), state_tensors(layout.optimizer)
    buffers = list(layout.model.buffers())
    # gathered parameters are plain tensors, and the shards that they were gathered from are still there
    gathered = [not isinstance(now, DTensor) for now in between]
    beside = [s for s, now_whole in zip(shards, gathered, strict=True) if isinstance(s, DTensor) and now_whole]
    measured = {
        "parameters": parameters[0],
        "gradients": storage_bytes(grads),
        "optimizer": storage_bytes(optimizer),
        "activations": 0 if peak is None else peak,
        "buffers": storage_bytes([*buffers, *beside]),
    }
    counted = {
        "parameters": parameters[1],
        "gradients": _size(grads),
        "optimizer": _size(optimizer),
        "activations": saved.num_bytes,
        "buffers": _size([*buffers, *beside]),
    }
    return measured, counted


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _size(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements on this rank, whatever storages hold them."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _formula(layout: Layout, shape: Shape, batch: Batch) -> dict[str, float]:
    """Return the closed forms of model state and of the layers' activations."""
    state = state_bytes(
        layout.state,
        num_parameters(shape),
        layout.sharded_by,
        mixed=batch.element_bytes < 4,
        tp=layout.divided_by,
        num_replicated=_num_replicated(layout.model) if layout.divided_by > 1 else 0,
    )
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": shape.layers
        * layer_activation_bytes(shape, batch, tp=layout.divided_by, sequence_parallel=layout.state == "tp_sp"),
    }


def layer_activation_bytes(shape: Shape, batch: Batch, *, tp: int = 1, sequence_parallel: bool = False) -> float:
    """Return what backward needs of one layer and one microbatch, by closed form."""
    layer = LayerShape(
        microbatch=batch.microbatch,
        sequence=shape.sequence,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
    )
    if batch.checkpointing == "full":
        return recompute_activation_bytes(layer, batch.element_bytes)
    formula = swiglu_activation_bytes if shape.recipe == "llama" else gpt_activation_bytes
    return formula(layer, batch.element_bytes, tp=tp, sequence_parallel=sequence_parallel)


def _num_replicated(model: nn.Module) -> int:
    """Return the elements of parameters that the tensor axis does not divide."""
    return sum(parameter.numel() for parameter in model.parameters() if not _is_divided(parameter))


def _is_divided(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return False
    return parameter.placements[-1].is_shard()


def _notes(layout: Layout, batch: Batch) -> tuple[str, ...]:
    notes = []
    if layout.state == "zero2":
        notes.append("zero2: FSDP2 keeps its shard beside the gathered parameters; it counts as a buffer")
    if batch.checkpointing == "selective":
        notes.append(UNCOUNTED)
    return tuple(notes)
