"""This rank's stages of the model and how microbatches pass through them: torch's pipeline runtime, or one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import record_function

from bench.results.details import Action
from workloads.expert_parallel.moe_layer import MoeLayer
from workloads.model.transformer import Transformer
from workloads.pipeline_parallel.pipeline_case import Pipeline
from workloads.pipeline_parallel.stages import Chunk, Recorder, make_stages, make_train
from workloads.step.layout import nothing
from workloads.step.training_step import Options

Loss = Callable[[Tensor, Tensor], Tensor]
"""A microbatch's part of what is to be trained on, of logits and targets."""
Begin = Callable[[Mapping[int, MoeLayer], int], None]
"""What comes before a stage's pass of a microbatch."""


class Stages(Protocol):
    """This rank's part of the model."""

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """The stages by number."""

    def train(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor | None:
        """Take the gradients of all microbatches; return the sum of their losses, None where they are not known."""


class OneStage:
    """All layers on this rank: forward and backward of one microbatch after the other."""

    def __init__(self, model: Transformer, loss: Loss, begin: Begin) -> None:
        self.chunks = {0: Chunk(model, 0, len(model.layers))}
        self._loss, self._begin = loss, begin

    def train(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Take the gradients; FSDP reduces them after the last microbatch alone."""
        chunk, losses = self.chunks[0], []
        for i, (given, wanted) in enumerate(zip(tokens, targets, strict=True)):
            if isinstance(chunk, FSDPModule):
                chunk.set_requires_gradient_sync(i == len(tokens) - 1)
            self._begin(mixtures_in(chunk), i)
            with record_function("parbench:forward"):
                loss = self._loss(chunk(given), wanted)
            with record_function("parbench:backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class PipelineStages:
    """Some stages on this rank; ``group`` are the ranks of its pipeline, through which (b, ``tokens``) pass."""

    def __init__(
        self,
        model: Transformer,
        options: Options,
        pipeline: Pipeline,
        recorder: "RoutingRecorder",
        group: dist.ProcessGroup,
        *,
        tokens: int,
        loss: Loss,
    ) -> None:
        stages = make_stages(model, options, pipeline, recorder, group=group, tokens=tokens)
        self.chunks = {stage.stage_index: stage.chunk for stage in stages}
        recorder.chunks = self.chunks
        self._train = make_train(pipeline.schedule, stages, recorder, loss)

    def train(self, tokens: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor | None:
        """Take the gradients in the schedule's order."""
        return self._train(torch.cat(tuple(tokens)), torch.cat(tuple(targets)))


class RoutingRecorder(Recorder):
    """Stamps actions, and lets its stage's mixtures know before which microbatch comes, for backward computes again."""

    def __init__(self, device: torch.device, begin: Begin, before: Callable[[], None] = nothing) -> None:
        super().__init__(device, before)
        self._begin = begin
        self.chunks: Mapping[int, Chunk] = {}

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Stamp the body as an action."""
        if action.kind in ("F", "B"):
            self._begin(mixtures_in(self.chunks[action.stage]), action.microbatch)
        with super().running(action):
            yield


def mixtures_in(chunk: Chunk) -> dict[int, MoeLayer]:
    """Return a stage's mixtures of experts, by number of the layer."""
    return {int(name): layer.ffn for name, layer in chunk.layers.items() if isinstance(layer.ffn, MoeLayer)}


def shard_stages(stages: Stages, mesh: DeviceMesh, *, kept: bool) -> None:
    """Shard each layer and the rest of each stage by FSDP2, experts left alone; ``kept`` ones stay gathered."""
    for chunk in stages.chunks.values():
        ignored: set[Any] = {p for mixture in mixtures_in(chunk).values() for p in mixture.experts.parameters()}
        for module in (*chunk.layers.values(), chunk):
            fully_shard(module, mesh=mesh, reshard_after_forward=not kept, ignored_params=ignored)
