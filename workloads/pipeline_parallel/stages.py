"""The stages of a rank on torch's pipeline runtime, with the time of each action.

Torch's first stage computes its input gradient with the weight gradient, because tokens have no
gradient. The gradient down to the output of the embeddings takes as long as that of another stage,
and zero-bubble schedules rely on it. Here it is part of the input gradient (I).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.simulated_compute import SimulatedCompute, calibrate, simulate_linears
from parbench.workloads.model.transformer import Transformer, draw_tokens
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.torch_pipelines import PlainStage, make_runtime
from parbench.workloads.step.layout import dtype_of, nothing
from parbench.workloads.step.probe import Moment, moment, seconds_of

_EDGE_MODULES = ("tokens", "positions", "norm", "head")


class Chunk(nn.Module):
    """The module of one stage: some layers, after the embeddings or before the norm and the head.

    It turns tokens (b, s) or activations (b, s, h) into activations (b, s, h) or logits
    (b, s, vocabulary). Parameters have their names in the full model.
    """

    def __init__(self, model: Transformer, first: int, count: int) -> None:
        super().__init__()
        is_first = first == 0
        is_last = first + count == len(model.layers)
        self.tokens = model.tokens if is_first else None
        self.positions = model.positions if is_first else None
        self.places = model.places
        self.layers = nn.ModuleDict(
            {str(index): model.layers[index] for index in range(first, first + count)}
        )
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.embedded: Tensor | None = None
        """The output of the embeddings for the last microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
            if self.positions is not None:
                places = self.places
                if places is None:
                    places = torch.arange(x.shape[1], device=x.device)
                x = x + self.positions(places)
            self.embedded = x
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            return self.head(self.norm(x))  # type: ignore[no-any-return]
        return x


