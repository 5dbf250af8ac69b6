"""A profiled step as spans of time: arithmetic, communication and copies from torch's profiler."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from parbench.bench.results.records import COMM, COPY, Interval, RankTimeline
from parbench.bench.results.records import COMPUTE as COMPUTE_STREAM
from parbench.bench.results.records import PHASE as PHASE_STREAM
from parbench.bench.results.spans import Span, difference, intersection, union

STEP = "parbench:step"
"""The name of the profiler range around a step."""
COMPUTE = "parbench:compute"
"""The name of the profiler range around simulated compute."""
PHASE = "parbench:"
"""The prefix of the names of profiler ranges by which a benchmark marks phases of its step."""
_ISSUE = "c10d::"
"""The prefix of the operators that issue communication."""
_WAIT = "_c10d_functional::wait_tensor"
"""The operator in which the host waits for a functional collective."""
_WITHIN_ISSUE = "record_param_comms"
"""The name of the event that torch's backends record inside a call of communication."""
_LAUNCH = ("cudaLaunch", "cuLaunch")
"""The prefixes of the CUDA calls that launch a kernel."""
_DEVICE_CALL = (*_LAUNCH, "cudaMemcpy", "cudaMemset")
"""The prefixes of the CUDA calls that launch a kernel, a copy or a memset."""
OPERATIONS = {
    "alltoallv": "all_to_all_v",
    "alltoall": "all_to_all",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "sendrecv",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""The operation by a part of a name in a trace, in lower case and without underscores.

The names are those of torch's calls, of gloo's events, and of kernels of NCCL, of symmetric memory
and of libraries for experts. A part comes before the parts that it contains.
"""
_COMMUNICATION_KERNEL = re.compile(
    r"(?!.*(gemm|matmul|_mm_))((void )?nccl|.*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce|multimem_|symmetric_memory::|quickreduce|nvshmem|mscclpp|deep_ep::|pplx))",
    re.IGNORECASE,
)
"""Matches the start of the name of a kernel that communicates and does not multiply matrices.

They are kernels of NCCL, of symmetric memory, of custom all-reduces and of libraries for experts.
"""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The arguments of a communication call that a trace contains. None means unknown."""

    op: str
    """The name of the operation, such as ``all_reduce``."""
    group: str | None = None
    """The name of the process group."""
    ranks: tuple[int, ...] | None = None
    """The global ranks of the process group."""
    size: int | None = None
    """The number of ranks of the process group."""
    num_bytes: int | None = None
    """The size of the call in bytes by the convention of nccl-tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """An event that torch's profiler recorded, such as an operator, a launch or a kernel.

    Its times are in ns of the profiler's clock.
    """

    name: str
    """The name that torch's profiler gives the event, such as ``aten::mm``."""
    start_ns: int
    """The start of the event."""
    stop_ns: int
    """The end of the event."""
    thread: int
    """The number of the host thread that recorded the event."""
    is_device: bool
    """True for an event on the device, such as a kernel. False for an event on the host."""
    is_async: bool
    """True if the event may end on another thread, such as a transfer of gloo."""
    is_annotation: bool = False
    """True for a named range. Torch repeats ranges of the host on the device, around kernels."""
    correlation: int = 0
    """A number that links events, 0 if there is none.

    A launch and its kernel have the same number. An operator has a number of its own, to which
    ``operator_correlation`` of a kernel refers. Operators and launches are numbered separately.
    """
    operator_correlation: int = 0
    """For a kernel, the ``correlation`` of the innermost operator that launched it.

    0 if it is unknown, and for other events.
    """
    launch_ns: int | None = None
    """For a kernel of communication, the time at which torch or the host launched the kernel.

    None if it is unknown, and for other events.
    """
    call: CallFacts | None = None
    """The facts about a communication call, None for other events or if unknown."""

    @property
    def span(self) -> Span:
        """The start and the stop of the event in ns of the profiler's clock."""
        return self.start_ns, self.stop_ns


class TimedCall(NamedTuple):
    """A communication call of a profiled step, with the time that it took."""

    axis: str
    """The name of the mesh axis on which the call communicates."""
    op: str
    """The operation, such as ``all_reduce``, or several joined by ``+``."""
    span: Span
    """The start and the end of the call in ns of the profiler's clock."""
    num_bytes: int | None = None
    """The size by the convention of nccl-tests, None if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The times at which one rank computed, copied and communicated in a profiled step.

    Spans and times are in ns of the profiler's clock.
    """

    step: Span
    """The start and the end of the step on the host."""
    compute: list[Span] = field(default_factory=list)
    """The disjoint spans in which the rank computes, in order of time."""
    comm: list[TraceEvent] = field(default_factory=list)
    """The communication calls, in order of their start.

    On a CPU an event lasts from the issue of the call to its end. On a device it is the kernel.
    """
    copies: list[Span] = field(default_factory=list)
    """The disjoint spans of copies and memsets on a device, in order of time."""
    start_ns: int = 0
    """The start of the step on the clock of ``time.perf_counter_ns``."""
    phases: list[tuple[str, Span]] = field(default_factory=list)
    """A pair (name, span) for each phase that the benchmark marks, such as ``forward``."""
    issue_spans: list[Span] | None = None
    """On a device, the span in which the host issues each communication call.

    None for a step on a CPU.
    """

    @property
    def seconds(self) -> float:
        """The duration of the step on the host."""
        return (self.step[1] - self.step[0]) / 1e9


@lru_cache(maxsize=1 << 12)
def parse_operation(name: str) -> str:
    """Return the operation that the name of a torch call, a kernel or a gloo event contains.

    For example, ``c10d::allreduce_`` gives ``all_reduce``. A name without a known operation is
    returned without its prefix ``c10d::`` or ``gloo:``.
    """
    normalized = _get_base_name(name).replace("_", "").lower()
    for part, operation in OPERATIONS.items():
        if part in normalized:
            return operation
    return name.removeprefix("c10d::").removeprefix("gloo:")


@lru_cache(maxsize=1 << 12)
def is_communication_kernel(name: str) -> bool:
    """Return True if a CUDA kernel with this name communicates and does not multiply matrices."""
    return _COMMUNICATION_KERNEL.match(_get_base_name(name)) is not None


def _get_base_name(name: str) -> str:
    """Return the name of a CUDA kernel without template arguments and parameters."""
    return re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]


