"""Attention of a rank's queries, block by block of keys and values: kernels, tile by tile, merged by log-sum-exp.

A kernel's forward takes q (b, a, r, d) and k, v (b, a_kv, t, d) to the output and the log-sum-exp (b, a, r) in float32;
a causal block is square, and its i-th query sees i + 1 keys. Backward takes those of *all* of a query's blocks: then
P = exp(q k^T / sqrt(d) - lse) is this block's part of the whole softmax, and its gradients of q, k and v are this
block's part of the whole gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parbench.workloads.context_parallel.context_case import ContextPlan, Tile, Tiles
from parbench.workloads.model.timed_compute import TimedCompute

_aten = torch.ops.aten

Grads = tuple[Tensor, Tensor, Tensor]


class CpuFlash:
    """torch's fused kernel for CPUs; keys and values may have fewer heads."""

    name = "flash_cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        given = (dout, q, k, v, out, lse, 0.0, causal)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given)
        return dq, dk, dv


class CudaFlash:
    """FlashAttention on CUDA, in 16 bit, heads of a multiple of 8 up to 256, compute capability 8.0 and above."""

    name = "flash_cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, no_dropout, no_dropout[0]
        )
        return dq, dk, dv


class CudaEfficient:
    """Memory-efficient attention on CUDA: float32, older GPUs, and head sizes that FlashAttention does not take.

    Queries, keys and values have as many heads each. The kernel pads the log-sum-exp to a multiple of 32 rows, with
    infinity, which makes a padded row's probabilities zero. Its backward takes the output and the output's gradient to
    lie in memory as (b, s, a, d), as forward writes the output, whatever their strides say.
    """

    name = "efficient_cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (self._repeat_heads(x, q) for x in (k, v))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal
        )
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        keys, values = (self._repeat_heads(x, q) for x in (k, v))
        dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            keys,
            values,
            None,
            out,
            lse,
            no_dropout,
            no_dropout,
            0.0,
            [True, True, True, False],
            causal,
        )
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in (dk, dv))
        return dq, dk, dv

    def _repeat_heads(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class Timed:
    """Waits so long for each pair of a query and a key that one sees, and twice that in backward; computes nothing."""

    name = "timed"

    def __init__(self, waiter: TimedCompute, seconds_per_pair: float) -> None:
        self._waiter, self._seconds_per_pair = waiter, seconds_per_pair

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        with self._waiter.waiting(self._seconds_per_pair * num_pairs(q, k, causal)):
            return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Grads:
        with self._waiter.waiting(2 * self._seconds_per_pair * num_pairs(q, k, causal)):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


Kernel = CpuFlash | CudaFlash | CudaEfficient | Timed


def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel:
    """Return the fused kernel of a device for a type and head size; FlashAttention where it takes them."""
    if device.type == "cpu":
        return CpuFlash()
    fits = dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256
    return (
        CudaFlash()
        if fits and torch.cuda.get_device_capability(device) >= (8, 0)
        else CudaEfficient()
    )


def waiting_kernel(
    seconds: float, plan: ContextPlan, *, microbatch: int, heads: int, waiter: TimedCompute
) -> Timed:
    """Return attention that waits: ``seconds`` a layer on the mean rank of a plan, which has so many heads."""
    return Timed(waiter, seconds * plan.ranks / (microbatch * heads * plan.all_pairs()))


def num_pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the pairs of a query and a key that a block's kernel is asked for, over batch and query heads."""
    rows, columns = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * columns)


class Merged:
    """The attention of queries (b, a, s, d) over all blocks added so far, in float32; rows of none are 0 and -inf.

    Two blocks' outputs o and log-sum-exps l become l' = log(e^l1 + e^l2), o' = e^(l1 - l') o1 + e^(l2 - l') o2 (online
    softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).
    """

    def __init__(self, queries: Tensor) -> None:
        self._dtype = queries.dtype
        self._out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        self.lse = torch.full(
            queries.shape[:3], -torch.inf, dtype=torch.float32, device=queries.device
        )

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a block's output (b, a, r, d) and finite log-sum-exp (b, a, r) into some rows."""
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse.float())
        old_scale = (before - after).exp().unsqueeze(-1)
        new_scale = (lse.float() - after).exp().unsqueeze(-1)
        self._out[:, :, rows] = self._out[:, :, rows] * old_scale + out.float() * new_scale
        self.lse[:, :, rows] = after

    def output(self) -> Tensor:
        return self._out.to(self._dtype)


class Saved(NamedTuple):
    """What backward needs of the queries (b, a, s, d): output and log-sum-exp over all blocks, output's gradient."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


class BlockAttention(ABC):
    """The core of an attention whose q, k, v (b, a, s/c, d) are parts of the sequence's, over all ranks' keys.

    ``tiles`` are those of each step. For backward a rank keeps its own q, k, v, output and log-sum-exp alone: other
    ranks' keys and values come again.
    """

    def __init__(self, kernel: Kernel, tiles: Tiles) -> None:
        self.kernel, self.tiles = kernel, tiles

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _BlockAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    @abstractmethod
    def forward(self, q: Tensor, kv: Tensor) -> Merged:
        """Return the attention of this rank's queries, given its own keys and values (2, b, a_kv, s/c, d)."""

    @abstractmethod
    def backward(self, saved: Saved, kv: Tensor, dq: Tensor) -> Tensor:
        """Return the gradients of this rank's keys and values, and add those of its queries to ``dq``, float32."""

    def add_block(self, step: int, q: Tensor, kv: Tensor, merged: Merged) -> None:
        """Add to ``merged`` the attention of queries over a block of keys and values (2, b, a_kv, t, d)."""
        for tile in self.tiles[step]:
            queries, keys, values = (
                q[:, :, tile.rows],
                kv[0, :, :, tile.columns],
                kv[1, :, :, tile.columns],
            )
            merged.add(tile.rows, *self.kernel.forward(queries, keys, values, tile.causal))

    def block_gradients(
        self, tiles: Sequence[Tile], saved: Saved, kv: Tensor, dq: Tensor
    ) -> Tensor:
        """Return the gradients of a block of keys and values, and add those of the queries to ``dq``; both float32."""
        d_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for tile in tiles:
            q, out, lse, dout = (x[:, :, tile.rows] for x in saved)
            k, v = kv[0, :, :, tile.columns], kv[1, :, :, tile.columns]
            of_q, of_k, of_v = self.kernel.backward(dout, q, k, v, out, lse, tile.causal)
            dq[:, :, tile.rows] += of_q
            d_kv[0, :, :, tile.columns] += of_k
            d_kv[1, :, :, tile.columns] += of_v
        return d_kv


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: BlockAttention) -> Tensor:
        merged = core.forward(q, torch.stack((k, v)))
        out = merged.output()
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        d_kv = ctx.core.backward(Saved(q, out, lse, gradients[0]), torch.stack((k, v)), dq)
        return dq.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype), None
