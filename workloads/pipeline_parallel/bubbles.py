"""The idle time of a pipeline (bubble) by cause, and its actions as facts for a record.

Formulas of bubbles belong to the schedules in ``schedules.py``.
"""

from collections import defaultdict
from statistics import fmean

from parbench.bench.results.details import (
    Action,
    ActionKind,
    IdleCause,
    PipelineDetails,
    PipelineTimeline,
    TimedAction,
)
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.simulation import SimulatedTimeline, simulate


def make_details(pipeline: Pipeline) -> PipelineDetails:
    """Return the schedule, the size and the stages of a pipeline for the record of a step.

    Measured and simulated times are not set.
    """
    size = pipeline.size
    return PipelineDetails(
        schedule=pipeline.schedule.name,
        ranks=size.ranks,
        microbatches=size.microbatches,
        virtual_stages=size.stages_per_rank,
        stages_by_rank=tuple(map(pipeline.list_stages, range(size.ranks))),
        layers_by_stage=pipeline.layers_by_stage,
    )


def make_detail_rows(timeline: SimulatedTimeline) -> PipelineTimeline:
    """Return the actions of each rank, with start and stop in microseconds, for a record.

    Ranks are in order, and the actions of a rank in the order of their start. Time 0 is the first
    start of all ranks.
    """

    rows = []
    for rank in range(timeline.ranks):
        row = []
        for timed in timeline.select_actions(rank):
            start_us = round(1e6 * (timed.start - timeline.first_start))
            stop_us = round(1e6 * (timed.stop - timeline.first_start))
            row.append(TimedAction(str(timed.action), start_us, stop_us))
        rows.append(tuple(row))
    return tuple(rows)


def split_idle(
    measured: SimulatedTimeline, simulated: SimulatedTimeline, order: PipelineOrder
) -> dict[IdleCause, float]:
    """Split the measured idle seconds of a step by cause, as means over ranks.

    ``simulated`` is the result of ``simulate_mean_actions`` for the ``measured`` step. The values
    add up to the measured idle time. The keys are the causes:

    * "schedule": the idle time if all actions of a kind (F, B, I or W) took their mean time.
    * "imbalance": the additional idle time if each stage had its own mean times. It is negative if
      unequal stages shorten the waits.
    * "rest": the additional idle time of the measured step, such as for messages and jitter.

    The first two come from simulations of ``order`` in which messages take no time.
    """
    seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for timed in measured.actions:
        seconds[timed.action.stage, timed.action.kind].append(timed.seconds)

    def get_stage_mean(action: Action) -> float:
        """Return the mean measured seconds of the action's kind in its stage."""
        return fmean(seconds[action.stage, action.kind])

    schedule = simulated.idle / measured.ranks
    stages = simulate(order, get_stage_mean).idle / measured.ranks
    total = measured.idle / measured.ranks
    return {"schedule": schedule, "imbalance": stages - schedule, "rest": total - stages}


def simulate_mean_actions(measured: SimulatedTimeline, order: PipelineOrder) -> SimulatedTimeline:
    """Simulate a step in which each action takes the mean time of its kind in a measured step.

    The kinds are F, B, I and W. The mean is over stages and microbatches. Ranks run the actions
    of ``order``. Messages take no time.
    """
    means = compute_kind_means(measured)
    return simulate(order, lambda action: means[action.kind])


def compute_kind_means(timeline: SimulatedTimeline) -> dict[ActionKind, float]:
    """Return the mean seconds of one action of each kind in a step, keyed by F, B, I and W.

    An action is the forward pass (F), full backward pass (B), input gradient (I) or weight gradient
    (W) of one stage and microbatch. The mean is over all actions of the step, except for I and W of
    the pipeline's first stage, because torch's first stage computes both in W.
    """
    seconds: defaultdict[ActionKind, list[float]] = defaultdict(list)
    for timed in timeline.actions:
        if timed.action.stage > 0 or timed.action.kind in "FB":
            seconds[timed.action.kind].append(timed.seconds)
    return {kind: fmean(values) for kind, values in seconds.items()}


def measure_passes(timeline: SimulatedTimeline, stages_per_rank: int) -> PassSeconds:
    """Return the mean seconds of a rank's passes for one microbatch in a measured step.

    The mean is over ranks and microbatches. A pass runs through all ``stages_per_rank`` stages of
    the rank. If backward passes are not split, input gradient and weight gradient are each taken to
    be half of a backward pass.
    """
    means = compute_kind_means(timeline)
    half_seconds = means.get("B", 0.0) / 2
    return PassSeconds(
        forward=stages_per_rank * means["F"],
        input_gradient=stages_per_rank * means.get("I", half_seconds),
        weight_gradient=stages_per_rank * means.get("W", half_seconds),
    )
