"""Ring attention (arXiv 2310.01889): keys and values go round the ranks while each computes on those it has.

Contiguous, striped and zigzag are the same ring over other tokens. Backward sends the blocks round again, and behind
each the sum of its gradients, which every rank adds to. A rank's own block is the first in forward; in backward half
of it comes first, over the first hop of keys, and half last, over the last hop of gradients home.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.context_parallel.attention_block import Blocks, Saved
from workloads.context_parallel.online_softmax import Merged
from workloads.context_parallel.recorder import Direction, Moment, Recorder
from workloads.context_parallel.tiles import split_rows


class Ring:
    """Ranks in a circle: ``start`` sends a block to the next one, ``wait`` returns the one from the rank before."""

    def __init__(self, group: dist.ProcessGroup | None, recorder: Recorder, what: str, tag: int) -> None:
        self._group, self._recorder, self._what, self._tag = group, recorder, what, tag
        self._rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._issued: Moment | None = None
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        if self.size > 1:
            recorder.moves[what] = self._move

    def start(self, block: Tensor) -> None:
        """Begin to send a block on, and to receive one like it."""
        self._sent, self._received = block.contiguous(), torch.empty_like(block, memory_format=torch.contiguous_format)
        after, before = self._neighbours()
        self._issued = self._recorder.issued()
        send = dist.P2POp(dist.isend, self._sent, group=self._group, tag=self._tag, group_peer=after)
        receive = dist.P2POp(dist.irecv, self._received, group=self._group, tag=self._tag, group_peer=before)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Return the block that came; only now may the one sent be changed."""
        for work in self._works:
            work.wait()
        received, self._sent, self._received = self._received, None, None
        assert received is not None, "a wait follows a start"
        return received

    def noted_wait(self, direction: Direction, step: int) -> Tensor:
        """Wait, and let the recorder know how long."""
        assert self._received is not None, "a wait follows a start"
        peers = [self._ranks[neighbour] for neighbour in self._neighbours()]
        with self._recorder.waiting(direction, step, self._what, self._received, peers, self._issued):
            return self.wait()

    def _neighbours(self) -> tuple[int, int]:
        return (self._rank + 1) % self.size, (self._rank - 1) % self.size

    def _move(self, block: Tensor) -> None:
        self.start(block)
        self.wait()


class RingAttention:
    """The core of an attention whose queries, keys and values (b, a, s/c, d) are parts of the sequence's.

    Without a group the rank is alone, with all of it.
    """

    def __init__(self, group: dist.ProcessGroup | None, blocks: Blocks) -> None:
        self.blocks = blocks
        self.keys = Ring(group, blocks.recorder, "keys and values", tag=1)
        self.gradients = Ring(group, blocks.recorder, "gradients", tag=2)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries over all ranks' keys."""
        out: Tensor = _RingAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, q: Tensor, kv: Tensor) -> Merged:
        """Compute on the block at hand while the next one comes."""
        merged, last = Merged(q), self.keys.size - 1
        for step in range(self.keys.size):
            if step < last:
                self.keys.start(kv)
            self.blocks.forward(step, q, kv, merged)
            if step < last:
                kv = self.keys.noted_wait("forward", step)
        return merged

    def backward(self, saved: Saved, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the queries and of this rank's keys and values, in float32."""
        own, last = kv, self.keys.size - 1
        first_half, second_half = split_rows(self.blocks.tiles[0], saved.q.shape[2] // 2)
        dq = torch.zeros(saved.q.shape, dtype=torch.float32, device=saved.q.device)
        if last:
            self.keys.start(kv)
        d_own = self.blocks.backward(0, first_half, saved, own, dq)
        for step in range(1, self.keys.size):
            kv = self.keys.noted_wait("backward", step - 1)
            if step < last:
                self.keys.start(kv)
            d_kv = self.blocks.backward(step, self.blocks.tiles[step], saved, kv, dq)
            if step > 1:
                d_kv += self.gradients.noted_wait("backward", step - 1)
            self.gradients.start(d_kv)
        d_own += self.blocks.backward(0, second_half, saved, own, dq)
        if last:
            d_own += self.gradients.noted_wait("backward", last)
        return dq, d_own


class _RingAttention(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and log-sum-exp alone: backward lets the rest come round again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: RingAttention) -> Tensor:
        merged = core.forward(q, torch.stack((k, v)))
        out = merged.output()
        ctx.save_for_backward(q, k, v, out, merged.lse())
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        saved = Saved(q=q, out=out, lse=lse, gradient=gradients[0])
        dq, d_kv = ctx.core.backward(saved, torch.stack((k, v)))
        return dq.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype), None
