"""torch's pipeline stage with a stamp at both ends of each action, and an input gradient on the first stage too.

torch's first stage leaves its input gradient to the weight gradient, as its input are tokens. The gradient down to the
embeddings' output is as long as any other stage's, and the zero-bubble schedules count on it: here it is taken in I.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from bench.results.details import Action, ActionKind
from bench.world.torch_compat import stage_backward
from workloads.pipeline_parallel.stages import Chunk
from workloads.step.layout import nothing


@dataclass(frozen=True, slots=True)
class Stamped:
    """An action and its two ends: ns of this rank's clock, or events of the device that tell them later."""

    action: Action
    start: Any
    stop: Any


class Recorder:
    """Keeps the actions of a step as they were run; on CUDA by events in the stream, which cost the host nothing.

    ``before`` is called before each action.
    """

    def __init__(self, device: torch.device, before: Callable[[], None] = nothing) -> None:
        self._device, self._before = device, before
        self._ran: list[Stamped] = []

    def forget(self) -> None:
        """Begin a step."""
        self._ran.clear()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Stamp the body as an action."""
        self._before()
        start = self._stamp()
        yield
        self._ran.append(Stamped(action, start, self._stamp()))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Let the body belong to the last action, as the loss does to the last stage's forward."""
        yield
        last = self._ran.pop()
        self._ran.append(Stamped(last.action, last.start, self._stamp()))

    def read(self) -> list[tuple[Action, int, int]]:
        """Return the actions with both ends in ns of ``time.perf_counter_ns``; on CUDA it waits for the device."""
        if self._device.type != "cuda":
            return [(one.action, one.start, one.stop) for one in self._ran]
        now = self._stamp()
        torch.cuda.synchronize(self._device)
        at = time.perf_counter_ns()
        ago = [(one.start.elapsed_time(now), one.stop.elapsed_time(now)) for one in self._ran]
        return [
            (one.action, at - int(start * 1e6), at - int(stop * 1e6))
            for one, (start, stop) in zip(self._ran, ago, strict=True)
        ]

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Stage(PipelineStage):
    """One stage of a pipeline on this rank; ``group`` are the pipeline's ranks."""

    def __init__(
        self,
        chunk: Chunk,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        recorder: Recorder,
        metas: tuple[Tensor, Tensor],
    ) -> None:
        given, output = metas
        gradient = given if given.is_floating_point() else None
        # told, so that torch need not run the model once to find out
        super().__init__(
            chunk,
            index,
            num_stages,
            device,
            input_args=given,
            output_args=output,
            output_grads=output,
            input_grads=(gradient,),
            group=group,
        )
        self._chunk, self._recorder = chunk, recorder
        self._embedded: dict[int, Tensor] = {}
        self._waiting: dict[int, tuple[Tensor, Tensor, list[dict[str, Any]]]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F."""
        with self._running("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self._chunk.embedded is not None:
            self._embedded[fwd_chunk_id], self._chunk.embedded = self._chunk.embedded, None
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run B or, where not ``full_backward``, I."""
        with self._running("B" if full_backward else "I", bwd_chunk_id):
            if full_backward or not self.is_first:
                self._embedded.pop(bwd_chunk_id, None)
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            else:
                self._input_gradient_of_first(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run W."""
        with self._running("W", bwd_chunk_id):
            if bwd_chunk_id in self._waiting:
                self._weight_gradient_of_first(bwd_chunk_id)
            else:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _input_gradient_of_first(self, microbatch: int) -> None:
        output, _ = self.fwd_cache.pop(microbatch)
        embedded = self._embedded.pop(microbatch)
        embedded.retain_grad()  # torch's function leaves the gradient there as well, and warns of tensors without
        gradients = self._retrieve_recv_grads(microbatch)
        weights = self._chunk.layers.parameters()
        [gradient], groups = stage_backward().stage_backward_input(list(output), gradients, [embedded], weights)
        assert gradient is not None, "the first stage's layers are given what the embeddings made"
        self._waiting[microbatch] = (embedded, gradient, groups)
        self.bwd_cache[microbatch] = (None,)

    def _weight_gradient_of_first(self, microbatch: int) -> None:
        embedded, gradient, groups = self._waiting.pop(microbatch)
        stage_backward().stage_backward_weight(self._chunk.layers.parameters(), groups)
        embedded.grad = None
        embedded.backward(gradient)  # type: ignore[no-untyped-call]

    def _running(self, kind: ActionKind, microbatch: int) -> Any:
        return self._recorder.running(Action(self.stage_index, kind, microbatch))


def timed_loss(recorder: Recorder, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function, whose time is the last forward's."""

    def measured(output: Tensor, target: Tensor) -> Tensor:
        with recorder.going_on():
            return loss(output, target)

    return measured
