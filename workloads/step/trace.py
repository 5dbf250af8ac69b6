"""A traced step as spans of time: what torch's profiler saw of arithmetic, communication and copies.

Spans as sets, union, intersection and difference, and by them where the wall time of a step went.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.results.records import COMM, COPY, Interval, RankTimeline
from bench.results.records import COMPUTE as COMPUTE_STREAM
from bench.results.records import PHASE as PHASE_STREAM
from bench.world.torch_compat import TraceEvent, trace_events

Span = tuple[int, int]  # start and stop in nanoseconds, the stop not included

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
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        began_ns = time.perf_counter_ns()
        with record_function(STEP):
            step()
            if on_cuda:
                torch.cuda.synchronize(device)
        wall_seconds = (time.perf_counter_ns() - began_ns) / 1e9
    events = trace_events(profiler)
    found = _on_device(events, wall_seconds) if on_cuda else _on_host(events, wall_seconds)
    named = [event for event in events if event.name.startswith(PHASE) and not event.device]
    phases = [(e.name.removeprefix(PHASE), _span(e)) for e in named if e.name not in (STEP, COMPUTE)]
    return replace(found, began_ns=began_ns, phases=sorted(phases, key=lambda phase: phase[1]))


def _on_host(events: Sequence[TraceEvent], wall_seconds: float) -> Trace:
    """Read a step whose arithmetic is the host's: operations of the step's own thread, gloo's own events."""
    whole = next(event for event in events if event.name == STEP)
    mine = [event for event in events if event.thread == whole.thread and not event.asynchronous]
    issued = _spans(event for event in events if event.name.startswith(_ISSUE) and not event.asynchronous)
    moved = _spans(event for event in events if event.name.startswith("gloo:") and event.asynchronous)
    comm = moved or issued
    if len(issued) == len(moved):  # those of gloo begin in the order of their issue
        comm = [(min(issue[0], move[0]), max(issue[1], move[1])) for issue, move in zip(issued, moved, strict=True)]
    arithmetic = _spans(event for event in mine if event.name.startswith("aten::") or event.name == COMPUTE)
    called = union([*issued, *_spans(event for event in mine if event.name == _WAIT)])
    return Trace(
        step=_span(whole),
        wall_seconds=wall_seconds,
        compute=difference(arithmetic, called),
        comm=comm,
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
            other = "copies" if event.name.startswith(("Memcpy", "Memset")) else "compute"
            ran["comm" if event.name.startswith("nccl") else other].append(_span(event))
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


def _spans(events: Iterable[TraceEvent]) -> list[Span]:
    return sorted(_span(event) for event in events)


def _span(event: TraceEvent) -> Span:
    return event.start_ns, event.stop_ns


def rank_timeline(
    rank: int, trace: Trace, axes: Sequence[str], operations: Sequence[str], late_ns: int
) -> RankTimeline:
    """Return one rank's step, which began ``late_ns`` after the first rank's, by its communications' axes and names.

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


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the disjoint spans, in order, that cover the same time; neighbours are joined, empty spans dropped.

    Linear in sorted spans (so are the other functions of spans), as sorting is then.
    """
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop < start:
            raise ValueError(f"stop({stop}) < start({start})")
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(spans: Iterable[Span]) -> int:
    """Return the nanoseconds that spans cover, each counted once."""
    return sum(stop - start for start, stop in union(spans))


def intersection(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return the time that is in both."""
    ours, theirs = union(a), union(b)
    common: list[Span] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < stop:
            common.append((start, stop))
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """Return the time that is in ``a`` and not in ``b``."""
    mine, theirs = union(a), union(b)
    if not mine:
        return []
    edges = [mine[0][0], *(edge for span in theirs for edge in span), mine[-1][1]]
    outside = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return intersection(mine, outside)


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the time of ``within`` that no span covers."""
    return difference([within], spans)


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a step went: the wall is the sum of all the rest."""

    compute_seconds: float
    exposed_comm_seconds: Mapping[str, float]
    copy_seconds: float
    idle_seconds: float
    wall_seconds: float
    residual_seconds: float


def break_down(
    wall: Span,
    compute: Sequence[Span],
    comm_by_axis: Mapping[str, Sequence[Span]],
    copies: Sequence[Span],
    *,
    measured_wall_seconds: float | None = None,
) -> Breakdown:
    """Return the breakdown of ``wall``; spans are clipped to it, compute hides copies, and both hide communication.

    Where several axes are exposed the time is that of the operation which started first, so that the sum over axes is
    |union of communication - compute - copies|. Where the wall was measured by another clock too, that is the wall and
    the residual is what the spans do not explain of it; else the residual is 0 by construction.
    """
    computing = intersection(compute, [wall])
    copying = difference(intersection(copies, [wall]), computing)
    busy = union([*computing, *copying])
    owned = _first_started(comm_by_axis)
    exposed = {axis: difference(intersection(spans, [wall]), busy) for axis, spans in owned.items()}
    idle = gaps([*busy, *(span for spans in exposed.values() for span in spans)], wall)
    covered = sum(length(spans) for spans in [computing, copying, idle, *exposed.values()])
    wall_seconds = length([wall]) / 1e9 if measured_wall_seconds is None else measured_wall_seconds
    return Breakdown(
        compute_seconds=length(computing) / 1e9,
        exposed_comm_seconds={axis: length(spans) / 1e9 for axis, spans in exposed.items()},
        copy_seconds=length(copying) / 1e9,
        idle_seconds=length(idle) / 1e9,
        wall_seconds=wall_seconds,
        residual_seconds=wall_seconds - covered / 1e9,
    )


def _first_started(spans_by_axis: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Return disjoint spans by axis: at any time the running operation that started first has it; axes in order tie."""
    tagged = [(start, order, stop) for order, spans in enumerate(spans_by_axis.values()) for start, stop in spans]
    owned: list[list[Span]] = [[] for _ in spans_by_axis]
    reached = min(tagged, default=(0, 0, 0))[0]
    for start, order, stop in sorted(tagged):
        if (begin := max(start, reached)) < stop:
            owned[order].append((begin, stop))
            reached = stop
    return dict(zip(spans_by_axis, owned, strict=True))
