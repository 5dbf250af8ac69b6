"""What a mixture's routes cost: loads, drops, bytes against their closed form, bandwidths, time lost to imbalance."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bench.results.details import Loads
from bench.results.metrics import MetricValue, value, values
from bench.results.stats import median
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.moe_costs import Moved, Sent, Sizes, dedup_ratio, even_dispatch_bytes, sent_by
from workloads.expert_parallel.dispatch import make_plan, start_trip
from workloads.expert_parallel.groups import Axes
from workloads.expert_parallel.moe_case import Moe
from workloads.expert_parallel.moe_layer import MoeLayer
from workloads.expert_parallel.routes import Routes
from workloads.expert_parallel.routing import BALANCED, expected_drop_rate, imbalance, rank_loads
from workloads.expert_parallel.wire import wired
from workloads.step.probe import Begin, Step, take_turns, timed
from workloads.step.sent_bytes import ByAxis, SentBytes
from workloads.step.trace import break_down, trace_step

_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Routed:
    """One source's microbatch in one layer: tokens that chose each expert (E), those kept, and rows by rank."""

    asked: Sequence[int]
    kept: Sequence[int]
    rows: Sequence[int]


Told = Sequence[Sequence[Routed]]
"""What one rank routed, by layer and then by microbatch."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one rank saw: its routes, bytes by axis, and seconds: of each way there and back, of steps and of traces.

    ``walls`` are those of steps by whether routes were balanced.
    """

    routed: Told
    bytes_by_axis: tuple[ByAxis, ByAxis]
    expected_drop: float | None
    trips: Sequence[tuple[float, float]]
    walls: Mapping[bool, Sequence[float]]
    exposed_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """The probe of the mixtures that a step goes through, of ``tokens`` tokens of one source and microbatch.

    ``counted`` are the groups whose bytes are, ``expected_bytes`` the closed forms of those that carry no tokens to
    experts. ``recomputes`` where forward is done twice, ``backward`` where there is one; ``traced`` where nobody else
    traces the step.
    """

    world: World
    moe: Moe
    axes: Axes
    routes: Routes
    mixtures: Sequence[MoeLayer]
    hidden: int
    element_bytes: int
    tokens: int
    counted: Mapping[str, dist.ProcessGroup]
    expected_bytes: ByAxis = field(default_factory=dict)
    recomputes: bool = False
    backward: bool = True
    traced: bool = False
    notes: tuple[str, ...] = ()
    share: float = 1.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Observed:
        """Count a step's bytes and routes, and take steps in turns with some under balanced routes."""
        for mixture in self.mixtures:
            mixture.chosen.clear()
        begin()
        sent = wired(step, self.counted)
        routed = routed_by(self.mixtures, self.tokens)
        expected = {**self.expected_bytes, **self._expected(self.world.gather(routed))}
        drop = self._expected_drop()
        trips = [self._trip() for _ in range(1 + _REPEATS)][1:] if "ep" in self.axes.groups else []
        walls: dict[bool, list[float]] = {False: [], True: []}

        def turn() -> None:
            for balanced in walls:
                self.routes.balance(balanced)
                begin()
                walls[balanced].append(timed(step, self.world))

        if self.routes.generator is None or self.routes.generator.name != BALANCED:
            take_turns(self.world, budget_seconds, turn, most=10)
            self.routes.balance(False)
        return Observed(
            routed=routed,
            bytes_by_axis=(sent, expected),
            expected_drop=drop,
            trips=trips,
            walls=walls,
            exposed_seconds=self._exposed(step, begin)
            if self.traced and {"ep", "etp"} & self.axes.groups.keys()
            else None,
        )

    def summarise(self, told: Sequence[Observed]) -> Explanation:
        """Return what routes cost: bytes of the rank that sends most, all else of rank 0's copy or the slowest rank."""
        ep, etp = self.moe.ep, self.moe.etp
        routed = merged([one.routed for one in told], etp)
        metrics = {
            **load_metrics(routed, ep, told[0].expected_drop),
            **SentBytes.summarise([one.bytes_by_axis for one in told]).metrics,
        }
        if ep > 1:
            dispatched = [one.dispatch for one in self._flights(routed, 0)]
            even = even_dispatch_bytes(self.tokens * etp, self.moe.top_k, self.hidden, self.element_bytes, ep)
            metrics |= values({"dispatch_bytes": sum(dispatched) / len(dispatched)}, "rank 0")
            metrics |= values({"dispatch_bytes_even": even})
            metrics |= self._bandwidths(told)
        if told[0].walls[True]:
            own, even_wall = (
                median([max(turn) for turn in zip(*(one.walls[balanced] for one in told), strict=True)])
                for balanced in (False, True)
            )
            how = f"medians of {len(told[0].walls[True])}, the slowest rank"
            metrics |= values({"imbalance_time": own - even_wall, "imbalance_slowdown": own / even_wall}, how)
        else:
            metrics["imbalance_time"] = value("imbalance_time", 0.0, "routing is balanced")
        exposed = [one.exposed_seconds for one in told if one.exposed_seconds is not None]
        if exposed:
            how = f"median of {_REPEATS} traced steps, the rank with the most"
            metrics |= values({"exposed_comm.ep": max(exposed)}, how)
        loads = Loads(expert_load=expert_loads(routed), rank_load=loads_of_ranks(routed, ep))
        return Explanation(metrics=metrics, details=loads.as_details, notes=self.notes)

    def _sizes(self, sources: int) -> Sizes:
        """Return the sizes that bytes depend on, where so many ranks have taken each other's tokens."""
        return Sizes(
            hidden=self.hidden,
            element_bytes=self.element_bytes,
            top_k=self.moe.top_k,
            tokens=self.tokens * sources,
            experts_per_rank=self.moe.experts_per_rank,
            slots=(self.moe.slots(self.tokens) or 0) * sources,
            chunks=self.moe.chunks,
        )

    def _flights(self, routed: Sequence[Told], rank: int) -> list[Sent]:
        """Return what a rank sends over ``ep`` in each layer and microbatch, of what blocks of ``etp`` ranks routed."""
        ep, block = self.moe.ep, rank // self.moe.etp
        first = block // ep * ep
        return sent_in_step(self.moe.variant, block % ep, routed[first : first + ep], self._sizes(self.moe.etp))

    def _expected(self, told: Sequence[Told]) -> dict[str, float]:
        """Return the closed form of what this rank has sent to experts, by the step's own routes."""
        etp, flights = self.moe.etp, {}
        routed = merged(told, etp)
        if "ep" in self.axes.groups:
            flights["ep"] = (self.moe.variant, self._flights(routed, self.world.rank))
        if "etp" in self.axes.groups:  # all tokens gathered, and parts of their sums scattered
            alone = [[0] * etp] * etp
            one = sent_by("allgather", 0, Moved(pairs=alone, rows=alone), self._sizes(1))
            flights["etp"] = ("allgather", [one] * sum(map(len, routed[0])))
        return {axis: sum(self._in_step(variant, one) for one in sent) for axis, (variant, sent) in flights.items()}

    def _in_step(self, variant: str, sent: Sent) -> float:
        again = sent.forward if self.recomputes else 0.0
        if self.recomputes and variant == "allgather" and not self.moe.shared:
            # torch stops once backward has all it needs: a sum that nothing is computed from is not made again
            again -= sent.combine
        return sent.forward + again + (sent.backward if self.backward else 0.0)

    def _expected_drop(self) -> float | None:
        slots, generator = self.moe.slots(self.tokens), self.routes.generator
        if generator is None:
            return None
        if slots is None:
            return 0.0
        if generator.name == "ragged" and self.moe.tp > 1:
            return None  # a rank's positions are then of several of the generator's sources
        return expected_drop_rate(generator, self.routes.step, self.tokens, slots)

    def _trip(self) -> tuple[float, float]:
        """Return how long one microbatch's tokens take to their experts and back, beside nothing, without gradients."""
        mixture = self.mixtures[0]
        plan = make_plan(next(iter(mixture.chosen.values())), self.moe.experts, self.moe.slots(self.tokens))
        x = torch.ones(self.tokens, self.hidden, dtype=mixture.router.weight.dtype, device=self.world.device)
        with torch.no_grad():
            self.world.barrier()
            began = time.perf_counter()
            trip = start_trip(self.moe.variant, x, x.new_ones(self.tokens, self.moe.top_k), plan, self.axes.held.group)
            rows = trip.arrive()
            self.world.sync()
            dispatched = time.perf_counter() - began
            self.world.barrier()
            began = time.perf_counter()
            trip.give_back(rows.tokens)
            trip.receive()
            self.world.sync()
        return dispatched, time.perf_counter() - began

    def _bandwidths(self, told: Sequence[Observed]) -> dict[str, MetricValue]:
        """Return how fast the first microbatch's tokens get to the first layer's experts and back.

        Logical bytes are all pairs of token and expert that travel or stay, wire bytes those that leave the busiest
        rank.
        """
        ep, etp = self.moe.ep, self.moe.etp
        copy = [one.routed[0][0] for one in told[: ep * etp : etp]]
        moved = moved_in(copy)
        sent = [sent_by(self.moe.variant, rank, moved, self._sizes(1)) for rank in range(ep)]
        wire = (max(one.dispatch + one.weights + one.told for one in sent), max(one.combine for one in sent))
        logical = float(max(sum(one.kept) for one in copy) * self.hidden * self.element_bytes)
        metrics: dict[str, MetricValue] = {}
        for i, name in enumerate(("dispatch", "combine")):
            seconds = median(
                [max(times[i] for times in turn) for turn in zip(*(one.trips for one in told), strict=True)]
            )
            how = f"median of {len(told[0].trips)} of the slowest rank's times, forward, alone"
            metrics |= values({f"{name}_time": seconds}, f"{how}, packing included")
            for kind, num_bytes in (("logical", logical), ("wire", wire[i])):
                rate = num_bytes / seconds if num_bytes else None
                metrics |= values({f"{name}_bandwidth.{kind}": rate}, f"{num_bytes:.12g} B over the {how}")
        return metrics

    def _exposed(self, step: Step, begin: Begin) -> float:
        """Return the seconds of communication that no arithmetic hides in a traced step."""
        found = []
        for _ in range(_REPEATS):
            begin()
            trace = trace_step(step, self.world.device)
            comm, wall = {"ep": trace.comm}, trace.wall_seconds
            parts = break_down(trace.step, trace.compute, comm, trace.copies, measured_wall_seconds=wall)
            found.append(parts.exposed_comm_seconds["ep"])
        return median(found)


