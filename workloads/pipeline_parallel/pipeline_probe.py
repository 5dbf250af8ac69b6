"""The probe of a pipeline measures its bubble and the memory of its ranks."""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

import torch
from msgspec.structs import replace
from torch import Tensor

from parbench.bench.machine.environment import get_emulation
from parbench.bench.machine.machine import get_affinity
from parbench.bench.results import details
from parbench.bench.results.details import COMPONENTS, Action
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import Clock, World
from parbench.workloads.costs.memory import activations_of, layer_equation, state_of
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.model.transformer import cross_entropy
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
from parbench.workloads.pipeline_parallel.stages import Chunk, Recorder
from parbench.workloads.step import memory
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.probe import Begin, Step, take_turns, timed
from parbench.workloads.step.turns import cross_fitted

MAX_TIMELINE_ACTIONS = 20_000
SHARED_NOTE = (
    "functional only: ranks share cores or a GPU, so that their compute cannot show a bubble"
)
_HALVES_NOTE = "other schedules are simulated with half of the backward pass as input gradient, half as weight gradient"
_MEMORY_SOURCES = {
    "memory": "activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "",
}


@dataclass(frozen=True)
class RankSteps:
    """The measured steps of a rank."""

    stamps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """Actions of each step with start and stop in nanoseconds of rank 0's clock."""
    wall_seconds: list[float] = field(default_factory=list)
    uncertainty_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """The observations of one rank."""

    steps: RankSteps | None
    memory: memory.BySource


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
class PipelineContext:
    """The objects of this rank's step that the probes of a pipeline use."""

    world: World
    layout: Layout
    at: Position
    chunks: Mapping[int, Chunk]
    tokens: int
    """Positions of a sequence on this rank."""
    recorder: Recorder
    train: Callable[[], object]
    """Runs a step without the optimizer."""

    @property
    def order(self) -> PipelineOrder:
        assert self.at.spec.pipeline is not None
        return self.at.spec.pipeline.order


@dataclass(frozen=True)
class PipelineProbe:
    """The probe of the bubble and of memory."""

    context: PipelineContext
    share = 1.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> RankSample:
        return RankSample(
            steps=measure_steps(self.context, step, begin, budget_seconds),
            memory=measure_memory(self.context, begin),
        )

    def summarise(self, samples: Sequence[RankSample]) -> Explanation:
        order = self.context.order
        memory_metrics = memory.largest_of([sample.memory for sample in samples], _MEMORY_SOURCES)
        metrics = {**memory_metrics, **summarize_order(order)}
        facts = self._make_details(samples)
        rank_steps = [sample.steps for sample in samples if sample.steps is not None]
        if not rank_steps:
            facts = replace(facts, why_not_measured=SHARED_NOTE)
            return Explanation(metrics=metrics, details=facts.as_details, notes=(SHARED_NOTE,))
        steps = merge_steps(rank_steps, order)
        latency = bubbles.measure_latency(steps.timelines, order)
        metrics |= summarize_bubble(steps, latency, self.context.at.spec.timed_seconds)
        facts = add_timelines(facts, steps, latency, self.context.world.clock)
        facts = replace(facts, comparison=self._compare_schedules(steps, latency))
        notes = () if order.splits_backward else (_HALVES_NOTE,)
        return Explanation(metrics=metrics, details=facts.as_details, notes=notes)

    def _make_details(self, samples: Sequence[RankSample]) -> details.PipelineDetails:
        order = self.context.order
        measured = [sample.memory["memory"] for sample in samples]
        return replace(
            bubbles.make_details(order),
            layers_by_stage=self.context.at.layers_by_stage,
            in_flight_by_rank=tuple(map(order.microbatches_in_flight, range(order.ranks))),
            activation_bytes_by_rank=tuple(parts["activations"] for parts in measured),
            memory_by_rank={name: tuple(parts[name] for parts in measured) for name in COMPONENTS},
        )

    def _compare_schedules(
        self, steps: PipelineSteps, latency: Mapping[tuple[int, int], float]
    ) -> tuple[details.SimulatedSchedule, ...]:
        spec = self.context.at.spec
        return bubbles.compare_schedules(
            steps.order,
            bubbles.measure_passes(steps.timelines, steps.order.stages_per_rank),
            layers=spec.shape.layers,
            layer_bytes=layer_equation(spec.at(0), spec.checkpointing).value,
            latency=fmean(latency.values()) if latency else 0.0,
            outside_seconds=median(steps.outside_seconds),
        )


def can_measure_bubble(world: World, timed_seconds: float | None) -> bool:
    """Return True unless ranks share a GPU, or cores for real compute. All ranks take part.

    SimulatedSchedule compute on a GPU is a kernel, which runs in turn with those of other ranks. On a CPU
    it needs no core.
    """
    if world.device.type == "cuda":
        gpus = world.gather(str(torch.cuda.get_device_properties(world.device).uuid))
        return len(set(gpus)) == len(gpus)
    return timed_seconds is not None or not has_shared_cores(world)


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


