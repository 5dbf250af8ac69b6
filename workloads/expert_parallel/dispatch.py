"""Dispatch of tokens to the ranks of their experts, and the combination of the results.

Each token chooses k experts, so that there are k pairs of token and expert for each token. A plan
lists the pairs of a rank in the order in which they are sent. An expert with a capacity takes the
first pairs of each rank and microbatch, and drops the others. The weights of a token's other
experts do not change. Receive buffers are zeroed first, because communication may be disabled to
measure its cost.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.collectives import communicate
from parbench.workloads.expert_parallel.routing import NO_EXPERT


class DispatchPlan(NamedTuple):
    """The order in which a rank sends its pairs of token and expert in one microbatch.

    A rank has ``tokens`` tokens, each of which chose ``top_k`` experts. Pairs are sent in the order
    of their experts, and pairs of one expert in the order of their tokens. A pair beyond the
    capacity of its expert is dropped: it is listed at the start of ``pairs``, and is not sent.
    """

    pairs: Tensor
    """The indices of all pairs, (tokens * top_k,), in the order in which the rank sends them.

    The index of a pair is token * top_k + i, where i from 0 is the position of the expert among the
    token's experts. Dropped pairs come first. The others are ordered by expert, and then by token.
    """
    counts: Tensor
    """The number of pairs of each expert that are not dropped, (experts,)."""
    expert_ids: Tensor
    """The experts of each token (tokens, top_k), with ``NO_EXPERT`` for dropped pairs."""
    num_pairs: int | None = None
    """The number of pairs that are not dropped. None if only the device has this number."""

    def trim(self) -> Tensor:
        """Return ``pairs`` without the dropped ones.

        The host waits for the device if ``num_pairs`` is None.
        """
        num_pairs = int(self.counts.sum()) if self.num_pairs is None else self.num_pairs
        return self.pairs[len(self.pairs) - num_pairs :]


def plan_dispatch(
    expert_ids: Tensor, experts: int, slots: int | None = None, num_pairs: int | None = None
) -> DispatchPlan:
    """Return the order in which a rank sends its pairs of token and expert in one microbatch.

    ``expert_ids`` (tokens, top_k) are the experts that each token chose, out of ``experts`` experts
    on all ranks. An expert takes its first ``slots`` pairs, and the others are dropped. If
    ``slots`` is None, none are dropped. ``num_pairs`` is the number of pairs that are not dropped,
    None if only the device has this number.
    """
    flat_ids = expert_ids.flatten()
    if slots is not None:
        flat_ids = drop_over_capacity(flat_ids, slots)
    return DispatchPlan(
        pairs=torch.argsort(flat_ids, stable=True),
        counts=count_pairs(flat_ids, experts),
        expert_ids=flat_ids.view_as(expert_ids),
        num_pairs=num_pairs,
    )


def drop_over_capacity(flat_ids: Tensor, slots: int) -> Tensor:
    """Return expert ids in which all but the first ``slots`` pairs of an expert are dropped.

    ``flat_ids`` (pairs,) has the expert id of each pair of token and expert, in the order of
    tokens. The result has ``NO_EXPERT`` in place of dropped pairs.
    """
    sorted_ids, order = torch.sort(flat_ids, stable=True)
    first_of_expert = torch.searchsorted(sorted_ids, sorted_ids)
    place = torch.arange(len(flat_ids), device=flat_ids.device) - first_of_expert
    has_slot = place < slots
    return torch.empty_like(flat_ids).scatter_(0, order, sorted_ids.where(has_slot, NO_EXPERT))


def count_pairs(expert_ids: Tensor, experts: int) -> Tensor:
    """Return the number of pairs of each expert in ``expert_ids``, as a tensor (experts,).

    Entries of ``NO_EXPERT`` do not count. Unlike ``torch.bincount``, this function does not let the
    host wait for the device.
    """
    bins = expert_ids.flatten() + 1
    counts = bins.new_zeros(experts + 1)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:]


class ExpertRows(NamedTuple):
    """The tokens that a rank received for its experts.

    There is one row for each pair of a token and an expert of this rank that the token chose.
    """

    tokens: Tensor
    """The activations (rows, hidden), ordered by the expert of this rank that takes them."""
    counts: Tensor
    """The number of rows of each expert of this rank, (local experts,)."""


class TokenExchange:
    """The dispatch of one microbatch's tokens to their experts, and the combination of the results.

    This base class is for a rank that holds all experts. Subclasses send tokens to other ranks.
    ``dispatch`` runs its phases in the order exchange_metadata, pack, transfer, unpack. Then
    ``combine`` takes the results of the experts.
    """

    def __init__(
        self, x: Tensor, weights: Tensor, plan: DispatchPlan, group: dist.ProcessGroup | None
    ) -> None:
        """Make an exchange of this rank's tokens ``x`` (tokens, hidden).

        ``weights`` (tokens, top_k) are the factors of the experts' results, ``plan`` the order in
        which pairs are sent, and ``group`` the ranks with different experts.
        """
        self.x = x
        self.weights = weights
        self.plan = plan
        self.group: Any = group

    def dispatch(self) -> ExpertRows:
        """Run all phases of dispatch, and return the received tokens by expert of this rank."""
        self.exchange_metadata()
        return self.unpack(self.transfer(self.pack()))

    def exchange_metadata(self) -> None:
        """Send the counts of pairs, or the expert ids, that the other ranks need for dispatch.

        The base class, which has all experts on this rank, sends nothing.
        """

    def pack(self) -> Tensor:
        """Return a copy of the token of each pair, (pairs, hidden), in the order of the plan.

        Dropped pairs are left out.
        """
        self.pairs = self.plan.trim()
        self.tokens = self.pairs // self.weights.shape[1]
        return self.x[self.tokens]

    def transfer(self, rows: Tensor) -> Tensor:
        """Send the result of ``pack`` to the ranks of the experts, and return the received rows.

        Both are (rows, hidden). The base class sends nothing, and returns ``rows``.
        """
        return rows

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the received rows (rows, hidden), ordered by expert of this rank.

        In the base class they already have this order.
        """
        return ExpertRows(tokens=rows, counts=self.plan.counts)

    def combine(self, results: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert results, for this rank's tokens.

        The sums are (tokens, hidden). ``results`` (rows, hidden) are the results of this rank's
        experts, in the order of ``unpack``. Dropped pairs add 0 to the sum of their token.
        """
        weighted = results * self.weights.flatten()[self.pairs].unsqueeze(1)
        return torch.zeros_like(self.x).index_add(0, self.tokens, weighted)


class AllToAllExchange(TokenExchange):
    """Sends each token to the ranks of its experts by an all_to_all with uneven sizes.

    A token is sent once for each of its experts, as a pair of token and expert. The host reads the
    numbers of pairs from the device once.
    """

    def exchange_metadata(self) -> None:
        """Exchange with all ranks the numbers of pairs for each expert, by a small all_to_all.

        The host then reads the numbers of tokens that this rank sends to and receives from each
        rank. ``transfer`` and ``combine`` need these sizes.
        """
        sent = self.plan.counts.view(self.group.size(), -1)
        received = sent.clone()  # also the result if communication is disabled for its cost
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        sizes = torch.stack((sent.sum(1), received.sum(1))).tolist()
        self.num_sent, self.num_received = sizes
        self.received_counts = received
        self.plan = self.plan._replace(num_pairs=sum(self.num_sent))

    def transfer(self, rows: Tensor) -> Tensor:
        """Send packed rows (rows, hidden) by an all_to_all, and return the received rows."""
        return self._exchange(rows, self.num_received, self.num_sent)

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the received rows (rows, hidden), ordered by expert of this rank.

        They arrive ordered by the rank that sent them, and then by expert.
        """
        received = self.received_counts
        expert = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        expert_of_row = expert.repeat_interleave(received.flatten(), output_size=len(rows))
        self.order = torch.argsort(expert_of_row, stable=True)
        return ExpertRows(tokens=rows[self.order], counts=received.sum(0))

    def combine(self, results: Tensor) -> Tensor:
        """Send results back by an all_to_all, and return their weighted sum for each token.

        ``results`` (rows, hidden) are the results of this rank's experts, in the order of
        ``unpack``. The sums are those of this rank's own tokens, (tokens, hidden).
        """
        by_source = results[torch.argsort(self.order)]
        return super().combine(self._exchange(by_source, self.num_sent, self.num_received))

    def _exchange(self, rows: Tensor, num_received: list[int], num_sent: list[int]) -> Tensor:
        """Send rows by an all_to_all and return the received rows. Backward reverses the exchange.

        ``num_received`` and ``num_sent`` are the numbers of rows from and to each rank of the
        group.
        """
        return communicate(
            rows,
            partial(_all_to_all, self.group, num_received, num_sent),
            partial(_all_to_all, self.group, num_sent, num_received),
        )


class AllgatherExchange(TokenExchange):
    """Dispatches tokens by an all_gather, and combines the results by a reduce_scatter.

    Every rank receives the tokens of all ranks, and runs its experts on those that chose them.
    """

    def exchange_metadata(self) -> None:
        """All-gather the expert ids (tokens, top_k) of all ranks' tokens, for ``unpack``."""
        self.expert_ids = gather_expert_ids(self.plan, self.group)

    def pack(self) -> Tensor:
        """Return this rank's tokens (tokens, hidden) unchanged, because all ranks receive them."""
        return self.x

    def transfer(self, rows: Tensor) -> Tensor:
        """All-gather the tokens and weights of all ranks, and return all tokens in rank order.

        They are (ranks * tokens, hidden). The weights are kept for ``combine``.
        """
        self.x = gather_rows(rows, self.group)
        self.weights = gather_rows(self.weights, self.group)
        return self.x

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the rows for this rank's experts, selected from the tokens of all ranks.

        ``rows`` (ranks * tokens, hidden) is not read, because ``transfer`` has stored the same
        tensor in ``self.x``.
        """
        local_experts = len(self.plan.counts) // self.group.size()
        local_ids = self.expert_ids - local_experts * self.group.rank()
        is_local = (local_ids >= 0) & (local_ids < local_experts)
        self.plan = plan_dispatch(local_ids.where(is_local, NO_EXPERT), local_experts)
        return ExpertRows(tokens=super().pack(), counts=self.plan.counts)

    def combine(self, results: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert results, for this rank's tokens.

        The sums are (tokens, hidden). ``results`` (rows, hidden) are the results of this rank's
        experts for the tokens of all ranks. Each rank first adds up its own results by token. A
        reduce_scatter then adds the sums of all ranks, and returns to each rank those of its
        tokens.
        """
        return reduce_scatter_rows(super().combine(results), self.group)


EXCHANGES: dict[str, type[TokenExchange]] = {
    "all_to_all": AllToAllExchange,
    "allgather": AllgatherExchange,
}
"""The class that executes a dispatcher of ``dispatchers.py``, by the dispatcher's name."""


def make_exchange(
    dispatcher: str,
    x: Tensor,
    weights: Tensor,
    plan: DispatchPlan,
    group: dist.ProcessGroup | None,
) -> TokenExchange:
    """Return the object that dispatches a microbatch's tokens and combines their results.

    ``plan`` is the order in which this rank's pairs of token and expert are sent, and ``group`` the
    ranks with different experts. ``dispatcher`` is a name in ``EXCHANGES``, ``x`` has this rank's
    tokens (tokens, hidden), and ``weights`` (tokens, top_k) are the factors of the experts'
    results. With a ``group`` of None, this rank holds all experts, and ``dispatcher`` is not used.
    """
    kind = TokenExchange if group is None else EXCHANGES[dispatcher]
    return kind(x, weights, plan, group)


def _all_to_all(
    group: dist.ProcessGroup, num_received: list[int], num_sent: list[int], rows: Tensor
) -> Tensor:
    """Send ``num_sent[j]`` rows to each rank j and return ``num_received[j]`` rows from each.

    Sent and received rows are ordered by rank j of the group.
    """
    received = rows.new_zeros(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
    return received


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather a tensor (n, ...) and return the rows of all ranks (ranks * n, ...) in rank order.

    The result has no gradient.
    """
    gathered = x.new_zeros(group.size() * len(x), *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor (ranks * n, ...) over ranks, and return this rank's rows of the sum (n, ...).

    The result has no gradient.
    """
    summed = x.new_zeros(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(summed, x.contiguous(), group)
    return summed


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``x`` (n, ...) and return the rows of all ranks (ranks * n, ...) in rank order.

    Backward is a reduce_scatter: it sums over ranks the gradients of this rank's rows.
    """
    return communicate(x, partial(_gather, group=group), partial(_reduce_scatter, group=group))


def gather_expert_ids(plan: DispatchPlan, group: dist.ProcessGroup) -> Tensor:
    """Return the expert ids in the plans of all ranks, (ranks * tokens, top_k), in rank order.

    ``plan`` is for this rank's tokens. Dropped pairs have ``NO_EXPERT``.
    """
    return _gather(plan.expert_ids.int(), group).long()


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` (ranks * n, ...) over ranks, and return this rank's rows of the sum (n, ...).

    Backward is an all_gather of the gradients of all ranks' rows.
    """
    return communicate(x, partial(_reduce_scatter, group=group), partial(_gather, group=group))
