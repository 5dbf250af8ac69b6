"""How tokens get to the ranks that hold their experts, and back: one way without communication, two over an axis.

A plan names the pairs of token and expert that travel: those over an expert's capacity, per source and microbatch and
in the order of tokens, do not, and the weights of the others stay as they are. What travels are flights that autograd
knows: one is issued, and waited for when its tokens are needed; its backward pass is a flight of gradients in the other
direction. What is received is zeroed first: where communication is silenced, it is read as it is.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.expert_parallel.routing import NOWHERE


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pairs of token and expert, ordered by expert and then by token; those that do not travel come first.

    How many travel is on the device (``counts``). The host has to wait for it, so it is read as late as possible.
    """

    tokens: Tensor  # each pair's token
    choices: Tensor  # which of the token's k choices a pair is
    experts: Tensor  # each pair's expert, NOWHERE if it does not travel
    counts: Tensor  # (E,), pairs of each expert
    experts_of: Tensor  # (T, k), the routing with NOWHERE in place of pairs that do not travel
    num_pairs: int | None  # pairs that travel; None if only the device has their number

    def trim(self, num_pairs: int | None = None) -> "Plan":
        """Return the plan without the pairs that do not travel.

        ``num_pairs`` is the number of the others. Without it the host waits for the device, unless all pairs travel.
        """
        if num_pairs is None:
            num_pairs = int(self.counts.sum()) if self.num_pairs is None else self.num_pairs
        first = len(self.tokens) - num_pairs
        return replace(
            self,
            tokens=self.tokens[first:],
            choices=self.choices[first:],
            experts=self.experts[first:],
            num_pairs=num_pairs,
        )


def make_plan(
    experts_of: Tensor, experts: int, slots: int | None = None, *, all_routed: bool = False
) -> Plan:
    """Return the plan of a routing (T, k); each expert takes its first ``slots`` pairs, all where it is None.

    ``all_routed`` states that no entry is NOWHERE, which cannot be found out without waiting for the device.
    """
    top_k, flat = experts_of.shape[1], experts_of.flatten()
    if slots is not None:
        flat = drop_over_capacity(flat, slots)
    by_expert, order = torch.sort(flat, stable=True)
    return Plan(
        tokens=order // top_k,
        choices=order % top_k,
        experts=by_expert,
        counts=count_pairs(flat, experts),
        experts_of=flat.view_as(experts_of),
        num_pairs=len(flat) if all_routed and slots is None else None,
    )


def drop_over_capacity(flat: Tensor, slots: int) -> Tensor:
    """Return experts of pairs in the order of tokens, NOWHERE in place of each expert's pairs after ``slots``."""
    by_expert, order = torch.sort(flat, stable=True)
    places = torch.arange(len(flat), device=flat.device) - torch.searchsorted(by_expert, by_expert)
    travels = by_expert >= 0
    travels &= places < slots
    return torch.empty_like(flat).scatter_(0, order, by_expert.where(travels, NOWHERE))


def count_pairs(experts_of: Tensor, experts: int) -> Tensor:
    """Return how many pairs each expert has, (E,), NOWHERE left out.

    ``torch.bincount`` would let the host wait for the device, for the smallest and the largest number.
    """
    numbers = experts_of.flatten() + 1
    counts = numbers.new_zeros(experts + 1)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))[1:]


def chunks_of(plan: Plan, num_chunks: int) -> list[Plan]:
    """Return plans of parts of the tokens, one after the other; capacity is the whole plan's."""
    experts, length = len(plan.counts), len(plan.experts_of)
    number = torch.arange(length, device=plan.experts_of.device) * num_chunks // length
    return [
        make_plan(plan.experts_of.where((number == chunk)[:, None], NOWHERE), experts)
        if num_chunks > 1
        else plan
        for chunk in range(num_chunks)
    ]


class Rows(NamedTuple):
    """Tokens (n, h) at their experts, by local expert; ``counts`` (local experts) are on the device."""

    tokens: Tensor
    counts: Tensor


def weighted_sum(made: Tensor, weights: Tensor, plan: Plan, num_tokens: int) -> Tensor:
    """Return for each token the sum of what experts made of it, times its weights (T, k)."""
    weighed = made * weights[plan.tokens, plan.choices].unsqueeze(1)
    return made.new_zeros(num_tokens, made.shape[1]).index_add(0, plan.tokens, weighed)


Stages = Generator[Any, Any, None]
"""A trip's four stages: what is sent is under way; the rows that arrived, for which it is given what experts made of
them; that is on its way back; each token's weighted sum."""


class Trip:
    """Tokens on their way to their experts and back, stage by stage."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        next(stages)

    def arrive(self) -> Rows:
        """Wait for the tokens of this rank's experts."""
        rows: Rows = next(self._stages)
        return rows

    def give_back(self, made: Tensor) -> None:
        """Send off what the experts made, (n, h), row by row."""
        self._stages.send(made)

    def receive(self) -> Tensor:
        """Wait for this rank's tokens' weighted sums, (T, h)."""
        sums: Tensor = next(self._stages)
        return sums


def start_trip(
    variant: str, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup | None
) -> Trip:
    """Send the tokens (T, h) that a plan names to their experts; without a group they are here."""
    return Trip(
        _at_home(x, weights, plan) if group is None else TRIPS[variant](x, weights, plan, group)
    )


