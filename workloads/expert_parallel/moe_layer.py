"""A mixture of experts in the place of a layer's FFN: router, experts as grouped products, shared experts.

A token's output is the sum over its k experts of score times what the expert makes of it, and what the shared experts
make of it. Scores are not normalised over the k, nor again where a pair is dropped: a token that loses all its experts
goes on by the residual and the shared ones.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parbench.workloads.expert_parallel import dispatch
from parbench.workloads.expert_parallel.dispatch import Plan, Rows
from parbench.workloads.expert_parallel.groups import Held
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.simulated_compute import SimulatedCompute, simulate_linears
from parbench.workloads.model.transformer import Ffn, Transformer, materialise
from parbench.workloads.step.layout import local


class Router(nn.Module):
    """Scores (T, E) of tokens (T, h) in float32: softmax over experts, or each one's sigmoid."""

    def __init__(self, shape: Shape, moe: Moe) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, shape.hidden))
        self._scores = moe.scores

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x.float(), self.weight.float())
        return logits.sigmoid() if self._scores == "sigmoid" else logits.softmax(-1)


class Experts(nn.Module):
    """The recipe's FFN without biases, one of each expert of this rank, as one product for each matrix of all.

    With a waiter they wait instead, ``seconds_per_row`` forward and as long for each of the two gradients: rows become
    zeros, and so do all gradients.
    """

    def __init__(self, shape: Shape, moe: Moe, held: Held) -> None:
        super().__init__()
        mine = moe.expert_ffn // moe.etp
        inner = (moe.experts_per_rank, shape.hidden, mine)
        self.gate = _parameter(inner, held.mesh, split=2) if shape.recipe == "llama" else None
        self.up = _parameter(inner, held.mesh, split=2)
        self.down = _parameter((moe.experts_per_rank, mine, shape.hidden), held.mesh, split=1)
        self.waiter: SimulatedCompute | None = None
        self.seconds_per_row = 0.0

    def forward(self, rows: Rows) -> Tensor:
        """Return what each row's expert, or this rank's part of it, makes of it, (n, h) -> (n, h)."""
        x = rows.tokens
        if self.waiter is not None:
            waited: Tensor = _Waited.apply(x, self, *map(local, self.parameters()))  # type: ignore[no-untyped-call]
            return waited
        ends = rows.counts.cumsum(0).int()
        wide = F.grouped_mm(x, local(self.up), offs=ends)
        gate = None if self.gate is None else F.grouped_mm(x, local(self.gate), offs=ends)
        return F.grouped_mm(_activated(wide, gate), local(self.down), offs=ends)


