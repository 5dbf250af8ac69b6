"""The probe of the memory of a rank's stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from parbench.bench.results.details import COMPONENTS
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.memory import activations_of, state_of
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.model.transformer import cross_entropy
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.stages import Chunk
from parbench.workloads.step import memory
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.probe import Begin, Step

_MEMORY_SOURCES = {
    "memory": "activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "",
}


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """The objects of this rank's step that the probe uses."""

    world: World
    layout: Layout
    at: Position
    chunks: Mapping[int, Chunk]
    tokens: int
    """Positions of a sequence on this rank."""
    train: Callable[[], object]
    """Runs a step without the optimizer."""

    @property
    def order(self) -> PipelineOrder:
        assert self.at.spec.pipeline is not None
        return self.at.spec.pipeline.order


@dataclass(frozen=True)
class PipelineMemoryProbe:
    """The probe of the memory of each rank."""

    context: PipelineContext
    share = 0.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> memory.BySource:
        return measure_memory(self.context, begin)

    def summarise(self, samples: Sequence[memory.BySource]) -> Explanation:
        by_rank = {name: [one["memory"][name] for one in samples] for name in COMPONENTS}
        metrics = memory.largest_of(samples, _MEMORY_SOURCES)
        return Explanation(metrics=metrics, details={"memory_by_rank": by_rank})


def _list_state(layout: Layout) -> dict[str, list[Tensor]]:
    return {
        "parameters": list(layout.model.parameters()),
        "gradients": memory.gradients(layout.model.parameters()),
        "optimizer": memory.state_tensors(layout.optimizer),
        "buffers": list(layout.model.buffers()),
    }


def prepare_nothing(chunk: Chunk) -> None:
    pass


def measure_memory(
    context: PipelineContext,
    begin: Begin,
    prepare: Callable[[Chunk], object] = prepare_nothing,
) -> memory.BySource:
    """Return the memory of this rank as measured, as counted and by formula.

    ``prepare`` is called before the counted forward pass of a stage. Gradients are kept between the
    steps, so that the measured peak does not contain them.
    """
    begin()
    context.train()
    state = {
        name: memory.storage_bytes(tensors) for name, tensors in _list_state(context.layout).items()
    }
    begin()
    activations = memory.peak_during(context.train, context.world.device) or 0
    formula = {**asdict(state_of(context.at)), "activations": activations_of(context.at)}
    return {
        "memory": {**state, "activations": activations},
        "memory_counted": count_memory(context, prepare),
        "memory_formula": formula,
    }


def count_memory(
    context: PipelineContext, prepare: Callable[[Chunk], object] = prepare_nothing
) -> dict[str, float]:
    """Return the bytes of state, and those that microbatches in flight have saved for backward."""
    spec = context.at.spec
    # State comes first, because the counted forward passes leave FSDP's parameters gathered.
    counted: dict[str, float] = {
        name: memory.local_bytes(tensors) for name, tensors in _list_state(context.layout).items()
    }
    saved = {}
    for stage, chunk in context.chunks.items():
        prepare(chunk)
        saved[stage] = count_saved_bytes(
            chunk, (spec.microbatch, context.tokens), spec.shape.hidden
        )
    if spec.pipeline is None:
        counted["activations"] = saved[0]
    else:
        counted["activations"] = context.order.peak_held(context.at.pp_rank, saved.__getitem__)
    return counted


def count_saved_bytes(chunk: Chunk, size: tuple[int, int], hidden: int) -> int:
    """Return the bytes that a stage saves for the backward pass of one microbatch.

    All ranks of the same stage take part.
    """
    weight = next(chunk.parameters())
    tokens = torch.zeros(size, dtype=torch.long, device=weight.device)
    hidden_states = torch.zeros(
        *size, hidden, device=weight.device, dtype=weight.dtype, requires_grad=True
    )
    with memory.SavedTensors(chunk) as saved:
        output = chunk(hidden_states if chunk.tokens is None else tokens)
        if chunk.head is not None:
            output = cross_entropy(output, torch.zeros_like(tokens))
    chunk.embedded = None
    return saved.num_bytes
