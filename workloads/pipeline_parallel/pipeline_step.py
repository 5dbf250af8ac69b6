"""Pipeline parallelism: each rank has some of the layers, which microbatches pass through."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.memory import layer_equation
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import Transformer, cross_entropy, materialise
from parbench.workloads.pipeline_parallel import stages
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_memory import (
    PipelineContext,
    PipelineMemoryProbe,
)
from parbench.workloads.pipeline_parallel.pipeline_probe import BubbleProbe
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.overlap import Overlap
from parbench.workloads.step.probe import Probe
from parbench.workloads.step.sent_bytes import SentBytes
from parbench.workloads.step.training_step import TrainingStep


class PipelineStep(TrainingStep):
    """A training step whose microbatches are those of the pipeline."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        super().__init__(world, params, self._lay_out, strategies.pp, outlined=True)

    def reset(self) -> None:
        super().reset()
        self._recorder.forget()

    def probes(self) -> tuple[Probe[Any], ...]:
        context = PipelineContext(
            world=self._world,
            layout=self.layout,
            at=self.spec.at(self._world.rank),
            chunks={stage.stage_index: stage.chunk for stage in self._stages},
            tokens=self.spec.shape.sequence,
            train=self._forward_backward,
        )
        assert self.spec.pipeline is not None
        bubble = BubbleProbe(
            world=self._world,
            order=self.spec.pipeline.order,
            pipelines=[range(self._world.size)],
            recorder=self._recorder,
            layers_by_stage=self.spec.pipeline.layers_by_stage,
            layer_bytes=layer_equation(self.spec.at(0), self.spec.checkpointing).value,
            simulated_seconds=self.spec.timed_seconds,
        )
        return (
            SentBytes(self.layout, self.expected_bytes()),
            bubble,
            Overlap(self._world, self.layout, self._notes_of_peak),
            PipelineMemoryProbe(context),
        )

    def _lay_out(
        self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
    ) -> Layout:
        pipeline = spec.pipeline
        assert pipeline is not None
        # The next action does not make up for one that took too long, which would move a bubble.
        self._recorder = stages.Recorder(world.device, self._waiter.reset_debt)
        for chunk in stages.make_chunks(model, pipeline, world.rank).values():
            materialise(chunk, world.seed, world.device)
        self._stages = stages.make_stages(
            model,
            spec,
            pipeline,
            self._recorder,
            world,
            group=world.group,
            tokens=spec.shape.sequence,
        )

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(logits, targets) / spec.microbatches

        train = stages.make_train(pipeline.order, self._stages, self._recorder, loss)

        def forward_backward(microbatches: Sequence[Tensor]) -> Tensor | None:
            tokens = torch.cat(tuple(microbatches))
            # Torch 2.11 compares the strides of its inputs.
            return train(tokens[:, :-1].contiguous(), tokens[:, 1:])

        parameters = stages.StageParameters(stage.chunk for stage in self._stages)
        return replace(
            Layout.of(spec, world, parameters, {"pp": world.group}),
            forward_backward=forward_backward,
            holds_stage_only=True,
            exact_order=find_gradient_order(pipeline.order, world.rank),
            notes=stages.list_notes(pipeline.order, world),
        )

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        stages.time_layers(model, self.spec, self._world, self._waiter, seconds)


def find_gradient_order(order: PipelineOrder, rank: int) -> tuple[int, ...]:
    """Return the microbatches in the order in which all stages of a rank sum their gradients.

    A single process that sums in this order has the same bits. Empty if the stages differ.
    """
    orders = set()
    for stage in order.stages_of(rank):
        sums = [
            action.microbatch
            for action in order.actions_by_rank[rank]
            if action.stage == stage and action.kind in ("B", "W")
        ]
        orders.add(tuple(sums))
    return orders.pop() if len(orders) == 1 else ()


prepare = behind_gate(PipelineStep, strategies.pp)
