"""A mixture of experts (MoE) in place of a layer's FFN: router, routed experts, shared experts.

A token's output is the sum of the results of its k experts, times their weights, and of the results
of the shared experts. A token whose experts are all full keeps the residual and the shared experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parbench.workloads.expert_parallel import dispatch
from parbench.workloads.expert_parallel.dispatch import DispatchPlan, ExpertRows
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.mesh.mesh import Mesh, get_local_tensor
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import Ffn, Transformer


class Router(nn.Module):
    """The linear layer without bias that scores all experts for each token."""

    def __init__(self, shape: Shape, moe: Moe) -> None:
        """Make a router with an uninitialized weight (experts, hidden)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (tokens, experts) of tokens (tokens, hidden): a softmax in float32.

        The scores of a token sum to 1 over all experts.
        """
        return F.linear(x.float(), self.weight.float()).softmax(-1)


def weigh_experts(moe: Moe, scores: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the factors (tokens, top_k) that multiply the results of each token's experts.

    A factor is the token's score of that expert, out of ``scores`` (tokens, experts). The experts
    are ``expert_ids`` (tokens, top_k). With ``moe.renormalize`` and several experts per token, the
    factors of a token are divided by their sum. This equals the softmax over the logits of the
    chosen experts, as in Mixtral, arXiv 2401.04088, section 2.1. With one expert per token the
    factor would then always be 1, so that the score is kept.
    """
    weights = scores.gather(1, expert_ids)
    if moe.renormalize and moe.top_k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return weights


class Experts(nn.Module):
    """The routed experts of this rank: FFNs without biases, which run as grouped GEMMs.

    There is one grouped GEMM for each of the matrices ``gate`` (only with SwiGLU), ``up`` and
    ``down``. Each stacks the matrices of all experts of this rank, (experts, inputs, outputs).
    """

    def __init__(self, shape: Shape, moe: Moe, mesh: DeviceMesh | None) -> None:
        """Make uninitialized experts.

        Parameters are DTensors over ``mesh``. It has the axes ``ep`` and ``etp``, except for an
        axis with one rank. None means that this rank holds all experts in plain tensors.
        """
        super().__init__()
        ffn = moe.expert_ffn // moe.etp
        size_in = (moe.experts_per_rank, shape.hidden, ffn)
        size_out = (moe.experts_per_rank, ffn, shape.hidden)
        self.gate = _make_parameter(size_in, mesh, 2) if shape.recipe == "llama" else None
        self.up = _make_parameter(size_in, mesh, 2)
        self.down = _make_parameter(size_out, mesh, 1)

    def forward(self, rows: ExpertRows) -> Tensor:
        """Return the results (rows, hidden) of this rank's experts for the received tokens.

        With ``etp`` > 1, a result is only this rank's term. The sum of the terms over the ranks of
        ``etp`` is the expert's result.
        """
        x = rows.tokens
        row_ends = rows.counts.cumsum(0).int()
        hidden = F.grouped_mm(x, get_local_tensor(self.up), offs=row_ends)
        gate = None
        if self.gate is not None:
            gate = F.grouped_mm(x, get_local_tensor(self.gate), offs=row_ends)
        return F.grouped_mm(_activate(hidden, gate), get_local_tensor(self.down), offs=row_ends)


def _make_parameter(
    size: tuple[int, int, int], mesh: DeviceMesh | None, etp_dim: int
) -> nn.Parameter:
    """Return the uninitialized matrices of this rank's experts as one parameter.

    ``size`` is the shape (experts, inputs, outputs) on this rank. With a mesh the parameter is a
    DTensor of the matrices of all ranks: ``ep`` splits dimension 0, and ``etp`` ``etp_dim``.
    """
    weights = torch.empty(size)
    if mesh is None:
        return nn.Parameter(weights)
    dim_by_axis = {"ep": 0, "etp": etp_dim}
    placements = [Shard(dim_by_axis[name]) for name in mesh.mesh_dim_names or ()]
    return nn.Parameter(DTensor.from_local(weights, mesh, placements, run_check=False))


def _activate(hidden: Tensor, gate: Tensor | None) -> Tensor:
    """Return the activation of an expert's FFN: GELU of ``hidden``, or SwiGLU with a gate.

    SwiGLU is silu(``gate``) * ``hidden``. Both tensors are (tokens, ffn).
    """
    return F.gelu(hidden) if gate is None else F.silu(gate) * hidden


