"""A training step with a mixture of experts in every layer: experts over ``ep`` ranks inside data parallelism.

Each rank takes its own microbatches, or its own positions of those that ``tp`` neighbours share, who split attention.
What is neither an expert's nor split is under DDP or FSDP2; experts are shared by blocks of ``ep`` neighbouring ranks.
They and what is split are averaged over their copies after the last microbatch. Routes are a generator's or the
router's; capacity and balance count what one rank takes of one microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parbench.bench.plan.params import Value
from parbench.bench.world.benchmark import Description
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.memory import state_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel import ddp
from parbench.workloads.data_parallel.fsdp import lay_out_fsdp
from parbench.workloads.expert_parallel import moe_layer
from parbench.workloads.expert_parallel.expert_probe import ExpertProbe
from parbench.workloads.expert_parallel.groups import TP_NOTE, fill_sums, make_axes, split_attention
from parbench.workloads.expert_parallel.moe_case import Moe, count_expert_parameters, make_moe
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.step_routing import StepRouting
from parbench.workloads.model.shapes import BUCKET
from parbench.workloads.model.transformer import Transformer, loss_of, materialise
from parbench.workloads.step.gate import behind_gate
from parbench.workloads.step.layout import Layout, dtype_of, local
from parbench.workloads.step.probe import Probe
from parbench.workloads.step.training_step import TrainingStep

CLAIM = "ep_step: the whole training step; what its all-to-alls cost is claimed for this model and batch alone"
TIMED = "timed experts: T is their forward at the mean load of ranks; attention and shared experts cost nothing"
NO_FORMULA = "memory: no closed form of a mixture's activations"


class MixtureStep(TrainingStep):
    """A training step whose mixtures, by number of their layer, take routes that are drawn with its batch.

    A dense model, where ``moe`` is None, has none.
    """

    moe: Moe | None
    measured_axes: tuple[str, ...] = ("ep",)
    _routes: StepRouting | None
    _mixtures: Mapping[int, MoeLayer]

    def check(self) -> int:
        """Return how many elements fail the parity gate, and how many routes one process's router would not take."""
        if self._routes is None:
            return super().check()
        return self._routes.count_wrong(self._mixtures, self._batch, super().check)

    def describe(self) -> Description:
        found, shape, moe = super().describe(), self.spec.shape, self.moe
        if moe is None:
            return found
        details = {
            "routed_parameters": shape.layers * moe.experts * count_expert_parameters(shape, moe),
            "flops_convention": "PaLM: 6 N + 12 L H Q T a token, N of the k experts and shared ones that it meets",
            "expert_ffn": moe.expert_ffn,
        }
        return replace(found, details={**found.details, **details})

    def expected_bytes(self) -> dict[str, float]:
        """Return the closed forms but for experts' tokens, whose bytes are those of the step's own routes."""
        return {
            axis: sent
            for axis, sent in super().expected_bytes().items()
            if axis not in self.measured_axes
        }

    def _draw(self) -> None:
        super()._draw()
        if self._routes is not None:
            self._routes.draw(self._step_number, self._microbatches)

    @property
    def _microbatches(self) -> range:
        """The numbers of this rank's microbatches, of all that a global batch has."""
        first = self.layout.data_rank * self.spec.microbatches
        return range(first, first + self.spec.microbatches)