def build_host_trace(events: Sequence[TraceEvent]) -> StepTrace:
    """Return the spans of a step on a CPU, from the events of a profile of one rank.

    Compute follows from the operators of the step's thread, communication from gloo's events.
    """
    step = next(event for event in events if event.name == STEP)
    on_host = sorted((event for event in events if not event.is_async), key=attrgetter("span"))
    calls = [event for event in on_host if event.name.startswith(_ISSUE)]
    transfers = [event for event in events if event.name.startswith("gloo:") and event.is_async]
    transfers.sort(key=attrgetter("span"))
    comm = transfers or calls
    if len(calls) == len(transfers):  # transfers begin in the order of their issue
        comm = list(map(_join_call, calls, transfers))
    arithmetic = []
    host_comm = [call.span for call in calls]
    for event in on_host:
        if event.thread != step.thread:
            continue
        if event.name.startswith("aten::") or event.name == COMPUTE:
            arithmetic.append(event.span)
        elif event.name == _WAIT:
            host_comm.append(event.span)
    return StepTrace(step=step.span, compute=difference(arithmetic, host_comm), comm=comm)


def _join_call(call: TraceEvent, transfer: TraceEvent) -> TraceEvent:
    """Return a call of gloo as one event, from the host's call to the end of the transfer."""
    facts = transfer.call
    if facts is not None:  # gloo implements some operations by others
        facts = replace(facts, op=parse_operation(call.name))
    start_ns = min(call.start_ns, transfer.start_ns)
    stop_ns = max(call.stop_ns, transfer.stop_ns)
    return replace(transfer, start_ns=start_ns, stop_ns=stop_ns, call=facts)


