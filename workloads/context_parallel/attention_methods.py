"""How queries meet keys of other ranks: keys go round or are gathered, tokens are exchanged for heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.context_parallel.attention_kernel import (
    BlockAttention,
    Kernel,
    Merged,
    Saved,
)
from parbench.workloads.context_parallel.context_case import Tiles, split_rows
from parbench.workloads.model.transformer import Core


class Ring:
    """Ranks in a circle: ``start`` sends a block to the next one, ``wait`` returns the one from the rank before."""

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag
        rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self._after, self._before = (rank + 1) % self.size, (rank - 1) % self.size
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    def start(self, block: Tensor) -> None:
        self._sent, self._received = (
            block.contiguous(),
            torch.empty_like(block, memory_format=torch.contiguous_format),
        )
        send = dist.P2POp(
            dist.isend, self._sent, group=self._group, tag=self._tag, group_peer=self._after
        )
        receive = dist.P2POp(
            dist.irecv, self._received, group=self._group, tag=self._tag, group_peer=self._before
        )
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Return the block that came; only now may the block that was sent be changed."""
        received, self._received = self._received, None
        assert received is not None, "a wait follows a start"
        for work in self._works:
            work.wait()
        self._sent = None
        return received


class RingAttention(BlockAttention):
    """Keys and values go round the ranks while each computes on those it has (arXiv 2310.01889); alone without a group.

    Contiguous, striped and zigzag are the same ring over other tokens. Backward sends the blocks round again, and
    behind each the sum of its gradients, which every rank adds to. A rank's own block is the first in forward; in
    backward half of it comes first, over the first hop of keys, and half last, over the last hop of gradients home.
    """

    def __init__(self, group: dist.ProcessGroup | None, kernel: Kernel, tiles: Tiles) -> None:
        super().__init__(kernel, tiles)
        self.keys = Ring(group, tag=1)
        self.gradients = Ring(group, tag=2)

    def forward(self, q: Tensor, kv: Tensor) -> Merged:
        merged, last = Merged(q), self.keys.size - 1
        for step in range(self.keys.size):
            if step < last:
                self.keys.start(kv)
            self.add_block(step, q, kv, merged)
            if step < last:
                kv = self.keys.wait()
        return merged

    def backward(self, saved: Saved, kv: Tensor, dq: Tensor) -> Tensor:
        own, last = kv, self.keys.size - 1
        first_half, second_half = split_rows(self.tiles[0], saved.q.shape[2] // 2)
        if last:
            self.keys.start(kv)
        d_own = self.block_gradients(first_half, saved, own, dq)
        for step in range(1, self.keys.size):
            kv = self.keys.wait()
            if step < last:
                self.keys.start(kv)
            d_kv = self.block_gradients(self.tiles[step], saved, kv, dq)
            if step > 1:
                d_kv += self.gradients.wait()
            self.gradients.start(d_kv)
        d_own += self.block_gradients(second_half, saved, own, dq)
        if last:
            d_own += self.gradients.wait()
        return d_own


class AllGatherAttention(BlockAttention):
    """Each rank gathers all keys, computes its queries, and scatters the sums of gradients; over zigzag parts.

    Llama 3's way (arXiv 2407.21783, section 3.3.2). Backward gathers again instead of keeping all keys. ``dealt`` are
    the positions of all ranks' tokens, one rank after the other.
    """

    def __init__(
        self, group: dist.ProcessGroup, kernel: Kernel, tiles: Tiles, dealt: Tensor
    ) -> None:
        super().__init__(kernel, tiles)
        self._group = group
        self._dealt, self._order = dealt, dealt.argsort()

    def forward(self, q: Tensor, kv: Tensor) -> Merged:
        merged = Merged(q)
        self.add_block(0, q, self._gather(kv), merged)
        return merged

    def backward(self, saved: Saved, kv: Tensor, dq: Tensor) -> Tensor:
        d_kv = self.block_gradients(self.tiles[0], saved, self._gather(kv), dq)
        in_turn = d_kv.index_select(3, self._dealt)
        parts = torch.stack(in_turn.chunk(self._group.size(), dim=3)).to(kv.dtype)
        reduced = parts.new_empty(1, *parts.shape[1:])
        reduce_scatter_single(reduced, parts, self._group)
        return reduced[0]

    def _gather(self, kv: Tensor) -> Tensor:
        """Return all keys and values (2, b, a_kv, s, d) in the sequence's order, from this rank's."""
        parts = kv.new_empty(self._group.size(), *kv.shape)
        all_gather_single(parts, kv.contiguous().unsqueeze(0), self._group)
        return parts.movedim(0, 3).flatten(3, 4).index_select(3, self._order)


class Ulysses:
    """Ranks exchange parts of the sequence for heads, attend to the whole with theirs, and exchange back.

    The core of an attention of q, k, v (b, a, s/u, d), around one of (b, a/u, s, d): arXiv 2309.14509; around a ring of
    other ranks it is USP (arXiv 2405.07719).
    """

    def __init__(self, group: dist.ProcessGroup, inner: Core) -> None:
        self._group, self._inner = group, inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = self._group.size()
        by_rank = torch.cat([_cut(x, 1, ranks) for x in (q, k, v)], dim=2).movedim(1, 0)
        heads = self._exchange(by_rank).movedim(0, 2).flatten(2, 3)
        whole_q, whole_k, whole_v = torch.split(
            heads, [x.shape[1] // ranks for x in (q, k, v)], dim=1
        )
        out = _cut(self._inner(whole_q, whole_k, whole_v), 2, ranks).movedim(2, 0)
        return self._exchange(out).movedim(0, 1).flatten(1, 2)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        received: Tensor = _Exchange.apply(by_rank, self._group)  # type: ignore[no-untyped-call]
        return received


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return a tensor with one dim cut in two: parts, and what is in each."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


class _Exchange(torch.autograd.Function):
    """An all_to_all of equal parts; backward is the same one."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(by_rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th of (u, ...) to rank i, and return what each rank sent to this one, (u, ...)."""
    received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, by_rank.contiguous(), group=group)
    return received
