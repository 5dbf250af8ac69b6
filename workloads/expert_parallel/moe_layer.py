"""A mixture of experts (MoE) in place of a layer's FFN: router, routed experts, shared experts.

A token's output is the sum of its k experts' results, times their weights, and of the results of the
shared experts. A token whose experts are all full keeps the residual and the shared experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parbench.bench.world import accelerator
from parbench.workloads.expert_parallel import dispatch
from parbench.workloads.expert_parallel.dispatch import DispatchPlan, ExpertRows
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.simulated_compute import SimulatedCompute
from parbench.workloads.model.transformer import Ffn, Transformer
from parbench.workloads.parallel.mesh import Mesh, get_local_tensor


class Router(nn.Module):
    """Scores (T, E) of tokens (T, h) in float32: the softmax over experts."""

    def __init__(self, shape: Shape, moe: Moe) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).softmax(-1)


def weigh_experts(moe: Moe, scores: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the weights (T, k) of each token's experts from the token's scores (T, E).

    Renormalized scores are the softmax over the logits of the chosen experts, as in Mixtral, arXiv
    2401.04088, section 2.1. With one expert per token, scores are not renormalized, because the
    weight would be constant.
    """
    weights = scores.gather(1, expert_ids)
    if moe.renormalize and moe.top_k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return weights


class Experts(nn.Module):
    """FFNs without biases of this rank's experts, as one grouped GEMM for each of their matrices.

    Simulated experts wait instead. Their results and all gradients are zeros.
    """

    def __init__(self, shape: Shape, moe: Moe, mesh: DeviceMesh | None) -> None:
        super().__init__()
        ffn = moe.expert_ffn // moe.etp
        size_in = (moe.experts_per_rank, shape.hidden, ffn)
        size_out = (moe.experts_per_rank, ffn, shape.hidden)
        self.gate = _make_parameter(size_in, mesh, 2) if shape.recipe == "llama" else None
        self.up = _make_parameter(size_in, mesh, 2)
        self.down = _make_parameter(size_out, mesh, 1)
        self.waiter: SimulatedCompute | None = None
        self.seconds_per_row = 0.0  # of simulated experts: forward, and each of two gradients

    def forward(self, rows: ExpertRows) -> Tensor:
        """Return the results of the experts, or of this rank's part of them, (rows, h)."""
        x = rows.tokens
        if self.waiter is not None:
            results: Tensor = _SimulatedExperts.apply(
                x, self, *map(get_local_tensor, self.parameters())
            )  # type: ignore[no-untyped-call]
            return results
        row_ends = rows.counts.cumsum(0).int()
        hidden = F.grouped_mm(x, get_local_tensor(self.up), offs=row_ends)
        gate = None
        if self.gate is not None:
            gate = F.grouped_mm(x, get_local_tensor(self.gate), offs=row_ends)
        return F.grouped_mm(_activate(hidden, gate), get_local_tensor(self.down), offs=row_ends)


def _make_parameter(
    size: tuple[int, int, int], mesh: DeviceMesh | None, etp_dim: int
) -> nn.Parameter:
    """Return the matrices of this rank's experts. ``etp`` splits dimension ``etp_dim``."""
    weights = torch.empty(size)
    if mesh is None:
        return nn.Parameter(weights)
    dim_by_axis = {"ep": 0, "etp": etp_dim}
    placements = [Shard(dim_by_axis[name]) for name in mesh.mesh_dim_names or ()]
    return nn.Parameter(DTensor.from_local(weights, mesh, placements, run_check=False))


def _activate(hidden: Tensor, gate: Tensor | None) -> Tensor:
    """Return GELU of ``hidden``, or with a gate SwiGLU."""
    return F.gelu(hidden) if gate is None else F.silu(gate) * hidden


