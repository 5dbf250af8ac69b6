"""The probe of a pipeline measures its bubble and compares its schedule with others."""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from msgspec.structs import replace

from parbench.bench.machine.environment import get_emulation
from parbench.bench.machine.machine import get_affinity
from parbench.bench.results import details
from parbench.bench.results.details import Action
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import Clock, World
from parbench.workloads.pipeline_parallel import bubbles
from parbench.workloads.pipeline_parallel.bubbles import to_us
from parbench.workloads.pipeline_parallel.order import PipelineOrder
from parbench.workloads.pipeline_parallel.schedule import PassSeconds, PipelineSize
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.pipeline_parallel.simulation import (
    Latency,
    TimedAction,
    Timeline,
    simulate_equal_passes,
)
from parbench.workloads.pipeline_parallel.stages import Recorder
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step
from parbench.workloads.step.turns import choose_ranks, cross_fitted

MAX_TIMELINE_ACTIONS = 20_000
SHARED_NOTE = (
    "functional only: ranks share cores or a GPU, so that their compute cannot show a bubble"
)
IDLE_NOTE = (
    "idle by cause is that of the pipeline, where a rank that waits for a stage is idle; "
    "in the parts of the step's time it has exposed communication of pp"
)
HALVES_NOTE = "other schedules are simulated with half of the backward pass as input gradient, half as weight gradient"


