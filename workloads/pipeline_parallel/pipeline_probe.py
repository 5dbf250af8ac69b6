"""Where a pipeline's time goes: the bubble as measured, simulated and by closed form, and the idle time by cause."""

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from bench.machine.environment import emulation
from bench.machine.world_spec import FUNCTIONAL_ONLY
from bench.results import details as told_by
from bench.results.details import COMPONENTS, Action, Idle, Pipeline, Simulated
from bench.results.metrics import MetricValue, values
from bench.results.stats import Estimate, median
from bench.world.subject import Explanation
from bench.world.world import World
from workloads.costs.communication_pattern import sent_bytes
from workloads.pipeline_parallel import bubbles, schedules
from workloads.pipeline_parallel.bubbles import Shares, compare, shares_of
from workloads.pipeline_parallel.pipeline_memory import Look
from workloads.pipeline_parallel.pipeline_memory import counted as counted_memory
from workloads.pipeline_parallel.pipeline_memory import formula as formula_of_memory
from workloads.pipeline_parallel.pipeline_memory import measured as measured_memory
from workloads.pipeline_parallel.pp_bytes import bytes_by_link
from workloads.pipeline_parallel.schedules import Schedule, peak_held
from workloads.pipeline_parallel.simulate import Ran, Timeline
from workloads.pipeline_parallel.stages import Recorder
from workloads.step.memory import UNCOUNTED, Held, largest_of, layer_activation_bytes
from workloads.step.sent_bytes import Call, counted

_REPEATS = (3, 12)
_MOST_ACTIONS_SHOWN = 20_000
_MEMORY = {
    "memory": "activations of a step above its start",
    "memory_counted": "activations: what the microbatches in flight saved for backward",
    "memory_formula": "",
}