class MoeLayer(nn.Module):
    """An MoE layer: a router, routed experts spread over ranks, and shared experts of every token.

    It maps this rank's activations of a microbatch, (batch, sequence, hidden), to a tensor of the
    same shape. The ranks of the mesh's ``ep`` group hold different experts. The ranks of its
    ``etp`` group hold different parts of each expert. Without a mesh, this rank holds all experts.
    """

    def __init__(self, shape: Shape, moe: Moe, mesh: Mesh | None = None) -> None:
        """Make a layer with uninitialized parameters, as ``moe`` describes it."""
        super().__init__()
        self.moe = moe
        self._ep_group = mesh.groups.get("ep") if mesh else None
        self._etp_group = mesh.groups.get("etp") if mesh else None
        self.router = Router(shape, moe)
        self.experts = Experts(shape, moe, mesh.experts if mesh else None)
        shared_shape = replace(shape, ffn=moe.shared * moe.expert_ffn)
        self.shared = Ffn(shared_shape) if moe.shared else None
        self.assigned_ids: Tensor | None = None
        """The experts (tokens, top_k) of the next microbatch, None if the router selects them."""
        self.microbatch = 0
        """The index in the step of the microbatch that the next forward pass gets."""
        self.expert_ids: dict[int, Tensor] = {}
        """The experts (tokens, top_k) that the last forward pass of each microbatch took.

        The keys are the indices of the microbatches in the step. Dropped pairs are included.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts plus the shared experts, shaped as ``x``.

        ``x`` is (batch, sequence, hidden). The chosen experts are recorded in ``expert_ids`` under
        the key ``microbatch``, where they replace those of an earlier pass of this microbatch.
        """
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        expert_ids = self.select_experts(scores.detach())
        self.expert_ids[self.microbatch] = expert_ids
        weights = weigh_experts(self.moe, scores, expert_ids).to(x.dtype)
        output = self.run_experts(tokens, weights, expert_ids).view_as(x)
        if self.shared is not None:
            output = output + self.shared(x)
        return output

    def select_experts(self, scores: Tensor) -> Tensor:
        """Return the experts (tokens, top_k) that tokens take, given scores (tokens, experts).

        They are ``assigned_ids`` if these are set, and otherwise the experts with the best scores.
        """
        if self.assigned_ids is not None:
            return self.assigned_ids
        return scores.topk(self.moe.top_k).indices

    def plan_dispatch(self, expert_ids: Tensor) -> DispatchPlan:
        """Return the order in which this rank sends its tokens to their experts.

        A token is sent once for each of its experts, so that the order is one of pairs of token and
        expert. ``expert_ids`` (tokens, top_k) are the experts of this rank's tokens of one
        microbatch. Pairs beyond the capacity of an expert are dropped.
        """
        slots = self.moe.slots(len(expert_ids))
        num_pairs = expert_ids.numel() if slots is None else None
        return dispatch.plan_dispatch(expert_ids, self.moe.experts, slots, num_pairs)

    def run_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's routed experts, (tokens, hidden).

        ``tokens`` are (tokens, hidden), ``weights`` and ``expert_ids`` (tokens, top_k). It
        communicates: tokens are dispatched over ``ep``, and results return the same way. With
        ``etp``, ranks first all-gather each other's tokens. In the end they reduce-scatter the
        results, of which each rank has computed one term.
        """
        plan = self.plan_dispatch(expert_ids)
        group = self._etp_group
        if group is None:
            return self._exchange(tokens, weights, plan)
        expert_ids = dispatch.gather_expert_ids(plan, group)
        tokens = dispatch.gather_rows(tokens, group)
        weights = dispatch.gather_rows(weights, group)
        num_pairs = None if plan.num_pairs is None else expert_ids.numel()
        plan = dispatch.plan_dispatch(expert_ids, self.moe.experts, num_pairs=num_pairs)
        return dispatch.reduce_scatter_rows(self._exchange(tokens, weights, plan), group)

    def _exchange(self, tokens: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
        """Send tokens to the ranks of ``ep`` with their experts, and return the combined results.

        The experts run on these ranks, and the results are sent back. The return value is the
        weighted sum of the results of each token's experts, (tokens, hidden). ``weights`` are
        (tokens, top_k), and ``plan`` is the order in which pairs of token and expert are sent.
        """
        exchange = dispatch.make_exchange(self.moe.variant, tokens, weights, plan, self._ep_group)
        return exchange.combine(self.experts(exchange.dispatch()))


NEAR_SCORES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""The difference of two router scores up to which rounding may change their order.

The key is the data type of the router's weight. Scores are between 0 and 1.
"""