def kernel_notes(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Say by which kernel a GPU computes experts' products; nothing of the CPU, which has one way alone."""
    if device.type != "cuda":
        return ()
    return (kernel_note(dtype, torch.cuda.get_device_capability(device)),)


def kernel_note(dtype: torch.dtype, capability: tuple[int, int]) -> str:
    # torch 2.11 and 2.13, aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda; what is not fast is looped over
    if dtype == torch.bfloat16 and capability[0] in (9, 10):
        return "experts: grouped, one kernel for all experts of a matrix"
    here = (
        f"{str(dtype).removeprefix('torch.')} on compute capability {capability[0]}.{capability[1]}"
    )
    return (
        "experts: looped, a product for each after their rows are counted on the host: torch groups bfloat16 on "
        f"compute capability 9.x and 10.x alone, and this is {here}"
    )


def _parameter(size: tuple[int, int, int], mesh: DeviceMesh | None, *, split: int) -> nn.Parameter:
    """Return this rank's experts' matrices: of all by their first dim, of each expert by the dim ``split``."""
    mine = torch.empty(size)
    if mesh is None:
        return nn.Parameter(mine)
    placements = [Shard(0 if name == "ep" else split) for name in mesh.mesh_dim_names or ()]
    return nn.Parameter(DTensor.from_local(mine, mesh, placements, run_check=False))


def _activated(wide: Tensor, gate: Tensor | None) -> Tensor:
    return F.gelu(wide) if gate is None else F.silu(gate) * wide


class MoeLayer(nn.Module):
    """Router, experts and shared experts, (b, s, h) -> (b, s, h), of one source's microbatch.

    ``given`` (T, k) are the routes to take, None where the router chooses, and ``all_routed`` states that none of them
    is NOWHERE; ``chosen`` those that were taken by the number of the microbatch, ``aux`` the loss that asks for
    balance, of the last forward pass.
    """

    def __init__(self, shape: Shape, moe: Moe, held: Held | None = None) -> None:
        super().__init__()
        self.moe, self._held = moe, held or Held()
        self.router = Router(shape, moe)
        self.experts = Experts(shape, moe, self._held)
        self.shared = Ffn(replace(shape, ffn=moe.shared * moe.expert_ffn)) if moe.shared else None
        self.given: Tensor | None = None
        self.all_routed = False
        self.microbatch = 0
        self.chosen: dict[int, Tensor] = {}
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        routes = scores.detach().topk(self.moe.top_k).indices if self.given is None else self.given
        self.chosen[self.microbatch] = routes
        self.aux = self.balance(scores, routes) if self.moe.aux else None
        weights = scores.gather(1, routes.clamp(min=0)).to(x.dtype)
        routed = self.route(tokens, weights, routes).view_as(x)
        out: Tensor = routed if self.shared is None else routed + self.shared(x)
        return out

    def balance(self, scores: Tensor, routes: Tensor) -> Tensor:
        return balance_loss(scores, routes)

    def route(self, tokens: Tensor, weights: Tensor, routes: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts, (T, h).

        Ranks that split experts take each other's tokens too, and add up their parts of what experts make of them.
        """
        split, slots = self._held.split, self.moe.slots(len(tokens))
        all_routed = self.given is None or self.all_routed
        plan = dispatch.make_plan(routes, self.moe.experts, slots, all_routed=all_routed)
        if split is None:
            return self._there_and_back(tokens, weights, plan)
        together = dispatch.gathered(plan.experts_of.int(), split).long()
        all_slots = None if slots is None else slots * split.size()
        plan = dispatch.make_plan(together, self.moe.experts, all_slots, all_routed=all_routed)
        parts = self._there_and_back(
            dispatch.gather_rows(tokens, split), dispatch.gather_rows(weights, split), plan
        )
        return dispatch.sum_rows(parts, split)

    def _there_and_back(self, tokens: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Send tokens to the ranks of their experts and back; a chunk travels while another is computed."""
        trips: list[dispatch.Trip] = []
        for part in dispatch.chunks_of(plan, self.moe.chunks):
            trips.append(
                dispatch.start_trip(self.moe.variant, tokens, weights, part, self._held.group)
            )
            for before in trips[-2:-1]:
                before.give_back(self.experts(before.arrive()))
        trips[-1].give_back(self.experts(trips[-1].arrive()))
        return (
            torch.stack([trip.receive() for trip in trips]).sum(0)
            if len(trips) > 1
            else trips[0].receive()
        )


class DenseMoe(MoeLayer):
    """The same in one process and in the plainest way, to compare with: each expert in turn, drops by counting.

    Where ``moe.tp`` ranks share sequences, each is a source: capacity and balance count its positions of all sequences
    by themselves.
    """

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        self._sources = (
            torch.arange(b * s, device=x.device).view(b, self.moe.tp, -1).transpose(0, 1).flatten(1)
        )
        return super().forward(x)

    def balance(self, scores: Tensor, routes: Tensor) -> Tensor:
        return torch.stack(
            [balance_loss(scores[mine], routes[mine]) for mine in self._sources]
        ).mean()

    def route(self, tokens: Tensor, weights: Tensor, routes: Tensor) -> Tensor:
        out, slots = torch.zeros_like(tokens), self.moe.slots(self._sources.shape[1])
        for mine in self._sources:
            for expert in range(self.moe.experts):
                takes = mine[(routes[mine] == expert).any(1)][:slots]
                weight = weights[takes].where(routes[takes] == expert, 0).sum(1, keepdim=True)
                x, gates = tokens[takes], self.experts.gate
                wide = _activated(
                    x @ self.experts.up[expert], None if gates is None else x @ gates[expert]
                )
                out = out.index_put(
                    (takes,), weight * (wide @ self.experts.down[expert]), accumulate=True
                )
        return out


def balance_loss(scores: Tensor, routes: Tensor) -> Tensor:
    """Return E sum_e f_e P_e: f the share of routes to an expert, P its mean share of scores (arXiv 2101.03961, eq. 4).

    Scores (T, E), routes (T, k); 1 where both are even. Gradients come by P alone.
    """
    experts = scores.shape[1]
    taken = dispatch.count_pairs(routes, experts)
    shares = taken / taken.sum().clamp(min=1)
    return experts * (shares * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()


def aux_loss(model: nn.Module) -> Tensor | float:
    """Return the coefficient times the mean over layers of the loss that asks for balance, of the last forward pass."""
    losses = []
    for mixture in mixtures(model):
        if mixture.aux is not None:
            losses.append(mixture.moe.aux * mixture.aux)
            mixture.aux = None
    return torch.stack(losses).mean() if losses else 0.0


def exchange_ffns(
    model: Transformer,
    shape: Shape,
    moe: Moe,
    seed: int,
    *,
    held: Held | None = None,
    dense: bool = False,
) -> None:
    """Put a mixture of experts in the place of each layer's FFN, with the seed's weights; an outline stays one."""
    like = next(model.parameters())
    for layer in model.layers:
        with torch.device("meta"):
            layer.ffn = (DenseMoe if dense else MoeLayer)(shape, moe, held).to(like.dtype)
    if not like.is_meta:
        materialise(model, seed, like.device)


def mixtures(model: nn.Module) -> list[MoeLayer]:
    return [module for module in model.modules() if isinstance(module, MoeLayer)]


def let_experts_wait(
    model: nn.Module, seconds: float, tokens: int, waiter: SimulatedCompute, *, others: float = 0.0
) -> None:
    """Let the experts of ``model.layers`` wait: T forward at a rank's mean load of ``tokens`` tokens, 2 T backward.

    ``others`` is how long all other products wait, which do not multiply.
    """
    simulate_linears(model, others, waiter)
    for mixture in (layers := mixtures(model)):
        rows = tokens * mixture.moe.top_k * mixture.moe.etp
        mixture.experts.waiter, mixture.experts.seconds_per_row = (
            waiter,
            seconds / len(layers) / rows,
        )


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Any, *weights: Tensor) -> Tensor:
        ctx.experts, ctx.sizes = experts, [weight.shape for weight in weights]
        with experts.waiter.taking(len(x) * experts.seconds_per_row):
            return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        experts, gradient = ctx.experts, gradients[0]
        with experts.waiter.taking(2 * len(gradient) * experts.seconds_per_row):
            return (
                torch.zeros_like(gradient),
                None,
                *(gradient.new_zeros(size) for size in ctx.sizes),
            )
