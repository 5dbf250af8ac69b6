"""Timed compute of a hybrid step: T is a rank's whole forward pass of a microbatch, shared by what products take.

Each part has the share of its multiply-adds a token: linear layers their weights, routed experts those of the k that a
token meets, causal attention h (s + 1), of q k^T and of what comes out over (s + 1) / 2 keys. Attention counts where
``cp`` cuts it into blocks, which wait; elsewhere it costs nothing, as in other timed steps.
"""

from dataclasses import dataclass

from torch import nn

from workloads.context_parallel.attention_kernel import Timed
from workloads.context_parallel.exchange_plan import ContextPlan
from workloads.expert_parallel.moe_case import Moe, num_expert_parameters, num_ffn_matrices
from workloads.expert_parallel.moe_layer import let_experts_wait
from workloads.model.shapes import Shape, num_layer_weights
from workloads.model.timed_compute import TimedCompute, TimedLinear
from workloads.step.layout import local
from workloads.step.parity import count_unfilled


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Parts of a rank's forward pass, which add up to 1."""

    linear: float
    experts: float
    attention: float


def shares_of(shape: Shape, moe: Moe | None, *, cp: int) -> Shares:
    """Return what each part takes of a layer."""
    linear, experts = float(num_layer_weights(shape)), 0.0
    if moe is not None:
        each = num_expert_parameters(shape, moe)
        linear += moe.shared * each - num_ffn_matrices(shape) * shape.hidden * shape.ffn
        experts = float(moe.top_k * each)
    attention = shape.hidden * (shape.sequence + 1) if cp > 1 else 0.0
    whole = linear + experts + attention
    return Shares(linear=linear / whole, experts=experts / whole, attention=attention / whole)


def let_layers_wait(model: nn.Module, seconds: float, shares: Shares, tokens: int, waiter: TimedCompute) -> None:
    """Let linear layers and experts of ``model.layers`` wait ``seconds`` forward, without attention's share.

    Experts wait for each row, so long that a rank's mean load of ``tokens`` tokens takes their share.
    """
    let_experts_wait(model, seconds * shares.experts, tokens, waiter, others=seconds * shares.linear)


def waiting_kernel(seconds: float, plan: ContextPlan, *, microbatch: int, heads: int, waiter: TimedCompute) -> Timed:
    """Return attention that waits: ``seconds`` a layer on the mean rank of ``cp``, which has so many heads."""
    pairs = microbatch * heads * plan.all_pairs() / plan.ranks
    return Timed(waiter, seconds / pairs)


def count_wrong_fills(model: nn.Module, times: float, *, tp: int, num_ranks: int) -> int:
    """Return how many weight gradients of linear layers are not ``times`` the mean of what data ranks fill in.

    Where ``tp`` splits none they are ``tp`` times that; ``num_ranks`` add to them at most.
    """
    wrong = 0
    for name, module in model.named_modules():
        if isinstance(module, TimedLinear):
            expected = times * module.mean_fill * (tp if name == "head" or ".ffn.shared." in name else 1)
            gradient = None if module.weight.grad is None else local(module.weight.grad)
            wrong += count_unfilled(gradient, expected, num_ranks)
    return wrong
