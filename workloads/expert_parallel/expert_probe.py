"""The cost of expert routing: loads, drops, bandwidths, and the time lost to imbalance."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub, truediv

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.bench.results.details import ExpertLoadDetails
from parbench.bench.results.metrics import MetricValue, make_value, make_values
from parbench.bench.results.stats import Estimate, estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import make_exchange
from parbench.workloads.expert_parallel.expert_traffic import (
    ExpertTraffic,
    RoutingCounts,
    count_routing,
)
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.expert_parallel.routing import BALANCED, compute_imbalance
from parbench.workloads.expert_parallel.step_routing import StepRouting
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step
from parbench.workloads.step.sent_bytes import record_calls
from parbench.workloads.step.turns import compare_turns, slowest

_REPEATS = 3

Run = Callable[[], object]


RoundTrip = Mapping[str, float]
"""The seconds or sent bytes of a microbatch's forward pass, by ``PHASES``."""
PHASES = ("dispatch", "dispatch_packing", "dispatch_transfer", "combine")
"""Dispatch is its packing, which permutes tokens, and its transfer of tokens and counts."""


@dataclass(frozen=True, kw_only=True)
class ExpertSample:
    """The routing and the times of one rank."""

    counts: RoutingCounts
    sent_bytes: RoundTrip
    round_trip_seconds: Sequence[RoundTrip]
    step_seconds: Sequence[float]  # interleaved with ``balanced_step_seconds``
    balanced_step_seconds: Sequence[float]  # of steps with balanced routing


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """Measures the routing, dispatch and load imbalance of the MoE layers of a step."""

    world: World
    spec: StepSpec
    layers: Mapping[int, MoeLayer]  # of this rank, by layer number
    routing: StepRouting
    ep_group: dist.ProcessGroup | None
    share: float = 1.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ExpertSample:
        counts = count_routing(self.layers)
        sent_bytes: RoundTrip = {}
        round_trips: list[RoundTrip] = []
        if self.ep_group is not None:
            sent_bytes = self._measure_round_trip(self._count_sent)
            round_trips = [self._measure_round_trip(self._time) for _ in range(_REPEATS)]
        routing = self.routing.name
        seconds: dict[str, list[float]] = {routing: [], BALANCED: []}

        def measure_both() -> None:
            names = [routing, BALANCED]
            if len(seconds[BALANCED]) % 2 == 1:
                names.reverse()  # so that drift affects both alike
            for name in names:
                self.routing.name = name
                reset()
                seconds[name].append(time_step(step, self.world))

        if routing != BALANCED:
            repeat_within_budget(self.world, budget_seconds, measure_both, max_repeats=10)
            self.routing.name = routing
        return ExpertSample(
            counts=counts,
            sent_bytes=sent_bytes,
            round_trip_seconds=round_trips,
            step_seconds=seconds[routing],
            balanced_step_seconds=seconds[BALANCED],
        )

    def _measure_round_trip(self, measure: Callable[[Run], float]) -> RoundTrip:
        """Return the result of ``measure`` for each phase of the first MoE layer's first microbatch.

        The phases run one after the other.
        """
        layer = next(iter(self.layers.values()))
        expert_ids = next(iter(layer.expert_ids.values()))
        size = (len(expert_ids), self.spec.shape.hidden)
        x = torch.ones(size, dtype=layer.router.weight.dtype, device=self.world.device)
        weights = x.new_ones(expert_ids.shape)
        exchange = make_exchange(
            layer.moe.variant,
            x,
            weights,
            layer.plan_dispatch(expert_ids),
            self.ep_group,
        )
        rows: list[Tensor] = []
        with torch.no_grad():
            metadata = measure(exchange.exchange_metadata)
            packing = measure(lambda: rows.append(exchange.pack()))
            transfer = measure(lambda: rows.append(exchange.transfer(rows[-1])))
            packing += measure(lambda: rows.append(exchange.unpack(rows[-1]).tokens))
            combine = measure(lambda: exchange.combine(rows[-1]))
        phases = (packing + metadata + transfer, packing, metadata + transfer, combine)
        return dict(zip(PHASES, phases, strict=True))

    def _time(self, run: Run) -> float:
        """Return the seconds of a phase from a barrier until the device has finished."""
        self.world.barrier()
        start = time.perf_counter()
        run()
        self.world.sync()
        return time.perf_counter() - start

    def _count_sent(self, run: Run) -> float:
        """Return the bytes that this rank sends over ``ep`` in a phase."""
        assert self.ep_group is not None
        calls = record_calls(run, {"ep": self.ep_group})
        return bytes_by_axis(calls, ("ep",))["ep"]

    def summarize(self, samples: Sequence[ExpertSample]) -> Explanation:
        traffic = ExpertTraffic(self.spec, [sample.counts for sample in samples])
        metrics = make_load_metrics(traffic)
        if self.ep_group is not None:
            metrics |= make_dispatch_metrics(samples)
        metrics |= make_imbalance_metrics(samples)
        details = ExpertLoadDetails(
            expert_load=traffic.list_expert_loads(),
            rank_load=traffic.list_rank_loads(),
        )
        return Explanation(metrics=metrics, details=details.as_details)


