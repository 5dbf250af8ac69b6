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
    """Start to send a block to the next rank in a circle, and one from the previous rank to here.

    The result waits for the hop and returns the received block. The sent block may be changed only
    after this.
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
        for work in works:
            work.wait()
        hop.clear()  # until here it holds the sent block
        return received

    return wait


class RingAttention(BlockAttention):
    """Attention in which keys and values travel around the ranks (arXiv 2310.01889).

    Without a group, this rank computes the only block. The backward pass sends the blocks around
    again. Each block is followed by the sum of its gradients, to which every rank adds its part. In
    forward, a rank's own block comes first. In backward, half of it comes first, during the first
    hop of keys, and half comes last, during the last hop of gradients.
    """

    def forward(self, q: Tensor, kv: Tensor) -> OnlineSoftmax:
        softmax = OnlineSoftmax(q)
        last_block = self.split.parts - 1
        for block in range(last_block):
            wait_for_keys = self._start_hop(kv, KEYS)
            self.add_block(block, q, kv, softmax)
            kv = wait_for_keys()
        self.add_block(last_block, q, kv, softmax)
        return softmax

    def backward(self, saved: SavedQueries, kv: Tensor, dq: Tensor) -> Tensor:
        last_block = self.split.parts - 1
        if last_block == 0:
            return self.compute_gradients(self.tiles[0], saved, kv, dq)
        own_kv = kv
        first_half, second_half = self.own_halves
        wait_for_keys = self._start_hop(kv, KEYS)
        own_d_kv = self.compute_gradients(first_half, saved, own_kv, dq)
        wait_for_gradients: Callable[[], Tensor] | None = None
        for block in range(1, last_block + 1):
            kv = wait_for_keys()
            if block < last_block:
                wait_for_keys = self._start_hop(kv, KEYS)
            d_kv = self.compute_gradients(self.tiles[block], saved, kv, dq)
            if wait_for_gradients is not None:
                d_kv += wait_for_gradients()
            wait_for_gradients = self._start_hop(d_kv, GRADIENTS)
        own_d_kv += self.compute_gradients(second_half, saved, own_kv, dq)
        assert wait_for_gradients is not None
        own_d_kv += wait_for_gradients()
        return own_d_kv

    def _start_hop(self, block: Tensor, tag: int) -> Callable[[], Tensor]:
        assert self.group is not None, "a ring has several ranks"
        return start_hop(self.group, block, tag)


class AllGatherAttention(BlockAttention):
    """Each rank gathers all keys, and scatters the sums of their gradients.

    This is the method of Llama 3 (arXiv 2407.21783, section 3.3.2). The backward pass gathers
    again, so that no rank saves all keys.
    """

    @cached_property
    def _positions(self) -> Tensor:
        """The positions of all ranks' tokens, rank by rank."""
        tokens_by_rank = [self.split.list_tokens(rank) for rank in range(self.split.ranks)]
        return torch.tensor(tokens_by_rank, device=self.device).flatten()

    @cached_property
    def _sequence_order(self) -> Tensor:
        """The indices that sort the gathered tokens by position in the sequence."""
        return self._positions.argsort()

    def forward(self, q: Tensor, kv: Tensor) -> OnlineSoftmax:
        softmax = OnlineSoftmax(q)
        self.add_block(0, q, self._gather(kv), softmax)
        return softmax

    def backward(self, saved: SavedQueries, kv: Tensor, dq: Tensor) -> Tensor:
        assert self.group is not None
        d_kv = self.compute_gradients(self.tiles[0], saved, self._gather(kv), dq)
        by_rank = d_kv.index_select(3, self._positions).chunk(self.group.size(), dim=3)
        parts = torch.stack(by_rank).to(kv.dtype)
        reduced = parts.new_empty(1, *parts.shape[1:])
        reduce_scatter_single(reduced, parts, self.group)
        return reduced[0]

    def _gather(self, kv: Tensor) -> Tensor:
        """Return all keys and values (2, b, a_kv, s, d) in the order of the sequence."""
        assert self.group is not None
        parts = kv.new_empty(self.group.size(), *kv.shape)
        all_gather_single(parts, kv.contiguous().unsqueeze(0), self.group)
        return parts.movedim(0, 3).flatten(3, 4).index_select(3, self._sequence_order)


class UlyssesAttention:
    """Ranks exchange parts of the sequence for heads before attention, and back afterwards.

    The inputs are q, k and v (b, a, s/u, d). ``attention`` is of (b, a/u, s, d) (arXiv 2309.14509).
    USP (arXiv 2405.07719) has a ring of other ranks as its ``attention``.
    """

    def __init__(self, group: dist.ProcessGroup, attention: Core) -> None:
        self._group = group
        self._attention = attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = self._group.size()
        heads_by_rank = [_split_dim(x, 1, ranks) for x in (q, k, v)]
        heads = self._exchange(torch.cat(heads_by_rank, dim=2).movedim(1, 0))
        heads_of_rank = [x.shape[1] // ranks for x in (q, k, v)]
        inputs = torch.split(heads.movedim(0, 2).flatten(2, 3), heads_of_rank, dim=1)
        output = self._attention(*inputs)
        tokens = self._exchange(_split_dim(output, 2, ranks).movedim(2, 0))
        return tokens.movedim(0, 1).flatten(1, 2)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Return the parts (u, ...) from all ranks, and exchange gradients back in backward."""
        exchange = partial(_all_to_all, self._group)
        return communicate(by_rank, exchange, exchange)


def _split_dim(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return a view in which a dimension is two: the parts, and the elements of each part."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


def _all_to_all(group: dist.ProcessGroup, by_rank: Tensor) -> Tensor:
    """Send part i of ``by_rank`` (u, ...) to rank i, and return the parts of all ranks (u, ...)."""
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
    """Return the attention of a rank of cp.

    ``groups`` has this rank's group of each axis of ``ContextMethod.list_axis_groups``.
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
    """Let every layer use an attention, and rotate its tokens by their positions (s) in a sequence.

    None leaves each layer's own attention.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            if attention is not None:
                module.core = attention
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=positions)
