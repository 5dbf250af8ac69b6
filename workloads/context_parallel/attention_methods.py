"""Attention over ranks: keys travel in a ring or are gathered, tokens are exchanged for heads."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.collectives import communicate
from parbench.workloads.context_parallel.attention_kernel import (
    BlockAttention,
    Kernel,
    OnlineSoftmax,
    SavedQueries,
)
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.model.transformer import Attention, Core, rotate

# The tags of messages, because keys and gradients travel at the same time.
KEYS = 1
GRADIENTS = 2


def start_hop(group: dist.ProcessGroup, block: Tensor, tag: int) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank of a ring, and to receive one from the previous rank.

    Return a function that waits for both and returns the received tensor, of the same shape as
    ``block``. ``block`` may be changed only after this wait. ``tag`` separates messages that are
    in flight at the same time: keys and values, and gradients.
    """
    sent = block.contiguous()
    received = torch.empty_like(block, memory_format=torch.contiguous_format)
    next_rank = (group.rank() + 1) % group.size()
    previous_rank = (group.rank() - 1) % group.size()
    hop = [
        dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=next_rank),
        dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=previous_rank),
    ]
    works = dist.batch_isend_irecv(hop)

    def wait() -> Tensor:
        """Wait for the send and the receive, and return the received block."""
        for work in works:
            work.wait()
        hop.clear()  # until here it holds the sent block
        return received

    return wait


class RingAttention(BlockAttention):
    """Ring attention: each rank's keys and values (a block) are sent around a ring of ranks.

    A rank computes with one block while it sends this block to the next rank (arXiv 2310.01889).
    The backward pass sends the blocks around again. Each block is followed by the sum of its
    gradients, to which every rank adds its part. A rank starts with its own block. If the process
    group is None, nothing is sent, and this rank has the only block.
    """

    def forward(self, q: Tensor, kv: Tensor) -> OnlineSoftmax:
        """Return the attention of this rank's q over all keys, which are sent around the ring.

        ``kv`` stacks this rank's keys and values, (2, batch, kv_heads, tokens, head size). While a
        rank computes with one block, it sends this block and receives the next.
        """
        softmax = OnlineSoftmax(q)
        last_block = self.split.parts - 1
        for block in range(last_block):
            assert self.group is not None, "a ring has several ranks"
            wait_for_keys = start_hop(self.group, kv, KEYS)
            self.add_block(block, q, kv, softmax)
            kv = wait_for_keys()
        self.add_block(last_block, q, kv, softmax)
        return softmax

    def backward(self, saved: SavedQueries, kv: Tensor, dq: Tensor) -> Tensor:
        """Return the gradients of this rank's keys and values from the queries of all ranks.

        Keys, values and their gradients are sent around the ring, and each rank adds its part.
        ``kv`` stacks this rank's keys and values, and the result has its shape. The gradients of
        this rank's queries are added to ``dq``.
        """
        last_block = self.split.parts - 1
        if self.group is None:
            return self.compute_gradients(self.tiles[0], saved, kv, dq)
        wait_for_keys = start_hop(self.group, kv, KEYS)
        own_d_kv = self.compute_gradients(self.tiles[0], saved, kv, dq)
        wait_for_gradients: Callable[[], Tensor] | None = None
        for block in range(1, last_block + 1):
            kv = wait_for_keys()
            if block < last_block:
                wait_for_keys = start_hop(self.group, kv, KEYS)
            d_kv = self.compute_gradients(self.tiles[block], saved, kv, dq)
            if wait_for_gradients is not None:
                d_kv += wait_for_gradients()
            wait_for_gradients = start_hop(self.group, d_kv, GRADIENTS)
        assert wait_for_gradients is not None
        return own_d_kv + wait_for_gradients()


