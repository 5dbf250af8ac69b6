"""Dispatch of tokens to the ranks of their experts, and the combination of the results.

A plan lists the pairs of token and expert. An expert with a capacity takes its first pairs of each
source and microbatch, and drops the others without changing their tokens' other weights. Received
buffers are zeroed first, because communication may be disabled to measure its cost.
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
    """The order in which a rank sends its pairs of token and expert."""

    pairs: Tensor
    """T k numbers, token * k + choice, ordered by expert and token, after the dropped pairs."""
    counts: Tensor  # (E,), the pairs of each expert
    expert_ids: Tensor  # (T, k), NO_EXPERT in place of dropped pairs
    num_pairs: int | None = None
    """The number of pairs that are not dropped. None if only the device has this number."""

    def trim(self) -> Tensor:
        """Return the pairs of the plan without dropped ones.

        The host waits for the device if the number of kept pairs is unknown.
        """
        num_pairs = int(self.counts.sum()) if self.num_pairs is None else self.num_pairs
        return self.pairs[len(self.pairs) - num_pairs :]


def plan_dispatch(
    expert_ids: Tensor, experts: int, slots: int | None = None, num_pairs: int | None = None
) -> DispatchPlan:
    """Return the plan of a routing (T, k) in which each expert takes at most ``slots`` pairs.

    ``slots`` of None is no limit.
    ``num_pairs`` is the number of pairs that are not dropped, None if the host does not have it.
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
    """Replace expert ids beyond the first ``slots`` of an expert by ``NO_EXPERT``.

    ``flat_ids`` has the expert ids of all pairs, in the order of tokens.
    """
    sorted_ids, order = torch.sort(flat_ids, stable=True)
    first_of_expert = torch.searchsorted(sorted_ids, sorted_ids)
    place = torch.arange(len(flat_ids), device=flat_ids.device) - first_of_expert
    has_slot = place < slots
    return torch.empty_like(flat_ids).scatter_(0, order, sorted_ids.where(has_slot, NO_EXPERT))


def count_pairs(expert_ids: Tensor, experts: int) -> Tensor:
    """Return the number of pairs of each expert, (E,), without NO_EXPERT.

    ``torch.bincount`` would let the host wait for the device.
    """
    bins = expert_ids.flatten() + 1
    counts = bins.new_zeros(experts + 1)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:]


class ExpertRows(NamedTuple):
    """Tokens (rows, h) ordered by local expert, and the number of rows of each (local experts,)."""

    tokens: Tensor
    counts: Tensor


class TokenExchange:
    """Dispatch and combine of tokens (T, h) with weights (T, k).

    This base class has all experts on this rank. Subclasses send tokens to other ranks.
    """

    def __init__(
        self, x: Tensor, weights: Tensor, plan: DispatchPlan, group: dist.ProcessGroup | None
    ) -> None:
        self.x = x
        self.weights = weights
        self.plan = plan
        self.group: Any = group

    def dispatch(self) -> ExpertRows:
        """Run all phases of dispatch, and return the rows for this rank's experts."""
        self.exchange_metadata()
        return self.unpack(self.transfer(self.pack()))

    def exchange_metadata(self) -> None:
        """Exchange the counts or indices that the other phases of dispatch need."""

    def pack(self) -> Tensor:
        """Return the tokens in the order of the plan's pairs (pairs, h)."""
        self.pairs = self.plan.trim()
        self.tokens = self.pairs // self.weights.shape[1]
        return self.x[self.tokens]

    def transfer(self, rows: Tensor) -> Tensor:
        """Send packed rows (rows, h) to their experts' ranks, and return the received rows."""
        return rows

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the received rows in the order of this rank's experts."""
        return ExpertRows(tokens=rows, counts=self.plan.counts)

    def combine(self, results: Tensor) -> Tensor:
        """Return the weighted sum of each token's results (T, h), from results (pairs, h)."""
        weighted = results * self.weights.flatten()[self.pairs].unsqueeze(1)
        return torch.zeros_like(self.x).index_add(0, self.tokens, weighted)


