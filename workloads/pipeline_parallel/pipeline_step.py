"""Pipeline parallelism: each rank holds some of the layers, and microbatches pass through the ranks.

Schedules are the project's own orders, run by torch's stages and its runtime; see ``schedules``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import Transformer, cross_entropy, materialise
from parbench.workloads.pipeline_parallel import stages
from parbench.workloads.pipeline_parallel.bubbles import bubble_fraction
from parbench.workloads.pipeline_parallel.pipeline_probe import Look, PipelineProbe
from parbench.workloads.pipeline_parallel.schedules import Schedule
from parbench.workloads.pipeline_parallel.simulation import simulate_even
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.training_step import TrainingStep


class PipelineStep(TrainingStep):
    """A training step whose microbatches are those of the pipeline."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        super().__init__(world, params, self._lay_out, strategies.pp, outlined=True)

    def reset(self) -> None:
        super().reset()
        self._recorder.forget()

    def probes(self) -> tuple[PipelineProbe]:
        look = Look(
            world=self._world,
            layout=self.layout,
            at=self.spec.at(self._world.rank),
            chunks={stage.stage_index: stage.chunk for stage in self._stages},
            tokens=self.spec.shape.sequence,
            recorder=self._recorder,
            train=self._forward_backward,
        )
        return (PipelineProbe(look),)

    def _lay_out(self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
        # an action that took too long is not made up for by the next one: that would be a bubble moved elsewhere
        self._recorder = stages.Recorder(world.device, self._waiter.forget)
        assert spec.pipeline is not None
        schedule, tokens = spec.pipeline.schedule, spec.shape.sequence
        for chunk in stages.chunks_of(model, spec.pipeline, world.rank).values():
            materialise(chunk, world.seed, world.device)
        self._stages = stages.make_stages(
            model, spec, spec.pipeline, self._recorder, world, group=world.group, tokens=tokens
        )

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(logits, targets) / spec.microbatches

        train = stages.make_train(schedule, self._stages, self._recorder, loss)

        def forward_backward(microbatches: Sequence[Tensor]) -> Tensor | None:
            tokens = torch.cat(tuple(microbatches))
            return train(tokens[:, :-1].contiguous(), tokens[:, 1:])  # torch 2.11 minds the strides of what it is given

        held = stages.Held(stage.chunk for stage in self._stages)
        return replace(
            Layout.of(spec, world, held, {"pp": world.group}),
            forward_backward=forward_backward,
            holds_stage_only=True,
            exact_order=order_of_gradients(schedule, world.rank),
            notes=(*notes_of(schedule), *stages.notes_of_links(world)),
        )

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        stages.time_layers(model, self.spec, self._world, self._waiter, seconds)


def order_of_gradients(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the microbatches in the one order in which a rank's stages, as one process, take gradients; or none."""
    taken = [action for action in schedule.actions_of(rank) if action.kind in ("B", "W")]
    orders = {tuple(a.microbatch for a in taken if a.stage == stage) for stage in schedule.stages_of(rank)}
    return orders.pop() if len(orders) == 1 else ()


def notes_of(schedule: Schedule) -> tuple[str, ...]:
    if schedule.name == "dualpipe_v":
        return (
            "dualpipe_v: the forward and backward of an overlapped pair run one after the other, each sent as it ends",
        )
    ranks, microbatches = schedule.ranks, schedule.microbatches
    bubble = bubble_fraction(simulate_even(schedule))
    if microbatches >= ranks or bubble < 0.5:
        return ()
    few = f"microbatches({microbatches}) < ranks({ranks}) do not fill the pipeline"
    return (f"{few}: at F = I = W its bubble is {bubble:.0%} of the time",)


prepare = behind_gate(PipelineStep, strategies.pp)
