"""A training step on one mesh of several axes, each of them the project's own: data, shards, pipeline, context, tensor,
and experts inside the first, the second and the fourth.

A rank takes its own positions of its own sequences through its own layers. Its loss is the mean over these, so that a
gradient is the mean over all ranks that hold the same layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from parbench.bench.plan.params import Value
from parbench.bench.results.details import COMPONENTS
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import Kernel, kernel_for, waiting_kernel
from parbench.workloads.context_parallel.context_step import attend_by, core_of
from parbench.workloads.costs import strategies
from parbench.workloads.costs.memory import state_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.expert_probe import (
    Routed,
    load_metrics,
    merged,
    routed_by,
    sent_in_step,
    sizes_of,
)
from parbench.workloads.expert_parallel.expert_step import MixtureStep
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    exchange_ffns,
    kernel_notes,
    let_experts_wait,
    mixtures,
)
from parbench.workloads.expert_parallel.routes import Routes
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.mesh import mesh_stages
from parbench.workloads.mesh.axes import coordinate_of, expert_groups, expert_parts, groups_along
from parbench.workloads.mesh.mesh_stages import Train, mixtures_in, train_alone
from parbench.workloads.model.timed_compute import TimedCompute, fill_distinct_gradients
from parbench.workloads.model.transformer import Transformer, cross_entropy, materialise
from parbench.workloads.pipeline_parallel import pipeline_probe as probing
from parbench.workloads.pipeline_parallel import stages as pipeline_stages
from parbench.workloads.pipeline_parallel.bubbles import make_details, measure_latency
from parbench.workloads.pipeline_parallel.stages import (
    Chunk,
    StageParameters,
    list_notes,
    make_chunks,
    make_stages,
    make_train,
)
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout, dtype_of, reference_loss_of
from parbench.workloads.step.memory import MemoryBySource, max_over_ranks
from parbench.workloads.step.overlap import OverlapProbe
from parbench.workloads.step.probe import Probe, ResetFn, Step
from parbench.workloads.step.sent_bytes import BytesByAxis, CommBytesProbe, CommVolume
from parbench.workloads.step.turns import choose_ranks
from parbench.workloads.tensor_parallel.tensor_parallel import split_blocks

_SUMMED = (
    "dp",
    "cp",
    "tp",
)  # over these gradients of a mean are summed; over fsdp FSDP takes the mean
_NO_OVERLAP = "gradients of dp, of edp and of what tp does not split are summed after the last microbatch, as one"
_IDLE = (
    "idle is of the traced wall, where waiting for a stage is exposed pp; "
    "idle by cause is the slowest pipeline's own"
)
_EVEN = "memory: the closed form of activations is of even routes, what is counted of those that were taken"
_TIMED = "timed compute: activations have no closed form, as attention keeps none of its own"


@dataclass(frozen=True)
class Sent:
    """What one rank sends by axis in a step and the closed forms but for experts' tokens; what it routed, if any."""

    sent: CommVolume
    expected: BytesByAxis
    routed: Routed | None


@dataclass(frozen=True)
class MeshBytes:
    """The probe of bytes by axis, counted and by closed form, those of experts' tokens by the step's own routes."""

    look: probing.PipelineContext
    expected: BytesByAxis
    share = 0.0

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float = 0.0) -> Sent:
        look, layers = self.look, mixtures(self.look.layout.model)
        for mixture in layers:
            mixture.chosen.clear()
        sent, expected = CommBytesProbe(look.layout.axes, lambda: self.expected).observe(
            step, begin, budget_seconds
        )
        routed = (
            routed_by(layers, look.at.spec.microbatch * look.tokens)
            if "ep" in look.layout.axes
            else None
        )
        return Sent(sent, expected, routed)

    def summarize(self, told: Sequence[Sent]) -> Explanation:
        metrics = CommBytesProbe.summarize(self.sent_and_expected(told)).metrics
        if (moe := self.look.at.spec.moe) is not None and (routed := self._routed(told)):
            first = next(ranks for ranks in expert_groups(self.look.at.spec.mesh) if 0 in ranks)
            metrics |= load_metrics([routed[rank] for rank in first], moe.ep, None)
        return Explanation(
            metrics=metrics,
            details={"bytes_sent_by_rank": [dict(one.sent.by_axis) for one in told]},
        )

    def sent_and_expected(self, told: Sequence[Sent]) -> list[tuple[CommVolume, BytesByAxis]]:
        spec, moe, routed = self.look.at.spec, self.look.at.spec.moe, self._routed(told)
        if moe is None or not routed:
            return [(one.sent, one.expected) for one in told]
        sizes = sizes_of(spec, moe, spec.microbatch * self.look.tokens, moe.etp)
        to_experts = {}
        for ranks in expert_groups(spec.mesh):
            copy = [routed[rank] for rank in ranks]
            for i, rank in enumerate(ranks):
                flights = sent_in_step(moe.variant, i, copy, sizes)
                to_experts[rank] = sum(
                    spec.forwards * one.forward + one.backward for one in flights
                )
        return [
            (one.sent, {**one.expected, "ep": to_experts[rank]}) for rank, one in enumerate(told)
        ]

    def _routed(self, told: Sequence[Sent]) -> dict[int, Routed]:
        """Return what each rank routed, with those that split experts: they take each other's tokens."""
        each = [one.routed for one in told if one.routed is not None]
        parts = expert_parts(self.look.at.spec.mesh) if each else []
        return {
            rank: merged([each[of] for of in ranks], len(ranks))[0]
            for ranks in parts
            for rank in ranks
        }


