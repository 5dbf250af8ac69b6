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
"""Passes that take equal times: forward, input gradient and weight gradient one second each."""


def bubble_fraction(timeline: SimulatedTimeline) -> float:
    """Return the fraction of the ranks' time in which they run no pass of a stage, from 0 to 1.

    The time of each rank is the makespan: from the first start to the last stop on any rank. The
    result is 0 if the makespan is 0.
    """
    total = timeline.ranks * timeline.makespan
    return timeline.idle / total if total else 0.0


def make_details(pipeline: Pipeline) -> PipelineDetails:
    """Return the schedule, the size and the stages of a pipeline for the record of a step.

    Measured and simulated times are not set.
    """
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
    """Return the actions of each rank, with start and stop in microseconds, for a record.

    Ranks are in order, and the actions of a rank in the order of their start. Time 0 is the first
    start of all ranks.
    """

    def to_microseconds(seconds: float) -> int:
        """Return the microseconds from the first start to a time in seconds."""
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
    """Split the measured idle seconds of a step by cause, as means over ranks.

    The values add up to the measured idle time. The keys are the causes:

    * "schedule": the idle time if all actions of a kind (F, B, I or W) took their mean time.
    * "imbalance": the additional idle time if each stage had its own mean times.
    * "p2p": the additional idle time if messages between ranks also took ``latency``.
    * "rest": the additional idle time of the measured step, such as jitter.

    The first three come from simulations of ``order``. A value is negative if its cause shortens
    the waits.
    """
    means = _compute_means(measured.actions, lambda action: (action.stage, action.kind))

    def seconds_of_stage(action: Action) -> float:
        """Return the mean measured seconds of the action's kind in its stage."""
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
    """Simulate a step in which all actions of a kind take their mean time of a measured step.

    The kinds are F, B, I and W, and the mean is over stages and microbatches. Ranks run the actions
    of ``order``. Messages take no time.
    """
    return simulate_kinds(order, compute_kind_seconds([measured]))


def simulate_kinds(
    order: PipelineOrder, seconds_by_kind: Mapping[ActionKind, float], latency: float = 0.0
) -> SimulatedTimeline:
    """Simulate a step in which all actions of a kind take the same time, on every stage.

    Ranks run the actions of ``order``. ``seconds_by_kind`` has the seconds of one action by kind
    (F, B, I or W), and ``latency`` is the seconds of a message between ranks.
    """
    return simulate(order, lambda action: seconds_by_kind[action.kind], latency)


def compute_kind_seconds(timelines: Sequence[SimulatedTimeline]) -> dict[ActionKind, float]:
    """Return the mean seconds of one action of each kind, keyed by F, B, I and W.

    An action is the forward pass (F), full backward pass (B), input gradient (I) or weight gradient
    (W) of one stage and microbatch. The mean is over all actions of the steps in ``timelines``.
    Split backward passes of the pipeline's first stage count only if other stages have none. In
    torch's first stage, the input gradient takes no time, and the weight gradient takes the time of
    both.
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
    """Return the mean seconds of ``actions``, separately for each value of ``key(action)``."""
    seconds: defaultdict[Key, list[float]] = defaultdict(list)
    for timed in actions:
        seconds[key(timed.action)].append(timed.seconds)
    return {group: fmean(values) for group, values in seconds.items()}


def measure_latency(
    timelines: Sequence[SimulatedTimeline], order: PipelineOrder
) -> dict[tuple[int, int], float]:
    """Return the seconds of a message between two ranks, keyed by (sending rank, receiving rank).

    The value is the median time from the end of the action that sends to the start of the action
    that needs the message. It is taken over the messages of all ``timelines`` for which an idle
    rank waited. Pairs of ranks without such a message are not in the result. The timelines are of
    steps that ran ``order``, with all times on one clock.
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
    """Return the mean seconds of a rank's passes for one microbatch, over all steps and ranks.

    A pass runs through all ``stages_per_rank`` stages of the rank. If backward passes are not
    split, the input gradient and the weight gradient are each taken to be half of them.
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
    """Return the simulated step of every schedule that can run on the same ranks, fastest first.

    An element has the seconds of a step, the bubble, and the memory of activations. The numbers of
    ranks and microbatches are those of the measured ``order``. ``passes`` has the seconds of a rank
    for one microbatch. ``layers`` is the number of layers of the model, ``layer_bytes`` the bytes
    of activations of one layer and microbatch, and ``latency`` the seconds of a message between
    ranks. ``outside_seconds`` is the part of a step before and after the pipeline, such as the
    optimizer. Schedules that cannot run with these ranks, microbatches or layers are left out.
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