class AllToAllExchange(TokenExchange):
    """Sends a row for each pair to the rank of its expert. The host reads the device once."""

    def exchange_metadata(self) -> None:
        sent = self.plan.counts.view(self.group.size(), -1)
        received = _exchange_evenly(sent, self.group)
        sizes = torch.stack((sent.sum(1), received.sum(1))).tolist()
        self.num_sent, self.num_received = sizes
        self.received_counts = received
        self.plan = self.plan._replace(num_pairs=sum(self.num_sent))

    def transfer(self, rows: Tensor) -> Tensor:
        return self._exchange(rows, self.num_received, self.num_sent)

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the received rows ordered by expert. They arrive by source and then by expert."""
        received = self.received_counts
        expert = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        expert_of_row = expert.repeat_interleave(received.flatten(), output_size=len(rows))
        self.order = torch.argsort(expert_of_row, stable=True)
        return ExpertRows(tokens=rows[self.order], counts=received.sum(0))

    def combine(self, results: Tensor) -> Tensor:
        by_source = results[torch.argsort(self.order)]
        return super().combine(self._exchange(by_source, self.num_sent, self.num_received))

    def _exchange(self, rows: Tensor, num_received: list[int], num_sent: list[int]) -> Tensor:
        """Return the rows that this rank receives. Backward returns their gradients."""
        return communicate(
            rows,
            partial(_all_to_all, self.group, num_received, num_sent),
            partial(_all_to_all, self.group, num_sent, num_received),
        )


class AllgatherExchange(TokenExchange):
    """Gathers the tokens of all ranks on every rank, and sums the results of all ranks' experts."""

    def exchange_metadata(self) -> None:
        self.expert_ids = _gather(self.plan.expert_ids.int(), self.group).long()

    def pack(self) -> Tensor:
        """Return the tokens as they are, because all ranks receive all of them."""
        return self.x

    def transfer(self, rows: Tensor) -> Tensor:
        self.x = gather_rows(rows, self.group)
        self.weights = gather_rows(self.weights, self.group)
        return self.x

    def unpack(self, rows: Tensor) -> ExpertRows:
        """Return the rows of this rank's experts, selected from the tokens of all ranks."""
        local_experts = len(self.plan.counts) // self.group.size()
        local_ids = self.expert_ids - local_experts * self.group.rank()
        is_local = (local_ids >= 0) & (local_ids < local_experts)
        self.plan = plan_dispatch(local_ids.where(is_local, NO_EXPERT), local_experts)
        return ExpertRows(tokens=super().pack(), counts=self.plan.counts)

    def combine(self, results: Tensor) -> Tensor:
        return reduce_scatter_rows(super().combine(results), self.group)


EXCHANGES: dict[str, type[TokenExchange]] = {
    "all_to_all": AllToAllExchange,
    "allgather": AllgatherExchange,
}
"""The execution of each dispatcher of ``dispatchers.py``."""


def make_exchange(
    dispatcher: str,
    x: Tensor,
    weights: Tensor,
    plan: DispatchPlan,
    group: dist.ProcessGroup | None,
) -> TokenExchange:
    """Return the exchange of a plan's pairs over a group. With None, this rank has all experts."""
    kind = TokenExchange if group is None else EXCHANGES[dispatcher]
    return kind(x, weights, plan, group)


def _all_to_all(
    group: dist.ProcessGroup, num_received: list[int], num_sent: list[int], rows: Tensor
) -> Tensor:
    """Send ``num_sent[j]`` rows to rank j and return ``num_received[j]`` rows from each rank j."""
    received = rows.new_zeros(sum(num_received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
    return received


def _exchange_evenly(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of an even all_to_all, or this rank's rows without communication."""
    received = rows.clone()
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks (ranks n, ...), in rank order."""
    gathered = x.new_zeros(group.size() * len(x), *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.new_zeros(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(summed, x.contiguous(), group)
    return summed


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks (ranks n, ...). Backward sums gradients of this rank's rows."""
    return communicate(x, partial(_gather, group=group), partial(_reduce_scatter, group=group))


def gather_routing(
    x: Tensor, weights: Tensor, plan: DispatchPlan, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (T, h), weights (T, k) and expert ids (T, k) of all ranks."""
    expert_ids = _gather(plan.expert_ids.int(), group).long()
    return gather_rows(x, group), gather_rows(weights, group), expert_ids


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows (n, ...) of the sum over ranks. Backward gathers their gradients."""
    return communicate(x, partial(_reduce_scatter, group=group), partial(_gather, group=group))
