"""The cost of expert routing: loads, drops, and the times of dispatch and combine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import TokenExchange, make_exchange
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.probes.probe import ResetFn, Step, slowest
from parbench.workloads.probes.sent_bytes import record_calls
from parbench.workloads.step.expert_traffic import (
    ExpertTraffic,
    RoutingCounts,
    count_routing,
)

Result = TypeVar("Result")
_REPEATS = 3
"""The number of times that an exchange of tokens is timed."""


ExchangeTimes = Mapping[str, float]
"""The seconds of the phases in which one rank exchanges one microbatch's tokens, by metric.

Only the forward pass is timed.

The keys are ``dispatch_packing_time`` (to permute tokens on this rank before and after their
transfer), ``dispatch_transfer_time`` (to send tokens and their counts or expert ids),
``dispatch_time`` (the sum of both) and ``combine_time`` (to send results back and sum them).
"""


@dataclass(frozen=True, kw_only=True)
class ExpertSample:
    """The measurements of one rank: its routing in a step, and its exchanges of tokens."""

    counts: RoutingCounts
    """The numbers of pairs of token and expert in the last step."""
    dispatch_bytes: float
    """The bytes that leave this rank in one forward dispatch of a microbatch, 0 without ``ep``.

    They are those of the tokens and of their counts, or with the dispatcher ``allgather`` of their
    expert ids and weights. The results of experts, which ``combine`` sends, do not count.
    """
    exchanges: Sequence[ExchangeTimes]
    """The times of each repetition of the exchange of one microbatch's tokens.

    Empty without ``ep``.
    """


@dataclass(frozen=True, kw_only=True)
class ExpertProbe:
    """Measures the load of experts and the exchange of tokens in further passes.

    The load of an expert is the number of pairs of token and expert that it takes.
    """

    world: World
    """All ranks of the benchmark."""
    spec: StepSpec
    """The sizes and options of the training step, or of the step around a single MoE layer."""
    layers: Mapping[int, MoeLayer]
    """The MoE layers of this rank by layer number."""
    ep_group: dist.ProcessGroup | None
    """The ranks that exchange tokens, None without ``ep``."""
    share = 0.0
    """0, because this probe needs no time budget: it always measures ``_REPEATS`` exchanges."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> ExpertSample:
        """Return this rank's expert load in the last step, and its times of exchanges.

        The arguments are not used, because no further step runs. All ranks take part.
        """
        dispatch_bytes = 0.0
        exchanges: list[ExchangeTimes] = []
        if self.ep_group is not None:
            calls = record_calls(self._make_exchange().dispatch, {"ep": self.ep_group})
            dispatch_bytes = bytes_by_axis(calls, ("ep",))["ep"]
            exchanges = [self._time_exchange() for _ in range(_REPEATS)]
        return ExpertSample(
            counts=count_routing(self.layers), dispatch_bytes=dispatch_bytes, exchanges=exchanges
        )

    def _make_exchange(self) -> TokenExchange:
        """Return an exchange of one microbatch's tokens, as in the last step.

        The elements of the tokens are 1. The experts are those that one microbatch of the last step
        took in this rank's first MoE layer.
        """
        layer = next(iter(self.layers.values()))
        expert_ids = next(iter(layer.expert_ids.values()))
        size = (len(expert_ids), self.spec.shape.hidden)
        x = torch.ones(size, dtype=layer.router.weight.dtype, device=self.world.device)
        plan = layer.plan_dispatch(expert_ids)
        weights = x.new_ones(expert_ids.shape)
        return make_exchange(layer.moe.variant, x, weights, plan, self.ep_group)

    @torch.no_grad()
    def _time_exchange(self) -> ExchangeTimes:
        """Exchange one microbatch's tokens in forward, and return the seconds of its phases.

        The keys are ``dispatch_packing_time`` (``pack`` and ``unpack``), ``dispatch_transfer_time``
        (``exchange_metadata`` and ``transfer``), ``dispatch_time`` (the sum of these four phases)
        and ``combine_time`` (``combine``). All ranks must call this method. Each phase starts after
        a barrier.
        """
        exchange = self._make_exchange()
        _, metadata_seconds = self._time(exchange.exchange_metadata)
        packed, pack_seconds = self._time(exchange.pack)
        received, transfer_seconds = self._time(lambda: exchange.transfer(packed))
        rows, unpack_seconds = self._time(lambda: exchange.unpack(received))
        _, combine_seconds = self._time(lambda: exchange.combine(rows.tokens))
        packing_seconds = pack_seconds + unpack_seconds
        sending_seconds = metadata_seconds + transfer_seconds
        return {
            "dispatch_packing_time": packing_seconds,
            "dispatch_transfer_time": sending_seconds,
            "dispatch_time": packing_seconds + sending_seconds,
            "combine_time": combine_seconds,
        }

    def _time(self, run_phase: Callable[[], Result]) -> tuple[Result, float]:
        """Run a phase after a barrier, and return its result and its seconds.

        The time ends when the device has finished the phase.
        """
        self.world.barrier()
        start = time.perf_counter()
        result = run_phase()
        self.world.sync()
        return result, time.perf_counter() - start

    def summarize(self, samples: Sequence[ExpertSample]) -> Explanation:
        """Return metrics of the load of ranks and of exchanges of tokens.

        The fact ``rank_load`` for the record is the load of each rank in a step, by MoE layer.
        ``samples`` has the sample of every rank, in rank order.
        """
        traffic = ExpertTraffic(self.spec, [sample.counts for sample in samples])
        metrics = make_load_metrics(traffic)
        if self.ep_group is not None:
            metrics |= make_dispatch_metrics(samples)
        return Explanation(metrics=metrics, details={"rank_load": traffic.list_rank_loads()})


def make_dispatch_metrics(samples: Sequence[ExpertSample]) -> dict[str, MetricValue]:
    """Return metrics of the exchange of one microbatch's tokens, by metric name.

    They are ``dispatch_packing_time``, ``dispatch_transfer_time``, ``dispatch_time`` and
    ``combine_time`` in seconds (see ``ExchangeTimes``), and ``dispatch_bandwidth.wire`` in bytes
    per second. A time is the mean over repetitions of the maximum over ranks. The bandwidth is the
    ``dispatch_bytes`` of the rank that sends most, divided by ``dispatch_time``, as the mean over
    repetitions. ``samples`` has the sample of every rank.
    """
    num_bytes = max(sample.dispatch_bytes for sample in samples)
    values = {}
    for name in samples[0].exchanges[0]:
        seconds = slowest([[times[name] for times in sample.exchanges] for sample in samples])
        values[name] = estimate_mean(seconds, "round trips", "amount")
        if name == "dispatch_time":
            rates = [num_bytes / duration for duration in seconds]
            values["dispatch_bandwidth.wire"] = estimate_mean(rates, "round trips", "amount")
    return make_values(values, "the slowest rank, forward")


def make_load_metrics(traffic: ExpertTraffic) -> dict[str, MetricValue]:
    """Return the metrics ``imbalance.rank`` and ``drop_rate`` of one step, by metric name.

    The load of a rank is the number of pairs of token and expert that it computes in a layer.
    ``imbalance.rank`` is the maximum over ranks divided by the mean, in the layer with the largest
    ratio. ``drop_rate`` is the fraction of the pairs of all layers and ranks that were dropped.
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