@dataclass(frozen=True)
class MeshBubble:
    """The probe of the pipeline that was slowest in the other half of the steps; no claim where ranks share cores."""

    look: probing.PipelineContext
    share = 2 / 3  # of what is left for the rest of the step's time

    def observe(
        self, step: Step, begin: ResetFn, budget_seconds: float
    ) -> probing.RankSteps | None:
        return probing.measure_steps(self.look, step, begin, budget_seconds)

    def summarize(self, told: Sequence[probing.RankSteps | None]) -> Explanation:
        order = self.look.order
        taken, facts = [one for one in told if one is not None], make_details(order)
        in_order = probing.summarize_order(order)
        if not taken:
            facts = msgspec.structs.replace(facts, why_not_measured=probing.SHARED_NOTE)
            return Explanation(
                metrics=in_order, details=facts.as_details, notes=(probing.SHARED_NOTE,)
            )
        pipelines = groups_along(self.look.at.spec.mesh, "pp")
        of_each = [
            probing.merge_steps([taken[rank] for rank in ranks], order) for ranks in pipelines
        ]
        turns = list(
            enumerate(
                choose_ranks(
                    [[timeline.makespan for timeline in steps.timelines] for steps in of_each]
                )
            )
        )
        slowest = probing.PipelineSteps(
            order=order,
            timelines=tuple(of_each[pipeline].timelines[turn] for turn, pipeline in turns),
            outside_seconds=tuple(
                of_each[pipeline].outside_seconds[turn] for turn, pipeline in turns
            ),
            uncertainty_seconds=max(steps.uncertainty_seconds for steps in of_each),
        )
        latency = measure_latency(slowest.timelines, order)
        metrics = in_order | probing.summarize_bubble(
            slowest, latency, self.look.at.spec.timed_seconds
        )
        # a step's compute and idle are those of its traced wall here, to which exposed communication belongs
        for name in ("compute", "idle", "non_pipeline_time"):
            del metrics[name]
        details = probing.add_timelines(facts, slowest, latency, self.look.world.clock).as_details
        return Explanation(metrics=metrics, details=details, notes=(_IDLE,))


@dataclass(frozen=True)
class MeshMemory:
    """The probe of what each rank holds, after all others: by closed form, counted and measured."""

    look: probing.PipelineContext
    share = 0.0

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float = 0.0) -> MemoryBySource:
        held = probing.measure_memory(self.look, begin, as_routed)
        return (
            {**held, "memory_formula": asdict(state_of(self.look.at))}
            if self.look.at.spec.timed
            else held
        )

    def summarize(self, told: Sequence[MemoryBySource]) -> Explanation:
        spec = self.look.at.spec
        notes = [_TIMED] if spec.timed else []
        if (
            spec.moe is not None
            and spec.moe.routing != BALANCED
            and spec.checkpointing == "none"
            and not spec.timed
        ):
            notes.append(_EVEN)
        details = {
            "memory_by_rank": {name: [one["memory"][name] for one in told] for name in COMPONENTS}
        }
        return Explanation(metrics=max_over_ranks(told), details=details, notes=tuple(notes))