def list_kernel_notes(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return a note if torch does not group the experts' GEMMs on a GPU.

    Source: torch 2.11 and 2.13, aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda.
    """
    if device.type != "cuda":
        return ()
    major, minor = accelerator.get_capability(device)
    if dtype == torch.bfloat16 and major in (9, 10):
        return ()
    name = str(dtype).removeprefix("torch.")
    return (
        "experts: one GEMM per expert after the host has read the counts, because torch groups "
        f"only bfloat16 on compute capability 9.x and 10.x. This is {name} on {major}.{minor}",
    )


class MoeLayer(nn.Module):
    """Router, experts and shared experts for one source's microbatch, (b, s, h) -> (b, s, h).

    The ranks of the mesh's ``ep`` group hold different experts. The ranks of its ``etp`` group hold
    different parts of each expert. Without a mesh, this rank holds all experts.
    """

    def __init__(self, shape: Shape, moe: Moe, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.moe = moe
        self._ep_group = mesh.groups.get("ep") if mesh else None
        self._etp_group = mesh.groups.get("etp") if mesh else None
        self.router = Router(shape, moe)
        self.experts = Experts(shape, moe, mesh.experts if mesh else None)
        shared_shape = replace(shape, ffn=moe.shared * moe.expert_ffn)
        self.shared = Ffn(shared_shape) if moe.shared else None
        self.assigned_ids: Tensor | None = None
        """Expert ids (T, k) to take, None if the router selects experts."""
        self.microbatch = 0
        """The number of the next microbatch."""
        self.expert_ids: dict[int, Tensor] = {}
        """The expert ids taken, by microbatch."""
        self.aux_weight = 0.0
        """The factor of the load-balancing loss in the gradients of a step."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        expert_ids = self.select_experts(scores.detach())
        self.expert_ids[self.microbatch] = expert_ids
        weights = weigh_experts(self.moe, scores, expert_ids).to(x.dtype)
        output = self.run_experts(tokens, weights, expert_ids).view_as(x)
        if self.shared is not None:
            output = output + self.shared(x)
        return self.add_balance_loss(output, scores, expert_ids) if self.moe.aux else output

    def select_experts(self, scores: Tensor) -> Tensor:
        """Return the expert ids (T, k) of tokens from their scores (T, E).

        Assigned ids, which a case may fix, replace the experts with the best scores.
        """
        if self.assigned_ids is not None:
            return self.assigned_ids
        return scores.topk(self.moe.top_k).indices

    def add_balance_loss(self, output: Tensor, scores: Tensor, expert_ids: Tensor) -> Tensor:
        """Return ``output`` with the load-balancing loss attached to its backward pass.

        The loss is attached to the activations, as in Megatron Core, because in a pipeline this
        rank may not compute the loss of the model.
        """
        loss = self.aux_weight * compute_balance_loss(scores, expert_ids)
        added: Tensor = _AddLoss.apply(output, loss)  # type: ignore[no-untyped-call]
        return added

    def plan_dispatch(self, expert_ids: Tensor) -> DispatchPlan:
        """Return the plan of one source's pairs of token and expert."""
        slots = self.moe.slots(len(expert_ids))
        num_pairs = expert_ids.numel() if slots is None else None
        return dispatch.plan_dispatch(expert_ids, self.moe.experts, slots, num_pairs)

    def run_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, (T, h).

        Ranks that split experts gather each other's tokens and sum their parts of the results.
        """
        plan = self.plan_dispatch(expert_ids)
        group = self._etp_group
        if group is None:
            return self._exchange(tokens, weights, plan)
        tokens, weights, expert_ids = dispatch.gather_routing(tokens, weights, plan, group)
        num_pairs = None if plan.num_pairs is None else expert_ids.numel()
        plan = dispatch.plan_dispatch(expert_ids, self.moe.experts, num_pairs=num_pairs)
        return dispatch.reduce_scatter_rows(self._exchange(tokens, weights, plan), group)

    def _exchange(self, tokens: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
        """Dispatch tokens to their experts, compute, and combine the results."""
        exchange = dispatch.make_exchange(self.moe.variant, tokens, weights, plan, self._ep_group)
        return exchange.combine(self.experts(exchange.dispatch()))


class _AddLoss(torch.autograd.Function):
    """Returns a tensor unchanged, and gives the loss a gradient of 1 in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones((), dtype=ctx.loss_dtype)


NEAR_SCORES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""The difference of scores, by dtype, below which rounding may change their order."""


class ReferenceMoeLayer(MoeLayer):
    """The same layer in one process, computed expert by expert, to verify ``MoeLayer``.

    Each part of a sequence that a rank holds is a source with its own capacity and balance.
    ``positions_by_source`` has the positions of each part. None means one source.
    """

    positions_by_source: Sequence[Sequence[int]] | None = None
    num_misrouted = 0
    """The number of tokens whose assigned experts differ from the router's selection."""
    aux_loss: Tensor | None = None
    """The weighted load-balancing loss of the last forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        token_numbers = torch.arange(batch * sequence, device=x.device).view(batch, sequence)
        sources = self.positions_by_source or [range(sequence)]
        self._tokens_by_source = [token_numbers[:, list(source)].flatten() for source in sources]
        return super().forward(x)

    def select_experts(self, scores: Tensor) -> Tensor:
        expert_ids = super().select_experts(scores)
        tolerance = NEAR_SCORES[self.router.weight.dtype]
        self.num_misrouted = count_misrouted(scores, expert_ids, tolerance)
        return expert_ids

    def add_balance_loss(self, output: Tensor, scores: Tensor, expert_ids: Tensor) -> Tensor:
        losses = [
            compute_balance_loss(scores[tokens], expert_ids[tokens])
            for tokens in self._tokens_by_source
        ]
        self.aux_loss = self.moe.aux * torch.stack(losses).mean()
        return output

    def run_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for source in self._tokens_by_source:
            slots = self.moe.slots(len(source))
            result = combine_by_expert(
                tokens[source], weights[source], expert_ids[source], slots, self._run_expert
            )
            output = output.index_put((source,), result)
        return output

    def _run_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return the result of one expert for its tokens."""
        gates = self.experts.gate
        gate = None if gates is None else x @ gates[expert]
        return _activate(x @ self.experts.up[expert], gate) @ self.experts.down[expert]


def combine_by_expert(
    tokens: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    slots: int | None,
    run_expert: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Return the weighted sum of each token's experts, (T, h), computed expert by expert.

    An expert takes its first ``slots`` tokens, or all tokens if it is None.
    """
    output = torch.zeros_like(tokens)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        is_expert = expert_ids == expert
        chosen = is_expert.any(1).nonzero()[:slots, 0]
        weight = weights[chosen].where(is_expert[chosen], 0).sum(1, keepdim=True)
        result = weight * run_expert(tokens[chosen], expert)
        output = output.index_put((chosen,), result, accumulate=True)
    return output


def count_misrouted(scores: Tensor, expert_ids: Tensor, tolerance: float) -> int:
    """Return the number of tokens whose experts (T, k) do not have the best scores (T, E).

    A score may be worse by ``tolerance``. A token that takes an expert twice counts too.
    """
    worst_taken = scores.gather(1, expert_ids).amin(1)
    best_other = scores.scatter(1, expert_ids, -1.0).amax(1)
    has_duplicate = (expert_ids.sort(1).values.diff(dim=1) == 0).any(1)
    return int(((best_other - worst_taken > tolerance) | has_duplicate).sum())


def compute_balance_loss(scores: Tensor, expert_ids: Tensor) -> Tensor:
    """Return E sum_e f_e P_e (arXiv 2101.03961, eq. 4), of scores (T, E) and expert ids (T, k).

    f is an expert's share of all pairs, and P its mean share of scores. Only P has gradients.
    The loss is 1 if both are balanced.
    """
    experts = scores.shape[1]
    pair_shares = dispatch.count_pairs(expert_ids, experts) / expert_ids.numel()
    return experts * (pair_shares * scores.mean(0)).sum()


def replace_ffns_with_moe(
    model: Transformer,
    shape: Shape,
    moe: Moe,
    *,
    mesh: Mesh | None = None,
    kind: type[MoeLayer] = MoeLayer,
) -> None:
    """Replace each layer's FFN by a mixture of experts on the meta device."""
    dtype = next(model.parameters()).dtype
    for layer in model.layers.values():
        with torch.device("meta"):
            layer.ffn = kind(shape, moe, mesh).to(dtype)


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Return the MoE layers in a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MoeLayer)]


def simulate_experts(
    model: nn.Module,
    expert_seconds: float,
    tokens: int,
    waiter: SimulatedCompute,
) -> None:
    """Replace the compute of experts by waits: all of them take ``expert_seconds`` in forward.

    Backward takes twice as long. The time is for ``tokens`` tokens of each rank with balanced
    routing, and a wait is proportional to the expert's rows.
    """
    layers = find_moe_layers(model)
    for layer in layers:
        rows = tokens * layer.moe.top_k * layer.moe.etp
        layer.experts.waiter = waiter
        layer.experts.seconds_per_row = expert_seconds / len(layers) / rows


class _SimulatedExperts(torch.autograd.Function):
    """Waits for the simulated time of the experts in forward and backward, and returns zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Any, *weights: Tensor) -> Tensor:
        ctx.experts = experts
        ctx.sizes = [weight.shape for weight in weights]
        with experts.waiter.taking(len(x) * experts.seconds_per_row):
            return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        experts = ctx.experts
        gradient = gradients[0]
        with experts.waiter.taking(2 * len(gradient) * experts.seconds_per_row):
            weight_gradients = [gradient.new_zeros(size) for size in ctx.sizes]
            return (torch.zeros_like(gradient), None, *weight_gradients)