def routed_by(mixtures: Sequence[MoeLayer], tokens: int) -> Told:
    """Return what this rank routed in its last microbatches of ``tokens`` tokens."""
    told = []
    for mixture in mixtures:
        moe, of_layer = mixture.moe, []
        for routes in mixture.chosen.values():
            asked = torch.bincount(routes.flatten() + 1, minlength=moe.experts + 1)[1:]
            plan = make_plan(routes, moe.experts, moe.slots(tokens))
            ranks = torch.unique(plan.experts // moe.experts_per_rank * tokens + plan.tokens) // tokens
            rows = torch.bincount(ranks, minlength=moe.ep)
            of_layer.append(Routed(asked=asked.tolist(), kept=plan.counts.tolist(), rows=rows.tolist()))
        told.append(of_layer)
    return told


def _added(loads: Iterable[Sequence[int]]) -> list[int]:
    return [sum(of) for of in zip(*loads, strict=True)]


def _by_flight(told: Sequence[Told]) -> list[Sequence[Routed]]:
    """Return what sources routed together, layer by layer and microbatch by microbatch."""
    return [sources for layer in zip(*told, strict=True) for sources in zip(*layer, strict=True)]


def merged(told: Sequence[Told], etp: int) -> list[Told]:
    """Return what each ``etp`` ranks in a row routed together: they take each other's tokens."""

    def together(sources: Sequence[Routed]) -> Routed:
        asked, kept, rows = (_added(getattr(one, name) for one in sources) for name in ("asked", "kept", "rows"))
        return Routed(asked=asked, kept=kept, rows=rows)

    blocks = [told[first : first + etp] for first in range(0, len(told), etp)]
    return [
        [[together(sources) for sources in zip(*layer, strict=True)] for layer in zip(*block, strict=True)]
        for block in blocks
    ]


def moved_in(sources: Sequence[Routed]) -> Moved:
    """Return who sends how much to whom among the ranks of one copy of the experts, in their order."""
    pairs = [rank_loads(source.kept, len(sources)) for source in sources]
    return Moved(pairs=pairs, rows=[source.rows for source in sources])


def sent_in_step(variant: str, rank: int, copy: Sequence[Told], sizes: Sizes) -> list[Sent]:
    """Return what ``rank`` of a copy sends in each layer and microbatch."""
    return [sent_by(variant, rank, moved_in(sources), sizes) for sources in _by_flight(copy)]


def expert_loads(told: Sequence[Told]) -> list[list[int]]:
    """Return by layer how many tokens of all ranks chose each expert, dropped ones among them."""
    return [_added(routed.asked for of in layer for routed in of) for layer in zip(*told, strict=True)]


def loads_of_ranks(told: Sequence[Told], ep: int) -> list[list[int]]:
    """Return by layer the pairs that each place's experts compute; each ``ep`` sources in a row are a copy."""
    found: list[list[int]] = [[] for _ in told[0]]
    for first in range(0, len(told), ep):
        for loads, layer in zip(found, zip(*told[first : first + ep], strict=True), strict=True):
            loads += rank_loads(_added(routed.kept for of in layer for routed in of), ep)
    return found


def load_metrics(told: Sequence[Told], ep: int, expected_drop: float | None) -> dict[str, MetricValue]:
    """Return imbalances, of the layer where they are largest, drop rate and deduplication ratio of all flights."""
    asked, ranks = expert_loads(told), loads_of_ranks(told, ep)
    total, kept = sum(map(sum, asked)), sum(map(sum, ranks))
    moved = [moved_in(of) for first in range(0, len(told), ep) for of in _by_flight(told[first : first + ep])]
    pairs, rows = (
        [_added(of) for of in zip(*each, strict=True)] for each in ([m.pairs for m in moved], [m.rows for m in moved])
    )
    found = {
        "imbalance.expert": _worst(asked),
        "imbalance.rank": _worst(ranks),
        "drop_rate": 1 - kept / total if total else None,
        "dedup_ratio": dedup_ratio(Moved(pairs=pairs, rows=rows)),
    }
    return values(found if expected_drop is None else {**found, "drop_rate_expected": expected_drop})


def _worst(by_layer: Sequence[Sequence[int]]) -> float | None:
    return max((found for loads in by_layer if (found := imbalance(loads)) is not None), default=None)
