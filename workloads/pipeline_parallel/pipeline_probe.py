"""Where a pipeline's time, bytes and memory go: the bubble beside simulated and closed form, idle time by cause."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

import torch
from msgspec.structs import replace
from torch import Tensor

from parbench.bench.machine.environment import emulation
from parbench.bench.machine.machine import get_affinity
from parbench.bench.results import details
from parbench.bench.results.details import COMPONENTS, Action
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.stats import estimate_mean
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import Clock, World
from parbench.workloads.costs import communication_pattern as pattern
from parbench.workloads.costs.memory import activations_of, layer_equation, state_of
from parbench.workloads.costs.step_spec import Position
from parbench.workloads.model.transformer import cross_entropy
from parbench.workloads.pipeline_parallel import bubbles
from parbench.workloads.pipeline_parallel.bubbles import as_us, compare, facts_of, rows_of, shares_of
from parbench.workloads.pipeline_parallel.schedules import Schedule, peak_held
from parbench.workloads.pipeline_parallel.simulation import Latency, Ran, Timeline, simulate_even
from parbench.workloads.pipeline_parallel.stages import Chunk, Recorder
from parbench.workloads.step import memory
from parbench.workloads.step.layout import Layout
from parbench.workloads.step.probe import Begin, Step, take_turns, timed
from parbench.workloads.step.sent_bytes import ByAxis, SentBytes, Tally, counted
from parbench.workloads.step.turns import cross_fitted

SHARED = "functional only: ranks share cores or a GPU, so that no bubble is claimed of what they compute"
_HALVES = "other schedules are simulated with half of the backward pass as input gradient, half as weight gradient"
_MEMORY = {
    "memory": "activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "",
}


@dataclass(frozen=True)
class Taken:
    """A rank's steps: the actions of each with both ends in ns of rank 0's clock, its wall and their doubt in s."""

    stamps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    uncertainty_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw: its steps, if any, bytes sent and expected by axis, sent by receiver, and memory by source."""

    taken: Taken | None
    sent: tuple[Tally, ByAxis]
    sent_to: dict[int, int]
    held: memory.BySource


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The measured steps of all ranks of a pipeline, and what each takes beyond it, such as the update."""

    schedule: Schedule
    timelines: tuple[Timeline, ...]
    outside_seconds: tuple[float, ...]
    uncertainty_seconds: float = 0.0

    @property
    def middle(self) -> Timeline:
        """The step of median makespan, which is shown."""
        return sorted(self.timelines, key=lambda timeline: timeline.makespan)[(len(self.timelines) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What there is to look at on this rank: its stages, what times their actions, and a step without its update.

    ``tokens`` are its positions of a sequence.
    """

    world: World
    layout: Layout
    at: Position
    chunks: Mapping[int, Chunk]
    tokens: int
    recorder: Recorder
    train: Callable[[], object]

    @property
    def schedule(self) -> Schedule:
        assert self.at.spec.pipeline is not None
        return self.at.spec.pipeline.schedule


@dataclass(frozen=True)
class PipelineProbe:
    """The probe of bytes, memory and bubble."""

    look: Look
    share = 1.0

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> Seen:
        begin()
        look, made = self.look, counted(step, self.look.layout.axes)
        sent_to: Counter[int] = Counter()
        for call in made:
            if call.peer is not None:
                sent_to[call.peer] += int(pattern.sent_bytes(call.op, call.num_bytes, call.ranks))
        taken = take_steps(look, step, begin, budget_seconds)
        sent = Tally.of(made, look.layout.axes), pattern.bytes_by_axis(pattern.calls(look.at))
        return Seen(taken=taken, sent=sent, sent_to=dict(sent_to), held=held_by_stages(look, begin))

    def summarise(self, told: Sequence[Seen]) -> Explanation:
        sent = SentBytes.summarise([one.sent for one in told])
        held = memory.largest_of([one.held for one in told], _MEMORY)
        metrics = {**sent.metrics, **held, **of_order(self.look.schedule)}
        facts = self._facts(told)
        taken = [one.taken for one in told if one.taken is not None]
        if not taken:
            facts = replace(facts, why_not_measured=SHARED)
            return Explanation(metrics=metrics, details=facts.as_details, notes=(SHARED,))
        spec, steps = self.look.at.spec, steps_of(taken, self.look.schedule)
        latency = bubbles.link_latency(steps.timelines, steps.schedule)
        shares = shares_of(steps.timelines, steps.schedule.chunks)
        comparison = compare(
            steps.schedule,
            shares,
            layers=spec.shape.layers,
            layer_bytes=layer_equation(spec.at(0), spec.checkpointing).value,
            latency=fmean(latency.values()) if latency else 0.0,
            outside=median(steps.outside_seconds),
        )
        facts = replace(with_timelines(facts, steps, latency, self.look.world.clock), comparison=comparison)
        metrics |= bubble_of(steps, latency, spec.timed_seconds)
        notes = (_HALVES,) if shares.assumed_halves else ()
        return Explanation(metrics=metrics, details=facts.as_details, notes=notes)

    def _facts(self, told: Sequence[Seen]) -> details.PipelineDetails:
        schedule, at = self.look.schedule, self.look.at
        boundaries = [
            {"from": rank, "to": call.peer, "expected_bytes": int(call.sent), "sent_bytes": one.sent_to.get(call.peer)}
            for rank, one in enumerate(told)
            for call in pattern.calls(at.spec.at(rank))
            if call.peer is not None
        ]
        return replace(
            facts_of(schedule),
            layers_by_stage=at.layers_by_stage,
            in_flight_by_rank=_in_flight(schedule),
            activation_bytes_by_rank=tuple(one.held["memory"]["activations"] for one in told),
            memory_by_rank={name: tuple(one.held["memory"][name] for one in told) for name in COMPONENTS},
            boundaries=boundaries,
        )


