"""One mixture of experts without a model around it: the whole layer, or dispatch and combine alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from parbench.bench.launch.messages import Work
from parbench.bench.plan.params import Value
from parbench.bench.results.details import MeshDetails
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import Rows, make_plan, start_trip
from parbench.workloads.expert_parallel.expert_probe import ExpertProbe
from parbench.workloads.expert_parallel.groups import make_axes
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of, num_expert_parameters
from parbench.workloads.expert_parallel.moe_layer import (
    DenseMoe,
    MoeLayer,
    kernel_notes,
    let_experts_wait,
)
from parbench.workloads.expert_parallel.routes import Routes
from parbench.workloads.model.timed_compute import TimedCompute
from parbench.workloads.model.transformer import fill, generator
from parbench.workloads.step.layout import dtype_of, end_groups, whole
from parbench.workloads.step.parity import compare, norm_of_all
from parbench.workloads.step.probe import run_probes

Layer = TypeVar("Layer", bound=MoeLayer)


class Scope:
    """A mixture and its tokens (b, s, h), each source's own in each step; what a step does its heirs say."""

    claim = ""
    backward = True

    def __init__(self, world: World, **params: Value) -> None:
        self._world, self.spec = world, StepSpec.of(params)
        shape = self.spec.shape
        self.moe = moe_of(params, shape, world.size)
        self._num_tokens = self.spec.microbatch * shape.sequence
        self._routes = Routes(world, self.spec, self.moe, range(shape.sequence))
        self._axes = make_axes(world, self.moe)
        world.barrier()  # a group that one rank gives back while another still connects breaks that one
        self.layer = self._made(MoeLayer, self.moe, dtype_of(self.spec))
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        self._step_number += 1
        self._draw()

    def describe(self) -> Description:
        details = {
            "tokens_per_rank": self._num_tokens,
            "slots": self.moe.slots(self._num_tokens),
            "expert_ffn": self.moe.expert_ffn,
            **MeshDetails(
                axes={name: {"ranks": group.size()} for name, group in self._axes.groups.items()}
            ).as_details,
        }
        return Description(headline="step_time", details=details)

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        probe = ExpertProbe(
            world=self._world,
            moe=self.moe,
            axes=self._axes,
            routes=self._routes,
            mixtures=(self.layer,),
            spec=self.spec,
            tokens=self._num_tokens,
            counted={name: group for name, group in self._axes.groups.items() if name != "edp"},
            backward=self.backward,
            traced=True,
            claim=self.claim,
        )
        return run_probes(self._world, [probe], self.step, begin, budget_seconds)

    def close(self) -> None:
        end_groups(self._axes.groups.values())

    def _draw(self) -> None:
        rank = self._world.rank
        self.x, self.upstream = (self.drawn_of(what, rank) for what in ("tokens", "gradients"))
        self._routes.begin(self._step_number, [rank])
        self._routes.give({0: self.layer}, rank)

    def drawn_of(self, what: str, source: int) -> Tensor:
        """Return normal numbers (b, s, h) of a source and this step: its tokens, or the gradients of what comes out."""
        chance = generator(self._world.seed, f"{what} {self._step_number} {source}")
        size = (self.spec.microbatch, self.spec.shape.sequence, self.spec.shape.hidden)
        return torch.randn(size, generator=chance).to(self._world.device, dtype_of(self.spec))

    def count_misplaced(self) -> int:
        """Return how many elements of a trip are wrong in which each expert multiplies by its number, from 1 on."""
        with torch.no_grad():
            tokens = self.x.flatten(0, 1)
            if (routes := self.layer.given) is None:
                routes = self.layer.router(tokens).topk(self.moe.top_k).indices
            plan = make_plan(routes, self.moe.experts, self.moe.slots(len(tokens)))
            weights = tokens.new_ones(routes.shape)
            trip = start_trip(self.moe.variant, tokens, weights, plan, self._axes.held.group)
            rows = trip.arrive()
            trip.give_back(rows.tokens * self._numbers(rows)[:, None])
            found = trip.receive().float()
            expected = tokens.float() * ((routes + 1) * self._kept(routes)).sum(1, keepdim=True)
            limit = (
                4
                * torch.finfo(tokens.dtype).eps
                * self.moe.experts
                * self.moe.top_k
                * tokens.abs().float()
            )
            return int((~((found - expected).abs() <= limit)).sum())

    def _numbers(self, rows: Rows) -> Tensor:
        group, local = self._axes.held.group, self.moe.experts_per_rank
        first = 1 + (0 if group is None else group.rank()) * local
        return torch.arange(first, first + local, device=rows.counts.device).repeat_interleave(
            rows.counts
        )

    def _kept(self, routes: Tensor) -> Tensor:
        """Return which pairs (T, k) travel, by counting the tokens of each expert in their order."""
        kept, slots = torch.zeros_like(routes, dtype=torch.bool), self.moe.slots(len(routes))
        for expert in range(self.moe.experts):
            takes = routes == expert
            kept |= takes if slots is None else takes & (takes.any(1).cumsum(0) <= slots)[:, None]
        return kept

    def _made(self, kind: type[Layer], moe: Moe, dtype: torch.dtype) -> Layer:
        with torch.device(self._world.device):
            module = kind(self.spec.shape, moe, self._axes.held if kind is MoeLayer else None).to(
                dtype
            )
        fill(module, self._world.seed)
        return module