def as_routed(chunk: Chunk) -> None:
    """Let a stage's mixtures take the routes of their last microbatch: of zeros a router would send all to one."""
    for mixture in mixtures_in(chunk).values():
        mixture.given = mixture.chosen[max(mixture.chosen)]


class HybridStep(MixtureStep):
    """A training step on a mesh, and what each axis of it sends and costs."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        spec = strategies.mesh(params, world.size, world.device.type)
        self.coordinate = coordinate_of(spec.mesh, world.rank)
        moe = self.moe = spec.moe
        self._tokens = mesh_stages.tokens_of(spec, self.coordinate)
        self._routes = None if moe is None else Routes(world, spec, moe, self._tokens)
        self._shares = mesh_stages.shares_of(spec.shape, moe, cp=spec.size("cp"))
        # its own: what other waits take too long must not make a block of attention shorter than it is said to be
        self._block_waiter = TimedCompute(world.device)
        super().__init__(world, params, self._lay_out, strategies.mesh, outlined=True)

    def reset(self) -> None:
        super().reset()
        self._block_waiter.forget()
        self._recorder.forget()

    def check(self) -> int:
        if not self.spec.timed:
            return super().check()
        # each gradient as its data rank fills it in: FSDP takes the mean over its own, dp and cp add theirs up
        times = self.spec.microbatches * self.spec.size("dp", "cp")
        return mesh_stages.count_wrong_fills(
            self.layout.model, times, tp=self.spec.size("tp"), num_ranks=self._world.size
        )

    def probes(self) -> Sequence[Probe[Any]]:
        """Return what looks into bytes by axis and the bubble, where a step's time goes, and last what ranks hold."""
        look = self.look()
        bubble = () if self.spec.pipeline is None else (MeshBubble(look),)
        time = OverlapProbe(
            self._world,
            self.layout.axes,
            ranks_differ=self.layout.holds_stage_only,
            list_notes=self._notes_of_peak,
        )
        return MeshBytes(look, self.expected_bytes()), *bubble, time, MeshMemory(look)

    def look(self) -> probing.PipelineContext:
        return probing.PipelineContext(
            world=self._world,
            layout=self.layout,
            at=self.spec.at(self._world.rank),
            chunks=self._chunks,
            tokens=len(self._tokens),
            recorder=self._recorder,
            train=self._forward_backward,
        )

    def _lay_out(
        self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
    ) -> Layout:
        groups = mesh_stages.make_groups(world, spec)
        # a wait that took too long is not made up for by the next action: that would be a bubble moved elsewhere
        self._recorder = mesh_stages.RoutingRecorder(world.device, self._begin, self._forget_late)
        if self.moe is not None:
            exchange_ffns(model, spec.shape, self.moe, world.seed, held=groups.held)
            if spec.timed_seconds is not None:
                seconds, tokens = (
                    spec.timed_seconds * spec.size("pp"),
                    spec.microbatch * len(self._tokens),
                )
                experts, others = seconds * self._shares.experts, seconds * self._shares.linear
                let_experts_wait(model, experts, tokens, self._waiter, others=others)
        self._begin_layers(model, groups)
        plan, cp = mesh_stages.plan_of(spec), self.coordinate["cp"]
        core = None
        if "cp" in groups.axes:
            core = core_of(plan, cp, world.device, groups.axes, self._kernel(spec))
        attend_by(model, core, torch.tensor(plan.tokens(cp), device=world.device))
        # The positions are on the device: a list as an index would be copied to it in every step.
        self._places = model.places = torch.tensor(self._tokens, device=world.device)
        self._chunks, self._train_chunks = self._make_stages(model, spec, groups)
        if "fsdp" in groups.axes:
            for chunk in self._chunks.values():
                mesh_stages.shard(
                    chunk, groups, mixtures_in(chunk).values(), kept=spec.pipeline is not None
                )
        held = StageParameters(self._chunks.values())
        self._mixtures = {
            n: one for chunk in self._chunks.values() for n, one in mixtures_in(chunk).items()
        }
        parameters = mesh_stages.by_kind(held, split="tp" in groups.axes)
        self._sums = mesh_stages.Sums(
            parameters=parameters, groups=groups.axes, shards=spec.size("fsdp")
        )
        return replace(
            Layout.of(spec, world, held, groups.axes),
            forward_backward=self._train,
            holds_stage_only=spec.pipeline is not None,
            replica_group=groups.replica_group,
            reference_model=None if self._routes is None else self._routes.reference_model,
            reference_loss=reference_loss_of
            if self._routes is None
            else self._routes.reference_loss,
            made_groups=groups.made,
            details={
                "mesh": dict(spec.mesh),
                **({"timed_shares": asdict(self._shares)} if spec.timed else {}),
            },
            notes=(
                *((_NO_OVERLAP,) if groups.axes.keys() & {"dp", "edp", "tp"} else ()),
                *(list_notes(spec.pipeline.order, world) if spec.pipeline is not None else ()),
                *(
                    kernel_notes(world.device, dtype_of(spec))
                    if self.moe is not None and not spec.timed
                    else ()
                ),
            ),
        )

    def _begin_layers(self, model: Transformer, groups: mesh_stages.Groups) -> None:
        """Materialise this rank's layers, split and shard each at once; then materialise its ends."""
        pipeline = self.spec.pipeline
        chunks = [Chunk(model, 0, len(model.layers))]
        if pipeline is not None:
            chunks = list(make_chunks(model, pipeline, groups.axes["pp"].rank()).values())
        for chunk in chunks:
            for name, layer in chunk.layers.items():
                materialise(layer, self._world.seed, self._world.device, f"layers.{name}")
                if "tp" in groups.axes:
                    split_blocks([layer], groups.mesh["tp"], mixtures=self.moe is not None)
                if "fsdp" in groups.axes:
                    mixtures = [layer.ffn] if isinstance(layer.ffn, MoeLayer) else []
                    mesh_stages.shard(layer, groups, mixtures, kept=pipeline is not None)
            materialise(chunk, self._world.seed, self._world.device)

    def _make_stages(
        self, model: Transformer, spec: StepSpec, groups: mesh_stages.Groups
    ) -> tuple[Mapping[int, Chunk], Train]:
        """Return this rank's stages by number, and what trains them on the loss over all of a gradient's ranks."""
        parts = spec.microbatches * spec.size(*_SUMMED)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(logits, targets) / parts

        if self.spec.pipeline is None:
            chunk = Chunk(model, 0, len(model.layers))
            return {0: chunk}, train_alone(chunk, loss, self._begin)
        recorder, group = self._recorder, groups.axes["pp"]
        stages = make_stages(
            model, spec, self.spec.pipeline, recorder, self._world, group, len(self._tokens)
        )
        recorder.chunks = {stage.stage_index: stage.chunk for stage in stages}
        train = make_train(self.spec.pipeline.order, stages, recorder, loss)
        return recorder.chunks, lambda tokens, targets: train(
            torch.cat(tuple(tokens)), torch.cat(tuple(targets))
        )

    def _train(self, microbatches: Sequence[Tensor]) -> Tensor | None:
        """Take gradients of the mean over all data; return this rank's mean loss, None where another rank knows it."""
        given = [tokens.index_select(1, self._places) for tokens in microbatches]
        next_places = self._places + 1
        targets = [tokens.index_select(1, next_places) for tokens in microbatches]
        loss = self._train_chunks(given, targets)
        self._sums.take()
        return None if loss is None else loss * self.spec.size(*_SUMMED)

    def _begin(self, mixtures: Mapping[int, MoeLayer], microbatch: int) -> None:
        if self._routes is not None:
            self._routes.give(mixtures, self._microbatches[microbatch])

    def _forget_late(self) -> None:
        self._waiter.forget()
        self._block_waiter.forget()

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Let linear layers wait; mixtures, whose experts wait as well, are not there before the model is laid out."""
        if self.moe is None:
            pipeline_stages.time_layers(
                model, self.spec, self._world, self._waiter, seconds * self._shares.linear
            )

    def _kernel(self, spec: StepSpec) -> Kernel:
        shape = spec.shape
        if spec.timed_seconds is None:
            return kernel_for(self._world.device, dtype_of(spec), shape.head_size)
        each = spec.timed_seconds * self.spec.size("pp") / shape.layers * self._shares.attention
        plan, heads = mesh_stages.plan_of(spec), shape.heads // self.spec.size("tp")
        return waiting_kernel(
            each, plan, microbatch=spec.microbatch, heads=heads, waiter=self._block_waiter
        )

    def _fill_distinct_gradients(self) -> None:
        layout = self.layout
        fill_distinct_gradients(
            layout.model, layout.data_rank, layout.data_size, self.spec.size("fsdp")
        )


prepare = behind_gate(HybridStep, strategies.mesh)
