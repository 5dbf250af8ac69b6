"""Attention over all keys at once: each rank gathers them, computes its queries, and scatters the sums of gradients.

Llama 3's way (arXiv 2407.21783, section 3.3.2), over zigzag parts. Backward gathers again instead of keeping all keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.world.torch_compat import all_gather_single, reduce_scatter_single
from workloads.context_parallel.attention_block import Blocks, Saved
from workloads.context_parallel.online_softmax import Merged
from workloads.context_parallel.recorder import Direction
from workloads.context_parallel.token_order import inverse


class AllGatherAttention:
    """The core of an attention whose q, k, v (b, a, s/c, d) are parts of the sequence's.

    ``dealt`` are the positions of all ranks' tokens, one rank after the other.
    """

    def __init__(self, group: dist.ProcessGroup, blocks: Blocks, dealt: Sequence[int], device: torch.device) -> None:
        self._group, self.blocks = group, blocks
        self._ranks = dist.get_process_group_ranks(group)
        self._dealt, self._order = (torch.tensor(of, device=device) for of in (dealt, inverse(dealt)))
        blocks.recorder.moves |= {"keys and values": self._gather, "gradients": self._reduce}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries over all ranks' keys."""
        out: Tensor = _AllGatherAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def gathered(self, kv: Tensor, direction: Direction) -> Tensor:
        """Return all keys and values (2, b, a_kv, s, d) in the sequence's order, from this rank's."""
        with self.blocks.recorder.waiting(direction, 0, "keys and values", kv, self._ranks):
            parts = self._gather(kv)
        return parts.movedim(0, 3).flatten(3, 4).index_select(3, self._order)

    def scattered(self, d_kv: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum over ranks of gradients of all keys and values, for this rank's alone."""
        in_turn = d_kv.index_select(3, self._dealt)
        parts = torch.stack(in_turn.chunk(self._group.size(), dim=3)).to(dtype)
        with self.blocks.recorder.waiting("backward", 0, "gradients", parts, self._ranks):
            return self._reduce(parts)

    def _gather(self, kv: Tensor) -> Tensor:
        parts = kv.new_empty(self._group.size(), *kv.shape)
        all_gather_single(parts, kv.contiguous().unsqueeze(0), self._group)
        return parts

    def _reduce(self, parts: Tensor) -> Tensor:
        mine = parts.new_empty(1, *parts.shape[1:])
        reduce_scatter_single(mine, parts, self._group)
        return mine[0]


class _AllGatherAttention(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and log-sum-exp alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: AllGatherAttention) -> Tensor:
        merged = Merged(q)
        core.blocks.forward(0, q, core.gathered(torch.stack((k, v)), "forward"), merged)
        out = merged.output()
        ctx.save_for_backward(q, k, v, out, merged.lse())
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        core: AllGatherAttention = ctx.core
        saved = Saved(q=q, out=out, lse=lse, gradient=gradients[0])
        kv = core.gathered(torch.stack((k, v)), "backward")
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        d_kv = core.scattered(core.blocks.backward(0, core.blocks.tiles[0], saved, kv, dq), k.dtype)
        return dq.to(q.dtype), d_kv[0], d_kv[1], None
