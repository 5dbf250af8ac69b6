"""What a mixture's routes cost: loads, drops, bytes against their closed form, bandwidths, time lost to imbalance."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.results.details import Loads
from bench.results.metrics import MetricValue, value, values
from bench.results.stats import median
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.moe_costs import Moved, Sent, Sizes, even_dispatch_bytes, sent_by
from workloads.expert_parallel.dispatch import Rows, make_plan, start_trip
from workloads.expert_parallel.expert_axis import ExpertAxis
from workloads.expert_parallel.expert_loads import (
    Routed,
    Told,
    expert_loads,
    load_metrics,
    loads_of_ranks,
    merged,
    moved_in,
    sent_in_step,
)
from workloads.expert_parallel.moe_case import Moe
from workloads.expert_parallel.moe_layer import MoeLayer
from workloads.expert_parallel.routing import BALANCED, Generator, expected_drop_rate
from workloads.expert_parallel.wire import wired
from workloads.step.trace import break_down, trace_step

_REPEATS = (3, 10)

Begin = Callable[[], None]
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is looked at: the mixtures that a step goes through, of h, e and T as in ``sizes``.

    ``passes`` are the closed form's: forward alone, or with backward; ``recomputes`` where forward is done twice.
    """

    world: World
    axis: ExpertAxis
    moe: Moe
    mixtures: tuple[MoeLayer, ...]
    sizes: tuple[int, int, int]
    generator: Generator | None
    step_number: Callable[[], int]
    recomputes: bool = False
    backward: bool = True

    @property
    def costs(self) -> Sizes:
        """The sizes that bytes depend on."""
        hidden, element_bytes, tokens = self.sizes
        return Sizes(
            hidden=hidden,
            element_bytes=element_bytes,
            top_k=self.moe.top_k,
            tokens=tokens,
            experts_per_rank=self.moe.experts_per_rank,
            slots=self.moe.slots(tokens) or 0,
            chunks=self.moe.chunks,
        )

    @property
    def shared_costs(self) -> Sizes:
        """The same where ranks that split experts have taken each other's tokens."""
        one, etp = self.costs, self.moe.etp
        return replace(one, tokens=one.tokens * etp, slots=one.slots * etp)

    def over(self, sent: Sent) -> float:
        """Return the bytes of a whole step of what is sent in one layer and microbatch."""
        again = sent.forward if self.recomputes else 0.0
        return sent.forward + again + (sent.backward if self.backward else 0.0)


def explain_experts(
    seen: Seen, step: Step, begin: Begin, budget_seconds: float, balance: Callable[[bool], None]
) -> Explanation:
    """Return what routes cost; every rank takes part. ``balance`` turns balanced routing on, and off again."""
    for mixture in seen.mixtures:
        mixture.chosen.clear()
    begin()
    sent = wired(step, seen.axis.groups)
    each = seen.world.gather(routed_by(seen.mixtures, seen.sizes[2]))
    told = merged(each, seen.moe.etp)
    metrics = {
        **load_metrics(told, seen.moe.ep, _expected_drop(seen)),
        **(_bytes(seen, sent["ep"], told) if seen.axis.group is not None else {}),
        **(_bytes_of_parts(seen, sent["etp"], told) if seen.axis.split is not None else {}),
        **(_bandwidths(seen) if seen.axis.group is not None else {}),
        **_lost(seen, step, begin, budget_seconds, balance),
    }
    loads = Loads(expert_load=expert_loads(told), rank_load=loads_of_ranks(told, seen.moe.ep))
    return Explanation(metrics=metrics, details=loads.as_details)


def routed_by(mixtures: Sequence[MoeLayer], tokens: int) -> Told:
    """Return what this rank routed in its last microbatches of ``tokens`` tokens."""
    return [[_routed(mixture, routes, tokens) for routes in mixture.chosen.values()] for mixture in mixtures]


