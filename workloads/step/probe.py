"""Probes: what looks into more steps once the timed ones are done, each with its share of the time that is left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.profiler import record_function

from parbench.bench.results.step_trace import (
    STEP,
    StepTrace,
    build_device_trace,
    build_host_trace,
    list_phases,
)
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.torch_internals import profiling, trace_events

Step = Callable[[], object]
Begin = Callable[[], None]
Moment = float | torch.cuda.Event
RankObservation = TypeVar("RankObservation")
_BRACKETS, _FEW_TURNS, _FEW_TURNS_SECONDS = 20, 3, 30.0


class Probe(Protocol[RankObservation]):
    """Something to find out about a step: every rank observes it, and then what all of them saw is put together."""

    @property
    def share(self) -> float:
        """What it takes of the budget, relative to the shares of the other probes; 0 where it takes what it takes."""

    def observe(self, step: Step, begin: Begin, budget_seconds: float) -> RankObservation:
        """Return what this rank sees; ``begin`` comes before each step, and every rank takes part in all of them."""

    def summarise(self, told: Sequence[RankObservation]) -> Explanation:
        """Return what the observations of all ranks, in order of global rank, say; the same on every rank."""


def run_probes(
    world: World, probes: Sequence[Probe[Any]], step: Step, begin: Begin, seconds: float
) -> Explanation:
    """Run probes one after the other and return what all of them say; of equal names the later one's counts."""
    whole = sum(probe.share for probe in probes) or 1.0
    said = []
    for probe in probes:
        seen = probe.observe(step, begin, seconds * probe.share / whole)
        said.append(probe.summarise(world.gather(seen)))
    return Explanation(
        metrics={name: metric for one in said for name, metric in one.metrics.items()},
        details={name: detail for one in said for name, detail in one.details.items()},
        notes=tuple(note for one in said for note in one.notes),
        timeline=next((one.timeline for one in reversed(said) if one.timeline is not None), None),
    )


def take_turns(world: World, seconds: float, turn: Callable[[], object], most: int = 12) -> None:
    """Take as many turns as there is time for, as many on every rank.

    A few are taken in any case, for their median; one where there is no time at all, or where a few would take so long
    that the case's time-out is near.
    """
    began, done, wanted = time.perf_counter(), 0, 1
    while done < wanted:
        turn()
        done += 1
        each = (time.perf_counter() - began) / done
        few = (
            _FEW_TURNS
            if seconds > 0 and _FEW_TURNS * each <= max(seconds, _FEW_TURNS_SECONDS)
            else 1
        )
        wanted = int(world.broadcast_from_rank_0([max(few, min(most, int(seconds / each)))])[0])


def timed(step: Step, world: World) -> float:
    """Return the seconds that one step takes, the device's work included."""
    began = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - began


def trace_step(step: Callable[[], object], device: torch.device) -> StepTrace:
    """Return the trace of one step; on CUDA its end is when the device is done."""
    on_cuda = device.type == "cuda"
    with profiling(device) as profiler:
        start_ns = time.perf_counter_ns()
        with record_function(STEP):
            step()
            if on_cuda:
                torch.cuda.synchronize(device)
        wall_seconds = (time.perf_counter_ns() - start_ns) / 1e9
    events = trace_events(profiler)
    found = (
        build_device_trace(events, wall_seconds)
        if on_cuda
        else build_host_trace(events, wall_seconds)
    )
    return replace(found, start_ns=start_ns, phases=list_phases(events))


def moment(device: torch.device) -> Moment:
    """Return now: seconds of ``time.perf_counter``, on CUDA an event in the stream, which costs the host nothing."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_of(device: torch.device) -> tuple[Callable[[Moment], float], float]:
    """Return what tells past moments' seconds by ``time.perf_counter``, and by how much it may be wrong.

    On CUDA it waits for the device, which then has nothing to do but to record an event: of several, the one whose
    record and end on the host are closest together is taken to lie in their middle.
    """
    if device.type != "cuda":
        return lambda then: float(cast(float, then)), 0.0
    torch.cuda.synchronize(device)
    width, at, now = min((_bracket(device) for _ in range(_BRACKETS)), key=lambda one: one[0])
    return lambda then: at - float(cast(Any, then).elapsed_time(now)) / 1e3, width / 2


def _bracket(device: torch.device) -> tuple[float, float, Any]:
    """Return how many seconds the host took for an event of an idle device, their middle, and the event."""
    began = time.perf_counter()
    event = cast(torch.cuda.Event, moment(device))
    event.synchronize()
    ended = time.perf_counter()
    return ended - began, (began + ended) / 2, event
