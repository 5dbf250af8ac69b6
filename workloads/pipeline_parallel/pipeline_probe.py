"""The probe of a pipeline measures its bubble and compares its schedule with others."""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace

from parbench.bench.machine.environment import get_emulation
from parbench.bench.machine.machine import get_affinity
from parbench.bench.results.details import Action, PipelineDetails
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel import bubbles
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.simulation import (
    Latency,
    SimulatedAction,
    SimulatedTimeline,
)
from parbench.workloads.pipeline_parallel.stages import ActionRecorder
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step

MAX_TIMELINE_ACTIONS = 20_000
SHARED_NOTE = (
    "functional only: ranks share cores or a GPU, so that their compute cannot show a bubble"
)
IDLE_NOTE = (
    "idle by cause is that of the pipeline, where a rank that waits for a stage is idle; "
    "in the parts of the step's time it has exposed communication of pp"
)
HALVES_NOTE = (
    "other schedules are simulated with half of the backward pass as input gradient, half as "
    "weight gradient"
)


class RankStep(NamedTuple):
    """One measured step of a rank."""

    actions: list[tuple[Action, float, float]]
    """Actions with start and stop in seconds of the rank's clock."""
    clock_offset: float
    """Seconds by which the clock of the rank is ahead of rank 0's."""
    wall_seconds: float


