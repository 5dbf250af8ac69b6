"""Ring attention (arXiv 2310.01889): keys and values go round the ranks while each computes on those it has.

Contiguous, striped and zigzag are the same ring over other tokens. Backward sends the blocks round again, and behind
each the sum of its gradients, which every rank adds to. A rank's own block is the first in forward; in backward half
of it comes first, over the first hop of keys, and half last, over the last hop of gradients home.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.context_parallel.attention_kernel import BlockAttention, Kernel, Merged, Saved
from workloads.context_parallel.exchange_plan import Tiles, split_rows
from workloads.context_parallel.recorder import Direction, Moment, Recorder


class Ring:
    """Ranks in a circle: ``start`` sends a block to the next one, ``wait`` returns the one from the rank before."""

    def __init__(self, group: dist.ProcessGroup | None, recorder: Recorder, what: str, tag: int) -> None:
        self._group, self._recorder, self._what, self._tag = group, recorder, what, tag
        rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self._after, self._before = (rank + 1) % self.size, (rank - 1) % self.size
        self._issued: Moment | None = None
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        if group is not None and self.size > 1:
            ranks = dist.get_process_group_ranks(group)
            self._peers = [ranks[self._after], ranks[self._before]]
            recorder.moves[what] = self._move

    def start(self, block: Tensor) -> None:
        """Begin to send a block on, and to receive one like it."""
        self._sent, self._received = block.contiguous(), torch.empty_like(block, memory_format=torch.contiguous_format)
        self._issued = self._recorder.issued()
        send = dist.P2POp(dist.isend, self._sent, group=self._group, tag=self._tag, group_peer=self._after)
        receive = dist.P2POp(dist.irecv, self._received, group=self._group, tag=self._tag, group_peer=self._before)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Return the block that came; only now may the one sent be changed."""
        for work in self._works:
            work.wait()
        received, self._sent, self._received = self._received, None, None
        assert received is not None, "a wait follows a start"
        return received

    def _move(self, block: Tensor) -> None:
        self.start(block)
        self.wait()

    def noted_wait(self, direction: Direction, step: int) -> Tensor:
        """Wait, and let the recorder know how long."""
        assert self._received is not None, "a wait follows a start"
        with self._recorder.waiting(direction, step, self._what, self._received, self._peers, self._issued):
            return self.wait()


class RingAttention(BlockAttention):
    """Computes on one block of keys and values while the next one comes; without a group the rank is alone."""

    def __init__(self, group: dist.ProcessGroup | None, kernel: Kernel, recorder: Recorder, tiles: Tiles) -> None:
        super().__init__(kernel, recorder, tiles)
        self.keys = Ring(group, recorder, "keys and values", tag=1)
        self.gradients = Ring(group, recorder, "gradients", tag=2)

    def forward(self, q: Tensor, kv: Tensor) -> Merged:
        merged, last = Merged(q), self.keys.size - 1
        for step in range(self.keys.size):
            if step < last:
                self.keys.start(kv)
            self.add_block(step, q, kv, merged)
            if step < last:
                kv = self.keys.noted_wait("forward", step)
        return merged

    def backward(self, saved: Saved, kv: Tensor, dq: Tensor) -> Tensor:
        own, last = kv, self.keys.size - 1
        first_half, second_half = split_rows(self.tiles[0], saved.q.shape[2] // 2)
        if last:
            self.keys.start(kv)
        d_own = self.block_gradients(0, first_half, saved, own, dq)
        for step in range(1, self.keys.size):
            kv = self.keys.noted_wait("backward", step - 1)
            if step < last:
                self.keys.start(kv)
            d_kv = self.block_gradients(step, self.tiles[step], saved, kv, dq)
            if step > 1:
                d_kv += self.gradients.noted_wait("backward", step - 1)
            self.gradients.start(d_kv)
        d_own += self.block_gradients(0, second_half, saved, own, dq)
        if last:
            d_own += self.gradients.noted_wait("backward", last)
        return d_own