def measure_steps(
    context: PipelineContext, step: Step, begin: Begin, budget_seconds: float
) -> RankSteps | None:
    """Run as many steps as the budget allows, none if they cannot show a bubble."""
    world, recorder = context.world, context.recorder
    if not can_measure_bubble(world, context.at.spec.timed_seconds):
        return None
    steps = RankSteps()
    offset = world.clock.offsets_ns[world.global_rank]

    def run_step() -> None:
        begin()
        steps.wall_seconds.append(timed(step, world))
        stamps = [
            (str(action), start - offset, stop - offset) for action, start, stop in recorder.read()
        ]
        steps.stamps.append(stamps)
        steps.uncertainty_seconds.append(recorder.uncertainty_seconds)

    take_turns(world, budget_seconds, run_step)
    return steps


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


def summarize_bubble(
    steps: PipelineSteps, latency: Latency, timed_seconds: float | None
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
    idle = timeline.idle / timeline.ranks
    causes = bubbles.split_idle(timeline, steps.order, latency)
    method = f"the step of median makespan, of {len(steps.timelines)}"
    outside = estimate_mean(steps.outside_seconds, "steps", "difference")
    return {
        **metrics,
        **_compute_analytical_bubble(steps, timed_seconds),
        **make_values({f"idle_{cause}": causes[cause] for cause in causes}, "mean over ranks"),
        **make_values(
            {"idle": idle, "compute": timeline.makespan - idle}, f"mean over ranks, {method}"
        ),
        **make_values({"makespan": timeline.makespan}, method),
        **make_values({"non_pipeline_time": outside}),
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
    steps: PipelineSteps, timed_seconds: float | None
) -> dict[str, MetricValue]:
    """Return the analytical bubble of the mean times, or of the times that simulated compute has.

    SimulatedSchedule compute is never exactly equal, which some formulas require.
    """
    order = steps.order
    if order.name not in SCHEDULES:
        return {}
    if timed_seconds is None:
        times = "mean times"
        passes = bubbles.measure_passes([steps.median], order.stages_per_rank)
    else:
        times = "requested times"
        passes = PassSeconds(timed_seconds, timed_seconds, timed_seconds)
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


def _list_state(layout: Layout) -> dict[str, list[Tensor]]:
    return {
        "parameters": list(layout.model.parameters()),
        "gradients": memory.gradients(layout.model.parameters()),
        "optimizer": memory.state_tensors(layout.optimizer),
        "buffers": list(layout.model.buffers()),
    }


def prepare_nothing(chunk: Chunk) -> None:
    pass


def measure_memory(
    context: PipelineContext,
    begin: Begin,
    prepare: Callable[[Chunk], object] = prepare_nothing,
) -> memory.BySource:
    """Return the memory of this rank as measured, as counted and by formula.

    ``prepare`` is called before the counted forward pass of a stage. Gradients are kept between the
    steps, so that the measured peak does not contain them.
    """
    begin()
    context.train()
    state = {
        name: memory.storage_bytes(tensors) for name, tensors in _list_state(context.layout).items()
    }
    begin()
    activations = memory.peak_during(context.train, context.world.device) or 0
    formula = {**asdict(state_of(context.at)), "activations": activations_of(context.at)}
    return {
        "memory": {**state, "activations": activations},
        "memory_counted": count_memory(context, prepare),
        "memory_formula": formula,
    }


def count_memory(
    context: PipelineContext, prepare: Callable[[Chunk], object] = prepare_nothing
) -> dict[str, float]:
    """Return the bytes of state, and those that microbatches in flight have saved for backward."""
    spec = context.at.spec
    # State comes first, because the counted forward passes leave FSDP's parameters gathered.
    counted: dict[str, float] = {
        name: memory.local_bytes(tensors) for name, tensors in _list_state(context.layout).items()
    }
    saved = {}
    for stage, chunk in context.chunks.items():
        prepare(chunk)
        saved[stage] = count_saved_bytes(
            chunk, (spec.microbatch, context.tokens), spec.shape.hidden
        )
    if spec.pipeline is None:
        counted["activations"] = saved[0]
    else:
        counted["activations"] = context.order.peak_held(context.at.pp_rank, saved.__getitem__)
    return counted


def count_saved_bytes(chunk: Chunk, size: tuple[int, int], hidden: int) -> int:
    """Return the bytes that a stage saves for the backward pass of one microbatch.

    All ranks of the same stage take part.
    """
    weight = next(chunk.parameters())
    tokens = torch.zeros(size, dtype=torch.long, device=weight.device)
    hidden_states = torch.zeros(
        *size, hidden, device=weight.device, dtype=weight.dtype, requires_grad=True
    )
    with memory.SavedTensors(chunk) as saved:
        output = chunk(hidden_states if chunk.tokens is None else tokens)
        if chunk.head is not None:
            output = cross_entropy(output, torch.zeros_like(tokens))
    chunk.embedded = None
    return saved.num_bytes
