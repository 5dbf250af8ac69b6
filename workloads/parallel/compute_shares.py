"""Shares of a rank's simulated compute by kind of multiplication. Pure."""

from dataclasses import dataclass

from parbench.workloads.costs.parameter_table import count_matmul_weights
from parbench.workloads.expert_parallel.moe_case import Moe, count_expert_parameters
from parbench.workloads.model.shapes import Shape, num_ffn_matrices


@dataclass(frozen=True, kw_only=True)
class ComputeShares:
    """Shares of a forward pass of linear layers, routed experts and attention. Their sum is 1."""

    linear: float
    experts: float
    attention: float


def compute_shares(shape: Shape, moe: Moe | None, *, keys_per_query: float) -> ComputeShares:
    """Return the share of linear layers, experts and attention in a forward pass's multiply-adds.

    Attention has 2 h multiply-adds per query and key: q k^T and the weighted sum of values.
    ``keys_per_query`` 0 leaves attention out, because only attention of context parallelism is
    simulated.
    """
    linear = count_matmul_weights(shape)
    experts = 0.0
    if moe is not None:
        expert_parameters = count_expert_parameters(shape, moe)
        ffn_parameters = num_ffn_matrices(shape) * shape.hidden * shape.ffn
        linear += moe.shared * expert_parameters - ffn_parameters
        experts = float(moe.top_k * expert_parameters)
    attention = 2 * shape.hidden * keys_per_query
    total = linear + experts + attention
    return ComputeShares(
        linear=linear / total, experts=experts / total, attention=attention / total
    )
