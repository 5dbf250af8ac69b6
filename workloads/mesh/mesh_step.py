"""A training step on one mesh of several axes, each of them the project's own: data, shards, pipeline, context, tensor,
and experts inside the first, the second and the fourth.

A rank takes its own positions of its own sequences through its own layers. Its loss is the mean over these, so that a
gradient is the mean over all ranks that hold the same layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.plan.params import Value
from bench.world.world import World
from workloads.context_parallel.attention_kernel import Kernel, kernel_for, waiting_kernel
from workloads.context_parallel.context_step import attend_by, core_of
from workloads.context_parallel.recorder import Recorder
from workloads.costs import strategies
from workloads.costs.step_spec import StepSpec
from workloads.expert_parallel.expert_step import MixtureStep
from workloads.expert_parallel.moe_layer import MoeLayer, exchange_ffns, kernel_notes, let_experts_wait
from workloads.expert_parallel.routes import Routes
from workloads.mesh.axes import coordinate_of
from workloads.mesh.mesh_probe import Look, MeshBubble, MeshBytes, MeshMemory
from workloads.mesh.mesh_stages import (
    Groups,
    RoutingRecorder,
    Stages,
    Sums,
    by_kind,
    count_wrong_fills,
    make_groups,
    mixtures_in,
    one_stage,
    plan_of,
    shard,
    shares_of,
    tokens_of,
)
from workloads.model.timed_compute import TimedCompute, calibrate, fill_distinct_gradients, make_timed
from workloads.model.transformer import Transformer, draw_tokens, loss_of, materialise
from workloads.pipeline_parallel.stages import Chunk, Held, chunks_of, make_stages, make_train, notes_of_links
from workloads.step.gate import gated
from workloads.step.layout import Layout, dtype_of
from workloads.step.overlap import Overlap
from workloads.step.probe import Probe
from workloads.tensor_parallel.tensor_parallel import split_blocks

_SUMMED = ("dp", "cp", "tp")  # over these gradients of a mean are summed; over fsdp FSDP takes the mean
_NO_OVERLAP = "gradients of dp, of edp and of what tp does not split are summed after the last microbatch, as one"


def prepare(world: World, **params: Value) -> "HybridStep":
    return gated(HybridStep, world, params, strategies.mesh)


class HybridStep(MixtureStep):
    """A training step on a mesh, and what each axis of it sends and costs."""

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        spec = strategies.mesh(params, world.size, world.device.type)
        self.coordinate = coordinate_of(spec.mesh, world.rank)
        moe = self.moe = spec.moe
        self._tokens = tokens_of(spec, self.coordinate)
        self._routes = None if moe is None else Routes(world, spec, moe, self._tokens, spec.size("dp", "fsdp"))
        self._shares = shares_of(spec.shape, moe, cp=spec.size("cp"))
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
        return count_wrong_fills(self.layout.model, times, tp=self.spec.size("tp"), num_ranks=self._world.size)

    def probes(self) -> Sequence[Probe[Any]]:
        """Return what looks into bytes by axis and the bubble, where a step's time goes, and last what ranks hold."""
        look, pipeline = self.look(), self.spec.pipeline
        bubble = () if pipeline is None else (MeshBubble(look, pipeline.schedule, self._recorder),)
        time = Overlap(self._world, self.layout, self._doubts_of_peak)
        return MeshBytes(look), *bubble, time, MeshMemory(look, self._forward_backward)

    def look(self) -> Look:
        return Look(
            world=self._world,
            layout=self.layout,
            at=self.spec.at(self._world.rank),
            expected=self.expected_bytes(),
            chunks=self._stages.chunks,
            tokens=len(self._tokens),
        )

    def _lay_out(self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]) -> Layout:
        """Put the model on the mesh, from the innermost axis to the outermost."""
        groups = make_groups(world, spec)
        # a wait that took too long is not made up for by the next action: that would be a bubble moved elsewhere
        self._recorder = RoutingRecorder(world.device, self._begin, self._forget_late)
        if self.moe is not None:
            exchange_ffns(model, spec.shape, self.moe, world.seed, held=groups.held)
            if spec.timed_seconds is not None:
                seconds, tokens = spec.timed_seconds * spec.size("pp"), spec.microbatch * len(self._tokens)
                experts, others = seconds * self._shares.experts, seconds * self._shares.linear
                let_experts_wait(model, experts, tokens, self._waiter, others=others)
        self._begin_layers(model, groups)
        plan, cp = plan_of(spec), self.coordinate["cp"]
        core = None
        if "cp" in groups.axes:
            core = core_of(plan, cp, world.device, groups.axes, self._kernel(spec), Recorder(world.device))
        attend_by(model, core, torch.tensor(plan.tokens(cp), device=world.device))
        model.places = torch.tensor(self._tokens, device=world.device)
        self._stages = self._make_stages(model, spec, groups)
        if "fsdp" in groups.axes:
            for chunk in self._stages.chunks.values():
                shard(chunk, groups, mixtures_in(chunk).values(), kept=spec.pipeline is not None)
        held = Held(self._stages.chunks.values())
        self._mixtures = {n: one for chunk in self._stages.chunks.values() for n, one in mixtures_in(chunk).items()}
        parameters = by_kind(held, split="tp" in groups.axes)
        self._sums = Sums(parameters=parameters, groups=groups.axes, shards=spec.size("fsdp"))
        return replace(
            Layout.of(spec, world, held, groups.axes),
            forward_backward=self._train,
            holds_stage_only=spec.pipeline is not None,
            replica_group=groups.replica_group,
            reference_model=None if self._routes is None else self._routes.reference_model,
            reference_loss=loss_of if self._routes is None else self._routes.reference_loss,
            reference_begin=None if self._routes is None else self._routes.reference_begin,
            made_groups=groups.made,
            details={"mesh": dict(spec.mesh), **({"timed_shares": asdict(self._shares)} if spec.timed else {})},
            notes=(
                *((_NO_OVERLAP,) if groups.axes.keys() & {"dp", "edp", "tp"} else ()),
                *(notes_of_links(world) if spec.pipeline is not None else ()),
                *(kernel_notes(world.device, dtype_of(spec)) if self.moe is not None and not spec.timed else ()),
            ),
        )

    def _begin_layers(self, model: Transformer, groups: Groups) -> None:
        """Materialise this rank's layers, split and shard each at once; then materialise its ends."""
        pipeline = self.spec.pipeline
        chunks = [Chunk(model, 0, len(model.layers))]
        if pipeline is not None:
            chunks = list(chunks_of(model, pipeline, groups.axes["pp"].rank()).values())
        for chunk in chunks:
            for name, layer in chunk.layers.items():
                materialise(layer, self._world.seed, self._world.device, f"layers.{name}")
                if "tp" in groups.axes:
                    split_blocks([layer], groups.mesh["tp"], mixtures=self.moe is not None)
                if "fsdp" in groups.axes:
                    mixtures = [layer.ffn] if isinstance(layer.ffn, MoeLayer) else []
                    shard(layer, groups, mixtures, kept=pipeline is not None)
            materialise(chunk, self._world.seed, self._world.device)

    def _make_stages(self, model: Transformer, spec: StepSpec, groups: Groups) -> Stages:
        """Return this rank's layers; what is trained on is the loss over all of a gradient's ranks and microbatches."""
        parts = spec.microbatches * spec.size(*_SUMMED)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / parts

        if self.spec.pipeline is None:
            return one_stage(model, loss, self._begin)
        recorder, group = self._recorder, groups.axes["pp"]
        stages = make_stages(model, spec, self.spec.pipeline, recorder, self._world, group, len(self._tokens))
        recorder.chunks = {stage.stage_index: stage.chunk for stage in stages}
        train = make_train(self.spec.pipeline.schedule, stages, recorder, loss)
        return Stages(
            chunks=recorder.chunks,
            train=lambda tokens, targets: train(torch.cat(tuple(tokens)), torch.cat(tuple(targets))),
        )

    def _train(self, microbatches: Sequence[Tensor]) -> Tensor | None:
        """Take gradients of the mean over all data; return this rank's mean loss, None where another rank knows it."""
        given, targets = (
            [tokens[:, [position + shift for position in self._tokens]] for tokens in microbatches] for shift in (0, 1)
        )
        loss = self._stages.train(given, targets)
        self._sums.take()
        return None if loss is None else loss * self.spec.size(*_SUMMED)

    def _begin(self, mixtures: Mapping[int, MoeLayer], microbatch: int) -> None:
        if self._routes is not None:
            self._routes.give(mixtures, self._microbatches[microbatch])

    def _forget_late(self) -> None:
        self._waiter.forget()
        self._block_waiter.forget()

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Let this rank's share of the layers take so long, and make it exact on as many of the plain model.

        Mixtures, whose experts wait as well, are not there before the model is laid out.
        """
        if self.moe is not None:
            return
        spec, pp = self.spec, self.spec.size("pp")
        make_timed(model, seconds * pp * self._shares.linear, self._waiter)
        count = max(1, spec.shape.layers // pp)
        some = Chunk(model, 0, count)
        tokens = draw_tokens(spec.shape, spec.microbatch, self._world.seed, 0).to(self._world.device)
        mine = seconds * pp * count / spec.shape.layers * self._shares.linear
        calibrate(mine, self._waiter, lambda: some(tokens[:, :-1]).sum())
        model.zero_grad()

    def _kernel(self, spec: StepSpec) -> Kernel:
        shape = spec.shape
        if spec.timed_seconds is None:
            return kernel_for(self._world.device, dtype_of(spec), shape.head_size)
        each = spec.timed_seconds * self.spec.size("pp") / shape.layers * self._shares.attention
        plan, heads = plan_of(spec), shape.heads // self.spec.size("tp")
        return waiting_kernel(each, plan, microbatch=spec.microbatch, heads=heads, waiter=self._block_waiter)

    def _fill_distinct_gradients(self) -> None:
        layout = self.layout
        fill_distinct_gradients(layout.model, layout.data_rank, layout.data_size, self.spec.size("fsdp"))
