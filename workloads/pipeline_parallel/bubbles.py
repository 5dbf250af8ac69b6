"""Bubbles of a pipeline: measured, by cause, and simulated for other schedules. Pure."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from statistics import fmean, median
from typing import TypeVar

from msgspec.structs import replace

from parbench.bench.results import details
from parbench.bench.results.details import (
    IDLE_CAUSES,
    Action,
    ActionKind,
    IdleCause,
    SimulatedSchedule,
)
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import PipelineOrder, get_output, get_received
from parbench.workloads.pipeline_parallel.pipeline_case import split_layers
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.simulation import (
    Latency,
    Timeline,
    simulate,
)

Key = TypeVar("Key", bound=Hashable)


def bubble_fraction(timeline: Timeline) -> float:
    """Return idle time as a share of all ranks' makespan."""
    total = timeline.ranks * timeline.makespan
    return timeline.idle / total if total else 0.0


def bubble_overhead(timeline: Timeline) -> float:
    """Return idle time over busy time, which is (P-1)/M for 1F1B."""
    busy = sum(map(timeline.busy, range(timeline.ranks)))
    return timeline.idle / busy if busy else 0.0


def bubble_fraction_span(timeline: Timeline) -> float:
    """Return the largest idle share of a rank's own span, from its first start to its last stop.

    Zero-bubble papers count it. A rank that starts and ends late loses no time if its next step
    starts late as well.
    """
    return max(list_span_fractions(timeline), default=0.0)


def list_span_fractions(timeline: Timeline) -> list[float]:
    fractions = []
    for rank in range(timeline.ranks):
        span = timeline.span(rank)
        fractions.append(1 - timeline.busy(rank) / span if span else 0.0)
    return fractions


def make_details(order: PipelineOrder) -> details.PipelineDetails:
    return details.PipelineDetails(
        schedule=order.name,
        ranks=order.ranks,
        microbatches=order.microbatches,
        chunks=order.stages_per_rank,
        stages_by_rank=tuple(map(order.stages_of, range(order.ranks))),
    )


def make_detail_rows(timeline: Timeline) -> details.PipelineTimeline:
    """Return the actions of each rank in microseconds."""
    rows = []
    for rank in range(timeline.ranks):
        actions = timeline.actions_of(rank)
        row = [details.TimedAction(str(a.action), to_us(a.start), to_us(a.stop)) for a in actions]
        rows.append(tuple(row))
    return tuple(rows)


def to_us(seconds: float) -> int:
    return round(seconds * 1e6)


def split_idle(
    measured: Timeline, order: PipelineOrder, latency: Latency
) -> dict[IdleCause, float]:
    """Return the measured idle seconds by cause, mean per rank, which add up to all idle time.

    Each cause is the idle time of one simulation minus that of the one before: "schedule" with the
    mean time of each kind of action, "imbalance" with that of each stage and kind, "p2p" with
    ``latency`` as well. "rest", such as jitter, is what the measured idle time exceeds them by.
    A cause is negative if it shortens the waits.
    """
    idle_by_cause: dict[IdleCause, float] = {}
    idle_before = 0.0
    timelines = [*_simulate_causes(measured, order, latency), measured]
    for cause, timeline in zip(IDLE_CAUSES, timelines, strict=True):
        idle = timeline.idle / measured.ranks
        idle_by_cause[cause] = idle - idle_before
        idle_before = idle
    return idle_by_cause


def attribute_gaps(
    measured: Timeline, order: PipelineOrder, latency: Latency
) -> list[tuple[int, float, float, IdleCause]]:
    """Return rank, start, stop and cause of the parts of every gap between actions.

    The first part of a gap is as long as the same gap with the schedule as its only cause. The
    longer gaps of the other simulations follow, then the rest. A gap has no negative parts, so that
    the sums may differ from ``split_idle``.
    """
    parts: list[tuple[int, float, float, IdleCause]] = []
    timelines = (measured, *_simulate_causes(measured, order, latency))
    for rank in range(measured.ranks):
        gaps = zip(*(_list_gaps(timeline, rank) for timeline in timelines), strict=True)
        for (gap_start, gap_stop), *simulated in gaps:
            lengths = [stop - start for start, stop in simulated]
            start = gap_start
            for cause, length in zip(IDLE_CAUSES, [*lengths, inf], strict=True):
                stop = min(gap_stop, gap_start + max(0.0, length))
                if stop > start:
                    parts.append((rank, start, stop, cause))
                    start = stop
    return parts


