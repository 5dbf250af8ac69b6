"""Benchmarks of one MoE layer without a model: the complete layer, or only dispatch and combine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parbench.bench.plan.params import Value
from parbench.bench.world.benchmark import Description, Explanation, Work
from parbench.bench.world.world import World
from parbench.workloads.expert_parallel.dispatch import make_exchange
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    ReferenceMoeLayer,
    combine_by_expert,
    weigh_experts,
)
from parbench.workloads.layers.layer_benchmark import LayerBenchmark, collect_tensors
from parbench.workloads.mesh.mesh import build_mesh
from parbench.workloads.model.transformer import DTYPES, set_weights
from parbench.workloads.presets import build_ep_step
from parbench.workloads.probes.overlap import OverlapProbe
from parbench.workloads.probes.probe import Probe, run_probes
from parbench.workloads.probes.sent_bytes import CommBytesProbe
from parbench.workloads.step.expert_probe import ExpertProbe
from parbench.workloads.step.expert_traffic import compute_expert_bytes
from parbench.workloads.step.step_routing import StepRouting


class MoeLayerBenchmark(LayerBenchmark):
    """The benchmark of one MoE layer's forward and backward pass, without a model.

    In each step, every rank has new random tokens, (sequences, positions, hidden). Gradients are
    not reduced over data ranks. The gradients of a routed expert are sums over the tokens that the
    expert receives from all ranks.
    """

    has_backward = True
    """True if the timed step has a backward pass."""

    def __init__(self, world: World, **params: Value) -> None:
        """Make the layer on all ranks of ``world``.

        ``params`` are the values of the benchmark's parameters by name.
        """
        self.spec = build_ep_step(params, world.size)
        super().__init__(world, DTYPES[self.spec.bytes_per_element])
        assert self.spec.moe is not None
        self.moe = self.spec.moe
        self._num_tokens = self.spec.local_tokens
        self._routing = StepRouting(world, self.spec, range(self.spec.shape.sequence))
        self._mesh = build_mesh(world, self.spec.dims, has_experts=True, unused_axes=["dp", "edp"])
        self.layer: MoeLayer = MoeLayer(self.spec.shape, self.moe, self._mesh)
        self._initialize(self.layer, self._dtype)
        self._draw()

    def _initialize(self, layer: MoeLayer, dtype: torch.dtype) -> None:
        """Move a layer to the device and to ``dtype``, and set its initial weights.

        The weights depend on the seed of the benchmark and the names of the parameters.
        """
        layer.to(device=self._world.device, dtype=dtype)
        set_weights(layer, self._world.seed)

    def _draw(self) -> None:
        """Draw this rank's tokens, output gradients and expert ids of tokens for the next step.

        The tokens take the drawn experts in place of those that the layer's router would choose.
        With the routing ``router``, no expert ids are drawn, and the router chooses in forward.
        """
        rank = self._world.rank
        self.x = self._draw_hidden("tokens", rank).requires_grad_()
        self.output_gradient = self._draw_hidden("gradients", rank)
        self._routing.draw(self._step_number, [rank])
        self._routing.assign({0: self.layer}, rank)

    def _draw_hidden(self, name: str, rank: int) -> Tensor:
        """Return random activations of a rank, (sequences, positions, hidden).

        They depend on the seed, the step, the ``rank``, and ``name``, such as "tokens".
        """
        shape = self.spec.shape
        return self._draw_tensor(
            f"{name} {rank}", self.spec.microbatch, shape.sequence, shape.hidden
        )

    def _run_reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the layer's output and gradients in a single process, by tensor name.

        The names are those of ``collect_tensors``, and all tensors are in ``dtype``. The gradients
        of routed experts are sums over the tokens of all ranks of this rank's ``ep`` group. The
        output and all other gradients are for this rank's tokens only.
        """
        layer = ReferenceMoeLayer(self.spec.shape, self.moe.on_one_rank())
        self._initialize(layer, dtype)
        tensors: dict[str, Tensor] = {}
        [ep_group] = [
            group for group in self.spec.dims.expert_groups("ep") if self._world.rank in group
        ]
        for source in ep_group:
            self._routing.assign({0: layer}, source, is_reference=True)
            x = self._draw_hidden("tokens", source).to(dtype).requires_grad_()
            output = layer(x)
            output.backward(self._draw_hidden("gradients", source).to(dtype))
            if source == self._world.rank:
                tensors = collect_tensors(layer, x, output)
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            for name, parameter in layer.named_parameters():
                if not name.startswith("experts."):
                    parameter.grad = None
        for name, parameter in layer.experts.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient of experts.{name}"] = parameter.grad
        return tensors

    def describe(self) -> Description:
        """Return the tokens that all ranks process in a step, and the mesh for its record.

        The tokens divided by the step's seconds give the metric ``tokens_per_second``.
        """
        axes = {"ep": {"ranks": self.moe.ep}} if self.moe.ep > 1 else {}
        tokens = self._num_tokens * self._world.size
        return Description(
            headline="step_time",
            work=(Work(name="tokens_per_second", amount=tokens),),
            details={"axes": axes},
            notes=("one layer, without gradient reduction and without overlap with attention",),
        )

    def explain_step(self, reset: Callable[[], None], budget_seconds: float) -> Explanation:
        """Return metrics of sent bytes, expert load, exchanges of tokens and, with backward, overlap.

        They are measured in further steps, which take about ``budget_seconds``. ``reset`` is called
        before each step. All ranks take part.
        """
        groups = {axis: group for axis, group in self._mesh.groups.items() if axis == "ep"}
        layers = {0: self.layer}

        compute_expected = partial(
            compute_expert_bytes, self._world, self.spec, layers, has_backward=self.has_backward
        )
        probes: list[Probe[Any]] = [
            CommBytesProbe(groups, compute_expected),
            ExpertProbe(
                world=self._world,
                spec=self.spec,
                layers=layers,
                ep_group=groups.get("ep"),
            ),
        ]
        if self.has_backward:
            probes.append(OverlapProbe(self._world, groups))
        return run_probes(self._world, probes, self.step, reset, budget_seconds)

    def close(self) -> None:
        """Destroy the process groups. All ranks must call this method."""
        self._mesh.close()