@dataclass(frozen=True)
class RankSteps:
    """The measured steps of a rank."""

    stamps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """Actions of each step with start and stop in nanoseconds of rank 0's clock."""
    wall_seconds: list[float] = field(default_factory=list)
    uncertainty_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PipelineSteps:
    """The measured steps of all ranks of a pipeline."""

    order: PipelineOrder
    timelines: tuple[Timeline, ...]
    outside_seconds: tuple[float, ...]
    """The time of each step before and after the pipeline, such as that of the optimizer."""
    uncertainty_seconds: float = 0.0

    @property
    def median(self) -> Timeline:
        """The step of median makespan, which reports show."""
        by_makespan = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        return by_makespan[(len(by_makespan) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class BubbleProbe:
    """Measures the bubble of one or several pipelines that take the same step.

    The metrics are of the slowest pipeline, which is chosen from the other half of the steps.
    """

    world: World
    order: PipelineOrder
    pipelines: Sequence[Sequence[int]]
    """The ranks of each pipeline, first stage first."""
    recorder: Recorder
    layers_by_stage: tuple[int, ...]
    layer_bytes: float
    """Bytes of the activations of one layer and microbatch, for the comparison of schedules."""
    simulated_seconds: float | None
    """The time of a rank's forward pass in simulated compute, None in real compute."""
    share = 1.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> RankSteps | None:
        """Run as many steps as the budget allows, none if they cannot show a bubble."""
        if not can_measure_bubble(self.world, self.simulated_seconds):
            return None
        steps = RankSteps()
        offset_ns = self.world.clock.offsets_ns[self.world.global_rank]

        def run_step() -> None:
            reset()
            steps.wall_seconds.append(time_step(step, self.world))
            stamps = [
                (str(action), start_ns - offset_ns, stop_ns - offset_ns)
                for action, start_ns, stop_ns in self.recorder.read()
            ]
            steps.stamps.append(stamps)
            steps.uncertainty_seconds.append(self.recorder.uncertainty_seconds)

        repeat_within_budget(self.world, budget_seconds, run_step)
        return steps

    def summarize(self, samples: Sequence[RankSteps | None]) -> Explanation:
        metrics = summarize_order(self.order)
        facts = replace(
            bubbles.make_details(self.order),
            layers_by_stage=self.layers_by_stage,
            in_flight_by_rank=tuple(
                map(self.order.microbatches_in_flight, range(self.order.ranks))
            ),
        )
        steps_by_rank = [sample for sample in samples if sample is not None]
        if not steps_by_rank:
            facts = replace(facts, why_not_measured=SHARED_NOTE)
            return Explanation(metrics=metrics, details=facts.as_details, notes=(SHARED_NOTE,))
        steps = find_slowest_pipeline(
            [
                merge_steps([steps_by_rank[rank] for rank in ranks], self.order)
                for ranks in self.pipelines
            ]
        )
        latency = bubbles.measure_latency(steps.timelines, self.order)
        metrics |= summarize_bubble(steps, latency, self.simulated_seconds)
        facts = add_timelines(facts, steps, latency, self.world.clock)
        facts = replace(facts, comparison=self._compare_schedules(steps, latency))
        notes = [IDLE_NOTE]
        if not self.order.splits_backward:
            notes.append(HALVES_NOTE)
        return Explanation(metrics=metrics, details=facts.as_details, notes=tuple(notes))

    def _compare_schedules(
        self, steps: PipelineSteps, latency: Mapping[tuple[int, int], float]
    ) -> tuple[details.SimulatedSchedule, ...]:
        return bubbles.compare_schedules(
            self.order,
            bubbles.measure_passes(steps.timelines, self.order.stages_per_rank),
            layers=sum(self.layers_by_stage),
            layer_bytes=self.layer_bytes,
            latency=fmean(latency.values()) if latency else 0.0,
            outside_seconds=median(steps.outside_seconds),
        )


def can_measure_bubble(world: World, simulated_seconds: float | None) -> bool:
    """Return True unless ranks share a GPU, or cores for real compute. All ranks take part.

    Simulated compute on a GPU is a kernel, which runs in turn with those of other ranks. On a CPU
    it needs no core.
    """
    if world.device.type == "cuda":
        gpus = world.gather(str(torch.cuda.get_device_properties(world.device).uuid))
        return len(set(gpus)) == len(gpus)
    return simulated_seconds is not None or not has_shared_cores(world)


def has_shared_cores(world: World) -> bool:
    """Return True if a machine runs more ranks than they have cores.

    Emulated hosts are one machine.
    """
    machine = "emulated" if get_emulation(os.environ) else socket.gethostname()
    num_ranks: Counter[str] = Counter()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for name, rank_cores in world.gather((machine, get_affinity())):
        num_ranks[name] += 1
        cores[name] |= rank_cores
    return any(num_ranks[name] > len(cores[name]) for name in cores)


def merge_steps(rank_steps: Sequence[RankSteps], order: PipelineOrder) -> PipelineSteps:
    """Return the steps of the ranks of one pipeline, with times in seconds from the first start."""
    timelines = []
    outside_seconds = []
    for step, walls in enumerate(zip(*(steps.wall_seconds for steps in rank_steps), strict=True)):
        stamps_by_rank = [steps.stamps[step] for steps in rank_steps]
        first_ns = min(start for stamps in stamps_by_rank for _, start, _ in stamps)
        actions = []
        for rank, stamps in enumerate(stamps_by_rank):
            for name, start, stop in stamps:
                timed_action = TimedAction(
                    rank=rank,
                    action=Action.parse(name),
                    start=(start - first_ns) / 1e9,
                    stop=(stop - first_ns) / 1e9,
                )
                actions.append(timed_action)
        timeline = Timeline(actions=tuple(actions), ranks=len(rank_steps))
        timelines.append(timeline)
        outside_seconds.append(max(walls) - timeline.makespan)
    return PipelineSteps(
        order=order,
        timelines=tuple(timelines),
        outside_seconds=tuple(outside_seconds),
        uncertainty_seconds=max(
            (seconds for steps in rank_steps for seconds in steps.uncertainty_seconds), default=0.0
        ),
    )


def find_slowest_pipeline(pipelines: Sequence[PipelineSteps]) -> PipelineSteps:
    """Return each step of the pipeline whose makespan is the maximum in the other half of steps."""
    makespans = [[timeline.makespan for timeline in steps.timelines] for steps in pipelines]
    chosen = [pipelines[number] for number in choose_ranks(makespans)]
    return PipelineSteps(
        order=pipelines[0].order,
        timelines=tuple(steps.timelines[step] for step, steps in enumerate(chosen)),
        outside_seconds=tuple(steps.outside_seconds[step] for step, steps in enumerate(chosen)),
        uncertainty_seconds=max(steps.uncertainty_seconds for steps in pipelines),
    )


def summarize_bubble(
    steps: PipelineSteps, latency: Latency, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    timeline = steps.median
    simulated = bubbles.simulate_mean_actions(timeline, steps.order)
    metrics: dict[str, MetricValue] = {}
    for compute in (
        bubbles.bubble_fraction,
        bubbles.bubble_fraction_span,
        bubbles.bubble_overhead,
    ):
        name = compute.__name__
        mean = estimate_mean(list(map(compute, steps.timelines)), "steps", "from zero")
        metrics |= make_values({name: mean, f"{name}_simulated": compute(simulated)})
    if len(steps.timelines) > 1:
        fractions_by_rank = zip(*map(bubbles.list_span_fractions, steps.timelines), strict=True)
        metrics |= make_values({"bubble_fraction_span": cross_fitted(list(fractions_by_rank))})
    causes = bubbles.split_idle(timeline, steps.order, latency)
    method = f"the step of median makespan, of {len(steps.timelines)}"
    return {
        **metrics,
        **_compute_analytical_bubble(steps, simulated_seconds),
        **make_values({f"idle_{cause}": causes[cause] for cause in causes}, "mean over ranks"),
        **make_values({"makespan": timeline.makespan}, method),
    }


def summarize_order(order: PipelineOrder) -> dict[str, MetricValue]:
    """Return the metrics that follow from the order alone."""
    bubble = bubbles.bubble_fraction(simulate_equal_passes(order))
    in_flight = max(map(order.microbatches_in_flight, range(order.ranks)))
    return {
        **make_values({"bubble_fraction_schedule": bubble}),
        **make_values({"in_flight": in_flight}, "largest over ranks"),
    }


def _compute_analytical_bubble(
    steps: PipelineSteps, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the analytical bubble of the mean times, or of the times that simulated compute has.

    Simulated compute is never exactly equal, which some formulas require.
    """
    order = steps.order
    if order.name not in SCHEDULES:
        return {}
    if simulated_seconds is None:
        times = "mean times"
        passes = bubbles.measure_passes([steps.median], order.stages_per_rank)
    else:
        times = "requested times"
        passes = PassSeconds(simulated_seconds, simulated_seconds, simulated_seconds)
    size = PipelineSize(order.ranks, order.microbatches, order.stages_per_rank)
    bubble = SCHEDULES[order.name].compute_bubble(size, passes)
    if bubble.seconds is None or bubble.span_seconds is None:
        return {}
    work_seconds = order.microbatches * passes.total
    metrics = {
        "bubble_fraction_formula": bubble.seconds / (bubble.seconds + work_seconds),
        "bubble_fraction_span_formula": bubble.span_seconds / (bubble.span_seconds + work_seconds),
        "bubble_overhead_formula": bubble.seconds / work_seconds,
    }
    return make_values(metrics, f"of the {times}; {bubble.note}")


def add_timelines(
    facts: details.PipelineDetails, steps: PipelineSteps, latency: Latency, clock: Clock
) -> details.PipelineDetails:
    """Add the clock and, unless they are too long, the timelines and the causes of gaps."""
    facts = replace(
        facts,
        clock=clock.method,
        clock_uncertainty_seconds=clock.uncertainty_ns / 1e9 + steps.uncertainty_seconds,
    )
    timeline = steps.median
    if len(timeline.actions) > MAX_TIMELINE_ACTIONS:
        return facts
    idle = []
    for rank, start, stop, cause in bubbles.attribute_gaps(timeline, steps.order, latency):
        idle.append(details.IdleSpan(rank, to_us(start), to_us(stop), cause))
    simulated = bubbles.simulate_mean_actions(timeline, steps.order)
    return replace(
        facts,
        measured=bubbles.make_detail_rows(timeline),
        predicted=bubbles.make_detail_rows(simulated),
        idle=tuple(idle),
    )