def build_device_trace(events: Sequence[TraceEvent]) -> StepTrace:
    """Return the spans of a step on a CUDA device, from the events of a profile of one rank.

    Compute and communication follow from kernels, copies from memory copies and memsets.
    """
    step = next(event for event in events if event.name == STEP and not event.is_device)
    issue_spans = []
    call_times = {}
    launch_times = {}
    for event in events:
        if event.is_device or event.is_async:
            continue
        if event.name.startswith(_LAUNCH):
            launch_times[event.correlation] = event.start_ns
        elif event.name.startswith((_ISSUE, _WITHIN_ISSUE)) and event.correlation:
            call_times[event.correlation] = event.start_ns
        if event.name.startswith(_ISSUE):
            issue_spans.append(event.span)
    copies = []
    comm = []
    compute = []
    for event in events:
        if not event.is_device or event.is_annotation:
            continue
        if event.name.startswith(("Memcpy", "Memset")):
            copies.append(event.span)
        elif is_communication_kernel(event.name):
            # The start of the call of torch that launched the kernel, otherwise of the launch.
            launch_ns = launch_times.get(event.correlation)
            launch_ns = call_times.get(event.operator_correlation, launch_ns)
            comm.append(replace(event, launch_ns=launch_ns))
        else:
            compute.append(event.span)
    return StepTrace(
        step=step.span,
        compute=union(compute),
        comm=sorted(comm, key=attrgetter("span")),
        copies=union(copies),
        issue_spans=sorted(issue_spans),
    )


def list_phases(events: Sequence[TraceEvent]) -> list[tuple[str, Span]]:
    """Return a pair (name, span) for each phase that a step marks, in order of time.

    On a device, a phase lasts from the start of the first to the end of the last kernel that the
    host launched within the marked range. Otherwise, and if the range launches no kernel, it is the
    range itself.
    """
    launch_times = {
        event.correlation: event.start_ns
        for event in events
        if event.correlation and not event.is_device and event.name.startswith(_DEVICE_CALL)
    }
    launches = [
        (launch_times[event.correlation], event.span)
        for event in events
        if event.is_device and event.correlation in launch_times
    ]
    phases = []
    for event in sorted(events, key=attrgetter("span")):
        is_range = event.is_annotation and not event.is_device
        if is_range and event.name.startswith(PHASE) and event.name not in (STEP, COMPUTE):
            start, stop = event.span
            kernels = [span for launched, span in launches if start <= launched < stop]
            spans = kernels or [event.span]
            span = min(start for start, _ in spans), max(stop for _, stop in spans)
            phases.append((event.name.removeprefix(PHASE), span))
    return phases


def build_rank_timeline(
    rank: int,
    trace: StepTrace,
    comm: Iterable[TimedCall],
    late_ns: int,
) -> RankTimeline:
    """Return the timeline of a rank's profiled step: the intervals of each kind of work.

    Times in the result are in microseconds since the first rank began the step. A copy is listed
    only for the time in which the rank does not compute, as in ``compute_breakdown``.

    Args:
        rank: the global rank.
        trace: the spans in which the rank computed and copied, and its phases.
        comm: the communication calls of the rank in the step.
        late_ns: the time in ns by which this rank began the step after the first rank.
    """
    offset_ns = late_ns - trace.step[0]
    intervals = []

    def add(stream: str, name: str, spans: Iterable[Span], num_bytes: int | None = None) -> None:
        """Add intervals for the parts of ``spans`` within the step."""
        for start, stop in intersection(spans, [trace.step]):
            start_us, stop_us = (start + offset_ns) / 1e3, (stop + offset_ns) / 1e3
            intervals.append(Interval(stream, name, start_us, stop_us, num_bytes))

    for name, span in trace.phases:
        add(PHASE_STREAM, name, [span])
    add(COMPUTE_STREAM, COMPUTE_STREAM, trace.compute)
    add(COPY, COPY, difference(trace.copies, trace.compute))
    for call in comm:
        add(f"{COMM} {call.axis}", call.op, [call.span], call.num_bytes)
    return RankTimeline(
        rank=rank,
        start_us=late_ns / 1e3,
        stop_us=(trace.step[1] + offset_ns) / 1e3,
        intervals=tuple(intervals),
    )
