"""Benchmarks of one MoE layer without a model: the complete layer, or only dispatch and combine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.launch.messages import Work
from parbench.bench.plan.params import Value
from parbench.bench.results.details import MeshDetails
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import ExpertRows
from parbench.workloads.expert_parallel.expert_probe import ExpertProbe
from parbench.workloads.expert_parallel.moe_case import Moe, count_expert_parameters
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    ReferenceMoeLayer,
    list_kernel_notes,
    simulate_experts,
    weigh_experts,
)
from parbench.workloads.expert_parallel.step_routing import StepRouting
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.model.transformer import get_dtype, make_generator, set_weights
from parbench.workloads.parallel.mesh import build_expert_mesh, get_full_tensor
from parbench.workloads.parallel.parallelize import make_placement
from parbench.workloads.presets import ep_layer
from parbench.workloads.step.overlap import OverlapProbe
from parbench.workloads.step.probe import Probe, run_probes
from parbench.workloads.step.verify import compare, norm_of_all

SIMULATED_NOTE = (
    "simulated experts: T is their forward pass for the mean load of ranks. "
    "Shared experts take no time"
)


class MoeLayerBenchmark:
    """One MoE layer with new tokens (b, s, h) of each rank in each step."""

    claim = ""
    has_backward = True

    def __init__(self, world: World, **params: Value) -> None:
        self._world = world
        self.spec = ep_layer(params, world.size)
        assert self.spec.moe is not None
        shape = self.spec.shape
        self.moe = self.spec.moe
        self._num_tokens = self.spec.microbatch * shape.sequence
        self._dtype = get_dtype(self.spec)
        self._routing = StepRouting(world, self.spec, self.moe, range(shape.sequence))
        self._mesh = build_expert_mesh(world, self.spec.dims)
        self._placement = make_placement(self._mesh)
        self.layer = MoeLayer(shape, self.moe, self._placement)
        self._initialize(self.layer, self._dtype)
        self._step_number = 0
        self._draw()

    def _initialize(self, layer: MoeLayer, dtype: torch.dtype) -> None:
        layer.to(device=self._world.device, dtype=dtype)
        set_weights(layer, self._world.seed)

    def reset(self) -> None:
        self._step_number += 1
        self._draw()

    def describe(self) -> Description:
        axes = {axis: {"ranks": group.size()} for axis, group in self._list_groups().items()}
        details = {
            "tokens_per_rank": self._num_tokens,
            "slots": self.moe.slots(self._num_tokens),
            "expert_ffn": self.moe.expert_ffn,
            **MeshDetails(axes=axes).as_details,
        }
        return Description(headline="step_time", details=details)

    def _list_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups that dispatch tokens, by axis."""
        groups = self._mesh.groups
        return {axis: groups[axis] for axis in ("ep", "etp") if axis in groups}

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        probe = ExpertProbe(
            world=self._world,
            spec=self.spec,
            tokens=self._num_tokens,
            layers={0: self.layer},
            routing=self._routing,
            placement=self._placement,
            axes=self._list_groups(),
            has_backward=self.has_backward,
            claim=self.claim,
        )
        probes: list[Probe[Any]] = [probe]
        if self.has_backward:
            probes.append(OverlapProbe(self._world, self._list_groups()))
        return run_probes(self._world, probes, self.step, begin, budget_seconds)

    def step(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._mesh.close()

    def _draw(self) -> None:
        rank = self._world.rank
        self.x = self._draw_hidden("tokens", rank)
        self.upstream = self._draw_hidden("gradients", rank)
        self._routing.draw(self._step_number, [rank])
        self._routing.assign({0: self.layer}, rank)

    def _draw_hidden(self, name: str, rank: int) -> Tensor:
        """Return normal numbers (b, s, h), a function of seed, step and rank."""
        random = make_generator(self._world.seed, f"{name} {self._step_number} {rank}")
        size = (self.spec.microbatch, self.spec.shape.sequence, self.spec.shape.hidden)
        return torch.randn(size, generator=random).to(self._world.device, self._dtype)

    def _select_experts(self) -> tuple[Tensor, Tensor]:
        """Return the expert ids and weights (T, k) of this step's tokens."""
        with torch.no_grad():
            scores = self.layer.router(self.x.flatten(0, 1))
            expert_ids = self.layer.assigned_ids
            if expert_ids is None:
                expert_ids = scores.topk(self.moe.top_k).indices
            weights = weigh_experts(self.moe, scores, expert_ids)
        return expert_ids, weights.to(self._dtype)

    @torch.no_grad()
    def count_misplaced(self) -> int:
        """Return the wrong elements if expert e multiplies its tokens by e + 1."""
        expert_ids, _ = self._select_experts()
        tokens = self.x.flatten(0, 1)
        weights = torch.ones_like(expert_ids, dtype=self._dtype)
        group = self._placement.ep_group
        experts = self.layer.experts
        first = (0 if group is None else group.rank()) * self.moe.experts_per_rank
        self.layer.experts = ScalingExperts(self.moe, first + 1)  # type: ignore[assignment]
        out = self.layer.run_experts(tokens, weights, expert_ids)
        self.layer.experts = experts
        return self._count_wrong_sums(out, (expert_ids + 1) * self._find_kept(expert_ids))

    def _count_wrong_sums(self, out: Tensor, factors: Tensor) -> int:
        """Return the elements that are not token times the sum of its factors (T, k)."""
        expected = self.x.detach().flatten(0, 1).float() * factors.float().sum(1, keepdim=True)
        tolerance = 4 * torch.finfo(self._dtype).eps * self.moe.top_k * expected.abs()
        is_right = (out.float() - expected).abs() <= tolerance
        return int((~is_right).sum())

    def _find_kept(self, expert_ids: Tensor) -> Tensor:
        """Return which pairs (T, k) are not dropped, counted expert by expert."""
        is_kept = torch.zeros_like(expert_ids, dtype=torch.bool)
        slots = self.moe.slots(len(expert_ids))
        for expert in range(self.moe.experts):
            takes_expert = expert_ids == expert
            place = takes_expert.any(1).cumsum(0)[:, None]
            is_kept |= takes_expert if slots is None else takes_expert & (place <= slots)
        return is_kept


class LayerBenchmark(MoeLayerBenchmark):
    """Forward and backward pass of the layer, without reduction or update of gradients.

    Gradients of routed experts are sums over the sources of one replica of the experts.
    """

    claim = "ep_layer: one layer without gradient reduction and without overlap with attention"

    def __init__(self, world: World, **params: Value) -> None:
        self._waiter = SimulatedCompute(world.device)
        self._differences: list[str] = []
        super().__init__(world, **params)
        if self.spec.simulated_seconds is not None:
            model = nn.Module()
            model.layers = nn.ModuleList([self.layer])
            simulate_experts(model, self.spec.simulated_seconds, self._num_tokens, self._waiter)

    def _draw(self) -> None:
        self._waiter.reset_debt()
        super()._draw()
        self.x.requires_grad_()

    def step(self) -> None:
        self.layer.zero_grad()
        self._out = self.layer(self.x)
        self._out.backward(self.upstream)

    def check(self) -> int:
        """Return the elements of output and gradients that differ from the reference.

        For simulated experts it is the count of ``count_misplaced``.
        """
        if self.spec.is_simulated:
            return self.count_misplaced()
        actual = {"out": self._out.detach(), **_get_gradients(self.layer, self.x)}
        reference = self._run_reference(torch.float32)
        low_precision = None
        if self._dtype != torch.float32:
            low_precision = self._run_reference(self._dtype)
        gradients = [reference[name] for name in reference if name not in ("out", "input")]
        wrong_tensors = list(compare(actual, reference, low_precision, norm_of_all(gradients)))
        self._differences = [str(tensor) for tensor in wrong_tensors]
        return sum(tensor.num_elements for tensor in wrong_tensors)

    def differences(self) -> Sequence[str]:
        return self._differences

    def describe(self) -> Description:
        description = super().describe()
        experts_per_token = self.moe.top_k + self.moe.shared
        weights = experts_per_token * count_expert_parameters(self.spec.shape, self.moe)
        notes = list_kernel_notes(self._world.device, self._dtype)
        if self.spec.is_simulated:
            notes = (SIMULATED_NOTE,)
        tokens = self._num_tokens * self._world.size
        return replace(
            description,
            work=(Work(name="tokens_per_second", amount=tokens),),
            details={**description.details, "flops_per_rank": 6.0 * weights * self._num_tokens},
            notes=notes,
        )

    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return output and gradients of one process.

        Those of routed experts are sums over all sources of this replica.
        """
        layer = ReferenceMoeLayer(self.spec.shape, replace(self.moe, ep=1, etp=1))
        self._initialize(layer, dtype)
        expected: dict[str, Tensor] = {}
        for source in self._find_sources():
            layer.zero_grad()
            self._routing.assign({0: layer}, source, is_reference=True)
            x = self._draw_hidden("tokens", source).to(dtype).requires_grad_()
            out = layer(x)
            out.backward(self._draw_hidden("gradients", source).to(dtype))
            for name, gradient in _get_gradients(layer, x).items():
                if name.startswith("experts."):
                    expected[name] = expected.get(name, 0) + gradient.clone()
                elif source == self._world.rank:
                    expected[name] = gradient.clone()
            if source == self._world.rank:
                expected["out"] = out.detach()
        return expected

    def _find_sources(self) -> list[int]:
        """Return the ranks whose tokens the experts of this rank's replica take."""
        dims = self.spec.dims
        [ep_group] = [group for group in dims.expert_groups() if self._world.rank in group]
        sources = []
        for etp_group in dims.expert_split_groups():
            if not set(etp_group).isdisjoint(ep_group):
                sources += etp_group
        return sources


def _get_gradients(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    gradients = {"input": x.grad}
    gradients |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: get_full_tensor(grad) for name, grad in gradients.items() if grad is not None}


class DispatchBenchmark(MoeLayerBenchmark):
    """Dispatch and combine of the forward pass. Experts return their tokens.

    Experts are selected before the timed step.
    """

    claim = "ep_dispatch: forward dispatch and combine without a layer, a step or overlap"
    has_backward = False

    def _draw(self) -> None:
        super()._draw()
        self.layer.experts = ScalingExperts(self.moe)  # type: ignore[assignment]
        self._expert_ids, self._weights = self._select_experts()
        self._out = torch.full_like(self.x.flatten(0, 1), torch.nan)

    @torch.no_grad()
    def step(self) -> None:
        self.layer.expert_ids[0] = self._expert_ids
        tokens = self.x.flatten(0, 1)
        self._out = self.layer.run_experts(tokens, self._weights, self._expert_ids)

    def check(self) -> int:
        """Return the wrong elements of the last step and of ``count_misplaced``."""
        weights = self._weights * self._find_kept(self._expert_ids)
        return self._count_wrong_sums(self._out, weights) + self.count_misplaced()

    def describe(self) -> Description:
        pairs = self._num_tokens * self.moe.top_k * self._world.size
        work = (Work(name="pairs_per_second", amount=pairs),)
        return replace(super().describe(), work=work)


class ScalingExperts(nn.Module):
    """Experts that return their tokens, times ``first_factor``, ``first_factor + 1`` and so on.

    Without a factor they return their tokens. Those that ``etp`` splits return a part of the sum.
    """

    def __init__(self, moe: Moe, first_factor: int | None = None) -> None:
        super().__init__()
        self._moe = moe
        self._first_factor = first_factor

    def forward(self, rows: ExpertRows) -> Tensor:
        results = rows.tokens
        if self._first_factor is not None:
            factors = torch.arange(self._moe.experts_per_rank, device=results.device)
            factors = (factors + self._first_factor).repeat_interleave(rows.counts)
            results = results * factors[:, None]
        return results if self._moe.etp == 1 else results / self._moe.etp


prepare = LayerBenchmark
prepare_dispatch = DispatchBenchmark
