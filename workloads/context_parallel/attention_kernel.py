"""Kernels of one attention block that give and take the log-sum-exp: torch's fused ones, a plain one, and a wait.

Forward takes q (b, a, r, d) and k, v (b, a_kv, t, d) to the output and the log-sum-exp (b, a, r) in float32. Backward
takes those of *all* of a query's blocks: then P = exp(q k^T / sqrt(d) - lse) is this block's part of the whole softmax,
and its gradients are this block's part of the whole gradients.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from workloads.model.timed_compute import TimedCompute

_aten = torch.ops.aten
_LEAST_CAPABILITY = (8, 0)

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention of some queries over some keys; a causal block is square and its i-th query sees i + 1 keys."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        """Return the gradients of q, k and v."""


class CpuFlash:
    """torch's fused kernel for CPUs; keys and values may have fewer heads."""

    name = "flash_cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        """Return the gradients of q, k and v."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal
        )
        return dq, dk, dv


class CudaFlash:
    """FlashAttention on CUDA, in 16 bit, heads of a multiple of 8 up to 256, compute capability 8.0 and above."""

    name = "flash_cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        """Return the gradients of q, k and v."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, no_dropout, no_dropout[0]
        )
        return dq, dk, dv


class Dense:
    """The formula, scores and all, in float32: where no fused kernel gives the log-sum-exp."""

    name = "dense"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(dim=-1)
        return ((scores - lse.unsqueeze(-1)).exp() @ _for_each_query_head(v, q)).to(q.dtype), lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        """Return the gradients of q, k and v: dS = P (dP - rowsum(dO O)), dq = dS k, dk = dS^T q, dv = P^T dO."""
        wide, scale = gradient.float(), 1 / math.sqrt(q.shape[-1])
        probabilities = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        of_probabilities = wide @ _for_each_query_head(v, q).transpose(-2, -1)
        delta = (wide * out.float()).sum(dim=-1, keepdim=True)
        of_scores = probabilities * (of_probabilities - delta) * scale
        dq = of_scores @ _for_each_query_head(k, q)
        dk = _summed_over_groups(of_scores.transpose(-2, -1) @ q.float(), k)
        dv = _summed_over_groups(probabilities.transpose(-2, -1) @ wide, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class Timed:
    """Waits so long for each pair of a query and a key that one sees, and twice that in backward; computes nothing."""

    name = "timed"

    def __init__(self, waiter: TimedCompute, seconds_per_pair: float) -> None:
        self._waiter, self._seconds_per_pair = waiter, seconds_per_pair

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        with self._waiter.waiting(self._seconds_per_pair * num_pairs(q, k, causal)):
            return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        """Return zeros."""
        with self._waiter.waiting(2 * self._seconds_per_pair * num_pairs(q, k, causal)):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> Kernel:
    """Return the fused kernel of a device where it has one for the type and size, else the formula."""
    if device.type == "cpu":
        return CpuFlash()
    fits = dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256
    return CudaFlash() if fits and capability_of(device) >= _LEAST_CAPABILITY else Dense()


def num_pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the pairs of a query and a key that a block's kernel is asked for, over batch and query heads."""
    rows, columns = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * columns)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q.float() @ _for_each_query_head(k, q).transpose(-2, -1) / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _summed_over_groups(x: Tensor, like: Tensor) -> Tensor:
    by_group = x.view(x.shape[0], like.shape[1], -1, *x.shape[2:])
    return by_group.sum(dim=2)