def _at_home(x: Tensor, weights: Tensor, plan: Plan) -> Stages:
    yield
    plan = plan.trim()
    made = yield Rows(tokens=x[plan.tokens], counts=plan.counts)
    yield
    yield weighted_sum(made, weights, plan, len(x))


def _all_to_all(x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> Stages:
    """A row for each pair, sent where its expert is by an uneven all-to-all; ranks tell each other counts before.

    The host reads the device once: the sizes of both directions.
    """
    sent = plan.counts.view(group.size(), -1)
    counts = swap_now(sent, [], [], group)
    sends, receives = torch.stack((sent.sum(1), counts.sum(1))).tolist()
    plan = plan.trim(sum(sends))
    flight = Flight(x[plan.tokens], receives, sends, group)
    yield
    # rows come by source and then by expert
    expert = torch.arange(counts.shape[1], device=x.device).repeat(len(counts))
    order = torch.argsort(
        expert.repeat_interleave(counts.flatten(), output_size=sum(receives)), stable=True
    )
    made = yield Rows(tokens=flight.wait()[order], counts=counts.sum(0))
    flight = Flight(made[torch.argsort(order)], sends, receives, group)
    del made
    yield
    yield weighted_sum(flight.wait(), weights, plan, len(x))


def _allgather(x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> Stages:
    """Every rank gets all tokens, weights and routes; experts' weighted sums are added up by a reduce-scatter."""
    experts = len(plan.counts) // group.size()
    first = experts * group.rank()
    routes = gathered(plan.experts_of.int(), group).long()
    here = (routes >= first) & (routes < first + experts)
    plan = make_plan((routes - first).where(here, NOWHERE), experts).trim()
    x, weights = gather_rows(x, group), gather_rows(weights, group)
    yield
    made = yield Rows(tokens=x[plan.tokens], counts=plan.counts)
    sums = sum_rows(weighted_sum(made, weights, plan, len(x)), group)
    del made
    yield
    yield sums


TRIPS: dict[str, Callable[[Tensor, Tensor, Plan, dist.ProcessGroup], Stages]] = {
    "all_to_all": _all_to_all,
    "allgather": _allgather,
}


class Flight:
    """Rows (n, ...) on their way: ``sends[j]`` of them to rank j, ``receives[j]`` from it, in rank order."""

    def __init__(
        self, x: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self.receives, self.sends, self.group = list(receives), list(sends), group
        self.work: dist.Work | None = None
        self.returned: tuple[Tensor, dist.Work] | None = None
        self._received: Tensor | None = _Issue.apply(x, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the rows received, (sum of ``receives``, ...); once."""
        # what is received knows its flight by autograd: kept here too, neither would ever be given back
        received, self._received = self._received, None
        assert received is not None, "a flight arrives once"
        arrived: Tensor = _Wait.apply(received, self)  # type: ignore[no-untyped-call]
        self.work = None
        return arrived


def _issue(
    x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    received = x.new_zeros(sum(receives), *x.shape[1:])
    return received, dist.all_to_all_single(
        received, x.contiguous(), receives, sends, group=group, async_op=True
    )


class _Issue(torch.autograd.Function):
    """Starts a flight forward; backward waits for the gradients that ``_Wait`` has sent off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        received, flight.work = _issue(x, flight.receives, flight.sends, flight.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert ctx.flight.returned is not None, (
            "waiting, which comes before in backward, has sent them"
        )
        gradient, work = ctx.flight.returned
        ctx.flight.returned = None
        work.wait()
        return gradient, None


class _Wait(torch.autograd.Function):
    """Waits for a flight forward; backward sends the gradients off. The gradient that it hands on is a placeholder."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: Flight) -> Tensor:
        assert flight.work is not None, "issuing comes before"
        ctx.flight = flight
        flight.work.wait()
        ctx.mark_dirty(received)  # neither a copy nor a view
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.returned = _issue(gradients[0], flight.sends, flight.receives, flight.group)
        return gradients[0], None


def swap_now(
    x: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Return the rows of an all-to-all without gradients, even where nothing is said of ``receives`` and ``sends``.

    Where communication is silenced, and ranks send as many as they receive, they are this rank's own.
    """
    received = x.clone() if receives == sends else x.new_zeros(sum(receives), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(receives), list(sends), group=group)
    return received


Rowwise = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows (ranks n, ...), in rank order, without gradients."""
    whole = x.new_zeros(group.size() * len(x), *x.shape[1:])
    all_gather_single(whole, x.contiguous(), group)
    return whole


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = x.new_zeros(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(part, x.contiguous(), group)
    return part


class _There(torch.autograd.Function):
    """One of the two, whose backward pass is the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Rowwise, back: Rowwise
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows (ranks n, ...), in rank order; backward sums their gradients and keeps this rank's."""
    whole: Tensor = _There.apply(x, group, gathered, _summed)  # type: ignore[no-untyped-call]
    return whole


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (n, ...) of the sum over ranks of x (ranks n, ...); backward gathers its gradients."""
    part: Tensor = _There.apply(x, group, _summed, gathered)  # type: ignore[no-untyped-call]
    return part