@dataclass(frozen=True, kw_only=True)
class PipelineSteps:
    """The measured steps of all ranks of a pipeline."""

    timelines: tuple[SimulatedTimeline, ...]
    outside_seconds: tuple[float, ...]
    """The time of each step before and after the pipeline, such as the optimizer's."""

    @property
    def median(self) -> SimulatedTimeline:
        """The step of median makespan, which reports show."""
        by_makespan = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        return by_makespan[(len(by_makespan) - 1) // 2]

    @property
    def mean_makespan(self) -> float:
        return fmean(timeline.makespan for timeline in self.timelines)


@dataclass(frozen=True, kw_only=True)
class BubbleProbe:
    """Measures the bubble of one or several pipelines that take the same step.

    The metrics are those of the pipeline with the longest mean makespan.
    """

    world: World
    pipeline: Pipeline
    pipeline_ranks: Sequence[Sequence[int]]
    """The ranks of each pipeline, first stage first."""
    recorder: ActionRecorder
    layer_bytes: float
    """Bytes of the activations of one layer and microbatch, for the comparison of schedules."""
    simulated_seconds: float | None
    """The time of a rank's forward pass in simulated compute, None in real compute."""
    share = 1.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> list[RankStep] | None:
        """Run as many steps as the budget allows. Return None if ranks cannot show a bubble."""
        if not can_measure_bubble(self.world, self.simulated_seconds):
            return None
        steps: list[RankStep] = []
        clock_offset = self.world.clock.offsets_ns[self.world.global_rank] / 1e9

        def run_step() -> None:
            reset()
            wall_seconds = time_step(step, self.world)
            steps.append(RankStep(self.recorder.read(), clock_offset, wall_seconds))

        repeat_within_budget(self.world, budget_seconds, run_step)
        return steps

    def summarize(self, samples: Sequence[list[RankStep] | None]) -> Explanation:
        order = self.pipeline.order
        schedule, size = self.pipeline.schedule, self.pipeline.size
        in_flight = max(schedule.microbatches_in_flight(rank, size) for rank in range(size.ranks))
        equal_passes = bubbles.simulate_kinds(order, bubbles.EQUAL_PASSES.by_kind)
        metrics = {
            **make_values({"bubble_fraction_schedule": bubbles.bubble_fraction(equal_passes)}),
            **make_values({"in_flight": in_flight}, "largest over ranks"),
        }
        facts = bubbles.make_details(self.pipeline)
        steps_by_rank = [sample for sample in samples if sample is not None]
        if not steps_by_rank:
            facts = replace(facts, why_not_measured=SHARED_NOTE)
            return Explanation(metrics=metrics, details=facts.as_details, notes=(SHARED_NOTE,))
        pipelines = [
            merge_steps([steps_by_rank[rank] for rank in ranks]) for ranks in self.pipeline_ranks
        ]
        steps = max(pipelines, key=lambda pipeline: pipeline.mean_makespan)
        latency = bubbles.measure_latency(steps.timelines, order)
        metrics |= summarize_bubble(steps, self.pipeline, latency, self.simulated_seconds)
        facts = replace(
            facts,
            clock=self.world.clock.method,
            clock_uncertainty_seconds=self.world.clock.uncertainty_ns / 1e9,
            comparison=bubbles.compare_schedules(
                order,
                bubbles.measure_passes(steps.timelines, order.stages_per_rank),
                layers=sum(self.pipeline.layers_by_stage),
                layer_bytes=self.layer_bytes,
                latency=fmean(latency.values()) if latency else 0.0,
                outside_seconds=median(steps.outside_seconds),
            ),
        )
        notes = [IDLE_NOTE] if schedule.splits_backward else [IDLE_NOTE, HALVES_NOTE]
        details = add_timelines(facts, steps.median, order).as_details
        return Explanation(metrics=metrics, details=details, notes=tuple(notes))


def can_measure_bubble(world: World, simulated_seconds: float | None) -> bool:
    """Return True unless ranks share a GPU, or cores for real compute. All ranks take part.

    Simulated compute on a GPU is a kernel, and kernels of several ranks run one after the other. On
    a CPU simulated compute needs no core.
    """
    if world.device.type == "cuda":
        gpus = world.gather(accelerator.get_properties(world.device).uuid)
        return len(set(gpus)) == len(gpus)
    return simulated_seconds is not None or not has_shared_cores(world)


def has_shared_cores(world: World) -> bool:
    """Return True if any machine runs more ranks than it has cores for them.

    Emulated hosts are one machine.
    """
    machine = "emulated" if get_emulation(os.environ) else socket.gethostname()
    num_ranks: Counter[str] = Counter()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for name, rank_cores in world.gather((machine, get_affinity())):
        num_ranks[name] += 1
        cores[name] |= rank_cores
    return any(num_ranks[name] > len(cores[name]) for name in cores)


def merge_steps(steps_by_rank: Sequence[Sequence[RankStep]]) -> PipelineSteps:
    """Return the steps of the ranks of one pipeline, with times on rank 0's clock."""
    timelines = []
    outside_seconds = []
    for steps in zip(*steps_by_rank, strict=True):
        actions = []
        for rank, step in enumerate(steps):
            for action, start, stop in step.actions:
                timed_action = SimulatedAction(
                    rank=rank,
                    action=action,
                    start=start - step.clock_offset,
                    stop=stop - step.clock_offset,
                )
                actions.append(timed_action)
        timeline = SimulatedTimeline(actions=tuple(actions), ranks=len(steps))
        timelines.append(timeline)
        outside_seconds.append(max(step.wall_seconds for step in steps) - timeline.makespan)
    return PipelineSteps(timelines=tuple(timelines), outside_seconds=tuple(outside_seconds))


def summarize_bubble(
    steps: PipelineSteps, pipeline: Pipeline, latency: Latency, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the measured, simulated and analytical bubble, and idle time by cause."""
    order = pipeline.order
    timeline = steps.median
    fractions = list(map(bubbles.bubble_fraction, steps.timelines))
    simulated = bubbles.simulate_mean_actions(timeline, order)
    causes = bubbles.split_idle(timeline, order, latency)
    method = f"the step of median makespan, of {len(steps.timelines)}"
    return {
        **make_values(
            {
                "bubble_fraction": estimate_mean(fractions, "steps", "from zero"),
                "bubble_fraction_simulated": bubbles.bubble_fraction(simulated),
            }
        ),
        **_compute_analytical_bubble(timeline, pipeline, simulated_seconds),
        **make_values({f"idle_{cause}": causes[cause] for cause in causes}, "mean over ranks"),
        **make_values({"makespan": timeline.makespan}, method),
    }


def _compute_analytical_bubble(
    timeline: SimulatedTimeline, pipeline: Pipeline, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the analytical bubble of the mean times, or of the times that simulated compute has.

    Some formulas require equal times, which measured times of simulated compute never have.
    """
    if simulated_seconds is None:
        times = "mean times"
        passes = bubbles.measure_passes([timeline], pipeline.size.stages_per_rank)
    else:
        times = "requested times"
        passes = PassSeconds(simulated_seconds, simulated_seconds, simulated_seconds)
    bubble = pipeline.schedule.compute_bubble(pipeline.size, passes)
    if bubble is None:
        return {}
    work_seconds = pipeline.size.microbatches * passes.total
    fraction = bubble.seconds / (bubble.seconds + work_seconds)
    return make_values({"bubble_fraction_formula": fraction}, f"of the {times}; {bubble.note}")


def add_timelines(
    facts: PipelineDetails, timeline: SimulatedTimeline, order: PipelineOrder
) -> PipelineDetails:
    """Return details with the measured and the simulated timeline, unless these are too long."""
    if len(timeline.actions) > MAX_TIMELINE_ACTIONS:
        return facts
    simulated = bubbles.simulate_mean_actions(timeline, order)
    return replace(
        facts,
        measured=bubbles.make_detail_rows(timeline),
        predicted=bubbles.make_detail_rows(simulated),
    )
