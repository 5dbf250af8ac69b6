"""A traced step as spans of time: what torch's profiler saw of arithmetic, communication and copies."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from parbench.bench.results.records import COMM, COPY, Interval, RankTimeline
from parbench.bench.results.records import COMPUTE as COMPUTE_STREAM
from parbench.bench.results.records import PHASE as PHASE_STREAM
from parbench.bench.results.spans import Span, difference, intersection, union

STEP = "parbench:step"
COMPUTE = "parbench:compute"
PHASE = "parbench:"
"""How the ranges begin that a step names itself."""
OPTIMIZER, _OPTIMIZER_STEP = "optimizer", "Optimizer.step#"
_ISSUE = "c10d::"
_WAIT = "_c10d_functional::wait_tensor"
_WITHIN_ISSUE = "record_param_comms"  # what torch's backends record of a call, inside it
_LAUNCH = ("cudaLaunch", "cuLaunch")
OPERATIONS = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
} | {"send": "send", "recv": "recv", "sendrecv": "sendrecv", "barrier": "barrier", "alltoallv": "all_to_all_v"}
"""Our operations by how the names of calls, kernels and gloo's ranges begin, without underscores."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a trace tells of a collective: its bytes by nccl-tests' convention and ranks; None is not told."""

    op: str
    group: str | None = None
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    num_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """What torch's profiler saw, in ns of its clock; ``device`` is the device's, not the host's.

    An ``annotation`` is a range with a name of its own: torch puts those of the host on the device too, around kernels.
    A kernel has the ``correlation`` of the host's launch of it, and is ``linked`` to the correlation of the innermost
    operator that launched it; 0 is none. Operators and launches number theirs apart.
    """

    name: str
    start_ns: int
    stop_ns: int
    thread: int
    device: bool
    asynchronous: bool
    annotation: bool = False
    correlation: int = 0
    linked: int = 0
    call: CallFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Spans in ns of a step on the host, arithmetic, each communication in order and copies; the wall by our own clock.

    A communication lasts from its issue to its end, on a device as long as its kernel. ``busy`` is when the host was in
    any operation, ``called`` when it was issuing communication or waiting for it in an operation of torch's.
    ``began_ns`` is the step's start on ``time.perf_counter_ns``'s clock; ``phases`` are the ranges that the step names
    itself, such as forward. Of a device, ``issued`` is when the host issued each call and ``launched`` when it launched
    each communication's kernel, None where that is not known; of a host ``issued`` is None. ``facts`` are those of
    ``comm``, none where a profile in memory tells none. ``kernels`` are how many a device ran, None of a host.
    """

    step: Span
    wall_seconds: float
    compute: list[Span] = field(default_factory=list)
    comm: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    called: list[Span] = field(default_factory=list)
    busy: list[Span] = field(default_factory=list)
    began_ns: int = 0
    phases: list[tuple[str, Span]] = field(default_factory=list)
    issued: list[Span] | None = None
    launched: list[int | None] = field(default_factory=list)
    facts: list[CallFacts | None] = field(default_factory=list)
    kernels: int | None = None


@lru_cache(maxsize=1 << 12)
def operation_of(name: str) -> str:
    """Return our name of an operation from a call's, a kernel's or gloo's; of others the name itself."""
    word = name.removeprefix("c10d::").removeprefix("gloo:")
    plain = re.sub(r"^nccl(Dev)?Kernel_|_", "", word).lower()
    known = [one for one in OPERATIONS if plain.startswith(one)]
    return OPERATIONS[max(known, key=len)] if known else word


def on_host(events: Sequence[TraceEvent], wall_seconds: float) -> Trace:
    """Read a step whose arithmetic is the host's: operations of the step's own thread, gloo's own events."""
    whole = next(event for event in events if event.name == STEP)
    mine = [event for event in events if event.thread == whole.thread and not event.asynchronous]
    calls = sorted((e for e in events if e.name.startswith(_ISSUE) and not e.asynchronous), key=_span)
    carried = sorted((e for e in events if e.name.startswith("gloo:") and e.asynchronous), key=_span)
    issued, moved = _spans(calls), _spans(carried)
    comm, facts = moved or issued, [event.call for event in carried]
    if len(issued) == len(moved):  # those of gloo begin in the order of their issue
        comm = [(min(issue[0], move[0]), max(issue[1], move[1])) for issue, move in zip(issued, moved, strict=True)]
        # gloo carries some as others
        facts = [one and replace(one, op=operation_of(call.name)) for one, call in zip(facts, calls, strict=True)]
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
        facts=facts,
    )


def on_device(events: Sequence[TraceEvent], wall_seconds: float) -> Trace:
    """Read a step whose arithmetic is the device's: its kernels, NCCL's among them, and its copies."""
    whole = next(event for event in events if event.name == STEP and not event.device)
    host = [event for event in events if not event.device and not event.asynchronous]
    issued = [event for event in host if event.name.startswith(_ISSUE)]
    calls = {e.correlation: e.start_ns for e in [*issued, *(e for e in host if e.name == _WITHIN_ISSUE)]}
    launches = {event.correlation: event.start_ns for event in host if event.name.startswith(_LAUNCH)}
    ran: dict[str, list[Span]] = {"compute": [], "copies": []}
    comm: list[tuple[Span, int | None, CallFacts | None]] = []
    for event in events:
        if not event.device or event.annotation:
            continue
        if event.name.startswith("nccl"):
            of_call = calls.get(event.linked) if event.linked else None
            launched = launches.get(event.correlation) if of_call is None else of_call
            comm.append((_span(event), launched, event.call))
        else:
            ran["copies" if event.name.startswith(("Memcpy", "Memset")) else "compute"].append(_span(event))
    comm.sort(key=lambda kernel: kernel[0])
    called = union([*_spans(issued), *_spans(event for event in host if event.name == _WAIT)])
    return Trace(
        step=_span(whole),
        wall_seconds=wall_seconds,
        compute=union(ran["compute"]),
        comm=[span for span, _, _ in comm],
        copies=union(ran["copies"]),
        called=called,
        busy=union([*_spans(event for event in host if event.name.startswith("aten::")), *called]),
        issued=_spans(issued),
        launched=[launched for _, launched, _ in comm],
        facts=[facts for _, _, facts in comm],
        kernels=len(ran["compute"]) + len(comm),
    )


def phases_of(events: Iterable[TraceEvent]) -> list[tuple[str, Span]]:
    """Return the ranges that a step names itself, or else those that torch names after optimizers."""
    host = sorted((e for e in events if e.annotation and not e.device), key=_span)
    named = [(e.name.removeprefix(PHASE), _span(e)) for e in host if e.name.startswith(PHASE)]
    own = [(name, span) for name, span in named if PHASE + name not in (STEP, COMPUTE)]
    return own or [(OPTIMIZER, _span(e)) for e in host if e.name.startswith(_OPTIMIZER_STEP)]


def _spans(events: Iterable[TraceEvent]) -> list[Span]:
    return sorted(_span(event) for event in events)


def _span(event: TraceEvent) -> Span:
    return event.start_ns, event.stop_ns


def rank_timeline(rank: int, trace: Trace, comm: Iterable[tuple[str, str, Span]], late_ns: int) -> RankTimeline:
    """Return one rank's step, which began ``late_ns`` after the first rank's; ``comm`` has axis, operation and span.

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
    for axis, operation, span in comm:
        found += [interval(f"{COMM} {axis}", operation, part) for part in intersection([span], [trace.step])]
    return RankTimeline(rank=rank, start_us=at(trace.step[0]), stop_us=at(trace.step[1]), intervals=tuple(found))
