"""What a mixture's routes cost: loads, drops, bytes against their closed form, bandwidths, time lost to imbalance."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.results.details import ExpertLoadDetails
from parbench.bench.results.metrics import MetricValue, make_value, make_values
from parbench.bench.results.spans import compute_breakdown
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import COUNT_BYTES, ROUTE_BYTES
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import make_plan, start_trip
from parbench.workloads.expert_parallel.groups import Axes
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routes import Routes
from parbench.workloads.expert_parallel.routing import BALANCED, expected_drop_rate, imbalance
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step, trace_step
from parbench.workloads.step.sent_bytes import BytesByAxis, CommBytesProbe, CommVolume, record_calls
from parbench.workloads.step.turns import cross_fitted, paired_difference, paired_factor, slowest

_REPEATS = 3
Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that bytes depend on; ``tokens`` are a rank's."""

    hidden: int
    element_bytes: int
    top_k: int
    tokens: int
    experts_per_rank: int
    chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends to others in one layer and microbatch.

    ``dispatch`` are tokens on their way to experts, ``combine`` what comes back; gradients go against their direction:
    a source gets back what it sent, and sends again for it. ``told`` are counts and routes, forward alone; ``weights``
    travel with tokens where experts need them.
    """

    dispatch: float
    combine: float
    told: float = 0.0
    weights: float = 0.0
    weights_backward: float = 0.0

    @property
    def forward(self) -> float:
        return self.dispatch + self.combine + self.told + self.weights

    @property
    def backward(self) -> float:
        return self.dispatch + self.combine + self.weights_backward


def sent_by(variant: str, rank: int, pairs: Matrix, sizes: Sizes) -> Sent:
    """Return the bytes that ``rank`` of the axis sends; ``pairs[source][target]`` count pairs of token and expert."""
    others = len(pairs) - 1
    row_bytes = sizes.hidden * sizes.element_bytes
    if variant == "all_to_all":
        own = pairs[rank][rank]
        received = sum(source[rank] for source in pairs)
        return Sent(
            dispatch=(sum(pairs[rank]) - own) * row_bytes,
            combine=(received - own) * row_bytes,
            told=sizes.chunks * others * sizes.experts_per_rank * COUNT_BYTES,
        )
    if variant == "allgather":
        tokens = others * sizes.tokens
        weights = tokens * sizes.top_k * sizes.element_bytes
        return Sent(
            dispatch=tokens * row_bytes,
            combine=tokens * row_bytes,
            told=tokens * sizes.top_k * ROUTE_BYTES,
            weights=weights,
            weights_backward=weights,
        )
    raise ValueError(f"variant({variant}) is not all_to_all or allgather")


class Routed(NamedTuple):
    """Pairs of token and expert of one source, (L, M, E) by layer, microbatch and expert, on the CPU."""

    asked: Tensor  # pairs that were chosen
    kept: Tensor  # pairs that the capacity left


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What one rank saw: its routes, bytes sent and expected, and seconds of trips, of steps and of traced ones.

    ``trips`` are a dispatch and a combine each, ``walls`` those of steps by whether routes were balanced.
    """

    routed: Routed
    tally_and_expected: tuple[CommVolume, BytesByAxis]
    expected_drop: float | None
    trips: Sequence[tuple[float, float]]
    walls: Mapping[bool, Sequence[float]]
    exposed_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """The probe of the mixtures that a step goes through, of ``tokens`` tokens of one source and microbatch.

    ``counted`` are the groups whose bytes are, ``expected_bytes`` the closed forms of those that carry no tokens to
    experts. ``backward`` where there is such a pass; ``traced`` where nobody else traces the step.
    ``claim`` says what the results may be used to claim.
    """

    world: World
    moe: Moe
    axes: Axes
    routes: Routes
    mixtures: Sequence[MoeLayer]
    spec: StepSpec
    tokens: int
    counted: Mapping[str, dist.ProcessGroup]
    expected_bytes: BytesByAxis = field(default_factory=dict)
    backward: bool = True
    traced: bool = False
    claim: str = ""
    notes: tuple[str, ...] = ()
    share: float = 1.0

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> Observed:
        for mixture in self.mixtures:
            mixture.chosen.clear()
        begin()
        tally = CommVolume.sum(record_calls(step, self.counted), self.counted)
        routed = routed_by(self.mixtures, self.tokens)
        expected = {**self.expected_bytes, **self._expected(self.world.gather(routed))}
        drop, apart = self._expected_drop(), {"ep", "etp"} & self.axes.groups.keys()
        trips = [self._trip() for _ in range(1 + _REPEATS)][1:] if "ep" in apart else []
        walls: dict[bool, list[float]] = {False: [], True: []}

        def turn() -> None:
            for balanced in sorted(
                walls, reverse=bool(len(walls[True]) % 2)
            ):  # drift weighs on both alike
                self.routes.balance(balanced)
                begin()
                walls[balanced].append(time_step(step, self.world))

        if self.routes.generator is None or self.routes.generator.name != BALANCED:
            repeat_within_budget(self.world, budget_seconds, turn, max_repeats=10)
            self.routes.balance(False)
        return Observed(
            routed=routed,
            tally_and_expected=(tally, expected),
            expected_drop=drop,
            trips=trips,
            walls=walls,
            exposed_seconds=self._exposed(step, begin) if self.traced and apart else [],
        )

    def summarize(self, told: Sequence[Observed]) -> Explanation:
        """Return what routes cost: bytes of the rank that sends most, all else of rank 0's copy or the slowest rank."""
        ep, routed = self.moe.ep, merged([one.routed for one in told], self.moe.etp)
        metrics = {
            **load_metrics(routed, ep, told[0].expected_drop),
            **CommBytesProbe.summarize([one.tally_and_expected for one in told]).metrics,
            **(self._bandwidths(told) if ep > 1 else {}),
        }
        if walls := told[0].walls[True]:
            own, even = (
                slowest([one.walls[balanced] for one in told]) for balanced in (False, True)
            )
            lost = {
                "imbalance_time": paired_difference(own, even),
                "imbalance_slowdown": paired_factor(own, even),
            }
            metrics |= make_values(
                lost, "the slowest rank of each turn" + ", one turn tells none" * (len(walls) == 1)
            )
        else:
            metrics["imbalance_time"] = make_value("imbalance_time", 0.0, "routing is balanced")
        if exposed := [one.exposed_seconds for one in told if one.exposed_seconds]:
            metrics |= make_values({"exposed_comm.ep": cross_fitted(exposed)}, "traced steps")
        loads = ExpertLoadDetails(
            expert_load=expert_loads(routed), rank_load=loads_of_ranks(routed, ep), claim=self.claim
        )
        return Explanation(metrics=metrics, details=loads.as_details, notes=self.notes)

    def _flights(self, routed: Sequence[Routed], rank: int) -> list[Sent]:
        """Return what a rank sends over ``ep`` in each layer and microbatch, of what blocks of ``etp`` ranks routed."""
        ep, block = self.moe.ep, rank // self.moe.etp
        first = block // ep * ep
        sizes = sizes_of(self.spec, self.moe, self.tokens, self.moe.etp)
        return sent_in_step(self.moe.variant, block % ep, routed[first : first + ep], sizes)

    def _expected(self, told: Sequence[Routed]) -> dict[str, float]:
        etp, flights = self.moe.etp, {}
        if "ep" in self.axes.groups:
            flights["ep"] = (self.moe.variant, self._flights(merged(told, etp), self.world.rank))
        if "etp" in self.axes.groups:  # all tokens gathered, and parts of their sums scattered
            one = sent_by(
                "allgather", 0, [[0] * etp] * etp, sizes_of(self.spec, self.moe, self.tokens)
            )
            flights["etp"] = ("allgather", [one] * len(told[0].kept.flatten(0, 1)))
        return {
            axis: sum(self._in_step(variant, one) for one in sent)
            for axis, (variant, sent) in flights.items()
        }

    def _in_step(self, variant: str, sent: Sent) -> float:
        again = 0.0
        if self.spec.checkpointing == "full":
            # torch stops once backward has all it needs: a sum that nothing is computed from is not made again
            again = sent.forward - (
                sent.combine if variant == "allgather" and not self.moe.shared else 0.0
            )
        return sent.forward + again + (sent.backward if self.backward else 0.0)

    def _expected_drop(self) -> float | None:
        slots, generator = self.moe.slots(self.tokens), self.routes.generator
        if generator is None:
            return None
        return 0.0 if slots is None else expected_drop_rate(generator, self.tokens, slots)

    def _trip(self) -> tuple[float, float]:
        """Return how long one microbatch's tokens take to their experts and back, beside nothing, without gradients."""
        mixture, world = self.mixtures[0], self.world
        plan = make_plan(
            next(iter(mixture.chosen.values())), self.moe.experts, self.moe.slots(self.tokens)
        )
        x = torch.ones(
            self.tokens,
            self.spec.shape.hidden,
            dtype=mixture.router.weight.dtype,
            device=world.device,
        )
        weights = x.new_ones(self.tokens, self.moe.top_k)
        with torch.no_grad():
            world.barrier()
            began = time.perf_counter()
            trip = start_trip(self.moe.variant, x, weights, plan, self.axes.held.group)
            rows = trip.arrive()
            world.sync()
            dispatched = time.perf_counter() - began
            world.barrier()
            began = time.perf_counter()
            trip.give_back(rows.tokens)
            trip.receive()
            world.sync()
        return dispatched, time.perf_counter() - began

    def _bandwidths(self, told: Sequence[Observed]) -> dict[str, MetricValue]:
        """Return what dispatch sends, and how fast the first microbatch gets to the first layer's experts and back.

        Logical bytes are all pairs of token and expert that travel or stay, wire bytes those that leave the busiest
        rank.
        """
        moe, ep, etp, row = (
            self.moe,
            self.moe.ep,
            self.moe.etp,
            self.spec.shape.hidden * self.spec.element_bytes,
        )
        routed = merged([one.routed for one in told], etp)
        dispatched_by_rank = []
        for rank in range(0, len(told), etp):
            dispatched_by_rank.append(fmean(sent.dispatch for sent in self._flights(routed, rank)))
        even = self.tokens * etp * moe.top_k * row * (ep - 1) / ep
        metrics = make_values({"dispatch_bytes": max(dispatched_by_rank)}, "the busiest rank")
        metrics |= make_values({"dispatch_bytes_even": even})
        copy = [one.routed for one in told[: ep * etp : etp]]
        pairs, sizes = pairs_between(copy)[0], sizes_of(self.spec, moe, self.tokens)
        sent = [sent_by(moe.variant, rank, pairs, sizes) for rank in range(ep)]
        logical = float(max(int(one.kept[0, 0].sum()) for one in copy) * row)
        wire = (
            max(one.dispatch + one.weights + one.told for one in sent),
            max(one.combine for one in sent),
        )
        for i, name in enumerate(("dispatch", "combine")):
            seconds = slowest([[trip[i] for trip in one.trips] for one in told])
            how = "the slowest rank's time, forward, alone"
            metrics |= make_values(
                {f"{name}_time": estimate_mean(seconds, "trips", "amount")},
                f"{how}, packing included",
            )
            for kind, num_bytes in (("logical", logical), ("wire", wire[i])):
                rate = (
                    estimate_mean([num_bytes / one for one in seconds], "trips", "amount")
                    if num_bytes
                    else None
                )
                metrics |= make_values(
                    {f"{name}_bandwidth.{kind}": rate}, f"{num_bytes:.12g} B over {how}"
                )
        return metrics

    def _exposed(self, step: Step, begin: ResetFn) -> list[float]:
        found = []
        for _ in range(_REPEATS):
            begin()
            trace = trace_step(step, self.world.device)
            if trace.issue_spans and not trace.comm:
                return []  # calls whose device's kernels the profiler did not see
            parts = compute_breakdown(trace.step, trace.compute, {"ep": trace.comm}, trace.copies)
            found.append(parts.exposed_comm_seconds["ep"])
        return found


