"""What a step holds in memory, by component: by formula, as counted, and as measured, on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.results.details import COMPONENTS
from bench.results.metrics import MetricValue, values
from bench.world.subject import Explanation
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
from workloads.step.probe import Begin, Step

UNCOUNTED = "selective checkpointing: the formula of activations is that of none; torch keeps them uncounted"
_HOW = {
    "parameters": "between forward and backward, where FSDP may hold them gathered",
    "gradients": "after backward",
    "optimizer": "after a step",
    "activations": "of a forward pass above its start, parameters gathered meanwhile included",
    "buffers": "buffers, and shards kept beside gathered parameters",
}

Held = Mapping[str, float]
BySource = Mapping[str, Held]
"""Bytes by component, as measured (``memory``) and as counted (``memory_counted``)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the formula of activations needs beside the shape."""

    microbatch: int
    element_bytes: int
    checkpointing: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The probe of what each component takes; ``forward`` is one microbatch's, after whole steps have been taken."""

    world: World
    layout: Layout
    forward: Callable[[], Tensor]
    formula: Held
    notes: tuple[str, ...] = ()
    share = 0.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> BySource:
        """Return what is measured and what is counted on this rank."""
        model, optimizer = self.layout.model, self.layout.optimizer
        shards = list(model.parameters())
        optimizer.zero_grad()
        begin()
        with SavedTensors(model) as saved:
            loss = self.forward()
        between = list(model.parameters())
        parameters = (storage_bytes(between), _size(between))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        begin()
        losses: list[Tensor] = []
        peak = peak_during(lambda: losses.append(self.forward()), self.world.device)
        losses.pop().backward()  # type: ignore[no-untyped-call]
        # gathered parameters are plain tensors, and the shards that they were gathered from are still there
        gathered = [not isinstance(now, DTensor) for now in between]
        beside = [s for s, now_whole in zip(shards, gathered, strict=True) if isinstance(s, DTensor) and now_whole]
        tensors = {
            "gradients": gradients(model.parameters()),
            "optimizer": state_tensors(optimizer),
            "buffers": [*model.buffers(), *beside],
        }
        measured = {"parameters": parameters[0], "activations": peak or 0}
        counted = {"parameters": parameters[1], "activations": saved.num_bytes}
        return {
            "memory": measured | {name: storage_bytes(of) for name, of in tensors.items()},
            "memory_counted": counted | {name: _size(of) for name, of in tensors.items()},
        }

    def summarise(self, told: Sequence[BySource]) -> Explanation:
        """Return each component's bytes, the largest over ranks, and every rank's in the details."""
        uncounted = {"activations"} if UNCOUNTED in self.notes else set()
        metrics: dict[str, MetricValue] = {}
        for name in COMPONENTS:
            measured, counted = ([one[source][name] for one in told] for source in ("memory", "memory_counted"))
            metrics |= values({f"memory.{name}": max(measured)}, f"{_HOW[name]}, largest over ranks")
            if name not in uncounted:
                metrics |= values({f"memory_counted.{name}": max(counted)}, "largest over ranks")
            if name in self.formula:
                metrics |= values({f"memory_formula.{name}": self.formula[name]})
        by_rank = {name: [one["memory"][name] for one in told] for name in COMPONENTS}
        return Explanation(metrics=metrics, details={"memory_by_rank": by_rank}, notes=self.notes)


def largest_of(told: Sequence[BySource], how: Mapping[str, str]) -> dict[str, MetricValue]:
    """Return each component's bytes on the rank with most of it, from each source of ``how``, which says where from."""
    metrics: dict[str, MetricValue] = {}
    for source, words in how.items():
        most = {
            f"{source}.{part}": max(one[source][part] for one in told) for part in COMPONENTS if part in told[0][source]
        }
        metrics |= values(most, f"{words}, largest over ranks".removeprefix(", "))
    return metrics


def _size(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements on this rank, whatever storages hold them."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def memory_formula(layout: Layout, shape: Shape, batch: Batch) -> dict[str, float]:
    """Return the closed forms of model state and of the layers' activations."""
    tp = layout.tensor_parallel_size
    state = state_bytes(
        layout.state,
        num_parameters(shape),
        layout.sharded_by,
        mixed=batch.element_bytes < 4,
        tp=tp,
        num_replicated=_num_replicated(layout.model) if tp > 1 else 0,
    )
    each = layer_activation_bytes(shape, batch, tp=tp, sequence_parallel=layout.state == "tp_sp")
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": shape.layers * each,
    }


def memory_notes(layout: Layout, batch: Batch) -> tuple[str, ...]:
    """Return what is to be known of the components as a step holds them."""
    notes = {
        "zero2: FSDP2 keeps its shard beside the gathered parameters; it counts as a buffer": layout.state == "zero2",
        UNCOUNTED: batch.checkpointing == "selective",
    }
    return tuple(note for note, holds in notes.items() if holds)


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
