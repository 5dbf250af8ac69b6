"""How tokens get to the ranks that hold their experts, and back: one way without communication, four over an axis.

A trip starts when it is made; it arrives as rows by expert, takes back what experts make of them, and returns each
token's weighted sum. A plan names the pairs of token and expert that travel: those over an expert's capacity, per
source and microbatch and in the order of tokens, do not, and the weights of the others stay as they are.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.expert_parallel.exchange import Flight, gather_rows, gathered, sum_rows, swap_counts, swap_now


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pairs that travel, by expert and then by token: each one's token, which of its k choices, and its expert.

    ``places`` count a pair among those of its expert, ``counts`` (E) are pairs by expert; ``experts_of`` (T, k) is the
    routing with NOWHERE in place of what does not travel. ``slots`` is an expert's capacity, None without one.
    """

    tokens: Tensor
    choices: Tensor
    experts: Tensor
    places: Tensor
    counts: Tensor
    experts_of: Tensor
    slots: int | None = None


def make_plan(experts_of: Tensor, experts: int, slots: int | None = None) -> Plan:
    """Return the plan of a routing (T, k), in which NOWHERE travels nowhere."""
    top_k, flat = experts_of.shape[1], experts_of.flatten()
    by_expert, order = torch.sort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    places = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[by_expert + 1]
    travels = by_expert >= 0
    if slots is not None:
        travels &= places < slots
    pairs = order[travels]
    kept = torch.full_like(flat, -1)
    kept[pairs] = flat[pairs]
    return Plan(
        tokens=pairs // top_k,
        choices=pairs % top_k,
        experts=by_expert[travels],
        places=places[travels],
        counts=torch.bincount(by_expert[travels], minlength=experts),
        experts_of=kept.view_as(experts_of),
        slots=slots,
    )


def chunks_of(plan: Plan, num_chunks: int) -> list[Plan]:
    """Return plans of parts of the tokens, one after the other; capacity is the whole plan's."""
    experts, length = len(plan.counts), len(plan.experts_of)
    number = torch.arange(length, device=plan.experts_of.device) * num_chunks // length
    return [
        make_plan(plan.experts_of.where((number == chunk)[:, None], -1), experts) if num_chunks > 1 else plan
        for chunk in range(num_chunks)
    ]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tokens (n, h) at their experts, by local expert; ``counts`` (local experts) are on the device."""

    tokens: Tensor
    counts: Tensor


class Trip(Protocol):
    """Tokens on their way to their experts and back."""

    def arrive(self) -> Rows:
        """Wait for the tokens of this rank's experts."""

    def give_back(self, made: Tensor) -> None:
        """Send off what the experts made, (n, h), row by row."""

    def receive(self) -> Tensor:
        """Wait for this rank's tokens' weighted sums, (T, h)."""


def weighted_sum(made: Tensor, weights: Tensor, plan: Plan, num_tokens: int) -> Tensor:
    """Return for each token the sum of what experts made of it, times its weights (T, k)."""
    weighed = made * weights[plan.tokens, plan.choices].unsqueeze(1)
    return made.new_zeros(num_tokens, made.shape[1]).index_add(0, plan.tokens, weighed)


class AtHome:
    """No trip: this rank holds all experts."""

    def __init__(self, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup | None = None) -> None:
        self._x, self._weights, self._plan = x, weights, plan

    def arrive(self) -> Rows:
        """Order tokens by expert."""
        return Rows(tokens=self._x[self._plan.tokens], counts=self._plan.counts)

    def give_back(self, made: Tensor) -> None:
        """Keep what was made."""
        self._made = made

    def receive(self) -> Tensor:
        """Sum by token."""
        return weighted_sum(self._made, self._weights, self._plan, len(self._x))


