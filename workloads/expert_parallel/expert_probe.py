"""The cost of expert routing: loads, drops, bandwidths, and the time lost to imbalance."""

import time
from collections.abc import Callable, Mapping, Sequence
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
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.expert_parallel.step_routing import StepRouting
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step
from parbench.workloads.step.sent_bytes import record_calls
from parbench.workloads.step.turns import compare_turns, slowest

_REPEATS = 3
"""The number of times that an exchange of tokens is timed."""

Run = Callable[[], object]
"""A function that executes one phase of an exchange of tokens."""


RoundTrip = Mapping[str, float]
"""The seconds, or the bytes that this rank sends, of each of ``PHASES``, by the phase's name.

They are those of the dispatch and combination of one microbatch in one MoE layer, forward.
"""
PHASES = ("dispatch", "dispatch_packing", "dispatch_transfer", "combine")
"""The phases of an exchange of tokens. ``dispatch`` is the sum of its packing and its transfer.

Packing permutes tokens on a rank. The transfer sends tokens and their counts or expert ids.
"""


@dataclass(frozen=True, kw_only=True)
class ExpertSample:
    """The measurements of one rank: its routing, its exchanges of tokens, and its step times."""

    counts: RoutingCounts
    """The numbers of pairs of token and expert in a step with the routing of the case."""
    sent_bytes: RoundTrip
    """The bytes that the rank sends in each phase, empty without ``ep``."""
    round_trip_seconds: Sequence[RoundTrip]
    """The seconds of each phase, once for each repetition. Empty without ``ep``."""
    step_seconds: Sequence[float]
    """The seconds of steps with the routing of the case, empty if this is balanced.

    These steps alternate with the steps of ``balanced_step_seconds``.
    """
    balanced_step_seconds: Sequence[float]
    """The seconds of steps with balanced routing."""


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """Measures the load of experts, the exchange of tokens, and the time lost to imbalance.

    Load is the number of tokens of an expert. The time lost to imbalance is the difference between
    steps with the case's routing and steps with balanced routing.
    """

    world: World
    """All ranks of the benchmark."""
    spec: StepSpec
    """The sizes and options of the training step, or of the step around a single MoE layer."""
    layers: Mapping[int, MoeLayer]
    """The MoE layers of this rank by layer number."""
    routing: StepRouting
    """Chooses the experts of each step. The probe switches it between routings."""
    ep_group: dist.ProcessGroup | None
    """The ranks that exchange tokens, None without ``ep``."""
    share: float = 1.0
    """The weight of this probe in the time budget."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ExpertSample:
        """Return this rank's expert load, times of exchanges, and times of steps.

        Exchanges are measured a fixed number of times. Then steps with the routing of the case
        alternate with steps with balanced routing, as often as the budget allows. ``reset`` is
        called before each ``step``. All ranks take part.
        """
        counts = count_routing(self.layers)
        sent_bytes: RoundTrip = {}
        round_trips: list[RoundTrip] = []
        if self.ep_group is not None:
            sent_bytes = self._measure_round_trip(self._count_sent)
            round_trips = [self._measure_round_trip(self._time) for _ in range(_REPEATS)]
        routing = self.routing.name
        seconds: dict[str, list[float]] = {routing: [], BALANCED: []}

        def measure_both() -> None:
            """Run a step with each of the two routings, in alternating order."""
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
        """Exchange one microbatch's tokens in forward, and return a measurement of each phase.

        ``measure`` runs a phase and returns its seconds, or the bytes that this rank sends. Keys
        are ``PHASES``. The tokens take the experts of one microbatch in this rank's first MoE layer
        in the last step. All ranks of ``ep`` take part.
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
        """Run a phase after a barrier, and return its seconds until the device has finished."""
        self.world.barrier()
        start = time.perf_counter()
        run()
        self.world.sync()
        return time.perf_counter() - start

    def _count_sent(self, run: Run) -> float:
        """Run a phase, and return the bytes that this rank sends over ``ep`` in it."""
        assert self.ep_group is not None
        calls = record_calls(run, {"ep": self.ep_group})
        return bytes_by_axis(calls, ("ep",))["ep"]

    def summarize(self, samples: Sequence[ExpertSample]) -> Explanation:
        """Return metrics of the load of ranks, exchanges of tokens, and imbalance.

        The facts for the record have the load of each rank in a step.
        ``samples`` has the sample of every rank, in rank order.
        """
        traffic = ExpertTraffic(self.spec, [sample.counts for sample in samples])
        metrics = make_load_metrics(traffic)
        if self.ep_group is not None:
            metrics |= make_dispatch_metrics(samples)
        metrics |= make_imbalance_metrics(samples)
        details = ExpertLoadDetails(rank_load=traffic.list_rank_loads())
        return Explanation(metrics=metrics, details=details.as_details)


def make_dispatch_metrics(samples: Sequence[ExpertSample]) -> dict[str, MetricValue]:
    """Return metrics of the exchange of one microbatch's tokens, by metric name.

    They are ``<phase>_time`` in seconds for each of ``PHASES``, ``dispatch_bytes``, and
    ``dispatch_bandwidth.wire`` and ``combine_bandwidth.wire`` in bytes per second. A time is the
    mean over repetitions of the maximum over ranks. Bytes are those of the rank that sends most.
    ``samples`` has the sample of every rank.
    """
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
    """Return metrics of the slowdown relative to steps with balanced routing, by metric name.

    ``imbalance_time`` is the difference in seconds per step, and ``imbalance_slowdown`` the factor.
    Both are means over pairs of steps that ran one after the other. A step's time is the maximum
    over ranks. If the routing is balanced, only ``imbalance_time`` is returned, with value 0.
    """
    if not samples[0].step_seconds:
        return {"imbalance_time": make_value("imbalance_time", 0.0, "routing is balanced")}
    seconds = slowest([sample.step_seconds for sample in samples])
    balanced = slowest([sample.balanced_step_seconds for sample in samples])
    method = "the slowest rank of each turn" if len(seconds) > 1 else "one turn is too few"
    return make_values(
        {
            "imbalance_time": compare_turns(seconds, balanced, sub, "difference"),
            "imbalance_slowdown": compare_turns(seconds, balanced, truediv, "difference"),
        },
        method,
    )


def make_load_metrics(traffic: ExpertTraffic) -> dict[str, MetricValue]:
    """Return metrics of the load of ranks in one step, by metric name.

    ``imbalance.rank`` is the number of pairs of token and expert that a rank computes, as the
    maximum divided by the mean over ranks, in the layer with the largest value. ``drop_rate`` is
    the fraction of the pairs of all layers and ranks that were dropped.
    """
    imbalances = [
        max(loads) * len(loads) / sum(loads) for loads in traffic.list_rank_loads() if any(loads)
    ]
    selected = sum(counts.selected for counts in traffic.counts)
    dispatched = sum(int(counts.dispatched.sum()) for counts in traffic.counts)
    return make_values(
        {
            "imbalance.rank": max(imbalances, default=None),
            "drop_rate": 1 - dispatched / selected,
        }
    )
