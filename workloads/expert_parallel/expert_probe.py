"""The cost of expert routing: loads, drops, bytes, bandwidths, and the time lost to imbalance."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.results.details import ExpertLoadDetails
from parbench.bench.results.metrics import MetricValue, make_value, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import make_exchange
from parbench.workloads.expert_parallel.dispatchers import Direction
from parbench.workloads.expert_parallel.expert_traffic import (
    ExpertTraffic,
    RoutingCounts,
    count_routing,
)
from parbench.workloads.expert_parallel.moe_layer import ExpertPlacement, MoeLayer
from parbench.workloads.expert_parallel.routing import BALANCED, compute_imbalance
from parbench.workloads.expert_parallel.step_routing import StepRouting
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step
from parbench.workloads.step.sent_bytes import BytesByAxis, CommBytesProbe, CommVolume, record_calls
from parbench.workloads.step.turns import paired_difference, paired_factor, slowest

_REPEATS = 3


class RoundTripSeconds(NamedTuple):
    """Seconds of one microbatch's way to its experts and back, without gradients or overlap."""

    packing: float  # permutation by expert, before and after the transfer
    transfer: float  # sizes or indices, and tokens
    combine: float  # with packing

    @property
    def dispatch(self) -> float:
        return self.packing + self.transfer


@dataclass(frozen=True, kw_only=True)
class ExpertObservation:
    """The routing, bytes and times of one rank."""

    counts: RoutingCounts
    tally: CommVolume
    expected_bytes: BytesByAxis
    round_trips: Sequence[RoundTripSeconds]
    step_seconds: Sequence[float]  # interleaved with those of balanced routing
    balanced_step_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """The probe of the MoE layers of a step, on any mesh."""

    world: World
    spec: StepSpec
    tokens: int  # of this rank in a microbatch
    layers: Mapping[int, MoeLayer]  # of this rank, by layer number
    routing: StepRouting
    placement: ExpertPlacement
    axes: Mapping[str, dist.ProcessGroup]  # whose bytes are counted
    expected_bytes: BytesByAxis = field(default_factory=dict)
    """Analytical bytes of the axes that dispatch no tokens."""
    has_backward: bool = True
    claim: str = ""  # what the results may be used to claim
    notes: tuple[str, ...] = ()
    share: float = 1.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ExpertObservation:
        for layer in self.layers.values():
            layer.expert_ids.clear()
        reset()
        tally = CommVolume.sum(record_calls(step, self.axes), self.axes)
        counts = count_routing(self.layers)
        round_trips: list[RoundTripSeconds] = []
        if self.placement.ep_group is not None:
            round_trips = [self._measure_round_trip() for _ in range(1 + _REPEATS)][1:]
        seconds: dict[bool, list[float]] = {False: [], True: []}

        def measure_both() -> None:
            is_balanced_first = len(seconds[True]) % 2 == 1  # drift affects both alike
            for is_balanced in (is_balanced_first, not is_balanced_first):
                self.routing.use_balanced(is_balanced)
                reset()
                seconds[is_balanced].append(time_step(step, self.world))

        if not self._is_balanced:
            repeat_within_budget(self.world, budget_seconds, measure_both, max_repeats=10)
            self.routing.use_balanced(False)
        return ExpertObservation(
            counts=counts,
            tally=tally,
            expected_bytes=self.expected_bytes,
            round_trips=round_trips,
            step_seconds=seconds[False],
            balanced_step_seconds=seconds[True],
        )

    @property
    def _is_balanced(self) -> bool:
        generator = self.routing.generator
        return generator is not None and generator.name == BALANCED

    def _measure_round_trip(self) -> RoundTripSeconds:
        layer = next(iter(self.layers.values()))
        expert_ids = next(iter(layer.expert_ids.values()))
        x = torch.ones(
            self.tokens,
            self.spec.shape.hidden,
            dtype=layer.router.weight.dtype,
            device=self.world.device,
        )
        weights = x.new_ones(expert_ids.shape)
        plan = layer.plan_dispatch(expert_ids)
        with torch.no_grad():
            exchange = make_exchange(layer.moe.variant, x, weights, plan, self.placement.ep_group)
            transfer = self._time(exchange.exchange_metadata)
            packing = self._time(exchange.pack)
            transfer += self._time(exchange.send, exchange.receive)
            rows: list[Tensor] = []
            packing += self._time(lambda: rows.append(exchange.unpack().tokens))
            combine = self._time(lambda: exchange.start_combine(rows[0]), exchange.finish_combine)
        return RoundTripSeconds(packing, transfer, combine)

    def _time(self, *actions: Callable[[], object]) -> float:
        self.world.barrier()
        start = time.perf_counter()
        for action in actions:
            action()
        self.world.sync()
        return time.perf_counter() - start

    def expect_bytes(self, rank: int) -> dict[str, float]:
        """Return the bytes of the last step on ``ep`` and ``etp``; all ranks take part."""
        counts = self.world.gather(count_routing(self.layers))
        traffic = ExpertTraffic(self.spec, self.tokens, counts)
        return traffic.expect_bytes(rank, has_backward=self.has_backward)

    def summarize(self, samples: Sequence[ExpertObservation]) -> Explanation:
        counts = [observation.counts for observation in samples]
        traffic = ExpertTraffic(self.spec, self.tokens, counts)
        metrics = make_load_metrics(traffic)
        tallies = []
        for rank, observation in enumerate(samples):
            expected = traffic.expect_bytes(rank, has_backward=self.has_backward)
            tallies.append((observation.tally, {**observation.expected_bytes, **expected}))
        metrics |= CommBytesProbe.summarize(tallies).metrics
        if traffic.moe.ep > 1:
            metrics |= self._make_dispatch_metrics(samples, traffic)
        metrics |= self._make_imbalance_metrics(samples)
        details = ExpertLoadDetails(
            expert_load=traffic.list_expert_loads(),
            rank_load=traffic.list_rank_loads(),
            claim=self.claim,
        )
        return Explanation(metrics=metrics, details=details.as_details, notes=self.notes)

    def _make_dispatch_metrics(
        self, samples: Sequence[ExpertObservation], traffic: ExpertTraffic
    ) -> dict[str, MetricValue]:
        """Return bytes of dispatch, and times and bandwidths of the first layer and microbatch."""
        moe = traffic.moe
        even_pairs = self.tokens * moe.etp * moe.top_k * (1 - 1 / moe.ep)
        even_bytes = even_pairs * self.spec.shape.hidden * self.spec.bytes_per_element
        metrics = make_values({"dispatch_bytes_even": even_bytes})
        directions: dict[str, Direction] = {"dispatch": "to_experts", "combine": "from_experts"}
        for part, direction in directions.items():
            sent = torch.stack(
                [_sum_forward(traffic, rank, direction) for rank in range(len(samples))]
            )
            if part == "dispatch":
                busiest = float(sent.mean((1, 2)).max())
                metrics |= make_values({"dispatch_bytes": busiest}, "the busiest rank")
            num_bytes = float(sent[:, 0, 0].max())
            seconds = _list_slowest(samples, part)
            rates = [num_bytes / duration for duration in seconds]
            metrics |= _make_means({f"{part}_time": seconds}, "with packing")
            if num_bytes:
                name = f"{part}_bandwidth.wire"
                metrics |= _make_means({name: rates}, f"{num_bytes:.12g} B over {part}_time")
        for part in ("packing", "transfer"):
            metrics |= _make_means({f"dispatch_{part}_time": _list_slowest(samples, part)})
        return metrics

    def _make_imbalance_metrics(
        self, samples: Sequence[ExpertObservation]
    ) -> dict[str, MetricValue]:
        if not samples[0].step_seconds:
            return {"imbalance_time": make_value("imbalance_time", 0.0, "routing is balanced")}
        seconds = slowest([observation.step_seconds for observation in samples])
        balanced = slowest([observation.balanced_step_seconds for observation in samples])
        values = {
            "imbalance_time": paired_difference(seconds, balanced),
            "imbalance_slowdown": paired_factor(seconds, balanced),
        }
        method = "the slowest rank of each turn"
        if len(seconds) == 1:
            method = "one turn is too few"
        return make_values(values, method)


