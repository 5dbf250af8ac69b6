"""Dispatch of tokens to the ranks of their experts, and the combination of the results.

A plan lists the pairs of token and expert. An expert with a capacity takes its first pairs of each
source and microbatch, and drops the others without changing their tokens' other weights. Received
buffers are zeroed first, because communication may be disabled to measure its cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.expert_parallel.routing import NO_EXPERT


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Pairs of token and expert, ordered by expert and then by token, after the dropped pairs.

    The host must wait for the device to read how many pairs are dropped.
    """

    tokens: Tensor  # the token of each pair
    choices: Tensor  # which of the token's k experts the pair is
    counts: Tensor  # (E,), the pairs of each expert
    expert_ids: Tensor  # (T, k), NO_EXPERT in place of dropped pairs
    num_pairs: int | None  # without dropped pairs; None if only the device has their number

    def trim(self, num_pairs: int | None = None) -> "DispatchPlan":
        """Return the plan without dropped pairs; ``num_pairs`` is the number of all others.

        The host waits for the device if the number is not known.
        """
        if num_pairs is None:
            num_pairs = int(self.counts.sum()) if self.num_pairs is None else self.num_pairs
        num_dropped = len(self.tokens) - num_pairs
        return replace(
            self,
            tokens=self.tokens[num_dropped:],
            choices=self.choices[num_dropped:],
            num_pairs=num_pairs,
        )


def plan_dispatch(
    expert_ids: Tensor, experts: int, slots: int | None = None, num_pairs: int | None = None
) -> DispatchPlan:
    """Return the plan of a routing (T, k) in which each expert takes at most ``slots`` pairs.

    ``num_pairs`` is the number of pairs in the plan if the host has it.
    """
    top_k = expert_ids.shape[1]
    flat_ids = expert_ids.flatten()
    if slots is not None:
        flat_ids = drop_over_capacity(flat_ids, slots)
    order = torch.argsort(flat_ids, stable=True)
    return DispatchPlan(
        tokens=order // top_k,
        choices=order % top_k,
        counts=count_pairs(flat_ids, experts),
        expert_ids=flat_ids.view_as(expert_ids),
        num_pairs=num_pairs,
    )


def drop_over_capacity(flat_ids: Tensor, slots: int) -> Tensor:
    """Return expert ids in the order of tokens, NO_EXPERT after the first ``slots`` of an expert."""
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


def split_plan(plan: DispatchPlan, num_chunks: int) -> list[DispatchPlan]:
    """Return the plans of consecutive parts of the tokens; the capacity is that of all parts."""
    if num_chunks == 1:
        return [plan]
    num_tokens = len(plan.expert_ids)
    chunk_of_token = torch.arange(num_tokens, device=plan.expert_ids.device)
    chunk_of_token = chunk_of_token * num_chunks // num_tokens
    plans = []
    for chunk in range(num_chunks):
        is_in_chunk = (chunk_of_token == chunk)[:, None]
        expert_ids = plan.expert_ids.where(is_in_chunk, NO_EXPERT)
        plans.append(plan_dispatch(expert_ids, len(plan.counts)))
    return plans


def combine_rows(rows: Tensor, weights: Tensor, plan: DispatchPlan, num_tokens: int) -> Tensor:
    """Return the sum of each token's rows (pairs, h), times their weights (T, k)."""
    weighted = rows * weights[plan.tokens, plan.choices].unsqueeze(1)
    return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, plan.tokens, weighted)


class ExpertRows(NamedTuple):
    """Tokens (rows, h) ordered by local expert, and the rows of each (local experts)."""

    tokens: Tensor
    counts: Tensor


class TokenExchange:
    """Dispatch and combine of tokens (T, h) with weights (T, k). This base class has one rank.

    Its methods are called once, in their order, except ``start_dispatch`` and ``finish_dispatch``,
    which call the five before them.
    """

    def __init__(
        self, x: Tensor, weights: Tensor, plan: DispatchPlan, group: dist.ProcessGroup | None
    ) -> None:
        self.x = x
        self.weights = weights
        self.plan = plan
        self.group: Any = group
        self.rows = x

    def exchange_metadata(self) -> None:
        """Exchange the sizes or indices that the transfer needs."""

    def pack(self) -> None:
        """Permute tokens by expert."""
        self.plan = self.plan.trim()
        self.rows = self.x[self.plan.tokens]

    def send(self) -> None:
        """Start the transfer to experts."""

    def receive(self) -> None:
        """Wait for the rows of this rank's experts."""

    def unpack(self) -> ExpertRows:
        """Permute what was received by local expert."""
        return ExpertRows(tokens=self.rows, counts=self.plan.counts)

    def start_dispatch(self) -> None:
        self.exchange_metadata()
        self.pack()
        self.send()

    def finish_dispatch(self) -> ExpertRows:
        self.receive()
        return self.unpack()

    def start_combine(self, results: Tensor) -> None:
        """Send the experts' results (rows, h) back, in the order of the rows."""
        self.rows = results

    def finish_combine(self) -> Tensor:
        """Return the weighted sum of each token's results, (T, h)."""
        return combine_rows(self.rows, self.weights, self.plan, len(self.x))