Step = Callable[[], object]
Stamps = list[tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank tells the others: bytes that it sends, its steps' actions on rank 0's clock, walls, and memory."""

    sent_bytes_to: dict[int, int]
    expected_bytes: float
    steps: list[Stamps]
    walls: list[float]
    memory: dict[str, Held]
    cores_shared: bool

    @property
    def sent_bytes(self) -> int:
        """To all ranks."""
        return sum(self.sent_bytes_to.values())


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The measured steps of all ranks, and the one of median makespan."""

    timelines: tuple[Timeline, ...]
    walls: tuple[float, ...]
    schedule: Schedule

    @property
    def middle(self) -> Timeline:
        """The step that is shown."""
        ordered = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def outside_seconds(self) -> float:
        """What a step takes beyond its pipeline, such as the update."""
        pairs = zip(self.walls, self.timelines, strict=True)
        return median([wall - timeline.makespan for wall, timeline in pairs])


def explain_pipeline(
    world: World, look: Look, recorder: Recorder, step: Step, train: Step, begin: Callable[[], None], seconds: float
) -> Explanation:
    """Return bytes, memory and the bubble of some more steps; every rank takes part.

    ``train`` is a step without its update. On ranks that share cores nothing is claimed of real compute's bubble.
    """
    begin()
    calls = counted(step, look.layout.axes)
    stamps, walls = take_steps(world, recorder, step, begin, seconds)
    memory = {
        "memory": measured_memory(look.layout, world, train, begin),
        "memory_counted": counted_memory(look, world.rank, world.device),
        "memory_formula": formula_of_memory(look, world.rank),
    }
    mine = Told(
        sent_bytes_to=_sent(calls),
        expected_bytes=look.layout.expected_bytes["pp"],
        steps=stamps,
        walls=walls,
        memory=memory,
        cores_shared=cores_shared(world) and look.timed_seconds is None,
    )
    told = world.gather(mine)
    metrics, facts = {**_bytes(told), **_memory(told)}, _facts(look, told)
    if any(one.cores_shared for one in told):
        shared = f"{FUNCTIONAL_ONLY}: ranks share cores, so that no bubble is claimed of what they really compute"
        return Explanation(metrics=metrics, details=facts.as_details, notes=(shared, *_uncounted(look)))
    steps = steps_of(told, look.pipeline.schedule)
    latency = bubbles.link_latency(steps.timelines, steps.schedule)
    metrics |= bubble_of(steps, latency, look.timed_seconds)
    facts = replace(
        with_timelines(facts, steps, latency),
        comparison=_comparison(steps, look, latency),
        clock=world.clock.method,
        clock_uncertainty_seconds=world.clock.uncertainty_ns / 1e9,
    )
    return Explanation(metrics=metrics, details=facts.as_details, notes=(*_notes(steps), *_uncounted(look)))


def take_steps(
    world: World, recorder: Recorder, step: Step, begin: Callable[[], None], seconds: float
) -> tuple[list[Stamps], list[float]]:
    """Take as many steps as there is time for, three at least; without any time, one."""
    stamps: list[Stamps] = []
    walls: list[float] = []
    least = _REPEATS[0] if seconds > 0 else 1
    began, wanted = time.perf_counter(), least
    offset = world.clock.offsets_ns[world.global_rank]
    while len(stamps) < wanted:
        begin()
        at = time.perf_counter()
        step()
        world.sync()
        walls.append(time.perf_counter() - at)
        stamps.append([(str(action), start - offset, stop - offset) for action, start, stop in recorder.read()])
        affordable = int(seconds / ((time.perf_counter() - began) / len(stamps)))
        wanted = int(world.decide([max(least, min(_REPEATS[1], affordable))])[0])
    return stamps, walls


def steps_of(told: Sequence[Told], schedule: Schedule) -> Steps:
    """Return the steps that the ranks of one pipeline told of, in the order of its stages."""
    count = len(told[0].steps)
    walls = tuple(max(one.walls[i] for one in told) for i in range(count))
    return Steps(timelines=tuple(_joined(told, i) for i in range(count)), walls=walls, schedule=schedule)


def _joined(told: Sequence[Told], step: int) -> Timeline:
    """Return one step of all ranks, in seconds from its first action."""
    first = min(start for one in told for _, start, _ in one.steps[step])
    ran = tuple(
        Ran(rank=rank, action=Action.parse(name), start=(start - first) / 1e9, stop=(stop - first) / 1e9)
        for rank, one in enumerate(told)
        for name, start, stop in one.steps[step]
    )
    return Timeline(ran=ran, ranks=len(told))


def cores_shared(world: World) -> bool:
    """Whether this machine runs more ranks than it has cores for them: all ranks, where its nodes are emulated."""
    if world.device.type != "cpu":
        return False
    here = world.size if emulation(os.environ) else world.hosts.count(socket.gethostname())
    return here > len(os.sched_getaffinity(0))


def _sent(calls: Sequence[Call]) -> dict[int, int]:
    """Return the bytes that this rank sends, by the rank that they go to."""
    sent: Counter[int] = Counter()
    for call in calls:
        if call.peer is not None:
            sent[call.peer] += int(sent_bytes(call.op, call.num_bytes, call.ranks))
    return dict(sent)


def _bytes(told: Sequence[Told]) -> dict[str, MetricValue]:
    """Return what the rank that sends most sends, and the ratio to the closed form that is farthest from 1."""
    busiest = max(told, key=lambda one: one.sent_bytes)
    ratios = [one.sent_bytes / one.expected_bytes for one in told if one.expected_bytes]
    ratio = max(ratios, key=lambda one: abs(one - 1), default=None)
    return {
        **values({"bytes_sent.pp": float(busiest.sent_bytes)}, "the rank that sends most"),
        **values({"bytes_expected.pp": busiest.expected_bytes}, "b s h e per microbatch, boundary and direction"),
        **values({"bytes_ratio.pp": ratio}, "the rank where they differ most"),
    }


def _memory(told: Sequence[Told]) -> dict[str, MetricValue]:
    return largest_of([one.memory for one in told], _MEMORY)


def bubble_of(
    steps: Steps, latency: Mapping[tuple[int, int], float], timed_seconds: float | None
) -> dict[str, MetricValue]:
    """Return all ways to say how much of the step is idle, and why."""
    middle, schedule = steps.middle, steps.schedule
    how = f"the step of median makespan, of {len(steps.timelines)}"
    predicted = bubbles.predicted(middle, schedule)
    metrics: dict[str, MetricValue] = {}
    for name, of in _KINDS.items():
        seen = [of(timeline) for timeline in steps.timelines]
        metrics |= values({name: Estimate(value=of(middle), low=min(seen), high=max(seen), method=how)}, "range of all")
        metrics |= values({f"{name}_simulated": of(predicted)})
    idle = middle.idle / middle.ranks
    split = bubbles.split_idle(middle, schedule, latency)
    held = max(peak_held(schedule, rank, lambda stage: 1 / schedule.chunks) for rank in range(schedule.ranks))
    return {
        **metrics,
        **_closed_forms(steps, timed_seconds),
        **values({f"idle_{cause}": seconds for cause, seconds in split.items()}, "mean over ranks"),
        **values({"idle": idle, "compute": middle.makespan - idle}, f"mean over ranks, {how}"),
        **values({"makespan": middle.makespan}, how),
        **values({"non_pipeline_time": steps.outside_seconds}, "median"),
        **values({"in_flight": held}, "largest over ranks"),
    }


_KINDS = {
    "bubble_fraction": bubbles.bubble_fraction,
    "bubble_fraction_span": bubbles.bubble_fraction_span,
    "bubble_overhead": bubbles.bubble_overhead,
}


def _closed_forms(steps: Steps, timed_seconds: float | None) -> dict[str, MetricValue]:
    """Return the closed forms; some hold for equal times alone, as timed compute is asked for and never quite is."""
    schedule = steps.schedule
    if schedule.name not in schedules.NAMES:
        return {}
    shares = shares_of((steps.middle,), schedule.chunks)
    if timed_seconds is not None:
        shares = Shares(f=timed_seconds, i=timed_seconds, w=timed_seconds)
    sizes = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    form = bubbles.closed_form(schedule.name, **sizes, f=shares.f, i=shares.i, w=shares.w)
    times = "mean times" if timed_seconds is None else "times asked for"
    how = f"of the {times}" + (f"; {form.note}" if form.note else "")
    found = {}
    for name, bubble in (
        ("bubble_fraction_formula", form.makespan_bubble_seconds),
        ("bubble_fraction_span_formula", form.span_bubble_seconds),
    ):
        if bubble is not None:
            found[name] = bubbles.fraction_of(bubble, schedule.microbatches, shares.f, shares.i, shares.w)
    if form.makespan_bubble_seconds is not None:
        ideal = schedule.microbatches * (shares.f + shares.i + shares.w)
        found["bubble_overhead_formula"] = form.makespan_bubble_seconds / ideal
    return values(found, how)


def _facts(look: Look, told: Sequence[Told]) -> Pipeline:
    schedule = look.pipeline.schedule
    boundaries = [
        {"from": one, "to": other, "expected_bytes": expected, "sent_bytes": told[one].sent_bytes_to.get(other)}
        for (one, other), expected in sorted(_expected_by_link(look).items())
    ]
    return replace(
        facts_of(schedule),
        layers_by_stage=tuple(look.pipeline.layers_by_stage),
        in_flight_by_rank=tuple(
            peak_held(schedule, rank, lambda stage: 1 / schedule.chunks) for rank in range(schedule.ranks)
        ),
        activation_bytes_by_rank=tuple(one.memory["memory"]["activations"] for one in told),
        memory_by_rank={name: tuple(one.memory["memory"][name] for one in told) for name in COMPONENTS},
        boundaries=boundaries,
    )


def facts_of(schedule: Schedule) -> Pipeline:
    """Return what any pipeline tells."""
    return Pipeline(
        schedule=schedule.name,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        stages_by_rank=tuple(tuple(schedule.stages_of(rank)) for rank in range(schedule.ranks)),
    )


def _expected_by_link(look: Look) -> dict[tuple[int, int], int]:
    return bytes_by_link(look.pipeline, look.shape, look.batch.microbatch, look.batch.element_bytes)


def with_timelines(facts: Pipeline, steps: Steps, latency: Mapping[tuple[int, int], float]) -> Pipeline:
    """Add the measured and the predicted step and the causes of each gap; nothing where there is too much of it."""
    middle = steps.middle
    if len(middle.ran) > _MOST_ACTIONS_SHOWN:
        return facts
    shades = bubbles.shade(middle, steps.schedule, latency)
    return replace(
        facts,
        measured=_rows(middle),
        predicted=_rows(bubbles.predicted(middle, steps.schedule)),
        idle=tuple(Idle(one.rank, _us(one.start), _us(one.stop), one.cause) for one in shades),
    )


def _rows(timeline: Timeline) -> told_by.Timeline:
    return tuple(
        tuple(told_by.Ran(str(ran.action), _us(ran.start), _us(ran.stop)) for ran in timeline.of(rank))
        for rank in range(timeline.ranks)
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _comparison(steps: Steps, look: Look, latency: Mapping[tuple[int, int], float]) -> tuple[Simulated, ...]:
    schedule = steps.schedule
    return compare(
        _shares(steps),
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        layers=look.shape.layers,
        layer_bytes=None if _uncounted(look) else layer_activation_bytes(look.shape, look.batch),
        latency_seconds=fmean(latency.values()) if latency else 0.0,
        outside_seconds=steps.outside_seconds,
    )


def _shares(steps: Steps) -> Shares:
    return shares_of(steps.timelines, steps.schedule.chunks)


def _notes(steps: Steps) -> tuple[str, ...]:
    if not _shares(steps).assumed_halves:
        return ()
    return ("other schedules are simulated with half of the backward pass as input gradient, half as weight gradient",)


def _uncounted(look: Look) -> tuple[str, ...]:
    return (UNCOUNTED,) if look.batch.checkpointing == "selective" else ()