class DispatchBenchmark(MoeLayerBenchmark):
    """The benchmark of dispatch and combine in forward, with experts that return their tokens.

    The experts of tokens are selected before the timed step.
    """

    has_backward = False

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw tokens, and choose their experts and weights for the next step, before it is timed.

        The last output is replaced by NaN, so that the check finds a step that writes nothing.
        """
        super()._draw()
        self._tokens = self.x.flatten(0, 1)
        scores = self.layer.router(self._tokens)
        self._expert_ids = self.layer.select_experts(scores)
        self._weights = weigh_experts(self.moe, scores, self._expert_ids).to(self._dtype)
        self.layer.expert_ids[0] = self._expert_ids
        self.output = torch.full_like(self._tokens, torch.nan)

    def step(self) -> None:
        """Send this rank's tokens to the ranks of their experts, and combine the results.

        The experts only return their tokens. There is no backward pass.
        """
        self.output = self._exchange_tokens(None)

    @torch.no_grad()
    def _exchange_tokens(self, factors: Tensor | None) -> Tensor:
        """Dispatch this rank's tokens, and return their combined results, (tokens, hidden).

        Each expert of this rank multiplies its tokens by its factor in ``factors``, (local
        experts,). With None, experts return their tokens unchanged.
        """
        plan = self.layer.plan_dispatch(self._expert_ids)
        group = self._mesh.groups.get("ep")
        exchange = make_exchange(self.moe.variant, self._tokens, self._weights, plan, group)
        rows = exchange.dispatch()
        results = rows.tokens
        if factors is not None:
            results = results * factors.to(results).repeat_interleave(rows.counts)[:, None]
        return exchange.combine(results)

    def check(self) -> int:
        """Return the number of wrong output elements of the last step and of one further step.

        In the last step, experts return their tokens unchanged. In the further step, each expert
        multiplies its tokens by a factor of its own. A token that was sent to a wrong expert then
        has a wrong result. All ranks must call this method, because the further step exchanges
        tokens. The result counts the elements of this rank's output only.
        """
        wrong = self._count_wrong(self.output, torch.ones(self.moe.experts))
        group = self._mesh.groups.get("ep")
        first = (0 if group is None else group.rank()) * self.moe.experts_per_rank
        factors = torch.arange(1.0, self.moe.experts + 1)
        output = self._exchange_tokens(factors[first : first + self.moe.experts_per_rank])
        return wrong + self._count_wrong(output, factors)

    def _count_wrong(self, output: Tensor, factors: Tensor) -> int:
        """Return the number of elements of ``output`` that differ from a single process's result.

        ``output`` are the combined results (tokens, hidden) of this rank. ``factors`` has the
        factor by which each expert of all ranks multiplies its tokens, (experts,).
        """
        expected = combine_by_expert(
            self._tokens.float(),
            self._weights.float(),
            self._expert_ids,
            self.moe.slots(self._num_tokens),
            lambda tokens, expert: tokens * factors[expert].item(),
        )
        tolerance = 4 * torch.finfo(self._dtype).eps * self.moe.top_k * expected.abs()
        is_right = (output.float() - expected).abs() <= tolerance
        return int((~is_right).sum())

    def describe(self) -> Description:
        """Return the pairs of token and expert that all ranks dispatch in a step, and facts.

        The pairs divided by the step's seconds give ``pairs_per_second``. The facts for the record
        are those of the MoE layer.
        """
        pairs = self._num_tokens * self.moe.top_k * self._world.size
        work = (Work(name="pairs_per_second", amount=pairs),)
        return replace(
            super().describe(),
            work=work,
            notes=("forward dispatch and combine, without a layer, a step or overlap",),
        )