class AllToAllExchange(TokenExchange):
    """Sends a row for each pair to the rank of its expert. The host reads the device once."""

    def exchange_metadata(self) -> None:
        sent = self.plan.counts.view(self.group.size(), -1)
        self.received_counts = all_to_all_without_gradient(sent, self.group)
        sizes = torch.stack((sent.sum(1), self.received_counts.sum(1))).tolist()
        self.num_sent, self.num_received = sizes
        self.plan = self.plan.trim(sum(self.num_sent))

    def send(self) -> None:
        self.transfer = AsyncAllToAll(self.rows, self.num_received, self.num_sent, self.group)
        del self.rows

    def receive(self) -> None:
        self.rows = self.transfer.wait()

    def unpack(self) -> ExpertRows:
        """Permute rows, which arrive by source and then by expert."""
        counts = self.received_counts
        expert = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
        expert_of_row = expert.repeat_interleave(
            counts.flatten(), output_size=sum(self.num_received)
        )
        self.order = torch.argsort(expert_of_row, stable=True)
        rows = self.rows[self.order]
        del self.rows
        return ExpertRows(tokens=rows, counts=counts.sum(0))

    def start_combine(self, results: Tensor) -> None:
        by_source = results[torch.argsort(self.order)]
        self.transfer = AsyncAllToAll(by_source, self.num_sent, self.num_received, self.group)

    def finish_combine(self) -> Tensor:
        self.rows = self.transfer.wait()
        return super().finish_combine()


class AllgatherExchange(TokenExchange):
    """Gathers the tokens of all ranks on each, and sums what the experts of all ranks return."""

    def exchange_metadata(self) -> None:
        self.expert_ids = gather_without_gradient(self.plan.expert_ids.int(), self.group).long()

    def pack(self) -> None:
        """Send tokens as they are."""

    def send(self) -> None:
        self.x = gather_rows(self.x, self.group)
        self.weights = gather_rows(self.weights, self.group)

    def unpack(self) -> ExpertRows:
        local_experts = len(self.plan.counts) // self.group.size()
        local_ids = self.expert_ids - local_experts * self.group.rank()
        is_local = (local_ids >= 0) & (local_ids < local_experts)
        self.plan = plan_dispatch(local_ids.where(is_local, NO_EXPERT), local_experts).trim()
        return ExpertRows(tokens=self.x[self.plan.tokens], counts=self.plan.counts)

    def start_combine(self, results: Tensor) -> None:
        partial_sums = combine_rows(results, self.weights, self.plan, len(self.x))
        self.rows = reduce_scatter_rows(partial_sums, self.group)

    def finish_combine(self) -> Tensor:
        return self.rows


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
    """Return the exchange of a plan's pairs over a group; None has all experts on this rank."""
    kind = TokenExchange if group is None else EXCHANGES[dispatcher]
    return kind(x, weights, plan, group)


class AsyncAllToAll:
    """An uneven all_to_all of rows (n, ...) in flight, whose backward pass is asynchronous too.

    ``num_sent[j]`` rows go to rank j of the group, ``num_received[j]`` come from it.
    """

    def __init__(
        self,
        rows: Tensor,
        num_received: Sequence[int],
        num_sent: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self.num_received = list(num_received)
        self.num_sent = list(num_sent)
        self.group = group
        self.work: dist.Work | None = None
        self.gradient: tuple[Tensor, dist.Work] | None = None
        self._received: Tensor | None = _StartAllToAll.apply(rows, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the received rows; to be called once."""
        # The received tensor refers to this object. A reference back would keep both alive.
        received = self._received
        self._received = None
        rows: Tensor = _WaitAllToAll.apply(received, self)  # type: ignore[no-untyped-call]
        self.work = None
        return rows


def _start_all_to_all(
    rows: Tensor, num_received: list[int], num_sent: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    received = rows.new_zeros(sum(num_received), *rows.shape[1:])
    work = dist.all_to_all_single(
        received, rows.contiguous(), num_received, num_sent, group=group, async_op=True
    )
    return received, work


class _StartAllToAll(torch.autograd.Function):
    """Starts the all_to_all; backward waits for the gradients that ``_WaitAllToAll`` sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        received, transfer.work = _start_all_to_all(
            rows, transfer.num_received, transfer.num_sent, transfer.group
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, work = ctx.transfer.gradient
        ctx.transfer.gradient = None
        work.wait()
        return gradient, None


class _WaitAllToAll(torch.autograd.Function):
    """Waits for the all_to_all; backward sends the gradients and returns a placeholder."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, transfer: AsyncAllToAll) -> Tensor:
        assert transfer.work is not None
        ctx.transfer = transfer
        transfer.work.wait()
        ctx.mark_dirty(received)  # The result is neither a copy nor a view.
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.gradient = _start_all_to_all(
            gradients[0], transfer.num_sent, transfer.num_received, transfer.group
        )
        return gradients[0], None


def all_to_all_without_gradient(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of an even all_to_all; with disabled communication they are this rank's."""
    received = rows.clone()
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gather_without_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks (ranks n, ...), in rank order."""
    gathered = x.new_zeros(group.size() * len(x), *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.new_zeros(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(summed, x.contiguous(), group)
    return summed


class _CollectiveWithGradient(torch.autograd.Function):
    """A collective whose backward pass is another one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.group = group
        ctx.backward_collective = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(gradients[0], ctx.group), None, None, None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks (ranks n, ...); backward sums the gradients of this rank's."""
    gathered: Tensor = _CollectiveWithGradient.apply(  # type: ignore[no-untyped-call]
        x, group, gather_without_gradient, _reduce_scatter
    )
    return gathered


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows (n, ...) of the sum over ranks; backward gathers their gradients."""
    summed: Tensor = _CollectiveWithGradient.apply(  # type: ignore[no-untyped-call]
        x, group, _reduce_scatter, gather_without_gradient
    )
    return summed
