"""Probes measure further steps after the timed ones, each within its share of the time budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.profiler import record_function

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.step_trace import (
    STEP,
    StepTrace,
    build_device_trace,
    build_host_trace,
    list_phases,
)
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.torch_internals import profiling, trace_events

_CLOCK_READINGS = 20
_MIN_REPEATS = 3
_MAX_SECONDS_OF_MIN_REPEATS = 30.0

Step = Callable[[], object]
ResetFn = Callable[[], None]
"""Resets the benchmark before a step, and returns on all ranks at the same time."""
Moment = float | accelerator.Event
Sample = TypeVar("Sample")


class Probe(Protocol[Sample]):
    """A measurement of training steps: all ranks take samples, and each rank summarizes them."""

    @property
    def share(self) -> float:
        """The weight of this probe in the time budget, 0 if it runs a fixed number of steps."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> Sample:
        """Measure steps on this rank. All ranks take part, and call ``reset`` before each step."""

    def summarize(self, samples: Sequence[Sample]) -> Explanation:
        """Return the same explanation on every rank, from all samples in order of global rank."""


def run_probes(
    world: World, probes: Sequence[Probe[Any]], step: Step, reset: ResetFn, seconds: float
) -> Explanation:
    """Run the probes in order, each with its share of ``seconds``, and merge their explanations.

    If two probes give the same metric, the later one counts.
    """
    total_share = sum(probe.share for probe in probes) or 1.0
    metrics: dict[str, MetricValue] = {}
    details: dict[str, object] = {}
    notes: list[str] = []
    timeline = None
    for probe in probes:
        sample = probe.observe(step, reset, seconds * probe.share / total_share)
        explanation = probe.summarize(world.gather(sample))
        metrics |= explanation.metrics
        details |= explanation.details
        notes += explanation.notes
        timeline = explanation.timeline or timeline
    return Explanation(metrics=metrics, details=details, notes=tuple(notes), timeline=timeline)


def repeat_within_budget(
    world: World, seconds: float, function: Callable[[], object], max_repeats: int = 12
) -> None:
    """Call a function as often as rank 0's time budget allows, equally often on every rank.

    The function is called at least three times, so that a median exists. It is called once if the
    budget is 0, or if three calls would take so long that the case might time out.
    """
    start = time.perf_counter()
    repeats = 0
    limit = 1
    while repeats < limit:
        function()
        repeats += 1
        mean_seconds = (time.perf_counter() - start) / repeats
        min_repeats = 1
        max_seconds = max(seconds, _MAX_SECONDS_OF_MIN_REPEATS)
        if seconds > 0 and _MIN_REPEATS * mean_seconds <= max_seconds:
            min_repeats = _MIN_REPEATS
        limit = max(min_repeats, min(max_repeats, int(seconds / mean_seconds)))
        limit = int(world.broadcast_from_rank_0([limit])[0])


def time_step(step: Step, world: World) -> float:
    """Return the seconds of one step, including the work of the device."""
    start = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - start


def trace_step(step: Step, device: torch.device) -> StepTrace:
    """Run one step under the profiler until the device is idle, and return the trace."""
    is_cuda = device.type == "cuda"
    with profiling(device) as profiler:
        start_ns = time.perf_counter_ns()
        with record_function(STEP):
            step()
            if is_cuda:
                accelerator.synchronize(device)
        wall_seconds = (time.perf_counter_ns() - start_ns) / 1e9
    events = trace_events(profiler)
    build_trace = build_device_trace if is_cuda else build_host_trace
    trace = build_trace(events, wall_seconds)
    return replace(trace, start_ns=start_ns, phases=list_phases(events))


def record_moment(device: torch.device) -> Moment:
    """Return ``time.perf_counter()``, or on CUDA an event in the stream, without a host delay."""
    if device.type != "cuda":
        return time.perf_counter()
    event = accelerator.make_event()
    event.record()
    return event


def make_moment_clock(device: torch.device) -> Callable[[Moment], float]:
    """Return a function from moments to seconds of ``time.perf_counter``.

    On CUDA this call synchronizes the device and reads both clocks several times. The shortest
    reading counts, and its event is taken to lie in the middle.
    """
    if device.type != "cuda":
        return lambda moment: float(cast(float, moment))
    accelerator.synchronize(device)
    readings = [_read_clocks(device) for _ in range(_CLOCK_READINGS)]
    _, middle, event = min(readings, key=lambda reading: reading[0])
    return lambda moment: middle - float(cast(Any, moment).elapsed_time(event)) / 1e3


def _read_clocks(device: torch.device) -> tuple[float, float, Any]:
    """Return an event of an idle device, after the host's seconds for it and their middle."""
    start = time.perf_counter()
    event = cast(accelerator.Event, record_moment(device))
    event.synchronize()
    stop = time.perf_counter()
    return stop - start, (start + stop) / 2, event