def make_dispatch_metrics(samples: Sequence[ExpertSample]) -> dict[str, MetricValue]:
    """Return bytes of dispatch, times of its phases and of combine, and bandwidths."""
    values: dict[str, Estimate] = {}
    for phase in PHASES:
        seconds = slowest(
            [[trip[phase] for trip in sample.round_trip_seconds] for sample in samples]
        )
        values[f"{phase}_time"] = estimate_mean(seconds, "round trips", "amount")
        num_bytes = max(sample.sent_bytes[phase] for sample in samples)
        if num_bytes and phase in ("dispatch", "combine"):
            rates = [num_bytes / duration for duration in seconds]
            values[f"{phase}_bandwidth.wire"] = estimate_mean(rates, "round trips", "amount")
    num_bytes = max(sample.sent_bytes["dispatch"] for sample in samples)
    return {
        **make_values(values, "the slowest rank, forward"),
        **make_values({"dispatch_bytes": num_bytes}, "the busiest rank"),
    }


def make_imbalance_metrics(samples: Sequence[ExpertSample]) -> dict[str, MetricValue]:
    """Return metrics of the slowdown relative to steps with balanced routing, turn by turn."""
    if not samples[0].step_seconds:
        return {"imbalance_time": make_value("imbalance_time", 0.0, "routing is balanced")}
    seconds = slowest([sample.step_seconds for sample in samples])
    balanced = slowest([sample.balanced_step_seconds for sample in samples])
    method = "the slowest rank of each turn" if len(seconds) > 1 else "one turn is too few"
    return make_values(
        {
            "imbalance_time": compare_turns(seconds, balanced, sub, "difference"),
            "imbalance_slowdown": compare_turns(seconds, balanced, truediv, "factor"),
        },
        method,
    )


def make_load_metrics(traffic: ExpertTraffic) -> dict[str, MetricValue]:
    """Return imbalances, each of the most imbalanced layer, and the drop rate over all layers."""
    selected = sum(int(counts.selected.sum()) for counts in traffic.counts)
    dispatched = sum(int(counts.dispatched.sum()) for counts in traffic.counts)
    return make_values(
        {
            "imbalance.expert": _find_worst(traffic.list_expert_loads()),
            "imbalance.rank": _find_worst(traffic.list_rank_loads()),
            "drop_rate": 1 - dispatched / selected,
        }
    )


def _find_worst(loads_by_layer: Iterable[Sequence[int]]) -> float | None:
    """Return the imbalance (max / mean load) of the most imbalanced layer, None without load."""
    imbalances = [compute_imbalance(loads) for loads in loads_by_layer]
    return max((value for value in imbalances if value is not None), default=None)
