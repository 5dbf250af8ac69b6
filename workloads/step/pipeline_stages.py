"""The stages of this rank for torch's pipeline runtime, with the time of each action.

Torch's first stage computes all its gradients with the weight gradient (W), because tokens have no
gradient. Its input gradient (I) takes no time. Parts of the runtime differ between versions:

| torch up to | behavior |
|---|---|
| 2.11 | stages do not know the meta tensors of gradients, and a rank hangs on gloo at start |
| 2.12 | the graph node of an ``autograd.Function`` may end before the node that it belongs to |
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import DTYPES
from parbench.workloads.parallel.parallelize import ParallelPart
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.probes.probe import Moment, make_moment_clock, record_moment


class ActionRecorder:
    """Records the start and stop of each action that this rank runs in a step.

    An action is a pass of one stage for one microbatch. On CUDA, times are events in the current
    stream, which do not delay the host.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Action], None]) -> None:
        """Make a recorder without actions, for the passes that this rank runs on ``device``.

        ``prepare(action)`` is called before each action. Its time is not part of the recorded time.
        """
        self._device = device
        self._prepare = prepare
        self._moments: list[tuple[Action, Moment, Moment]] = []

    def forget(self) -> None:
        """Remove all recorded actions."""
        self._moments.clear()

    @contextmanager
    def record_action(self, action: Action) -> Iterator[None]:
        """Record the start and stop of an action that the body of the ``with`` statement runs."""
        self._prepare(action)
        start = record_moment(self._device)
        yield
        self._moments.append((action, start, record_moment(self._device)))

    def extend(self) -> None:
        """Set the stop of the last recorded action to now.

        Torch's runtime computes the loss after the forward pass of the last stage. This call makes
        the loss part of this pass.
        """
        action, start, _ = self._moments[-1]
        self._moments[-1] = (action, start, record_moment(self._device))

    def read(self) -> list[tuple[Action, float, float]]:
        """Return each recorded action with its start and stop, in the order of execution.

        Times are in seconds of this process's ``time.perf_counter``. On CUDA, this call waits for
        the device.
        """
        to_seconds = make_moment_clock(self._device)
        return [
            (action, to_seconds(start), to_seconds(stop)) for action, start, stop in self._moments
        ]