class AllGatherAttention(BlockAttention):
    """Attention in which each rank gathers all keys and values, and reduce-scatters gradients.

    This is the method of Llama 3 (arXiv 2407.21783, section 3.3.2). The backward pass gathers
    again, so that no rank saves all keys.
    """

    @cached_property
    def _positions(self) -> Tensor:
        """The position in the sequence of each gathered token, in rank order."""
        tokens_by_rank = [self.split.list_tokens(rank) for rank in range(self.split.ranks)]
        return torch.tensor(tokens_by_rank, device=self.device).flatten()

    @cached_property
    def _sequence_order(self) -> Tensor:
        """The indices that sort gathered tokens by position in the sequence."""
        return self._positions.argsort()

    def forward(self, q: Tensor, kv: Tensor) -> OnlineSoftmax:
        """All-gather the keys and values of all ranks, and return the attention of this rank's q.

        ``kv`` stacks this rank's keys and values, (2, batch, kv_heads, tokens, head size).
        """
        softmax = OnlineSoftmax(q)
        self.add_block(0, q, self._gather(kv), softmax)
        return softmax

    def backward(self, saved: SavedQueries, kv: Tensor, dq: Tensor) -> Tensor:
        """Return the gradients of this rank's keys and values from the queries of all ranks.

        All keys and values are gathered again, and a reduce_scatter sums their gradients over
        ranks. ``kv`` stacks this rank's keys and values, and the result has its shape. The
        gradients of this rank's queries are added to ``dq``.
        """
        assert self.group is not None
        d_kv = self.compute_gradients(self.tiles[0], saved, self._gather(kv), dq)
        by_rank = d_kv.index_select(3, self._positions).chunk(self.group.size(), dim=3)
        parts = torch.stack(by_rank).to(kv.dtype)
        reduced = parts.new_empty(1, *parts.shape[1:])
        reduce_scatter_single(reduced, parts, self.group)
        return reduced[0]

    def _gather(self, kv: Tensor) -> Tensor:
        """All-gather keys and values, and sort their tokens by position in the sequence.

        ``kv`` stacks the keys and values of this rank, (2, batch, kv_heads, tokens, head size). The
        result has the tokens of all ranks.
        """
        assert self.group is not None
        parts = kv.new_empty(self.group.size(), *kv.shape)
        all_gather_single(parts, kv.contiguous().unsqueeze(0), self.group)
        return parts.movedim(0, 3).flatten(3, 4).index_select(3, self._sequence_order)


class UlyssesAttention:
    """Attention in which ranks first exchange tokens for heads, and afterwards exchange back.

    It is called with this rank's q, k and v, (batch, heads, tokens, head size). A rank then
    computes attention for its part of the heads and the tokens of all ranks of the group (Ulysses,
    arXiv 2309.14509).
    """

    def __init__(self, group: dist.ProcessGroup, attention: Core) -> None:
        """Make attention over a group of ranks that exchange tokens for heads.

        ``attention(q, k, v)`` computes the attention of this rank's heads. In USP (arXiv
        2405.07719) it is a ring of other ranks.
        """
        self._group = group
        self._attention = attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of all heads for this rank's tokens, with the shape of ``q``."""
        ranks = self._group.size()
        heads_by_rank = [_split_dim(x, 1, ranks) for x in (q, k, v)]
        heads = self._exchange(torch.cat(heads_by_rank, dim=2).movedim(1, 0))
        heads_of_rank = [x.shape[1] // ranks for x in (q, k, v)]
        inputs = torch.split(heads.movedim(0, 2).flatten(2, 3), heads_of_rank, dim=1)
        output = self._attention(*inputs)
        tokens = self._exchange(_split_dim(output, 2, ranks).movedim(2, 0))
        return tokens.movedim(0, 1).flatten(1, 2)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Send part i of ``by_rank`` to rank i, and return the parts from all ranks in rank order.

        Both are (ranks of the group, ...). Backward sends the gradients the opposite way.
        """
        exchange = partial(_all_to_all, self._group)
        return communicate(by_rank, exchange, exchange)


def _split_dim(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return ``x`` with dimension ``dim`` split into two: ``parts`` and the elements of a part."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


def _all_to_all(group: dist.ProcessGroup, by_rank: Tensor) -> Tensor:
    """Send part i of ``by_rank`` to rank i, and return the parts from all ranks in rank order.

    Both are (ranks of the group, ...). The result has no gradient.
    """
    received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, by_rank.contiguous(), group=group)
    return received


def build_attention(
    split: SequenceSplit,
    rank: int,
    device: torch.device,
    groups: Mapping[str, dist.ProcessGroup],
    kernel: Kernel,
) -> Core:
    """Return the function (q, k, v) -> output that computes attention over the ranks of ``cp``.

    ``rank`` is this rank's index along ``cp``. ``groups`` has this rank's process group for each
    axis of ``ContextMethod.list_axis_groups``. ``kernel`` computes attention over one block of
    keys.
    """
    method = split.method
    part_group = groups[method.part_axis] if split.parts > 1 else None
    gathers_keys = method.keys == "gather"
    attention_class = AllGatherAttention if gathers_keys else RingAttention
    attention = attention_class(part_group, kernel, split, rank, device)
    if split.ulysses == 1:
        return attention
    return UlyssesAttention(groups[method.head_axis], attention)


def install_attention(model: nn.Module, attention: Core | None, positions: Tensor) -> None:
    """Set the attention function and the positions for RoPE in every layer of a model.

    ``attention(q, k, v)`` replaces the attention of the layers. None keeps that of each layer.
    ``positions`` (tokens,) are the positions of this rank's tokens in the sequence.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            if attention is not None:
                module.core = attention
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=positions)