def _routed(mixture: MoeLayer, routes: Tensor, tokens: int) -> Routed:
    moe = mixture.moe
    asked = torch.bincount(routes.flatten() + 1, minlength=moe.experts + 1)[1:]
    plan = make_plan(routes, moe.experts, moe.slots(tokens))
    ranks = torch.unique(plan.experts // moe.experts_per_rank * tokens + plan.tokens) // tokens
    return Routed(
        asked=asked.tolist(), kept=plan.counts.tolist(), rows=torch.bincount(ranks, minlength=moe.ep).tolist()
    )


def _expected_drop(seen: Seen) -> float | None:
    slots = seen.moe.slots(seen.sizes[2])
    if seen.generator is None:
        return None
    if slots is None:
        return 0.0
    if seen.generator.name == "ragged" and seen.moe.tp > 1:
        return None  # a rank's positions are then of several of the generator's sources
    return expected_drop_rate(seen.generator, seen.step_number(), seen.sizes[2], slots)


def _bytes(seen: Seen, sent: float, told: Sequence[Told]) -> dict[str, MetricValue]:
    """Return what this rank's step sends over the expert axis and the closed form, and dispatch beside T k h e."""
    first = seen.axis.sources[0] // seen.moe.etp
    flights = sent_in_step(seen.moe.variant, seen.axis.place, told[first : first + seen.moe.ep], seen.shared_costs)
    expected = sum(map(seen.over, flights))
    if seen.recomputes and seen.moe.variant == "allgather" and not seen.moe.shared:
        # torch stops once backward has all it needs: a sum that nothing is computed from is not made again
        expected -= sum(one.combine for one in flights)
    hidden, element_bytes, tokens = seen.sizes
    even = even_dispatch_bytes(tokens * seen.moe.etp, seen.moe.top_k, hidden, element_bytes, seen.moe.ep)
    dispatched = sum(one.dispatch for one in flights) / len(flights)
    return {
        **_held_against("ep", sent, expected),
        **values({"dispatch_bytes": dispatched}, "rank 0"),
        **values({"dispatch_bytes_even": even}),
    }


def _bytes_of_parts(seen: Seen, sent: float, told: Sequence[Told]) -> dict[str, MetricValue]:
    """Return what ranks that split experts send each other: all tokens gathered, and their parts of sums scattered."""
    alone = [[0] * seen.moe.etp] * seen.moe.etp
    one = sent_by("allgather", 0, Moved(pairs=alone, rows=alone), seen.costs)
    expected = sum(map(len, told[0])) * seen.over(one)
    if seen.recomputes and not seen.moe.shared:
        expected -= sum(map(len, told[0])) * one.combine
    return _held_against("etp", sent, expected)


def _held_against(axis: str, sent: float, expected: float) -> dict[str, MetricValue]:
    return {
        **values({f"bytes_sent.{axis}": sent}, "what goes to other ranks, rank 0"),
        **values({f"bytes_expected.{axis}": expected}, "of the step's own routes"),
        **values({f"bytes_ratio.{axis}": sent / expected if expected else None}),
    }


def _bandwidths(seen: Seen) -> dict[str, MetricValue]:
    """Return how fast one microbatch's tokens get to their experts and back, beside nothing, gradients left out.

    Logical bytes are all pairs of token and expert that travel or stay, wire bytes those that leave the busiest rank.
    """
    hidden, _, tokens = seen.sizes
    mixture = seen.mixtures[0]
    routes = next(iter(mixture.chosen.values()))
    plan = make_plan(routes, seen.moe.experts, seen.moe.slots(tokens))
    x = torch.ones(tokens, hidden, dtype=mixture.router.weight.dtype, device=seen.world.device)
    weights = x.new_ones(tokens, seen.moe.top_k)

    def trip() -> tuple[float, float]:
        seen.world.barrier()
        began = time.perf_counter()
        away = start_trip(seen.moe.variant, x, weights, plan, seen.axis.group)
        rows: Rows = away.arrive()
        seen.world.sync()
        dispatched = time.perf_counter() - began
        seen.world.barrier()
        began = time.perf_counter()
        away.give_back(rows.tokens)
        away.receive()
        seen.world.sync()
        return dispatched, time.perf_counter() - began

    with torch.no_grad():
        taken = [trip() for _ in range(1 + _REPEATS[0])][1:]
    told = seen.world.gather((routed_by([mixture], tokens), taken))
    return _rates(seen, told)


def _rates(seen: Seen, told: Sequence[tuple[Told, list[tuple[float, float]]]]) -> dict[str, MetricValue]:
    hidden, element_bytes, _ = seen.sizes
    column = seen.axis.sources[seen.axis.sources.index(seen.world.rank) % seen.moe.etp :: seen.moe.etp]
    copy = [told[source][0][0][0] for source in column]
    moved = moved_in(copy)
    sent = [sent_by(seen.moe.variant, rank, moved, seen.costs) for rank in range(seen.moe.ep)]
    wire = (max(one.dispatch + one.weights + one.told for one in sent), max(one.combine for one in sent))
    logical = max(sum(one.kept) for one in copy) * hidden * element_bytes
    metrics: dict[str, MetricValue] = {}
    for place, name in enumerate(("dispatch", "combine")):
        seconds = median([max(times[place] for times in turn) for turn in zip(*(of[1] for of in told), strict=True)])
        how = f"over the median of {len(told[0][1])} of the slowest rank's times, forward, alone"
        metrics |= values({f"{name}_time": seconds}, f"{how.removeprefix('over the ')}, packing included")
        for kind, num_bytes in (("logical", float(logical)), ("wire", wire[place])):
            rate = num_bytes / seconds if num_bytes else None
            metrics |= values({f"{name}_bandwidth.{kind}": rate}, f"{num_bytes:.12g} B {how}")
    return metrics


def _lost(
    seen: Seen, step: Step, begin: Begin, budget_seconds: float, balance: Callable[[bool], None]
) -> dict[str, MetricValue]:
    """Return how much longer a step takes than under balanced routes, both in turns."""
    if seen.generator is not None and seen.generator.name == BALANCED:
        return {"imbalance_time": value("imbalance_time", 0.0, "routing is balanced")}
    walls: dict[bool, list[float]] = {False: [], True: []}
    began, wanted = time.perf_counter(), _REPEATS[1]
    while len(walls[True]) < wanted:
        for balanced in (False, True):
            balance(balanced)
            begin()
            walls[balanced].append(_timed(step, seen.world))
        affordable = int(budget_seconds / ((time.perf_counter() - began) / len(walls[True])))
        least = _REPEATS[0] if budget_seconds > 0 else 1
        wanted = int(seen.world.decide([max(least, min(_REPEATS[1], affordable))])[0])
    balance(False)
    told = seen.world.gather(walls)
    own, even = (median([max(turn) for turn in zip(*(of[kind] for of in told), strict=True)]) for kind in (False, True))
    how = f"medians of {len(walls[True])}, the slowest rank"
    return values({"imbalance_time": own - even, "imbalance_slowdown": own / even}, how)


def exposed_of(step: Step, begin: Begin, world: World) -> dict[str, MetricValue]:
    """Return the communication of a traced step that no arithmetic hides, on the slowest rank."""
    found = []
    for _ in range(_REPEATS[0]):
        begin()
        trace = trace_step(step, world.device)
        parts = break_down(
            trace.step, trace.compute, {"ep": trace.comm}, trace.copies, measured_wall_seconds=trace.wall_seconds
        )
        found.append(parts.exposed_comm_seconds["ep"])
    told = world.gather(median(found))
    return values({"exposed_comm.ep": max(told)}, f"median of {_REPEATS[0]} traced steps, the rank with the most")


def _timed(step: Step, world: World) -> float:
    began = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - began
