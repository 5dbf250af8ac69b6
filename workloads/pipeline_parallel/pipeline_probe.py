"""The probe of a pipeline measures its bubble and compares its schedule with others."""

import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from parbench.bench.machine.machine import get_affinity
from parbench.bench.results.details import Action
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel import bubbles
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.simulation import SimulatedAction, SimulatedTimeline
from parbench.workloads.pipeline_parallel.stages import ActionRecorder
from parbench.workloads.step.probe import ResetFn, Step, repeat_within_budget, time_step

MAX_TIMELINE_ACTIONS = 20_000
"""The maximum number of actions in a step, over all ranks, of a timeline that is recorded."""
SHARED_NOTE = (
    "functional only: ranks share cores or a GPU, so that their compute cannot show a bubble"
)


class RankStep(NamedTuple):
    """One measured step of a rank of the pipeline."""

    actions: list[tuple[Action, float, float]]
    """Each action with its start and stop, in seconds of the rank's ``time.perf_counter``."""
    clock_offset: float
    """The seconds by which the clock of the rank is ahead of the clock of rank 0."""
    wall_seconds: float
    """The seconds of the complete step on the rank, with the optimizer."""


@dataclass(frozen=True, kw_only=True)
class PipelineSteps:
    """The measured steps of all ranks of one pipeline."""

    timelines: tuple[SimulatedTimeline, ...]
    """The actions of each step with their times, in the order of the steps."""
    outside_seconds: tuple[float, ...]
    """The seconds of each step before and after the pipeline, such as those of the optimizer.

    They are the longest step time of a rank minus the makespan.
    """

    @property
    def median(self) -> SimulatedTimeline:
        """The step with the median makespan, which reports show.

        The makespan is the time from the first start to the last stop of an action on any rank.
        """
        by_makespan = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        return by_makespan[(len(by_makespan) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class BubbleProbe:
    """Measures the idle time (bubble) of the pipelines of a step, and simulates other schedules.

    If a step also has other parallelisms, it has several equal pipelines. The metrics are those of
    the pipeline with the longest median makespan, which is the time from the first start to the
    last stop of an action.
    """

    world: World
    """All ranks of the step."""
    pipeline: Pipeline
    """The schedule, size and layers of each pipeline."""
    pipeline_ranks: Sequence[Sequence[int]]
    """The global ranks of each pipeline, that of the first stage first."""
    recorder: ActionRecorder
    """The recorder of this rank's stages."""
    layer_bytes: float
    """The bytes of activations of one layer and microbatch, to estimate other schedules' memory."""
    simulated_seconds: float | None
    """The simulated seconds of a rank's forward pass of one microbatch, None for real compute."""
    share = 1.0
    """The weight of this probe when the time budget is divided among all probes of a step."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> list[RankStep] | None:
        """Run steps for about ``budget_seconds``, and return this rank's times of each step.

        ``reset`` is called before each ``step``. All ranks take part. The result is None if ranks
        share cores or a GPU, so that their times would not show the bubble.
        """
        if not can_measure_bubble(self.world, self.simulated_seconds):
            return None
        steps: list[RankStep] = []
        clock_offset = self.world.clock.offsets_ns[self.world.global_rank] / 1e9

        def run_step() -> None:
            """Run one step, and add its times to ``steps``."""
            reset()
            wall_seconds = time_step(step, self.world)
            steps.append(RankStep(self.recorder.read(), clock_offset, wall_seconds))

        repeat_within_budget(self.world, budget_seconds, run_step)
        return steps

    def summarize(self, samples: Sequence[list[RankStep] | None]) -> Explanation:
        """Return metrics of the bubble, and facts: timelines and a comparison of schedules.

        ``samples`` has, for every global rank in order, the steps that ``observe`` returned. If
        these are None, because ranks share cores or a GPU, the only metrics are the microbatches in
        flight and the bubble of a simulation with equal passes. A note then gives the reason.
        """
        order = self.pipeline.order
        schedule, size = self.pipeline.schedule, self.pipeline.size
        in_flight = max(schedule.microbatches_in_flight(rank, size) for rank in range(size.ranks))
        equal_passes = bubbles.simulate_passes(order, bubbles.EQUAL_PASSES)
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
        steps = max(pipelines, key=lambda pipeline: pipeline.median.makespan)
        metrics |= summarize_bubble(steps, self.pipeline, self.simulated_seconds)
        simulated = bubbles.simulate_mean_actions(steps.median, order)
        has_timeline = len(steps.median.actions) <= MAX_TIMELINE_ACTIONS
        facts = replace(
            facts,
            clock=self.world.clock.method,
            measured=bubbles.make_detail_rows(steps.median) if has_timeline else None,
            predicted=bubbles.make_detail_rows(simulated) if has_timeline else None,
            comparison=bubbles.compare_schedules(
                order,
                bubbles.measure_passes(steps.timelines, order.stages_per_rank),
                layers=sum(self.pipeline.layers_by_stage),
                layer_bytes=self.layer_bytes,
                outside_seconds=median(steps.outside_seconds),
            ),
        )
        return Explanation(metrics=metrics, details=facts.as_details)


def can_measure_bubble(world: World, simulated_seconds: float | None) -> bool:
    """Return True if all ranks can compute at the same time, so that idle times show the bubble.

    The result is False if ranks share a GPU, or if they share CPU cores and compute is real.
    Simulated compute on a GPU is a kernel, and kernels of several ranks run one after the other. On
    a CPU, simulated compute needs no core. ``simulated_seconds`` is None for real compute. All
    ranks must call this function.
    """
    if world.device.type == "cuda":
        gpus = world.gather(accelerator.get_properties(world.device).uuid)
        return len(set(gpus)) == len(gpus)
    if simulated_seconds is not None:
        return True
    num_ranks: Counter[str] = Counter()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for host, rank_cores in world.gather((socket.gethostname(), get_affinity())):
        num_ranks[host] += 1
        cores[host] |= rank_cores
    return all(num_ranks[host] <= len(cores[host]) for host in cores)


def merge_steps(steps_by_rank: Sequence[Sequence[RankStep]]) -> PipelineSteps:
    """Combine the steps of the ranks of one pipeline, with all times on the clock of rank 0.

    ``steps_by_rank`` has the steps of each rank, first stage first, in the order of execution.
    """
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
    steps: PipelineSteps, pipeline: Pipeline, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the metrics of the bubble that measured steps show, by metric name.

    ``bubble_fraction`` is the fraction of the ranks' time in which they run no pass of a stage, as
    the mean over steps. The others are of the step with the median makespan:
    ``bubble_fraction_simulated``, ``bubble_fraction_formula`` if the schedule has a formula, and
    ``idle_<cause>`` in seconds as the mean over ranks. ``simulated_seconds`` is the time of a
    rank's forward pass of one microbatch, None for real compute. The formula takes this time for
    all passes, because some formulas require equal times. With real compute, it takes the mean
    measured times of the passes.
    """
    order = pipeline.order
    timeline = steps.median
    fractions = list(map(bubbles.bubble_fraction, steps.timelines))
    simulated = bubbles.simulate_mean_actions(timeline, order)
    causes = bubbles.split_idle(timeline, order)
    metrics = {
        **make_values(
            {
                "bubble_fraction": estimate_mean(fractions, "steps", "from zero"),
                "bubble_fraction_simulated": bubbles.bubble_fraction(simulated),
            }
        ),
        **make_values({f"idle_{cause}": causes[cause] for cause in causes}, "mean over ranks"),
    }
    if simulated_seconds is None:
        passes = bubbles.measure_passes([timeline], pipeline.size.stages_per_rank)
    else:
        passes = PassSeconds(simulated_seconds, simulated_seconds, simulated_seconds)
    bubble = pipeline.schedule.compute_bubble(pipeline.size, passes)
    if bubble is not None:
        work_seconds = pipeline.size.microbatches * passes.total
        fraction = bubble.seconds / (bubble.seconds + work_seconds)
        metrics |= make_values({"bubble_fraction_formula": fraction}, bubble.note)
    return metrics
