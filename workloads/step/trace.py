"""A traced step as spans of time: what torch's profiler saw of arithmetic, communication and copies."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.results.records import COMM, COPY, Interval, RankTimeline
from bench.results.records import COMPUTE as COMPUTE_STREAM
from bench.results.records import PHASE as PHASE_STREAM
from bench.world.torch_compat import TraceEvent, trace_events
from workloads.step.intervals import Span, difference, intersection, union

STEP = "parbench:step"
COMPUTE = "parbench:compute"
PHASE = "parbench:"
"""How the ranges begin that a step names itself."""
_ISSUE = "c10d::"
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Spans in ns of a step on the host, arithmetic, each communication in order and copies; the wall by our own clock.

    A communication lasts from its issue to its end. ``busy`` is when the host was in any operation, ``called`` when it
    was issuing communication or waiting for it in an operation of torch's. ``began_ns`` is the step's start on
    ``time.perf_counter_ns``'s clock; ``phases`` are the ranges that the step names itself, such as forward.
    """

    step: Span
    wall_seconds: float
    compute: list[Span]
    comm: list[Span]
    copies: list[Span]
    called: list[Span]
    busy: list[Span]
    began_ns: int = 0
    phases: list[tuple[str, Span]] = field(default_factory=list)


def trace_step(step: Callable[[], object], device: torch.device) -> Trace:
    """Return the trace of one step; on CUDA its end is when the device is done."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        began_ns = time.perf_counter_ns()
        with record_function(STEP):
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        wall_seconds = (time.perf_counter_ns() - began_ns) / 1e9
    events = trace_events(profiler)
    found = _on_device(events, wall_seconds) if device.type == "cuda" else _on_host(events, wall_seconds)
    return replace(found, began_ns=began_ns, phases=_phases(events))


def _phases(events: Sequence[TraceEvent]) -> list[tuple[str, Span]]:
    """Return the host's own ranges, by the names that follow the prefix."""
    mine = [event for event in events if event.name.startswith(PHASE) and not event.device]
    named = [(event.name.removeprefix(PHASE), _span(event)) for event in mine]
    return sorted((one for one in named if f"{PHASE}{one[0]}" not in (STEP, COMPUTE)), key=lambda one: one[1])


def _on_host(events: Sequence[TraceEvent], wall_seconds: float) -> Trace:
    """Read a step whose arithmetic is the host's: operations of the step's own thread, gloo's own events."""
    whole = next(event for event in events if event.name == STEP)
    mine = [event for event in events if event.thread == whole.thread and not event.asynchronous]
    issued = _spans(event for event in events if event.name.startswith(_ISSUE) and not event.asynchronous)
    moved = _spans(event for event in events if event.name.startswith("gloo:") and event.asynchronous)
    arithmetic = _spans(event for event in mine if event.name.startswith("aten::") or event.name == COMPUTE)
    called = union([*issued, *_spans(event for event in mine if event.name == _WAIT)])
    return Trace(
        step=_span(whole),
        wall_seconds=wall_seconds,
        compute=difference(union(arithmetic), called),
        comm=_joined(issued, moved),
        copies=[],
        called=called,
        busy=union([*arithmetic, *called]),
    )


def _on_device(events: Sequence[TraceEvent], wall_seconds: float) -> Trace:
    """Read a step whose arithmetic is the device's: its kernels, NCCL's among them, and its copies."""
    whole = next(event for event in events if event.name == STEP and not event.device)
    ran: dict[str, list[Span]] = {"compute": [], "comm": [], "copies": []}
    for event in events:
        if event.device and not event.annotation:
            ran[_kind(event.name)].append(_span(event))
    host = [event for event in events if not event.device and not event.asynchronous]
    called = union(_spans(event for event in host if event.name.startswith(_ISSUE) or event.name == _WAIT))
    return Trace(
        step=_span(whole),
        wall_seconds=wall_seconds,
        compute=union(ran["compute"]),
        comm=sorted(ran["comm"]),
        copies=union(ran["copies"]),
        called=called,
        busy=union([*_spans(event for event in host if event.name.startswith("aten::")), *called]),
    )


def _kind(kernel: str) -> str:
    """Return what a device does in a kernel or copy of this name."""
    if kernel.startswith("nccl"):
        return "comm"
    return "copies" if kernel.startswith(("Memcpy", "Memset")) else "compute"


def _joined(issued: Sequence[Span], moved: Sequence[Span]) -> list[Span]:
    """Return each communication from its issue to its end; those of gloo begin in the order of their issue."""
    if len(issued) != len(moved):
        return list(moved) or list(issued)
    return [(min(issue[0], move[0]), max(issue[1], move[1])) for issue, move in zip(issued, moved, strict=True)]


def _spans(events: Iterable[TraceEvent]) -> list[Span]:
    return sorted(_span(event) for event in events)


def _span(event: TraceEvent) -> Span:
    return event.start_ns, event.stop_ns


def rank_timeline(
    rank: int, trace: Trace, axes: Sequence[str], operations: Sequence[str], late_ns: int
) -> RankTimeline:
    """Return one rank's step, which began ``late_ns`` after the first rank's, of whose communication axes are known.

    Compute and copies are as the breakdown counts them: disjoint, and copies only where nothing is computed.
    """

    def at(stamp: int) -> float:
        return (stamp - trace.step[0] + late_ns) / 1e3

    def interval(stream: str, name: str, span: Span) -> Interval:
        return Interval(stream, name, at(span[0]), at(span[1]))

    computing = intersection(trace.compute, [trace.step])
    copying = difference(intersection(trace.copies, [trace.step]), computing)
    found = [interval(PHASE_STREAM, name, span) for name, span in trace.phases]
    found += [interval(COMPUTE_STREAM, COMPUTE_STREAM, span) for span in computing]
    found += [interval(COPY, COPY, span) for span in copying]
    for axis, operation, span in zip(axes, operations, trace.comm, strict=True):
        found += [interval(f"{COMM} {axis}", operation, part) for part in intersection([span], [trace.step])]
    return RankTimeline(rank=rank, start_us=at(trace.step[0]), stop_us=at(trace.step[1]), intervals=tuple(found))
