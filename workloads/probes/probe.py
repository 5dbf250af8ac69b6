"""Probes measure further steps after the timed ones, each within its share of the time budget."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

# Ranks import this module before they measure. Otherwise `stats` would import scipy meanwhile.
import scipy.special  # type: ignore[import-untyped]  # noqa: F401
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
from parbench.workloads.torch_internals import open_profiler, trace_events

_CLOCK_READINGS = 20
"""The number of times that the clocks of host and device are read together."""
_MIN_REPEATS = 3
"""The number of repeats that a median needs, even if they exceed the time budget."""
_MAX_SECONDS_OF_MIN_REPEATS = 30.0
"""The seconds that ``_MIN_REPEATS`` repeats may take although the time budget is shorter.

If they would take longer than this and the budget, only one repeat runs.
"""

Step = Callable[[], object]
"""Runs one step of the benchmark. Its result is not used."""
ResetFn = Callable[[], None]
"""Resets the benchmark before a step, and returns on all ranks at the same time."""
Moment = float | accelerator.Event
"""A time as ``time.perf_counter`` seconds on a CPU, or as an event in the stream on CUDA."""
Sample = TypeVar("Sample")
"""The result of a probe on one rank."""


class Probe(Protocol[Sample]):
    """Measures one aspect of a training step, such as its memory, after the timed steps.

    Each rank runs further steps and takes a sample with ``observe``. Samples are gathered, and
    ``summarize`` turns those of all ranks into metrics.
    """

    @property
    def share(self) -> float:
        """The weight of this probe when the time budget is divided among all probes.

        0 means that the probe runs a fixed number of steps.
        """

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> Sample:
        """Run and measure further steps, and return this rank's sample. All ranks call it.

        ``reset`` must be called before each ``step``. The steps should take at most
        ``budget_seconds``.
        """

    def summarize(self, samples: Sequence[Sample]) -> Explanation:
        """Return metrics, facts for the record and notes from the samples of all ranks.

        ``samples`` are in the order of global ranks. The result is the same on every rank.
        """


def run_probes(
    world: World, probes: Sequence[Probe[Any]], step: Step, reset: ResetFn, seconds: float
) -> Explanation:
    """Run probes one after the other on all ranks, and return their merged results.

    The results are metrics, facts for the record (``details``), notes and a timeline. ``seconds``
    is the time budget of all probes together. Each probe gets a part in proportion to its weight
    ``Probe.share``: with the weights 1 and 3, a quarter and three quarters. A probe of weight 0
    gets 0 seconds, because it runs a fixed number of steps. If two probes give the same metric,
    fact or timeline, the later one counts.
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
    """Call ``function`` repeatedly within a time budget of ``seconds``, equally often on all ranks.

    Rank 0 sets the number of calls from its own clock and sends it to all ranks. The number is at
    most ``max_repeats``. It is at least three, so that a median exists. There is only one call if
    the budget is 0, or if three calls would take longer than 30 s and the budget.
    """
    start = time.perf_counter()
    repeats = 0
    limit = 1
    while repeats < limit:
        function()
        repeats += 1
        mean_seconds = (time.perf_counter() - start) / repeats
        max_seconds = max(seconds, _MAX_SECONDS_OF_MIN_REPEATS)
        has_time = seconds > 0 and _MIN_REPEATS * mean_seconds <= max_seconds
        min_repeats = _MIN_REPEATS if has_time else 1
        limit = max(min_repeats, min(max_repeats, int(seconds / mean_seconds)))
        limit = int(world.broadcast_from_rank_0([limit])[0])


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the maximum over ranks for each round of steps, in order.

    ``by_rank[rank][round]`` is the seconds of a rank's step in a round. To compare two kinds of
    steps, such as with and without communication, take the difference of their maxima in each
    round. Do not take the maximum over ranks of each rank's own difference of the two kinds.
    Because times vary, this maximum over many ranks is above zero even if both kinds take equally
    long.
    """
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def time_step(step: Step, world: World) -> float:
    """Run one step and return its seconds on this rank, including the work of the device."""
    start = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - start


def trace_step(step: Step, device: torch.device) -> StepTrace:
    """Run one step under torch's profiler until the device is idle, and return its trace."""
    is_cuda = device.type == "cuda"
    with open_profiler(device) as profiler:
        start_ns = time.perf_counter_ns()
        with record_function(STEP):
            step()
            if is_cuda:
                accelerator.synchronize(device)
    events = trace_events(profiler)
    build_trace = build_device_trace if is_cuda else build_host_trace
    return replace(build_trace(events), start_ns=start_ns, phases=list_phases(events))


def record_moment(device: torch.device) -> Moment:
    """Return the present time as ``time.perf_counter()``, or on CUDA as an event in the stream.

    An event does not delay the host.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = accelerator.make_event()
    event.record()
    return event


def make_moment_clock(device: torch.device) -> Callable[[Moment], float]:
    """Return a function that converts a ``Moment`` to seconds of ``time.perf_counter``.

    On CUDA, this call synchronizes the device. Then it records events on the idle device, and uses
    the one for which the host waited least. This event is taken to be in the middle of the wait.
    """
    if device.type != "cuda":
        return lambda moment: float(cast(float, moment))
    accelerator.synchronize(device)
    shortest, middle, reference = math.inf, 0.0, None
    for _ in range(_CLOCK_READINGS):
        start = time.perf_counter()
        event = cast(accelerator.Event, record_moment(device))
        event.synchronize()
        stop = time.perf_counter()
        if stop - start < shortest:
            shortest, middle, reference = stop - start, (start + stop) / 2, event
    return lambda moment: middle - float(cast(Any, moment).elapsed_time(reference)) / 1e3