def _sum_forward(traffic: ExpertTraffic, rank: int, direction: Direction) -> Tensor:
    """Return the bytes (L, M) that a rank sends over ``ep`` in a forward pass."""
    sent = torch.zeros_like(traffic.count_sent(rank), dtype=torch.double)
    for axis, call, num_bytes in traffic.list_bytes(rank):
        if axis == "ep" and call.direction == direction:
            sent += call.forward * num_bytes
    return sent


def _list_slowest(samples: Sequence[ExpertObservation], part: str) -> list[float]:
    """List the seconds of the slowest rank in each round trip."""
    return slowest(
        [[getattr(trip, part) for trip in observation.round_trips] for observation in samples]
    )


def _make_means(
    values_by_name: Mapping[str, Sequence[float]], qualifier: str = ""
) -> dict[str, MetricValue]:
    means = {
        name: estimate_mean(values, "round trips", "amount")
        for name, values in values_by_name.items()
    }
    return make_values(means, f"the slowest rank, forward, {qualifier}".removesuffix(", "))


def make_load_metrics(traffic: ExpertTraffic) -> dict[str, MetricValue]:
    """Return imbalances, each of the most imbalanced layer, and drop rates over all layers.

    The expected drop rate follows from the load of each source: sum max(0, load - C) / (k T).
    """
    slots = traffic.moe.slots(traffic.tokens)
    chosen = kept = over_capacity = 0
    for counts in traffic.counts:
        chosen += int(counts.chosen.sum())
        kept += int(counts.kept.sum())
        if slots is not None:
            over_capacity += int((counts.chosen - slots).clamp(min=0).sum())
    return make_values(
        {
            "imbalance.expert": _find_worst(traffic.list_expert_loads()),
            "imbalance.rank": _find_worst(traffic.list_rank_loads()),
            "drop_rate": 1 - kept / chosen,
            "drop_rate_expected": over_capacity / chosen,
        }
    )


def _find_worst(loads_by_layer: Iterable[Sequence[int]]) -> float | None:
    imbalances = [compute_imbalance(loads) for loads in loads_by_layer]
    return max((value for value in imbalances if value is not None), default=None)