def _simulate_causes(
    measured: Timeline, order: PipelineOrder, latency: Latency
) -> tuple[Timeline, Timeline, Timeline]:
    means = _compute_means([measured], lambda action: (action.stage, action.kind))

    def seconds_of_stage(action: Action) -> float:
        return means[action.stage, action.kind]

    return (
        simulate_mean_actions(measured, order),
        simulate(order, seconds_of_stage),
        simulate(order, seconds_of_stage, latency),
    )


def simulate_mean_actions(measured: Timeline, order: PipelineOrder) -> Timeline:
    """Simulate the measured mean time of each kind of action, without latency."""
    return simulate_kinds(order, _compute_means([measured], lambda action: action.kind))


def simulate_kinds(
    order: PipelineOrder, seconds_by_kind: Mapping[ActionKind, float], latency: float = 0.0
) -> Timeline:
    return simulate(order, lambda action: seconds_by_kind[action.kind], latency)


def _compute_means(timelines: Sequence[Timeline], key: Callable[[Action], Key]) -> dict[Key, float]:
    seconds: defaultdict[Key, list[float]] = defaultdict(list)
    for timeline in timelines:
        for timed in timeline.actions:
            seconds[key(timed.action)].append(timed.seconds)
    return {group: fmean(values) for group, values in seconds.items()}


def _list_gaps(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return the possibly empty gap before each action of a rank, and the one after the last."""
    gaps = []
    last_stop = timeline.first_start
    for timed in timeline.actions_of(rank):
        gaps.append((last_stop, timed.start))
        last_stop = max(last_stop, timed.stop)
    gaps.append((last_stop, timeline.first_start + timeline.makespan))
    return gaps


def measure_latency(
    timelines: Sequence[Timeline], order: PipelineOrder
) -> dict[tuple[int, int], float]:
    """Return the seconds of messages by sender and receiver. The ranks' clocks must agree.

    It is the median time from the sender's stop to the receiver's start, of the messages for which
    an idle rank waited. If no rank waited for a message of a link, it is 0.
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


def measure_passes(timelines: Sequence[Timeline], stages_per_rank: int) -> PassSeconds:
    """Return mean seconds of a rank's passes. If backward is not split, its halves are equal."""
    means = _compute_means(timelines, lambda action: action.kind)
    half = means.get("B", 0.0) / 2
    return PassSeconds(
        forward=stages_per_rank * means["F"],
        input_gradient=stages_per_rank * means.get("I", half),
        weight_gradient=stages_per_rank * means.get("W", half),
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
    """Simulate every schedule with as many ranks and microbatches, and sort them by step time.

    ``layer_bytes`` are the activations of a layer, ``outside_seconds`` the part of a step before
    and after the pipeline. Schedules that cannot run come last, with the reason.
    """
    seconds_by_kind: dict[ActionKind, float] = {
        "F": passes.forward,
        "I": passes.input_gradient,
        "W": passes.weight_gradient,
        "B": passes.backward,
    }
    rows = []
    for schedule in SCHEDULES.values():
        row = SimulatedSchedule(
            schedule=schedule.name, chunks=schedule.stages_per_rank, measured=False
        )
        try:
            size = schedule.size(order.ranks, order.microbatches)
            layers_per_stage = split_layers(layers, size.num_stages)[0]
        except UserError as error:
            rows.append(replace(row, why_not=str(error)))
            continue
        chunks = size.stages_per_rank
        action_seconds = {kind: seconds_by_kind[kind] / chunks for kind in seconds_by_kind}
        timeline = simulate_kinds(schedule.make_order(size), action_seconds, latency)
        in_flight = max(schedule.microbatches_in_flight(rank, size) for rank in range(size.ranks))
        row = replace(
            row,
            step_seconds=timeline.makespan + outside_seconds,
            bubble_fraction=bubble_fraction(timeline),
            in_flight=in_flight,
            activation_bytes=layer_bytes * in_flight * chunks * layers_per_stage,
        )
        rows.append(row)
    rows.sort(key=lambda row: inf if row.step_seconds is None else row.step_seconds)
    return tuple(rows)