class StageParameters(nn.Module):
    """The parameters of several chunks with their names in the full model. It is never called."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for chunk in chunks:
            self.layers.update(dict(chunk.layers.items()))
            for name in _EDGE_MODULES:
                module = getattr(chunk, name)
                if module is not None:
                    setattr(self, name, module)


class Recorder:
    """Records the actions of a step. On CUDA its events in the stream take no time of the host."""

    def __init__(self, device: torch.device, before: Callable[[], None] = nothing) -> None:
        self._device = device
        self._before = before
        self._moments: list[tuple[Action, Moment, Moment]] = []
        self.uncertainty_seconds = 0.0  # of the last ``read``

    def forget(self) -> None:
        self._moments.clear()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        self._before()
        start = moment(self._device)
        yield
        self._moments.append((action, start, moment(self._device)))

    def extend(self) -> None:
        """Add the time until now to the last action, such as the loss to the last forward pass."""
        action, start, _ = self._moments[-1]
        self._moments[-1] = (action, start, moment(self._device))

    def read(self) -> list[tuple[Action, int, int]]:
        """Return the actions with start and stop in nanoseconds of ``time.perf_counter_ns``.

        On CUDA it waits for the device.
        """
        to_seconds, self.uncertainty_seconds = seconds_of(self._device)
        return [
            (action, int(to_seconds(start) * 1e9), int(to_seconds(stop) * 1e9))
            for action, start, stop in self._moments
        ]


class Stage(PlainStage):
    """One stage of this rank, which records its actions."""

    def __init__(self, chunk: Chunk, recorder: Recorder, **options: Any) -> None:
        super().__init__(chunk, **options)
        self.chunk = chunk
        self._recorder = recorder
        self._embedded: dict[int, Tensor] = {}
        self._embedding_gradients: dict[int, tuple[Tensor, Tensor, Any]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._running("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.chunk.embedded is not None:
            self._embedded[fwd_chunk_id] = self.chunk.embedded
            self.chunk.embedded = None
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self._running("B" if full_backward else "I", bwd_chunk_id):
            embedded = self._embedded.pop(bwd_chunk_id, None)
            if full_backward or embedded is None:
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
                return
            gradient, graph_start = self.input_gradient(
                bwd_chunk_id, embedded, self.chunk.layers.parameters()
            )
            self._embedding_gradients[bwd_chunk_id] = (embedded, gradient, graph_start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._running("W", bwd_chunk_id):
            if bwd_chunk_id not in self._embedding_gradients:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
                return
            embedded, gradient, graph_start = self._embedding_gradients.pop(bwd_chunk_id)
            self.weight_gradients(bwd_chunk_id, self.chunk.layers.parameters(), graph_start)
            embedded.grad = None
            embedded.backward(gradient)  # type: ignore[no-untyped-call]

    def _running(self, kind: ActionKind, microbatch: int) -> AbstractContextManager[None]:
        return self._recorder.running(Action(self.stage_index, kind, microbatch))


def time_layers(
    model: Transformer, spec: StepSpec, world: World, waiter: SimulatedCompute, seconds: float
) -> None:
    """Simulate compute: a rank's share of the layers takes ``seconds`` per forward pass."""
    ranks = spec.size("pp")
    simulate_linears(model, seconds * ranks, waiter)
    num_layers = max(1, spec.shape.layers // ranks)
    chunk = Chunk(model, 0, num_layers)
    tokens = draw_tokens(spec.shape, spec.microbatch, world.seed, 0).to(world.device)
    chunk_seconds = seconds * ranks * num_layers / spec.shape.layers
    calibrate(waiter, chunk_seconds, lambda: chunk(tokens[:, :-1]).sum())
    model.zero_grad()


def make_chunks(model: Transformer, pipeline: Pipeline, rank: int) -> dict[int, Chunk]:
    """Return the modules of a rank by stage."""
    layers = pipeline.layers_by_stage
    return {
        stage: Chunk(model, sum(layers[:stage]), layers[stage])
        for stage in pipeline.order.stages_of(rank)
    }


def make_stages(
    model: Transformer,
    spec: StepSpec,
    pipeline: Pipeline,
    recorder: Recorder,
    world: World,
    group: dist.ProcessGroup,
    tokens: int,
) -> list[Stage]:
    """Return this rank's stages in a pipeline over ``group``, for (b, ``tokens``) tokens."""
    size = (spec.microbatch, tokens)
    last = pipeline.order.num_stages - 1

    def make_meta(width: int) -> Tensor:
        return torch.empty(*size, width, dtype=dtype_of(spec), device="meta", requires_grad=True)

    token_ids = torch.empty(size, dtype=torch.long, device="meta")
    activations = make_meta(spec.shape.hidden)
    logits = make_meta(spec.shape.vocabulary)
    return [
        Stage(
            chunk,
            recorder,
            index=stage,
            input_meta=token_ids if stage == 0 else activations,
            output_meta=logits if stage == last else activations,
            num_stages=pipeline.order.num_stages,
            device=world.device,
            group=group,
        )
        for stage, chunk in make_chunks(model, pipeline, group.rank()).items()
    ]


def list_notes(order: PipelineOrder, world: World) -> tuple[str, ...]:
    """Return the limits of the measured bubble."""
    notes = []
    if order.name in SCHEDULES and SCHEDULES[order.name].note:
        notes.append(f"{order.name}: {SCHEDULES[order.name].note}")
    if world.backend == "nccl":
        notes.append(
            "pp on nccl: a rank's sends and receives share a communicator and its stream, where "
            "one that waits for its peer delays those behind it: that counts as bubble"
        )
    return tuple(notes)


def make_train(
    order: PipelineOrder,
    stages: Sequence[Stage],
    recorder: Recorder,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return ``train(tokens, targets)``, which computes the gradients of all microbatches.

    It returns the sum of ``loss(logits, targets)`` over microbatches on the rank of the last stage,
    and None on other ranks.
    """

    def compute_timed_loss(logits: Tensor, targets: Tensor) -> Tensor:
        value = loss(logits, targets)
        recorder.extend()
        return value

    def train(tokens: Tensor, targets: Tensor) -> Tensor | None:
        inputs = [tokens] if any(stage.is_first for stage in stages) else []
        losses: list[Tensor] = []
        runtime.step(
            *inputs, target=targets, losses=losses if has_last else None, return_outputs=False
        )
        return torch.stack(losses).sum().detach() if losses else None

    has_last = any(stage.is_last for stage in stages)
    runtime = make_runtime(stages, order, compute_timed_loss)
    return train