class ReferenceMoeLayer(MoeLayer):
    """An MoE layer that one process computes expert by expert, to verify ``MoeLayer``.

    It takes complete sequences, whose tokens several ranks share in the verified step. The capacity
    of experts applies to the tokens of each of these ranks separately, as in ``MoeLayer``. The
    layer finds the tokens of a rank by their positions: a position is the index of a token in its
    sequence, from 0.
    """

    positions_by_source: Sequence[Sequence[int]] | None = None
    """The positions in a sequence of the tokens of each rank that shares it in the verified step.

    The outer index is the rank's index among the ranks that share a sequence. None means that one
    rank holds complete sequences.
    """
    num_misrouted = 0
    """The number of tokens of the last forward pass that the router would send elsewhere.

    The experts that such a token takes do not have its best scores, or it takes one twice.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer for complete sequences (batch, sequence, hidden)."""
        batch, sequence, _ = x.shape
        token_numbers = torch.arange(batch * sequence, device=x.device).view(batch, sequence)
        sources = self.positions_by_source or [range(sequence)]
        self._tokens_by_source = [token_numbers[:, list(source)].flatten() for source in sources]
        return super().forward(x)

    def select_experts(self, scores: Tensor) -> Tensor:
        """Return the experts as ``MoeLayer`` does, and count misrouted tokens in ``num_misrouted``.

        The result is ``assigned_ids`` if these are set, such as the experts that the verified ranks
        took, and otherwise the experts with the best scores. Misrouted tokens are those for which
        this layer's router scores another expert higher than one of the result, by more than
        rounding explains (``NEAR_SCORES``), and those that take an expert twice. The count does not
        change the result.
        """
        expert_ids = super().select_experts(scores)
        tolerance = NEAR_SCORES[self.router.weight.dtype]
        self.num_misrouted = count_misrouted(scores, expert_ids, tolerance)
        return expert_ids

    def run_experts(self, tokens: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of each token's routed experts, (tokens, hidden).

        Other than in ``MoeLayer``, all experts run in this process, one after the other. In the
        verified step, several ranks may share the sequences (``positions_by_source`` has the
        positions of each). Capacity applies to the tokens of each of these ranks separately.
        """
        output = torch.zeros_like(tokens)
        for source in self._tokens_by_source:
            slots = self.moe.slots(len(source))
            result = combine_by_expert(
                tokens[source], weights[source], expert_ids[source], slots, self._run_expert
            )
            output = output.index_put((source,), result)
        return output

    def _run_expert(self, x: Tensor, expert: int) -> Tensor:
        """Return the results (tokens, hidden) of the expert with index ``expert`` for tokens ``x``.

        ``x`` is (tokens, hidden), too.
        """
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
    """Return the weighted sum of each token's experts, (tokens, hidden).

    It is computed one expert after the other, without communication. ``tokens`` are (tokens,
    hidden), ``weights`` and ``expert_ids`` (tokens, top_k). ``run_expert(x, expert)`` returns an
    expert's results for its tokens ``x``. An expert takes the first ``slots`` of the tokens that
    chose it, and its results for the other tokens are left out. With ``slots`` of None it takes all
    of them.
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
    """Return the number of tokens that do not take the experts with their best scores.

    ``scores`` are (tokens, experts), and ``expert_ids`` (tokens, top_k) the experts that tokens
    take. A token counts if another expert's score is better than one of these by more than
    ``tolerance``. A token that takes an expert twice counts too.
    """
    worst_taken = scores.gather(1, expert_ids).amin(1)
    best_other = scores.scatter(1, expert_ids, -1.0).amax(1)
    has_duplicate = (expert_ids.sort(1).values.diff(dim=1) == 0).any(1)
    return int(((best_other - worst_taken > tolerance) | has_duplicate).sum())


def replace_ffns_with_moe(
    model: Transformer,
    shape: Shape,
    moe: Moe,
    *,
    mesh: Mesh | None = None,
    kind: type[MoeLayer] = MoeLayer,
) -> None:
    """Replace the FFN of each layer of ``model`` by an MoE layer on the meta device.

    The MoE layers are of class ``kind``, have the sizes in ``shape`` and ``moe``, and the data type
    of the model's parameters. ``mesh`` has the process groups ``ep`` and ``etp`` of the ranks that
    share the experts. None means that this rank holds all experts.
    """
    dtype = next(model.parameters()).dtype
    for layer in model.layers.values():
        with torch.device("meta"):
            layer.ffn = kind(shape, moe, mesh).to(dtype)


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Return all MoE layers in a model, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, MoeLayer)]