class LayerStep(Scope):
    """Forward and backward of one mixture; gradients stay where they are, and nothing is updated.

    Experts' gradients are sums over the sources of one copy, the others' are of this rank's tokens.
    """

    claim = "ep_layer: one layer, forward and backward; no gradient is summed over copies, and no attention hides it"

    def __init__(self, world: World, **params: Value) -> None:
        self._waiter = TimedCompute(world.device)
        self._differences: list[str] = []
        super().__init__(world, **params)
        if self.spec.timed_seconds is not None:
            around = nn.Module()
            around.layers = nn.ModuleList([self.layer])
            let_experts_wait(around, self.spec.timed_seconds, self._num_tokens, self._waiter)

    def step(self) -> None:
        self.layer.zero_grad()
        self._out = self.layer(self.x)
        self._out.backward(self.upstream)

    def check(self) -> int:
        """Return how many elements of output and gradients differ from one process's; of waits, what is misplaced."""
        if self.spec.timed:
            return self.count_misplaced()
        found = {"out": self._out.detach(), "input": self.x.grad, **_gradients_of(self.layer)}
        right = {name: tensor for name, tensor in found.items() if tensor is not None}
        dtype = dtype_of(self.spec)
        reference = self._reference(torch.float32)
        low_precision = None if dtype == torch.float32 else self._reference(dtype)
        norm = norm_of_all(
            tensor for name, tensor in reference.items() if name not in ("out", "input")
        )
        compared = list(compare(right, reference, low_precision, norm))
        self._differences = [
            str(one) if one.name == "out" else f"gradient of {one}" for one in compared if one.wrong
        ]
        return sum(one.wrong for one in compared)

    def differences(self) -> Sequence[str]:
        return self._differences

    def describe(self) -> Description:
        found, moe = super().describe(), self.moe
        flops = (
            6.0
            * (moe.top_k + moe.shared)
            * num_expert_parameters(self.spec.shape, moe)
            * self._num_tokens
        )
        timed = (
            "timed experts: T is their forward at the mean load of ranks; shared experts cost nothing",
        )
        kernel = timed if self.spec.timed else kernel_notes(self._world.device, dtype_of(self.spec))
        return replace(
            found,
            work=(Work(name="tokens_per_second", amount=self._num_tokens * self._world.size),),
            details={**found.details, "flops_per_rank": flops},
            notes=(*found.notes, *kernel),
        )

    def _draw(self) -> None:
        self._waiter.forget()
        super()._draw()
        self.x.requires_grad_()

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return one process's output and gradients: experts' of all sources of this copy, the rest of this rank."""
        alone = self._made(DenseMoe, replace(self.moe, ep=1, etp=1), dtype)
        expected: dict[str, Tensor] = {}
        for source in self._axes.sources:
            alone.zero_grad()
            self._routes.give({0: alone}, source, whole=True)
            x = self.drawn_of("tokens", source).to(dtype).requires_grad_()
            out = alone(x)
            out.backward(self.drawn_of("gradients", source).to(dtype))
            mine = source == self._world.rank
            for name, gradient in _gradients_of(alone).items():
                if name.startswith("experts."):
                    expected[name] = (
                        expected[name] + gradient if name in expected else gradient.clone()
                    )
                elif mine:
                    expected[name] = gradient.clone()
            if mine:
                assert x.grad is not None
                expected |= {"out": out.detach(), "input": x.grad}
        return expected


def _gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


class DispatchStep(Scope):
    """The forward way there and back; experts give back what they get, and nothing has gradients.

    Scores are taken before it is timed.
    """

    claim = "ep_dispatch: forward dispatch and combine alone; no claim about a layer, a step, or what compute hides"
    backward = False

    def step(self) -> None:
        self.layer.chosen[0] = self._chosen
        with torch.no_grad():
            self._out = self.layer.route(self.x.flatten(0, 1), self._weights, self._chosen)

    def check(self) -> int:
        """Return how many elements of the last step are not token times weights, and how many are misplaced."""
        scale = (self._weights.float() * self._kept(self._chosen)).sum(1, keepdim=True)
        expected = self.x.flatten(0, 1).float() * scale
        limit = 4 * torch.finfo(self.x.dtype).eps * self.moe.top_k * expected.abs()
        return (
            int((~((self._out.float() - expected).abs() <= limit)).sum()) + self.count_misplaced()
        )

    def describe(self) -> Description:
        pairs = self._num_tokens * self.moe.top_k * self._world.size
        return replace(super().describe(), work=(Work(name="pairs_per_second", amount=pairs),))

    def _draw(self) -> None:
        super()._draw()
        self.layer.experts = Passing(self.moe.etp)  # type: ignore[assignment]
        with torch.no_grad():
            scores = self.layer.router(self.x.flatten(0, 1))
            given = self.layer.given
            self._chosen = scores.topk(self.moe.top_k).indices if given is None else given
            self._weights = scores.gather(1, self._chosen.clamp(min=0)).to(self.x.dtype)
        self._out = torch.full_like(self.x.flatten(0, 1), torch.nan)


class Passing(nn.Module):
    """Experts that give back what they get, each of the ranks that split them its part of it."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self._parts = parts

    def forward(self, rows: Rows) -> Tensor:
        return rows.tokens if self._parts == 1 else rows.tokens / self._parts


prepare, prepare_dispatch = LayerStep, DispatchStep
