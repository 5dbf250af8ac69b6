"""Bubbles of a pipeline: measured, by cause, and simulated for other schedules.

Their formulas belong to the schedules in ``schedules.py``.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import fmean, median
from typing import TypeVar

from parbench.bench.results.details import (
    IDLE_CAUSES,
    Action,
    ActionKind,
    IdleCause,
    PipelineDetails,
    PipelineTimeline,
    SimulatedSchedule,
    TimedAction,
)
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel import simulation
from parbench.workloads.pipeline_parallel.order import PipelineOrder, get_output, get_received
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline, split_layers
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.simulation import Latency, SimulatedTimeline, simulate

Key = TypeVar("Key", bound=Hashable)
EQUAL_PASSES = PassSeconds(1.0, 1.0, 1.0)


def bubble_fraction(timeline: SimulatedTimeline) -> float:
    """Return the idle time of all ranks relative to the makespan times the number of ranks."""
    total = timeline.ranks * timeline.makespan
    return timeline.idle / total if total else 0.0


def make_details(pipeline: Pipeline) -> PipelineDetails:
    """Return the schedule, its size and the stages of each rank, as rows record them."""
    size = pipeline.size
    return PipelineDetails(
        schedule=pipeline.schedule.name,
        ranks=size.ranks,
        microbatches=size.microbatches,
        chunks=size.stages_per_rank,
        stages_by_rank=tuple(map(pipeline.stages_of, range(size.ranks))),
        layers_by_stage=pipeline.layers_by_stage,
    )


def make_detail_rows(timeline: SimulatedTimeline) -> PipelineTimeline:
    """Return the actions of each rank in microseconds since the first start."""

    def to_microseconds(seconds: float) -> int:
        return round((seconds - timeline.first_start) * 1e6)

    rows = []
    for rank in range(timeline.ranks):
        row = [
            TimedAction(str(a.action), to_microseconds(a.start), to_microseconds(a.stop))
            for a in timeline.actions_of(rank)
        ]
        rows.append(tuple(row))
    return tuple(rows)


def split_idle(
    measured: SimulatedTimeline, order: PipelineOrder, latency: Latency
) -> dict[IdleCause, float]:
    """Return the measured idle seconds by cause, mean per rank, which add up to all idle time.

    Each cause is the idle time that one simulation has more than the simulation before.
    "schedule" simulates the mean time of each kind of action, "imbalance" the mean time of each
    stage and kind, and "p2p" adds ``latency``. "rest" is the remaining idle time, such as jitter.
    A cause is negative if it shortens the waits.
    """
    means = _compute_means(measured.actions, lambda action: (action.stage, action.kind))

    def seconds_of_stage(action: Action) -> float:
        return means[action.stage, action.kind]

    timelines = (
        simulate_mean_actions(measured, order),
        simulate(order, seconds_of_stage),
        simulate(order, seconds_of_stage, latency),
        measured,
    )
    idle_by_cause: dict[IdleCause, float] = {}
    idle_before = 0.0
    for cause, timeline in zip(IDLE_CAUSES, timelines, strict=True):
        idle = timeline.idle / measured.ranks
        idle_by_cause[cause] = idle - idle_before
        idle_before = idle
    return idle_by_cause


def simulate_mean_actions(measured: SimulatedTimeline, order: PipelineOrder) -> SimulatedTimeline:
    """Return the simulated timeline with the measured mean time of each kind, without latency."""
    return simulate_kinds(order, compute_kind_seconds([measured]))


def simulate_kinds(
    order: PipelineOrder, seconds_by_kind: Mapping[ActionKind, float], latency: float = 0.0
) -> SimulatedTimeline:
    """Return the simulated timeline of an order in which a kind takes equal seconds on all stages.

    ``latency`` is the seconds of a message.
    """
    return simulate(order, lambda action: seconds_by_kind[action.kind], latency)


def compute_kind_seconds(timelines: Sequence[SimulatedTimeline]) -> dict[ActionKind, float]:
    """Return the mean seconds of the actions of each kind.

    Of split backward passes, torch's first stage does not count: its input gradient takes no time,
    and its weight gradient takes the time of both.
    """
    actions = list(chain.from_iterable(timeline.actions for timeline in timelines))
    comparable = [timed for timed in actions if timed.action.stage or timed.action.kind in "FB"]
    return {
        **_compute_means(actions, lambda action: action.kind),
        **_compute_means(comparable, lambda action: action.kind),
    }


def _compute_means(
    actions: Iterable[simulation.SimulatedAction], key: Callable[[Action], Key]
) -> dict[Key, float]:
    """Return the mean seconds of actions, grouped by ``key(action)``."""
    seconds: defaultdict[Key, list[float]] = defaultdict(list)
    for timed in actions:
        seconds[key(timed.action)].append(timed.seconds)
    return {group: fmean(values) for group, values in seconds.items()}


def measure_latency(
    timelines: Sequence[SimulatedTimeline], order: PipelineOrder
) -> dict[tuple[int, int], float]:
    """Return the seconds of messages by sender and receiver. The ranks' clocks must agree.

    A link's seconds are the median time from the sender's stop to the receiver's start, over the
    messages for which an idle rank waited. They are 0 if no rank waited for a message of the link.
    """
    waits: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        producers = {get_output(timed.action): timed for timed in timeline.actions}
        for rank in range(timeline.ranks):
            last_stop = -inf
            for timed in timeline.actions_of(rank):
                received = get_received(timed.action, order.num_stages)
                source = timed if received is None else producers[received]
                if source.rank != rank and source.stop > last_stop:
                    waits[source.rank, rank].append(timed.start - source.stop)
                last_stop = max(last_stop, timed.stop)
    return {link: max(0.0, median(waits[link])) for link in sorted(waits)}


def measure_passes(timelines: Sequence[SimulatedTimeline], stages_per_rank: int) -> PassSeconds:
    """Return the mean seconds of a rank's forward, input-gradient and weight-gradient passes.

    If the backward pass is not split, both gradients are taken to be half of it.
    """
    means = compute_kind_seconds(timelines)
    half_seconds = means.get("B", 0.0) / 2
    return PassSeconds(
        forward=stages_per_rank * means["F"],
        input_gradient=stages_per_rank * means.get("I", half_seconds),
        weight_gradient=stages_per_rank * means.get("W", half_seconds),
    )


def compare_schedules(
    order: PipelineOrder,
    passes: PassSeconds,
    *,
    layers: int,
    layer_bytes: float,
    latency: float,
    outside_seconds: float,
) -> tuple[SimulatedSchedule, ...]:
    """Simulate each schedule that can run, and return them sorted by step time.

    The ranks and microbatches are those of ``order``. ``layer_bytes`` are the activations of a
    layer, ``latency`` the seconds of a message, and ``outside_seconds`` the part of a step before
    and after the pipeline.
    """
    rows = []
    for schedule in SCHEDULES.values():
        try:
            size = schedule.size(order.ranks, order.microbatches)
            layers_per_stage = split_layers(layers, size.num_stages)[0]
        except UserError:
            continue
        chunks = size.stages_per_rank
        action_seconds = {kind: seconds / chunks for kind, seconds in passes.by_kind.items()}
        timeline = simulate_kinds(schedule.make_order(size), action_seconds, latency)
        in_flight = max(schedule.microbatches_in_flight(rank, size) for rank in range(size.ranks))
        row = SimulatedSchedule(
            schedule=schedule.name,
            chunks=chunks,
            measured=False,
            step_seconds=timeline.makespan + outside_seconds,
            bubble_fraction=bubble_fraction(timeline),
            in_flight=in_flight,
            activation_bytes=layer_bytes * in_flight * chunks * layers_per_stage,
        )
        rows.append(row)
    rows.sort(key=lambda row: row.step_seconds or 0.0)
    return tuple(rows)