def claims_bubble(world: World, timed_seconds: float | None) -> bool:
    """Whether a bubble can be claimed: where no rank shares its GPU, or its cores if it really computes; all ask.

    Waits on a GPU are kernels, which take turns with those of another rank; waits on a CPU need no core.
    """
    if world.device.type == "cuda":
        gpus = world.gather(str(torch.cuda.get_device_properties(world.device).uuid))
        return len(set(gpus)) == len(gpus)
    return timed_seconds is not None or not cores_shared(world)


def cores_shared(world: World) -> bool:
    """Whether a machine runs more ranks than they have cores together, several hosts being one if emulated; all ask."""
    machine = "emulated" if emulation(os.environ) else socket.gethostname()
    placed = world.gather((machine, get_affinity()))
    cores = {name: frozenset[int]().union(*(own for at, own in placed if at == name)) for name, _ in placed}
    ranks = Counter(name for name, _ in placed)
    return any(ranks[name] > len(own) for name, own in cores.items())


def take_steps(look: Look, step: Step, begin: Begin, seconds: float) -> Taken | None:
    """Take as many steps as there is time for; none where no bubble could be claimed of them."""
    world, recorder = look.world, look.recorder
    if not claims_bubble(world, look.at.spec.timed_seconds):
        return None
    taken, offset = Taken(), world.clock.offsets_ns[world.global_rank]

    def turn() -> None:
        begin()
        taken.walls.append(timed(step, world))
        taken.stamps.append([(str(action), start - offset, stop - offset) for action, start, stop in recorder.read()])
        taken.uncertainty_seconds.append(recorder.uncertainty_seconds)

    take_turns(world, seconds, turn)
    return taken


def steps_of(told: Sequence[Taken], schedule: Schedule) -> Steps:
    """Return the steps that the ranks of one pipeline took, in the order of its stages, in seconds from the first."""
    timelines = []
    for rows in zip(*(one.stamps for one in told), strict=True):
        first = min(start for row in rows for _, start, _ in row)
        ran = tuple(
            Ran(rank=rank, action=Action.parse(name), start=(start - first) / 1e9, stop=(stop - first) / 1e9)
            for rank, row in enumerate(rows)
            for name, start, stop in row
        )
        timelines.append(Timeline(ran=ran, ranks=len(told)))
    walls = zip(*(one.walls for one in told), strict=True)
    outside = tuple(max(wall) - timeline.makespan for wall, timeline in zip(walls, timelines, strict=True))
    doubt = max((seconds for one in told for seconds in one.uncertainty_seconds), default=0.0)
    return Steps(schedule=schedule, timelines=tuple(timelines), outside_seconds=outside, uncertainty_seconds=doubt)


def bubble_of(steps: Steps, latency: Latency, timed_seconds: float | None) -> dict[str, MetricValue]:
    middle, schedule = steps.middle, steps.schedule
    how = f"the step of median makespan, of {len(steps.timelines)}"
    predicted = bubbles.predicted(middle, schedule)
    metrics: dict[str, MetricValue] = {}
    for of in (bubbles.bubble_fraction, bubbles.bubble_fraction_span, bubbles.bubble_overhead):
        name, found = of.__name__, estimate_mean([of(timeline) for timeline in steps.timelines], "steps", "from zero")
        if of is bubbles.bubble_fraction_span and len(steps.timelines) > 1:
            found = cross_fitted(list(zip(*map(bubbles.span_fractions, steps.timelines), strict=True)))
        metrics |= make_values({name: found, f"{name}_simulated": of(predicted)})
    idle = middle.idle / middle.ranks
    by_cause = {f"idle_{cause}": each for cause, each in bubbles.split_idle(middle, schedule, latency).items()}
    return {
        **metrics,
        **_closed_forms(steps, timed_seconds),
        **make_values(by_cause, "mean over ranks"),
        **make_values({"idle": idle, "compute": middle.makespan - idle}, f"mean over ranks, {how}"),
        **make_values({"makespan": middle.makespan}, how),
        **make_values({"non_pipeline_time": estimate_mean(steps.outside_seconds, "steps", "difference")}),
    }


