"""The probe of a pipeline measures its bubble, the time in which ranks are idle."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median_low

from msgspec.structs import replace

from parbench.bench.machine.machine import get_affinity
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.pipeline_parallel import bubbles
from parbench.workloads.pipeline_parallel.pipeline_case import Pipeline
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.simulation import SimulatedAction, SimulatedTimeline
from parbench.workloads.probes.probe import ResetFn, Step, repeat_within_budget
from parbench.workloads.step.pipeline_stages import ActionRecorder

SHARED_NOTE = (
    "oversubscribed: ranks share cores or a GPU, so that their compute cannot show a bubble"
)
RankStep = list[SimulatedAction]
"""The actions that one rank ran in one measured step, with times on the clock of rank 0."""


@dataclass(frozen=True, kw_only=True)
class BubbleProbe:
    """Measures the idle time (bubble) of the pipelines of a step.

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
    simulated_seconds: float | None
    """The simulated seconds of a rank's forward pass of one microbatch, None for real compute."""
    share = 1.0
    """The weight of this probe when the time budget is divided among all probes of a step."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> list[RankStep] | None:
        """Run steps for about ``budget_seconds``, and return this rank's actions in each step.

        ``reset`` is called before each ``step``. All ranks take part. The result is None if ranks
        share cores or a GPU, so that their times would not show the bubble.
        """
        if not can_measure_bubble(self.world, self.simulated_seconds):
            return None
        rank = self.world.global_rank
        [ranks] = [ranks for ranks in self.pipeline_ranks if rank in ranks]
        clock_offset = self.world.clock.offsets_ns[rank] / 1e9
        steps: list[RankStep] = []

        def run_step() -> None:
            """Run one step, and add its actions to ``steps``."""
            reset()
            step()
            actions = [
                SimulatedAction(
                    rank=ranks.index(rank),
                    action=action,
                    start=start - clock_offset,
                    stop=stop - clock_offset,
                )
                for action, start, stop in self.recorder.read()
            ]
            steps.append(actions)

        repeat_within_budget(self.world, budget_seconds, run_step)
        return steps

    def summarize(self, samples: Sequence[list[RankStep] | None]) -> Explanation:
        """Return metrics of the bubble, and facts: the measured and the simulated timeline.

        ``samples`` has, for every global rank in order, the steps that ``observe`` returned. If
        these are None, because ranks share cores or a GPU, the only metric is the number of
        microbatches in flight. A note then gives the reason.
        """
        schedule, size = self.pipeline.schedule, self.pipeline.size
        in_flight = max(schedule.microbatches_in_flight(rank, size) for rank in range(size.ranks))
        metrics = make_values({"in_flight": in_flight}, "largest over ranks")
        facts = bubbles.make_details(self.pipeline)
        steps_by_rank = [sample for sample in samples if sample is not None]
        if not steps_by_rank:
            return Explanation(metrics=metrics, details=facts.as_details, notes=(SHARED_NOTE,))
        pipelines = [
            merge_steps([steps_by_rank[rank] for rank in ranks]) for ranks in self.pipeline_ranks
        ]
        timelines = max(pipelines, key=lambda timelines: find_median_step(timelines).makespan)
        metrics |= summarize_bubble(timelines, self.pipeline, self.simulated_seconds)
        measured = find_median_step(timelines)
        simulated = bubbles.simulate_mean_actions(measured, self.pipeline.order)
        facts = replace(
            facts,
            clock=self.world.clock.method,
            measured=bubbles.make_detail_rows(measured),
            predicted=bubbles.make_detail_rows(simulated),
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
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for host, rank_cores in zip(world.hosts, world.gather(get_affinity()), strict=True):
        cores[host] |= rank_cores
    return all(world.hosts.count(host) <= len(cores[host]) for host in cores)


def merge_steps(steps_by_rank: Sequence[Sequence[RankStep]]) -> list[SimulatedTimeline]:
    """Return the timeline of each measured step of one pipeline, in the order of the steps.

    ``steps_by_rank`` has the steps of each rank of the pipeline, first stage first. The times of
    all ranks must be on one clock. In a ``RankStep`` they are on the clock of rank 0.
    """
    return [
        SimulatedTimeline(actions=tuple(chain.from_iterable(steps)), ranks=len(steps))
        for steps in zip(*steps_by_rank, strict=True)
    ]


def find_median_step(timelines: Sequence[SimulatedTimeline]) -> SimulatedTimeline:
    """Return the step with the median makespan, the shorter one of two in the middle.

    The makespan is the time from the first start to the last stop of an action on any rank.
    """
    makespans = [timeline.makespan for timeline in timelines]
    return timelines[makespans.index(median_low(makespans))]


def summarize_bubble(
    timelines: Sequence[SimulatedTimeline], pipeline: Pipeline, simulated_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the metrics of the bubble that the measured steps of a pipeline show, by metric name.

    ``bubble_fraction`` is the fraction of the ranks' time in which they run no pass of a stage, as
    the mean over steps. The others are of the step with the median makespan:
    ``bubble_fraction_simulated``, ``bubble_fraction_formula`` if the schedule has a formula, and
    ``idle_<cause>`` in seconds as the mean over ranks. ``simulated_seconds`` is the time of a
    rank's forward pass of one microbatch, None for real compute. The formula takes this time for a
    rank's forward pass, input gradient and weight gradient of one microbatch each, because some
    formulas require equal times. With real compute, it takes the mean measured times of these three
    passes.
    """
    timeline = find_median_step(timelines)
    fractions = [timeline.bubble_fraction for timeline in timelines]
    simulated = bubbles.simulate_mean_actions(timeline, pipeline.order)
    causes = bubbles.split_idle(timeline, simulated, pipeline.order)
    metrics = {
        **make_values(
            {
                "bubble_fraction": estimate_mean(fractions, "steps", "from zero"),
                "bubble_fraction_simulated": simulated.bubble_fraction,
            }
        ),
        **make_values({f"idle_{cause}": causes[cause] for cause in causes}, "mean over ranks"),
    }
    if simulated_seconds is None:
        passes = bubbles.measure_passes(timeline, pipeline.size.stages_per_rank)
    else:
        passes = PassSeconds(simulated_seconds, simulated_seconds, simulated_seconds)
    bubble = pipeline.schedule.compute_bubble(pipeline.size, passes)
    if bubble is not None:
        work_seconds = pipeline.size.microbatches * passes.total
        fraction = bubble.seconds / (bubble.seconds + work_seconds)
        metrics |= make_values({"bubble_fraction_formula": fraction}, bubble.note)
    return metrics
