"""One mixture of experts without a model around it: what the layer and the dispatch alone have in common."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from bench.plan.params import Value
from bench.results.details import Mesh
from bench.world.subject import Description, Explanation
from bench.world.world import World
from workloads.expert_parallel.dispatch import Rows, make_plan, start_trip
from workloads.expert_parallel.expert_axis import make_axis
from workloads.expert_parallel.expert_probe import Seen, explain_experts, exposed_of
from workloads.expert_parallel.moe_case import Moe, moe_of
from workloads.expert_parallel.moe_layer import DenseMoe, MoeLayer
from workloads.expert_parallel.routes import Drawn
from workloads.expert_parallel.routing import BALANCED
from workloads.model.transformer import fill
from workloads.step.training_step import Options

Layer = TypeVar("Layer", bound=MoeLayer)


class Scope:
    """A mixture and its tokens (b, s, h), each source's own in each step; what a step does its heirs say."""

    claim = ""
    backward = True

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        self._world, self._options = world, Options.of(params)
        shape = self._options.shape
        self.moe = moe_of(params, shape, world.size)
        self._num_tokens = self._options.microbatch * shape.sequence
        self._generator = self.moe.generator(world.seed, world.size, self._num_tokens)
        self._routes = Drawn(self._generator, self._num_tokens, world.device)
        self._axis = make_axis(world, self.moe.ep, self.moe.etp)
        world.barrier()  # a group that one rank gives back while another still connects breaks that one
        self.layer = self._made(MoeLayer, self.moe, self._options.dtype)
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        """Do what is timed."""
        raise NotImplementedError

    def reset(self) -> None:
        """Draw the next step's tokens and routes."""
        self._step_number += 1
        self._draw()

    def describe(self) -> Description:
        """Return the sizes of the mixture, and what the row may be used to claim."""
        moe = self.moe
        return Description(
            headline="step_time",
            details={
                "tokens_per_rank": self._num_tokens,
                "slots": moe.slots(self._num_tokens),
                "expert_ffn": moe.expert_ffn,
                **Mesh(axes={name: {"ranks": group.size()} for name, group in self._axis.groups.items()}).as_details,
            },
            notes=(self.claim,),
        )

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Say what routes and all-to-alls cost."""
        shape = self._options.shape
        seen = Seen(
            world=self._world,
            axis=self._axis,
            moe=self.moe,
            mixtures=(self.layer,),
            sizes=(shape.hidden, self._options.dtype.itemsize, self._num_tokens),
            generator=self._generator,
            step_number=lambda: self._step_number,
            backward=self.backward,
        )
        found = explain_experts(seen, self.step, begin, budget_seconds, self._balanced)
        alone = self._axis.group is None and self._axis.split is None
        exposed = {} if alone else exposed_of(self.step, begin, self._world)
        return replace(found, metrics={**found.metrics, **exposed})

    def close(self) -> None:
        """Give back the groups of the expert axis."""
        self._axis.close()

    def _draw(self) -> None:
        self.x, self.upstream = (self.drawn_of(what, self._world.rank) for what in ("tokens", "gradients"))
        self._routes.begin(self._step_number, range(self._world.rank, self._world.rank + 1))
        given = self._routes.of(self._world.rank)
        assert given is None or isinstance(given, Tensor)
        self.layer.given = given

    def drawn_of(self, what: str, source: int) -> Tensor:
        """Return normal numbers (b, s, h) of a source and this step: its tokens, or the gradients of what comes out."""
        name = f"{self._world.seed} {what} {self._step_number} {source}"
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = (self._options.microbatch, self._options.shape.sequence, self._options.shape.hidden)
        return torch.randn(size, generator=chance).to(self._world.device, self._options.dtype)

    def dense(self, dtype: torch.dtype) -> MoeLayer:
        """Return the same mixture in one process, with the weights of the seed."""
        return self._made(DenseMoe, replace(self.moe, ep=1, etp=1), dtype)

    def count_misplaced(self) -> int:
        """Return how many elements of a trip are wrong in which each expert multiplies by its number, from 1 on.

        The reference takes drops by counting the tokens of each expert, in their order.
        """
        with torch.no_grad():
            tokens = self.x.flatten(0, 1)
            routes = self.layer.given
            if routes is None:
                routes = self.layer.router(tokens).topk(self.moe.top_k).indices
            weights = torch.ones(routes.shape, dtype=tokens.dtype, device=tokens.device)
            plan = make_plan(routes, self.moe.experts, self.moe.slots(len(tokens)))
            trip = start_trip(self.moe.variant, tokens, weights, plan, self._axis.group)
            rows = trip.arrive()
            trip.give_back(rows.tokens * self._numbers(rows)[:, None])
            found = trip.receive().float()
            expected = tokens.float() * self._sum_of_numbers(routes)[:, None]
            limit = 4 * torch.finfo(tokens.dtype).eps * self.moe.experts * self.moe.top_k * tokens.abs().float()
            return int((~((found - expected).abs() <= limit)).sum())

    def _numbers(self, rows: Rows) -> Tensor:
        local = self.moe.experts_per_rank
        first = 1 + self._axis.place * local
        return torch.arange(first, first + local, device=rows.counts.device).repeat_interleave(rows.counts)

    def _sum_of_numbers(self, routes: Tensor) -> Tensor:
        """Return for each token the sum of its experts' numbers, dropped ones left out."""
        slots, total = self.moe.slots(len(routes)), torch.zeros(len(routes), device=routes.device)
        for expert in range(self.moe.experts):
            takes = (routes == expert).any(1)
            total += (expert + 1) * (takes if slots is None else takes & (takes.cumsum(0) <= slots))
        return total

    def _balanced(self, now: bool) -> None:
        """From the next step on, take balanced routes in place of the case's, or the case's again."""
        balanced = self.moe.generator(self._world.seed, self._world.size, self._num_tokens, BALANCED)
        self._routes.generator = balanced if now else self._generator

    def _made(self, kind: type[Layer], moe: Moe, dtype: torch.dtype) -> Layer:
        with torch.device(self._world.device):
            module = kind(self._options.shape, moe, self._axis.held if kind is MoeLayer else None).to(dtype)
        fill(module, self._world.seed)
        return module


class Passing(nn.Module):
    """Experts that give back what they get, each of the ranks that split them its part of it."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self._parts = parts

    def forward(self, rows: Rows) -> Tensor:
        """Return the rows."""
        return rows.tokens if self._parts == 1 else rows.tokens / self._parts