def of_order(schedule: Schedule) -> dict[str, MetricValue]:
    """Return what the order of a schedule's actions tells, however long they take."""
    bubble = make_values({"bubble_fraction_schedule": bubbles.bubble_fraction(simulate_even(schedule))})
    return bubble | make_values({"in_flight": max(_in_flight(schedule))}, "largest over ranks")


def _closed_forms(steps: Steps, timed_seconds: float | None) -> dict[str, MetricValue]:
    """Return the closed forms; some hold for equal times alone, as timed compute is asked for and never quite is."""
    schedule, microbatches = steps.schedule, steps.schedule.microbatches
    shares, times = shares_of((steps.middle,), schedule.chunks), "mean times"
    f, i, w = shares.f, shares.i, shares.w
    if timed_seconds is not None:
        f, i, w, times = timed_seconds, timed_seconds, timed_seconds, "times asked for"
    sizes = {"ranks": schedule.ranks, "microbatches": microbatches, "chunks": schedule.chunks}
    form = bubbles.closed_form(schedule.name, **sizes, f=f, i=i, w=w)
    bubble, of_span = form.makespan_bubble_seconds, form.span_bubble_seconds
    if bubble is None or of_span is None:
        return {}
    found = {
        "bubble_fraction_formula": bubbles.fraction_of(bubble, microbatches, f, i, w),
        "bubble_fraction_span_formula": bubbles.fraction_of(of_span, microbatches, f, i, w),
        "bubble_overhead_formula": bubble / (microbatches * (f + i + w)),
    }
    return make_values(found, f"of the {times}; {form.note}")


def _in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Return how many microbatches each rank holds at once, a chunk for its part of one."""
    return tuple(peak_held(schedule, rank, lambda stage: 1 / schedule.chunks) for rank in range(schedule.ranks))


def with_timelines(
    facts: details.PipelineDetails, steps: Steps, latency: Latency, clock: Clock
) -> details.PipelineDetails:
    """Add the clock of the measured step, it and the predicted one and each gap's cause unless that is too much."""
    middle, doubt = steps.middle, clock.uncertainty_ns / 1e9 + steps.uncertainty_seconds
    facts = replace(facts, clock=clock.method, clock_uncertainty_seconds=doubt)
    if len(middle.ran) > 20_000:
        return facts
    shades = bubbles.shade(middle, steps.schedule, latency)
    return replace(
        facts,
        measured=rows_of(middle),
        predicted=rows_of(bubbles.predicted(middle, steps.schedule)),
        idle=tuple(details.IdleSpan(rank, as_us(start), as_us(stop), cause) for rank, start, stop, cause in shades),
    )


def _state(layout: Layout) -> dict[str, list[Tensor]]:
    return {
        "parameters": list(layout.model.parameters()),
        "gradients": memory.gradients(layout.model.parameters()),
        "optimizer": memory.state_tensors(layout.optimizer),
        "buffers": list(layout.model.buffers()),
    }


def held_by_stages(look: Look, begin: Begin, before: Callable[[Chunk], object] = lambda chunk: None) -> memory.BySource:
    """Return what this rank holds as measured, as counted and by closed form; ``before`` comes before a stage's pass.

    Gradients are kept from one step to the next meanwhile, so that they are no part of the measured peak.
    """
    begin()
    look.train()
    held = {name: memory.storage_bytes(tensors) for name, tensors in _state(look.layout).items()}
    begin()
    measured = {**held, "activations": memory.peak_during(look.train, look.world.device) or 0}
    closed = {**asdict(state_of(look.at)), "activations": activations_of(look.at)}
    return {"memory": measured, "memory_counted": counted_memory(look, before), "memory_formula": closed}


def counted_memory(look: Look, before: Callable[[Chunk], object] = lambda chunk: None) -> dict[str, float]:
    """Return the bytes of this rank's tensors, and of what the microbatches in flight have saved for backward."""
    spec, saved = look.at.spec, {}
    # state first: the forward passes that are counted leave FSDP's parameters gathered
    state: dict[str, float] = {name: memory.local_bytes(held) for name, held in _state(look.layout).items()}
    for stage, chunk in look.chunks.items():
        before(chunk)
        saved[stage] = saved_bytes(chunk, (spec.microbatch, look.tokens), spec.shape.hidden)
    if spec.pipeline is None:
        return {**state, "activations": saved[0]}
    return {**state, "activations": peak_held(look.schedule, look.at.pp_rank, lambda stage: saved[stage])}


def saved_bytes(chunk: Chunk, size: tuple[int, int], hidden: int) -> int:
    """Return what one microbatch's forward pass of a stage saves; ranks of the same stage make it together."""
    weights = next(chunk.parameters())
    tokens, targets = (torch.zeros(size, dtype=torch.long, device=weights.device) for _ in range(2))
    between = torch.zeros(*size, hidden, device=weights.device, dtype=weights.dtype)
    with memory.SavedTensors(chunk) as saved:
        output = chunk(tokens if chunk.tokens is not None else between.requires_grad_())
        if chunk.head is not None:
            output = cross_entropy(output, targets)
    chunk.embedded = None
    return saved.num_bytes
