"""A rank's stages of the Transformer, with a stamp at both ends of each action, on torch's pipeline runtime.

torch's first stage leaves its input gradient to the weight gradient, as its input are tokens. The gradient down to the
embeddings' output is as long as any other stage's, and the zero-bubble schedules count on it: here it is taken in I.
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
from parbench.workloads.model.timed_compute import TimedCompute, calibrate, make_timed
from parbench.workloads.model.transformer import Transformer, draw_tokens
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedules import Schedule
from parbench.workloads.pipeline_parallel.torch_pipelines import PlainStage, pipeline_runtime
from parbench.workloads.step.layout import dtype_of, nothing
from parbench.workloads.step.probe import Moment, moment, seconds_of


class Chunk(nn.Module):
    """One stage: its layers, embeddings before the first of all, the norm and the head after the last.

    (b, s) tokens or (b, s, h) activations -> (b, s, h) activations or (b, s, vocabulary) logits. Parameters have the
    names that they have in the whole model. What the embeddings gave for the last microbatch is ``embedded``.
    """

    def __init__(self, model: Transformer, first: int, count: int) -> None:
        super().__init__()
        last = first + count == len(model.layers)
        self.tokens = model.tokens if first == 0 else None
        self.positions = model.positions if first == 0 else None
        self.places = model.places
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(first, first + count)})
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        self.embedded: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
            if self.positions is not None:
                places = torch.arange(x.shape[1], device=x.device) if self.places is None else self.places
                x = x + self.positions(places)
            self.embedded = x
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Held(nn.Module):
    """The parameters of several chunks under their plain names, for optimizer, parity and memory; it is not called."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for chunk in chunks:
            self.layers.update(dict(chunk.layers.items()))
            for name in ("tokens", "positions", "norm", "head"):
                if (part := getattr(chunk, name)) is not None:
                    setattr(self, name, part)


class Recorder:
    """Keeps the actions of a step as they were run; on CUDA by events in the stream, which cost the host nothing."""

    def __init__(self, device: torch.device, before: Callable[[], None] = nothing) -> None:
        self._device, self._before = device, before
        self._ran: list[tuple[Action, Moment, Moment]] = []
        self.uncertainty_seconds = 0.0  # of what was read last

    def forget(self) -> None:
        self._ran.clear()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        self._before()
        start = moment(self._device)
        yield
        self._ran.append((action, start, moment(self._device)))

    def extend(self) -> None:
        """Let what was done since belong to the last action, as the loss does to the last stage's forward."""
        action, start, _ = self._ran[-1]
        self._ran[-1] = (action, start, moment(self._device))

    def read(self) -> list[tuple[Action, int, int]]:
        """Return the actions with both ends in ns of ``time.perf_counter_ns``; on CUDA it waits for the device."""
        told, self.uncertainty_seconds = seconds_of(self._device)
        return [(action, int(told(start) * 1e9), int(told(stop) * 1e9)) for action, start, stop in self._ran]


class Stage(PlainStage):
    """One stage on this rank."""

    def __init__(self, chunk: Chunk, index: int, recorder: Recorder, given: Tensor, out: Tensor, **rest: Any) -> None:
        super().__init__(chunk, index, given, out, **rest)
        self.chunk, self._recorder = chunk, recorder
        self._embedded: dict[int, Tensor] = {}
        self._waiting: dict[int, tuple[Tensor, Tensor, Any]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._running("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.chunk.embedded is not None:
            self._embedded[fwd_chunk_id], self.chunk.embedded = self.chunk.embedded, None
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._running("B" if full_backward else "I", bwd_chunk_id):
            if full_backward or not self.is_first:
                self._embedded.pop(bwd_chunk_id, None)
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
                return
            embedded = self._embedded.pop(bwd_chunk_id)
            gradient, start = self.input_gradient(bwd_chunk_id, embedded, self.chunk.layers.parameters())
            self._waiting[bwd_chunk_id] = (embedded, gradient, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._running("W", bwd_chunk_id):
            if bwd_chunk_id not in self._waiting:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
                return
            embedded, gradient, start = self._waiting.pop(bwd_chunk_id)
            self.weight_gradients(bwd_chunk_id, self.chunk.layers.parameters(), start)
            embedded.grad = None
            embedded.backward(gradient)  # type: ignore[no-untyped-call]

    def _running(self, kind: ActionKind, microbatch: int) -> AbstractContextManager[None]:
        return self._recorder.running(Action(self.stage_index, kind, microbatch))


def time_layers(model: Transformer, spec: StepSpec, world: World, waiter: TimedCompute, seconds: float) -> None:
    """Let a rank's share of the layers take so long, and make it exact on as many of the plain model."""
    ranks, layers = spec.size("pp"), spec.shape.layers
    make_timed(model, seconds * ranks, waiter)
    count = max(1, layers // ranks)
    some = Chunk(model, 0, count)
    tokens = draw_tokens(spec.shape, spec.microbatch, world.seed, 0).to(world.device)
    calibrate(seconds * ranks * count / layers, waiter, lambda: some(tokens[:, :-1]).sum())
    model.zero_grad()


def chunks_of(model: Transformer, pipeline: Pipeline, rank: int) -> dict[int, Chunk]:
    counts = pipeline.layers_by_stage
    return {stage: Chunk(model, sum(counts[:stage]), counts[stage]) for stage in pipeline.schedule.stages_of(rank)}


def make_stages(
    model: Transformer,
    spec: StepSpec,
    pipeline: Pipeline,
    recorder: Recorder,
    world: World,
    group: dist.ProcessGroup,
    tokens: int,
) -> list[Stage]:
    """Return this rank's stages of a pipeline, through which (b, ``tokens``) pass; ``group`` are its ranks."""
    size, counts = (spec.microbatch, tokens), pipeline.layers_by_stage
    given = torch.empty(size, dtype=torch.long, device="meta")
    between = torch.empty(*size, spec.shape.hidden, dtype=dtype_of(spec), device="meta", requires_grad=True)
    logits = torch.empty(*size, spec.shape.vocabulary, dtype=dtype_of(spec), device="meta", requires_grad=True)
    return [
        Stage(
            chunk,
            stage,
            recorder,
            given if stage == 0 else between,
            logits if stage == len(counts) - 1 else between,
            num_stages=len(counts),
            device=world.device,
            group=group,
        )
        for stage, chunk in chunks_of(model, pipeline, group.rank()).items()
    ]


def notes_of_links(world: World) -> tuple[str, ...]:
    """Return what a bubble holds beside the schedule's: torch makes one communicator where a device is bound."""
    if world.backend != "nccl":
        return ()
    why = "a rank's sends and receives share a communicator and its stream"
    return (f"pp on nccl: {why}, where one that waits for its peer holds up those behind it: that counts as bubble",)


def make_train(
    schedule: Schedule, stages: Sequence[Stage], recorder: Recorder, loss: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return what takes the gradients of all microbatches' tokens and targets, in the order of a schedule.

    It gives the sum of the microbatches' losses, None on ranks that do not know it; ``loss`` is of logits and targets.
    """

    def timed_loss(logits: Tensor, targets: Tensor) -> Tensor:
        found = loss(logits, targets)
        recorder.extend()
        return found

    def train(tokens: Tensor, targets: Tensor) -> Tensor | None:
        given = (tokens,) if stages[0].is_first else ()
        losses: list[Tensor] | None = [] if stages[-1].is_last else None
        runtime.step(*given, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else None

    order = {rank: [str(action) for action in schedule.actions_of(rank)] for rank in range(schedule.ranks)}
    runtime = pipeline_runtime(stages, order, schedule.microbatches, timed_loss)
    return train