class Stage(PipelineStage):
    """A stage of torch's pipeline runtime that also records times and reduces gradients.

    It records the start and stop of each forward and backward pass, and averages gradients over
    data ranks. It has one input and one output tensor. Their shapes are given as meta tensors, so
    that torch need not exchange them at the first step.
    """

    def __init__(
        self,
        parallel_part: ParallelPart,
        recorder: ActionRecorder,
        index: int,
        input_meta: Tensor,
        output_meta: Tensor,
        **options: Any,
    ) -> None:
        """Make stage number ``index`` of the pipeline, which runs the layers in ``parallel_part``.

        ``recorder`` gets the times of the stage's passes. ``input_meta`` and ``output_meta`` are
        meta tensors with the shapes and types of the stage's input and output for one microbatch.
        ``options`` are further arguments of torch's ``PipelineStage``.
        """
        if "output_grads" in inspect.signature(PipelineStage).parameters:
            has_gradient = input_meta.is_floating_point()
            options["input_grads"] = (input_meta if has_gradient else None,)
            options["output_grads"] = output_meta
        part = parallel_part.part
        super().__init__(part, index, input_args=input_meta, output_args=output_meta, **options)
        self._recorder = recorder
        self._reducers = parallel_part.reducers
        self._graphs: dict[int, list[Any]] = {}
        """Edges of autograd's graph by microbatch, between input gradient and weight gradient.

        They keep the nodes of the graph alive, which torch before 2.13 may free too early.
        """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward pass of a microbatch, and record its time."""
        with self._recording("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run torch's backward pass of a microbatch, and record its time.

        It is a full backward pass, or the input gradient if ``full_backward`` is False.
        ``last_backward`` is True in the stage's last backward pass of a step. The method then also
        reduces gradients over ranks, each bucket as soon as its gradients exist.
        """
        if last_backward:
            for reducer in self._reducers:
                reducer.tracker.activate()
        if not full_backward and torch.__version__ < "2.13":
            outputs = self.fwd_cache[bwd_chunk_id][0] if loss is None else [loss]
            self._graphs[bwd_chunk_id] = [get_gradient_edge(output) for output in outputs]
        with self._recording("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run torch's weight gradient of a microbatch, and record its time.

        After the last weight gradient of a step, it also starts the reduction over ranks of all
        gradients of the stage.
        """
        with self._recording("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)
        if last_backward:
            # Torch accumulates these gradients without the hooks of autograd.
            for reducer in self._reducers:
                reducer.tracker.activate()
                reducer.tracker.start_remaining()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return an empty list, so that torch sends no messages before the first step.

        Torch's own method returns a send or a receive for each neighbor, to connect the ranks.
        ``make_train`` connects them by an all_reduce instead.
        """
        return []

    def _recording(self, kind: ActionKind, microbatch: int) -> AbstractContextManager[None]:
        """Return the context manager that records the time of one pass of this stage.

        ``kind`` is F, B, I or W, and ``microbatch`` is the index of the microbatch.
        """
        return self._recorder.record_action(Action(self.stage_index, kind, microbatch))


def make_stages(
    parts: Mapping[int, ParallelPart],
    spec: StepSpec,
    recorder: ActionRecorder,
    world: World,
    group: dist.ProcessGroup,
) -> list[Stage]:
    """Return the stages that this rank runs in torch's pipeline runtime, in the order of ``parts``.

    ``parts`` has the rank's parts of the model, keyed by the index of the stage in the pipeline.
    ``spec`` has the sizes of activations, ``recorder`` gets the times of all passes, and ``group``
    has the ranks of the pipeline.
    """
    assert spec.pipeline is not None
    num_stages = spec.pipeline.size.num_stages
    tokens = spec.shape.sequence // spec.dims.cp
    token_ids = torch.empty(spec.microbatch, tokens, dtype=torch.long, device="meta")
    sharded_tokens = spec.sharded_tokens // spec.microbatch

    def make_meta(*size: int) -> Tensor:
        """Return a meta tensor (sequences of a microbatch, *size) that requires a gradient."""
        return torch.empty(
            spec.microbatch,
            *size,
            dtype=DTYPES[spec.bytes_per_element],
            device="meta",
            requires_grad=True,
        )

    stages = []
    for index, parallel_part in parts.items():
        activations = make_meta(sharded_tokens, spec.shape.hidden)
        output = activations
        if index == num_stages - 1:
            output = make_meta(tokens, parallel_part.logits_width)
        stage = Stage(
            parallel_part,
            recorder,
            index=index,
            input_meta=token_ids if index == 0 else activations,
            output_meta=output,
            num_stages=num_stages,
            device=world.device,
            group=group,
        )
        stages.append(stage)
    return stages


def make_train(
    order: PipelineOrder,
    stages: Sequence[Stage],
    recorder: ActionRecorder,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return ``train(tokens, targets)``, which runs one step of the pipeline on this rank.

    ``train`` computes the gradients of all microbatches by torch's pipeline runtime, without an
    update. ``tokens`` and ``targets`` hold all microbatches of the step, (sequences, positions of
    this rank). On the rank of the last stage, ``train`` returns the sum over microbatches of
    ``loss(logits, targets)``, which is a microbatch's part of the mean loss. On other ranks it
    returns None. ``stages`` are those of this rank, and ``recorder`` records the times of passes.

    All ranks of the pipeline call this function, which runs one all_reduce. It connects the ranks,
    as batched sends and receives require.
    """

    def compute_timed_loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, and count its time as part of the last forward pass."""
        value = loss(logits, targets)
        recorder.extend()
        return value

    module = importlib.import_module("torch.distributed.pipelining.schedules")
    runtime = module._PipelineScheduleRuntime(
        list(stages), order.size.microbatches, loss_fn=compute_timed_loss, scale_grads=False
    )
    actions = {
        rank: [module._Action.from_str(str(action)) for action in rank_actions]
        for rank, rank_actions in enumerate(order.actions_by_rank)
    }
    runtime.pipeline_order = {rank: list(actions[rank]) for rank in actions}
    runtime._prepare_schedule_with_comms(actions)
    dist.all_reduce(torch.zeros(1, device=stages[0].device), group=stages[0].group)

    def train(tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Run all actions of this rank in one step, and return the loss on the last stage."""
        inputs = [tokens] if any(stage.is_first for stage in stages) else []
        losses: list[Tensor] | None = [] if any(stage.is_last for stage in stages) else None
        runtime.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else None

    return train


def list_gradient_order(order: PipelineOrder, rank: int) -> tuple[int, ...]:
    """Return the microbatches of a step in the order in which a rank adds up their gradients.

    The order is that of the rank's first stage, which equals that of its other stages. If a single
    process adds gradients in this order, its sums equal the rank's in every bit.
    """
    actions = order.actions_by_rank[rank]
    stage = actions[0].stage
    return tuple(
        action.microbatch for action in actions if action.stage == stage and action.kind in "BW"
    )