class EpStep(MixtureStep):
    """A training step with experts inside data parallelism."""

    moe: Moe
    measured_axes = ("ep", "etp")
    _routes: StepRouting

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        spec = StepSpec.of(params)
        tp = self._tp = int(params["tp"])
        self.moe = make_moe(params, spec.shape, world.size, tp)
        each = spec.shape.sequence // tp
        self._positions = range(world.rank % tp * each, (world.rank % tp + 1) * each)
        self._num_tokens = spec.microbatch * each
        self._routes = StepRouting(
            world,
            spec,
            self.moe,
            self._positions,
            [range(i * each, (i + 1) * each) for i in range(tp)],
        )
        self._axes = make_axes(world, self.moe, tp)
        super().__init__(world, params, self._lay_out, strategies.ep_step, outlined=True)

    def describe(self) -> Description:
        found = super().describe()
        return replace(found, details={**found.details, "slots": self.moe.slots(self._num_tokens)})

    def probes(self) -> Sequence[Probe[Any]]:
        """Return what looks into the step: experts' own bytes in place of those that tell nothing of routes."""
        memory, _, overlap = super().probes()
        return memory, self.expert_probe(share=3 / 7 * overlap.share), overlap

    def expert_probe(self, share: float = 1.0) -> ExpertProbe:
        return ExpertProbe(
            world=self._world,
            moe=self.moe,
            routing=self._routes,
            placement=self._axes.placement,
            ep_groups=self._axes.ep_groups,
            etp_groups=self._axes.etp_groups,
            layers=self._mixtures,
            spec=self.spec,
            tokens=self._num_tokens,
            axes=self.layout.axes,
            expected_bytes=self.expected_bytes(),
            claim=CLAIM,
            notes=(NO_FORMULA,),
            share=share,
        )

    def memory_formula(self) -> dict[str, float]:
        """Return the closed form of model state; that of activations is of even routes alone."""
        return asdict(state_of(self.spec.at(self._world.rank)))

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Wait for nothing yet: what waits are the experts, which are not there before the model is laid out."""

    def _fill_distinct_gradients(self) -> None:
        super()._fill_distinct_gradients()
        fill_sums(self.layout.model, self._tp)

    def _lay_out(
        self, model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
    ) -> Layout:
        """Exchange FFNs for mixtures, wrap what is not an expert's, and say what a step is."""
        groups, tp = self._axes.groups, self._tp
        moe_layer.replace_ffns_with_moe(
            model, spec.shape, self.moe, world.seed, placement=self._axes.placement
        )
        self._mixtures = dict(enumerate(moe_layer.find_moe_layers(model)))
        # experts now, which FSDP leaves alone; of all else it has one layer at a time whole
        for i, mixture in self._mixtures.items():
            materialise(mixture.experts, world.seed, world.device, f"layers.{i}.ffn.experts")
        if not params["fsdp"]:
            materialise(model, world.seed, world.device)
        if spec.timed_seconds is not None:
            moe_layer.simulate_experts(model, spec.timed_seconds, self._num_tokens, self._waiter)
        split = (
            split_attention(model, groups["tp"], self._positions, world.device) if tp > 1 else []
        )
        routed = [p for name, p in model.named_parameters() if ".ffn.experts." in name]
        self._copies = {"adp": split, "edp": routed}
        around = self._under_data_parallelism(model, world, spec, bool(params["fsdp"]))
        kernel = (
            [TIMED] if spec.timed else moe_layer.list_kernel_notes(world.device, dtype_of(spec))
        )
        notes = [*([TP_NOTE] if tp > 1 else []), *around.notes, *kernel]
        return replace(
            around,
            axes={**around.axes, **groups},
            loss=lambda tokens: self._loss(around.module, tokens),
            finalize_gradients=self._average_copies,
            reference_model=self._routes.make_reference_model,
            reference_loss=self._routes.compute_reference_loss,
            made_groups=(*around.made_groups, *groups.values()),
            details={},
            notes=tuple(notes),
        )

    def _under_data_parallelism(
        self, model: Transformer, world: World, spec: StepSpec, fsdp: bool
    ) -> Layout:
        """Put what is no expert's and not split under FSDP2 or DDP, synchronised after the last microbatch alone."""
        others = [parameter for parameters in self._copies.values() for parameter in parameters]
        if fsdp:
            return lay_out_fsdp(
                model,
                world,
                spec,
                {"reshard": True, "prefetch": "default", "no_sync": True},
                others,
            )
        ignored = {id(parameter) for parameter in others}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in ignored]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
        params = {"bucket_mb": BUCKET.default, "static_graph": False, "no_sync": True}
        return ddp.lay_out(model, world, spec, params)

    def _loss(self, module: nn.Module, tokens: Tensor) -> Tensor:
        self._routes.assign(
            self._mixtures, self._microbatches[[mine is tokens for mine in self._mine].index(True)]
        )
        first, last = self._positions.start, self._positions.stop
        return loss_of(module, tokens[:, first : last + 1]) + moe_layer.pop_aux_loss(module)

    def _average_copies(self) -> None:
        """Make of gradients, each the sum over the ranks of one copy, the mean over all ranks."""
        for axis, parameters in self._copies.items():
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    if axis in self._axes.groups:
                        dist.all_reduce(gradient, group=self._axes.groups[axis])
                    gradient /= self._world.size


prepare = behind_gate(EpStep, strategies.ep_step)
