"""Attention of a rank's queries over blocks of keys: fused kernels, and their merged results.

Shapes: queries are (b, a, r, d), keys and values (b, a_kv, t, d), and the log-sum-exp (b, a, r) in
float32. A kernel's backward pass takes the output and the log-sum-exp over *all* blocks of a query.
P = exp(q k^T / sqrt(d) - lse) is then the block's part of the full softmax, and the gradients are
the block's part of the full gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parbench.bench.world import accelerator
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.context_parallel.tiles import Tile

_aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of queries, keys and values, each with the shape of its tensor."""


class SavedQueries(NamedTuple):
    """Some queries and the tensors of their attention over all keys that a backward pass needs."""

    q: Tensor
    """The queries (batch, heads, rows, head size)."""
    output: Tensor
    """The attention over all keys, with the shape of ``q``."""
    lse: Tensor
    """The log-sum-exp of the scores over all keys, (batch, heads, rows) in float32."""
    output_gradient: Tensor
    """The gradient of ``output``."""


class Kernel(Protocol):
    """A kernel that computes the attention of queries over one block of keys and values.

    Queries are (batch, heads, rows, head size), keys and values (batch, kv_heads, keys, head size).
    If the block is causal, it has as many keys as queries, and query i (from 0) attends to the
    first i + 1 keys.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp of the scores over this block's keys.

        The output has the shape of ``q``, and the log-sum-exp is (batch, heads, rows) in float32.
        """

    def backward(self, saved: SavedQueries, k: Tensor, v: Tensor, is_causal: bool) -> Gradients:
        """Return the gradients of q, k and v from the attention over this block's keys.

        ``k`` and ``v`` are the keys and values of this block. ``saved`` has the queries, and their
        output, its gradient and the log-sum-exp over the keys of all blocks.
        """


class CpuFlash:
    """The kernel on CPUs: torch's flash attention. Keys may have fewer heads than queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over one block of keys, as ``Kernel.forward``."""
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        return output, lse

    def backward(self, saved: SavedQueries, k: Tensor, v: Tensor, is_causal: bool) -> Gradients:
        """Return the gradients of q, k and v from one block of keys, as ``Kernel.backward``."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            saved.output_gradient, saved.q, k, v, saved.output, saved.lse, 0.0, is_causal
        )
        return dq, dk, dv


class CudaFlash:
    """The kernel on CUDA for bfloat16 and float16: FlashAttention.

    It requires head sizes that are multiples of 8 up to 256, and compute capability 8.0 or above.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over one block of keys, as ``Kernel.forward``."""
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return output, lse

    def backward(self, saved: SavedQueries, k: Tensor, v: Tensor, is_causal: bool) -> Gradients:
        """Return the gradients of q, k and v from one block of keys, as ``Kernel.backward``."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=k.device)
        lengths = (None, None, saved.q.shape[2], k.shape[2])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            saved.output_gradient,
            saved.q,
            k,
            v,
            saved.output,
            saved.lse.contiguous(),
            *lengths,
            0.0,
            is_causal,
            no_dropout,
            no_dropout[0],
        )
        return dq, dk, dv


class CudaEfficient:
    """The kernel on CUDA for float32, older GPUs and other head sizes: memory-efficient attention.

    Torch's operator needs as many heads of keys and values as of queries, so that this class
    repeats the heads of keys and values before each call. The operator's forward pass pads the
    log-sum-exp to a multiple of 32 rows. This class removes the padding after forward, and pads
    with infinity before backward, so that the probabilities of padded rows are zero. The operator's
    backward pass reads the output and the output's gradient in the memory order (batch, rows,
    heads, size), whatever their strides are. This class stores both in this order.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over one block of keys, as ``Kernel.forward``."""
        keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, is_causal
        )
        return output, lse[:, :, : q.shape[2]]

    def backward(self, saved: SavedQueries, k: Tensor, v: Tensor, is_causal: bool) -> Gradients:
        """Return the gradients of q, k and v from one block of keys, as ``Kernel.backward``."""
        q = saved.q
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        padded_lse = F.pad(saved.lse, (0, -q.shape[2] % 32), value=torch.inf)
        needs_gradient = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            _store_by_position(saved.output_gradient),
            q,
            _repeat_heads(k, q),
            _repeat_heads(v, q),
            None,
            _store_by_position(saved.output),
            padded_lse,
            no_dropout,
            no_dropout,
            0.0,
            needs_gradient,
            is_causal,
        )
        return dq, _sum_repeated_heads(dk, k), _sum_repeated_heads(dv, v)