class AllToAll:
    """A row for each pair, sent where its expert is by an uneven all-to-all; ranks tell each other counts before."""

    def __init__(self, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        self._weights, self._plan, self._group, self._num_tokens = weights, plan, group, len(x)
        sent = plan.counts.view(group.size(), -1)
        self._counts = swap_counts(sent, group)
        self._sends, self._receives = sent.sum(1).tolist(), self._counts.sum(1).tolist()
        self._flight = Flight(x[plan.tokens], self._receives, self._sends, group)

    def arrive(self) -> Rows:
        """Order rows, which come by source and then by expert, by expert."""
        arrived = self._flight.wait()
        local = torch.arange(self._counts.shape[1], device=arrived.device)
        of = local.repeat(len(self._counts)).repeat_interleave(self._counts.flatten())
        self._order = torch.argsort(of, stable=True)
        return Rows(tokens=arrived[self._order], counts=self._counts.sum(0))

    def give_back(self, made: Tensor) -> None:
        """Send each row back to its source."""
        by_source = made[torch.argsort(self._order)]
        self._flight = Flight(by_source, self._sends, self._receives, self._group)

    def receive(self) -> Tensor:
        """Sum by token; weights never travel."""
        return weighted_sum(self._flight.wait(), self._weights, self._plan, self._num_tokens)


class Padded:
    """As many rows for every expert and source as the capacity says, zeros where there are fewer: no counts needed."""

    def __init__(self, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        assert plan.slots is not None, "padded needs a capacity"
        self._weights, self._plan, self._group, self._num_tokens = weights, plan, group, len(x)
        self._slot = plan.experts * plan.slots + plan.places
        slots = x.new_zeros(len(plan.counts) * plan.slots, x.shape[1]).index_copy(0, self._slot, x[plan.tokens])
        self._each = [len(slots) // group.size()] * group.size()
        self._flight = Flight(slots, self._each, self._each, group)

    def arrive(self) -> Rows:
        """Order slots, which come by source and then by expert, by expert."""
        arrived, ranks = self._flight.wait(), self._group.size()
        local, slots = len(self._plan.counts) // ranks, self._plan.slots or 0
        by_expert = arrived.view(ranks, local, slots, -1).transpose(0, 1).reshape(len(arrived), -1)
        return Rows(tokens=by_expert, counts=self._plan.counts.new_full((local,), ranks * slots))

    def give_back(self, made: Tensor) -> None:
        """Send each slot back to its source."""
        ranks, slots = self._group.size(), self._plan.slots or 0
        by_source = made.view(-1, ranks, slots, made.shape[1]).transpose(0, 1).reshape(len(made), -1)
        self._flight = Flight(by_source, self._each, self._each, self._group)

    def receive(self) -> Tensor:
        """Sum by token the slots that were filled."""
        return weighted_sum(self._flight.wait()[self._slot], self._weights, self._plan, self._num_tokens)


class AllGather:
    """Every rank gets all tokens, weights and routes; experts' weighted sums are added up by a reduce-scatter."""

    def __init__(self, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        self._group = group
        experts = len(plan.counts) // group.size()
        first = experts * group.rank()
        routes = gathered(plan.experts_of.int(), group).long()
        mine = (routes >= first) & (routes < first + experts)
        self._plan = make_plan((routes - first).where(mine, -1), experts)
        self._x, self._weights = gather_rows(x, group), gather_rows(weights, group)

    def arrive(self) -> Rows:
        """Order by expert those tokens that are for this rank's."""
        return Rows(tokens=self._x[self._plan.tokens], counts=self._plan.counts)

    def give_back(self, made: Tensor) -> None:
        """Sum by token, and over ranks."""
        self._sum = sum_rows(weighted_sum(made, self._weights, self._plan, len(self._x)), self._group)

    def receive(self) -> Tensor:
        """Return the sums of this rank's tokens."""
        return self._sum


class Dedup:
    """A row for each pair of token and rank, however many of the rank's experts it takes; its weights travel too."""

    def __init__(self, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        self._group, self._num_tokens = group, len(x)
        experts = len(plan.counts) // group.size()
        # pairs of one rank and token are one number, and come out ordered by rank and then by token
        ranks_and_tokens = torch.unique(plan.experts // experts * len(x) + plan.tokens)
        ranks, self._tokens = ranks_and_tokens // len(x), ranks_and_tokens % len(x)
        routes = plan.experts_of[self._tokens]
        here = (routes >= 0) & (routes // experts == ranks[:, None])
        local_routes = (routes % experts).where(here, -1)
        sent = torch.bincount(ranks, minlength=group.size())
        self._sends, self._receives = sent.tolist(), swap_counts(sent[:, None], group).flatten().tolist()
        arrived_routes = swap_now(local_routes.int(), self._receives, self._sends, group).long()
        self._plan = make_plan(arrived_routes, experts)
        self._flights = [Flight(rows[self._tokens], self._receives, self._sends, group) for rows in (weights, x)]

    def arrive(self) -> Rows:
        """Order by expert, a token as often as this rank's experts are its own."""
        self._weights, self._arrived = (flight.wait() for flight in self._flights)
        return Rows(tokens=self._arrived[self._plan.tokens], counts=self._plan.counts)

    def give_back(self, made: Tensor) -> None:
        """Sum over this rank's experts, and send each sum back."""
        sums = weighted_sum(made, self._weights, self._plan, len(self._arrived))
        self._back = Flight(sums, self._sends, self._receives, self._group)

    def receive(self) -> Tensor:
        """Add up ranks' sums."""
        back = self._back.wait()
        return back.new_zeros(self._num_tokens, back.shape[1]).index_add(0, self._tokens, back)


TRIPS: dict[str, type[AllToAll | Padded | AllGather | Dedup]] = {
    "all_to_all": AllToAll,
    "padded": Padded,
    "allgather": AllGather,
    "dedup": Dedup,
}


def start_trip(variant: str, x: Tensor, weights: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Trip:
    """Send the tokens (T, h) that a plan names to their experts; without a group they are here."""
    return AtHome(x, weights, plan) if group is None else TRIPS[variant](x, weights, plan, group)