def routed_by(mixtures: Sequence[MoeLayer], tokens: int) -> Routed:
    """Return what this rank routed in its last microbatches of ``tokens`` tokens."""
    moe, found = mixtures[0].moe, []
    for routes in (routes for mixture in mixtures for routes in mixture.chosen.values()):
        plan = make_plan(routes, moe.experts, moe.slots(tokens))
        asked = torch.bincount(routes.flatten() + 1, minlength=moe.experts + 1)[1:]
        found.append((asked, plan.counts))
    size = (len(mixtures), len(found) // len(mixtures), -1)
    return Routed(*(torch.stack(of).view(size).cpu() for of in zip(*found, strict=True)))


def _together(told: Sequence[Routed]) -> Routed:
    return Routed(*(torch.stack(of).sum(0) for of in zip(*told, strict=True)))


def merged(told: Sequence[Routed], etp: int) -> list[Routed]:
    """Return what each ``etp`` ranks in a row routed together: they take each other's tokens."""
    return [_together(told[first : first + etp]) for first in range(0, len(told), etp)]


def pairs_between(copy: Sequence[Routed]) -> list[Matrix]:
    """Return, for each layer and microbatch, the pairs that each rank of one copy sends to each other rank."""
    by_source = [_by_rank(source.kept, len(copy)) for source in copy]
    pairs: list[Matrix] = torch.stack(by_source, 2).flatten(0, 1).tolist()
    return pairs


def _by_rank(loads: Tensor, ranks: int) -> Tensor:
    """Return the loads (..., R) of ranks that hold the experts (..., E) in blocks."""
    return loads.view(*loads.shape[:-1], ranks, -1).sum(-1)


def sizes_of(spec: StepSpec, moe: Moe, tokens: int, sources: int = 1) -> Sizes:
    """Return the sizes that bytes depend on, where so many ranks have taken each other's ``tokens`` tokens."""
    return Sizes(
        hidden=spec.shape.hidden,
        element_bytes=spec.element_bytes,
        top_k=moe.top_k,
        tokens=tokens * sources,
        experts_per_rank=moe.experts_per_rank,
        chunks=moe.chunks,
    )


def sent_in_step(variant: str, rank: int, copy: Sequence[Routed], sizes: Sizes) -> list[Sent]:
    return [sent_by(variant, rank, pairs, sizes) for pairs in pairs_between(copy)]


def expert_loads(told: Sequence[Routed]) -> list[list[int]]:
    """Return by layer how many tokens of all ranks chose each expert, dropped ones among them."""
    loads: list[list[int]] = _together(told).asked.sum(1).tolist()
    return loads


def loads_of_ranks(told: Sequence[Routed], ep: int) -> list[list[int]]:
    """Return by layer the pairs that each place's experts compute; each ``ep`` sources in a row are a copy."""
    loads: list[list[int]] = torch.cat(
        [_by_rank(copy.kept.sum(1), ep) for copy in merged(told, ep)], 1
    ).tolist()
    return loads


def load_metrics(
    told: Sequence[Routed], ep: int, expected_drop: float | None
) -> dict[str, MetricValue]:
    """Return the imbalances of the layer where they are largest, and the drop rate over all layers."""
    asked, ranks = expert_loads(told), loads_of_ranks(told, ep)
    total, kept = sum(map(sum, asked)), sum(map(sum, ranks))
    found = {
        "imbalance.expert": _worst(asked),
        "imbalance.rank": _worst(ranks),
        "drop_rate": 1 - kept / total if total else None,
    }
    return make_values(
        found if expected_drop is None else {**found, "drop_rate_expected": expected_drop}
    )


def _worst(by_layer: Sequence[Sequence[int]]) -> float | None:
    return max(
        (found for loads in by_layer if (found := imbalance(loads)) is not None), default=None
    )