def _repeat_heads(x: Tensor, queries: Tensor) -> Tensor:
    """Return keys or values (batch, kv_heads, ...), each head repeated for its query heads.

    The result has as many heads as ``queries``.
    """
    return x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)


def _sum_repeated_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of ``x`` from the gradient of the result of ``_repeat_heads``.

    The gradients of the repetitions of each head are summed.
    """
    batch, heads, rows, size = x.shape
    return gradient.reshape(batch, heads, -1, rows, size).sum(dim=2)


def _store_by_position(x: Tensor) -> Tensor:
    """Return a tensor (batch, heads, rows, size) with memory in (batch, rows, heads, size) order.

    The shape and the values do not change.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def choose_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel:
    """Return the fused attention kernel for a device, data type and head size.

    On CUDA it is FlashAttention if that supports all three, and otherwise memory-efficient
    attention.
    """
    if device.type == "cpu":
        return CpuFlash()
    has_16_bits = dtype in (torch.bfloat16, torch.float16)
    has_flash_size = head_size % 8 == 0 and head_size <= 256
    is_recent = accelerator.get_capability(device) >= (8, 0)
    can_use_flash = has_16_bits and has_flash_size and is_recent
    return CudaFlash() if can_use_flash else CudaEfficient()


class OnlineSoftmax:
    """The attention of queries over several blocks of keys, accumulated block by block in float32.

    ``add`` merges a block into the result. Outputs o and log-sum-exps l of two blocks become
    l' = log(e^l1 + e^l2) and o' = e^(l1 - l') o1 + e^(l2 - l') o2 (arXiv 1805.02867,
    FlashAttention, arXiv 2205.14135). Queries without a block have output 0 and log-sum-exp -inf.
    """

    def __init__(self, queries: Tensor) -> None:
        """Start with the attention over no keys, for queries (batch, heads, rows, head size).

        Only the shape, data type and device of ``queries`` are used.
        """
        self._dtype = queries.dtype
        batch, heads, rows, size = queries.shape
        # Stored as (b, s, a, d), so that the output projection saves no copy of it.
        by_position = torch.zeros(
            batch, rows, heads, size, dtype=torch.float32, device=queries.device
        )
        self._output = by_position.transpose(1, 2)
        self.lse = torch.full(
            queries.shape[:3], -torch.inf, dtype=torch.float32, device=queries.device
        )
        """The log-sum-exp of the scores over all blocks so far, (batch, heads, rows)."""

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Merge the attention of some queries over further keys into the result.

        ``rows`` selects these queries. ``output`` (batch, heads, rows, head size) and the finite
        ``lse`` (batch, heads, rows) are the results of a kernel for these queries and keys.
        """
        old_lse = self.lse[:, :, rows]
        new_lse = torch.logaddexp(old_lse, lse.float())
        old_scale = (old_lse - new_lse).exp().unsqueeze(-1)
        block_scale = (lse.float() - new_lse).exp().unsqueeze(-1)
        self._output[:, :, rows] = (
            self._output[:, :, rows] * old_scale + output.float() * block_scale
        )
        self.lse[:, :, rows] = new_lse

    def output(self) -> Tensor:
        """Return the attention over all blocks so far, with the shape and type of the queries."""
        return self._output.to(self._dtype)


class BlockAttention(ABC):
    """The attention of a rank's queries over the keys and values of all ranks of ``cp``.

    It is called with this rank's q, k and v, (batch, heads, tokens, head size), and returns the
    attention output with the shape of q. A rank saves only its own q, k, v, output and log-sum-exp
    for the backward pass. The keys and values of other ranks are sent again.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        kernel: Kernel,
        split: SequenceSplit,
        rank: int,
        device: torch.device,
    ) -> None:
        """Make the attention of one rank.

        ``group`` are the ranks that exchange keys and values, None if this rank has all keys.
        ``kernel`` computes the attention of some queries over some keys. ``split`` is the
        distribution of the sequence over ``cp``, and ``rank`` the index of this rank along ``cp``.
        """
        self.group = group
        self.kernel = kernel
        self.split = split
        self.tiles = split.list_tiles(rank)
        """For each block of keys, in the order of computation, the tiles of this rank's queries.

        A tile is the rectangle of queries and keys of one kernel call.
        """
        self.device = device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of q over the keys of all ranks, with gradients in backward."""
        output: Tensor = _BlockAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return output

    @abstractmethod
    def forward(self, q: Tensor, kv: Tensor) -> OnlineSoftmax:
        """Communicate over ``cp``, and return the attention of this rank's queries over all keys.

        ``q`` are this rank's queries (batch, heads, tokens, head size). ``kv`` stacks this rank's
        keys and values, (2, batch, kv_heads, tokens, head size).
        """

    @abstractmethod
    def backward(self, saved: SavedQueries, kv: Tensor, dq: Tensor) -> Tensor:
        """Communicate over ``cp``, and return the gradients of this rank's keys and values.

        The gradients are sums over the queries of all ranks, because all of them attend to these
        keys. ``kv`` stacks this rank's keys and values, (2, batch, kv_heads, tokens, head size).
        The result has the same shape. The gradients of this rank's queries are added to ``dq``
        (float32, with the shape of the queries). ``saved`` has this rank's queries, with their
        attention output, log-sum-exp and output gradient.
        """

    def add_block(self, block: int, q: Tensor, kv: Tensor, softmax: OnlineSoftmax) -> None:
        """Add the attention of ``q`` over one block of keys and values to ``softmax``.

        In a ring, a block is the keys and values that the rank has in one step of the ring. If they
        are gathered, the only block has those of the full sequence. ``block`` is the index of the
        block in the order of computation. ``kv`` stacks its keys and values, (2, batch, kv_heads,
        keys, head size). There is one kernel call for each tile, a rectangle of queries and keys.
        """
        for tile in self.tiles[block]:
            queries = q[:, :, tile.rows]
            keys, values = kv[:, :, :, tile.columns]
            output, lse = self.kernel.forward(queries, keys, values, tile.is_causal)
            softmax.add(tile.rows, output, lse)

    def compute_gradients(
        self, tiles: Sequence[Tile], saved: SavedQueries, kv: Tensor, dq: Tensor
    ) -> Tensor:
        """Return the gradients of a block's keys and values from this rank's queries, in float32.

        ``kv`` stacks the keys and values of the block, (2, batch, kv_heads, keys, head size). The
        result has the same shape. The gradients of the queries are added to ``dq``. ``tiles`` are
        the rectangles of queries and keys to compute. ``saved`` has the queries, with their output,
        log-sum-exp and output gradient. Nothing is communicated.
        """
        d_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for tile in tiles:
            saved_rows = SavedQueries(*(tensor[:, :, tile.rows] for tensor in saved))
            k, v = kv[:, :, :, tile.columns]
            tile_dq, tile_dk, tile_dv = self.kernel.backward(saved_rows, k, v, tile.is_causal)
            dq[:, :, tile.rows] += tile_dq
            d_kv[0, :, :, tile.columns] += tile_dk
            d_kv[1, :, :, tile.columns] += tile_dv
        return d_kv


class _BlockAttention(torch.autograd.Function):
    """Runs the forward and backward pass of a ``BlockAttention`` as one operator of autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: BlockAttention) -> Tensor:
        """Return the attention of this rank's q over the keys of all ranks of ``cp``.

        It saves this rank's q, k, v, output and log-sum-exp for backward.
        """
        softmax = attention.forward(q, torch.stack((k, v)))
        output = softmax.output()
        ctx.save_for_backward(q, k, v, output, softmax.lse)
        ctx.attention = attention
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of this rank's q, k and v over all ranks' queries and keys.

        The fourth element is None, the gradient of ``attention``.
        """
        q, k, v, output, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        saved = SavedQueries(q, output, lse, gradients[0])
        d_kv = ctx.attention.backward(saved, torch.stack((k, v)), dq)
        return dq.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype), None
