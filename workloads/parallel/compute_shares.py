"""Fractions of a rank's simulated compute time by kind of multiplication. Pure."""

from dataclasses import dataclass

from parbench.workloads.costs.parameter_table import count_matmul_weights
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class ComputeShares:
    """The fractions of a rank's simulated forward time, by kind of matrix multiplication.

    Their sum is 1.
    """

    linear: float
    """The fraction of linear layers."""
    attention: float
    """The fraction of the multiplications of queries, keys and values in attention."""


def compute_shares(shape: Shape, *, keys_per_query: float) -> ComputeShares:
    """Return the fractions of a layer's forward multiply-adds, by kind of multiplication.

    ``keys_per_query`` is the mean number of keys to which a query attends. Attention has 2 * hidden
    multiply-adds per query and key: q k^T and the weighted sum of values. ``keys_per_query`` is 0
    without context parallelism, because the simulated time then has no part for attention.
    """
    linear = count_matmul_weights(shape)
    attention = 2 * shape.hidden * keys_per_query
    total = linear + attention
    return ComputeShares(linear=linear / total, attention=attention / total)
