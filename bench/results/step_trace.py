"""A profiled step as spans of time: arithmetic, communication and copies from torch's profiler."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from parbench.bench.results.records import COMM, COPY, Interval, RankTimeline
from parbench.bench.results.records import COMPUTE as COMPUTE_STREAM
from parbench.bench.results.records import PHASE as PHASE_STREAM
from parbench.bench.results.spans import Span, difference, intersection, union

STEP = "parbench:step"
COMPUTE = "parbench:compute"
PHASE = "parbench:"
"""The prefix of the ranges that a step names itself."""
OPTIMIZER = "optimizer"
_OPTIMIZER_STEP = "Optimizer.step#"
_ISSUE = "c10d::"
_WAIT = "_c10d_functional::wait_tensor"
_WITHIN_ISSUE = "record_param_comms"  # the backends of torch record it inside a call
_LAUNCH = ("cudaLaunch", "cuLaunch")
_DEVICE_CALL = (*_LAUNCH, "cudaMemcpy", "cudaMemset")
OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "sendrecv": "sendrecv",
    "barrier": "barrier",
}
"""Operations by the prefix of calls, kernels and ranges of gloo, without underscores."""


_COMMUNICATION_KERNEL = re.compile(
    r"^(void )?nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce"
    r"|multimem_|symmetric_memory::|quickreduce|nvshmem|mscclpp|deep_ep::|pplx",
    re.IGNORECASE,
)
"""Kernels of NCCL, of symmetric memory, of custom all-reduces and of expert dispatch libraries."""
KernelKind = Literal["compute", "communication", "fused"]
"""A fused kernel communicates and also computes."""
_FUSED_KERNEL = re.compile(r"gemm|matmul|_mm_", re.IGNORECASE)
_KERNEL_OPERATIONS = (
    (re.compile(r"all_?reduce|cross_device_reduce|quickreduce", re.IGNORECASE), "all_reduce"),
    (re.compile(r"reduce_?scatter", re.IGNORECASE), "reduce_scatter"),
    (re.compile(r"all_?gather", re.IGNORECASE), "all_gather"),
    (re.compile(r"all_?to_?all|dispatch|combine", re.IGNORECASE), "all_to_all"),
)


@dataclass(frozen=True, slots=True)
class CallFacts:
    """The facts about a communication call in a trace. None means unknown."""

    op: str
    """The name of the operation, such as ``all_reduce``."""
    group: str | None = None
    """The name of the process group."""
    ranks: tuple[int, ...] | None = None
    """The global ranks of the group."""
    size: int | None = None
    """The number of ranks of the group."""
    num_bytes: int | None = None
    """The size by the convention of nccl-tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """An event of torch's profiler. Its times are in ns of the profiler's clock."""

    name: str
    start_ns: int
    stop_ns: int
    thread: int
    is_device: bool
    """True for an event of the device, False for one of the host."""
    is_async: bool
    is_annotation: bool = False
    """True for a named range. Torch repeats ranges of the host on the device, around kernels."""
    correlation: int = 0
    """The number of an operator or of a kernel's launch, which have separate numbers. 0 is none."""
    operator_correlation: int = 0
    """The correlation of the innermost operator that launched a kernel, 0 if unknown."""
    call: CallFacts | None = None

    @property
    def span(self) -> Span:
        return self.start_ns, self.stop_ns


class TimedCall(NamedTuple):
    """A communication call with its axis, operation, span and size. The size may be unknown."""

    axis: str
    op: str
    span: Span
    num_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The spans of a profiled step."""

    step: Span
    """The step on the host."""
    wall_seconds: float
    """The time of the step by another clock than the profiler's."""
    compute: list[Span] = field(default_factory=list)
    comm: list[Span] = field(default_factory=list)
    """Each call of communication in order: from its issue to its end, on a device its kernel."""
    copies: list[Span] = field(default_factory=list)
    start_ns: int = 0
    """The start of the step on the clock of ``time.perf_counter_ns``."""
    phases: list[tuple[str, Span]] = field(default_factory=list)
    """The ranges that the step names itself, such as forward."""
    issue_spans: list[Span] | None = None
    """On a device, the time in which the host issues each call. None on a host."""
    launch_times: list[int | None] = field(default_factory=list)
    """On a device, the launch of the kernel of each call of communication, None if unknown."""
    facts: list[CallFacts | None] = field(default_factory=list)
    """The facts about each call in ``comm``, empty for a profile without such facts."""


@lru_cache(maxsize=1 << 12)
def parse_operation(name: str) -> str:
    """Return the operation in the name of a call, kernel or gloo range.

    An unknown name is returned as it is.
    """
    short_name = name.removeprefix("c10d::").removeprefix("gloo:")
    normalized = re.sub(r"^nccl(Symk?)?(Dev)?Kernel_|_", "", short_name).lower()
    prefixes = [prefix for prefix in OPERATIONS if normalized.startswith(prefix)]
    return OPERATIONS[max(prefixes, key=len)] if prefixes else short_name


@lru_cache(maxsize=1 << 12)
def classify_kernel(name: str) -> KernelKind:
    """Return the kind of the kernel with this name."""
    base_name = _get_base_name(name)
    if _COMMUNICATION_KERNEL.search(base_name) is None:
        return "compute"
    if _FUSED_KERNEL.search(base_name) is None or name.startswith("nccl"):
        return "communication"
    return "fused"


def parse_kernel_operation(name: str) -> str:
    """Return the operation in the name of a kernel, empty if it names none."""
    base_name = _get_base_name(name)
    for pattern, operation in _KERNEL_OPERATIONS:
        if pattern.search(base_name):
            return operation
    return ""


def describe_nccl_kernels(events: Iterable[Mapping[str, Any]]) -> str:
    """Return NCCL's kernels with their blocks and threads, from the events of a trace file.

    For example ``AllReduce_Sum_f32_RING_LL<<<24,544>>>``. NCCL launches a block for each channel.
    A kernel stands for several algorithms and all protocols: RING for all but TREE, and LL for any
    (NCCL, src/device/generate.py, ``best_kernel``). So the name alone shows neither of them.
    """
    kernels: dict[str, None] = {}
    for event in events:
        name = _get_base_name(event["name"])
        if name.startswith("nccl"):
            (blocks, *_), (threads, *_) = event["args"]["grid"], event["args"]["block"]
            kernels[f"{name.removeprefix('ncclDevKernel_')}<<<{blocks},{threads}>>>"] = None
    return ", ".join(kernels)


def _get_base_name(name: str) -> str:
    """Return the name of a kernel without its template and its parameters."""
    return re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]


def build_host_trace(events: Sequence[TraceEvent], wall_seconds: float) -> StepTrace:
    """Return the trace of a step on the host from its thread's operators and gloo's events."""
    step = next(event for event in events if event.name == STEP)
    own = [event for event in events if event.thread == step.thread and not event.is_async]
    calls = [event for event in events if event.name.startswith(_ISSUE) and not event.is_async]
    transfers = [event for event in events if event.name.startswith("gloo:") and event.is_async]
    calls.sort(key=attrgetter("span"))
    transfers.sort(key=attrgetter("span"))
    comm = _list_spans(transfers) or _list_spans(calls)
    facts = [event.call for event in transfers]
    if len(calls) == len(transfers):  # transfers begin in the order of their issue
        comm = []
        for number, (call, transfer) in enumerate(zip(calls, transfers, strict=True)):
            start = min(call.start_ns, transfer.start_ns)
            comm.append((start, max(call.stop_ns, transfer.stop_ns)))
            if transfer.call is not None:  # gloo implements some operations by others
                facts[number] = replace(transfer.call, op=parse_operation(call.name))
    operators = [event for event in own if event.name.startswith("aten::")]
    simulated_compute = [event for event in own if event.name == COMPUTE]
    arithmetic = _list_spans([*operators, *simulated_compute])
    waits = [event for event in own if event.name == _WAIT]
    host_comm = union(_list_spans([*calls, *waits]))
    return StepTrace(
        step=step.span,
        wall_seconds=wall_seconds,
        compute=difference(arithmetic, host_comm),
        comm=comm,
        facts=facts,
    )


def build_device_trace(events: Sequence[TraceEvent], wall_seconds: float) -> StepTrace:
    """Return the trace of a step on the device.

    The trace has the kernels of computation and of communication, and the copies.
    """
    step = next(event for event in events if event.name == STEP and not event.is_device)
    host = [event for event in events if not event.is_device and not event.is_async]
    calls = [event for event in host if event.name.startswith(_ISSUE)]
    within_calls = [event for event in host if event.name == _WITHIN_ISSUE]
    launches = [event for event in host if event.name.startswith(_LAUNCH)]
    call_times = {event.correlation: event.start_ns for event in (*calls, *within_calls)}
    launch_times = {event.correlation: event.start_ns for event in launches}
    work = [event for event in events if event.is_device and not event.is_annotation]
    work.sort(key=attrgetter("span"))
    copies = []
    comm = []
    compute = []
    for event in work:
        if event.name.startswith(("Memcpy", "Memset")):
            copies.append(event)
        elif classify_kernel(event.name) == "communication":
            comm.append(event)
        else:
            compute.append(event)

    def find_launch(kernel: TraceEvent) -> int | None:
        """Return the start in ns of the call that launched a kernel, otherwise of the launch."""
        launch = launch_times.get(kernel.correlation)
        if not kernel.operator_correlation:
            return launch
        return call_times.get(kernel.operator_correlation, launch)

    return StepTrace(
        step=step.span,
        wall_seconds=wall_seconds,
        compute=union(_list_spans(compute)),
        comm=_list_spans(comm),
        copies=union(_list_spans(copies)),
        issue_spans=_list_spans(calls),
        launch_times=[find_launch(kernel) for kernel in comm],
        facts=[kernel.call for kernel in comm],
    )


def list_phases(events: Sequence[TraceEvent]) -> list[tuple[str, Span]]:
    """Return the ranges that a step names, otherwise the ranges that torch names for optimizers.

    On a device, a phase lasts from the first to the last kernel that the host launched within it.
    """
    ranges = [event for event in events if event.is_annotation and not event.is_device]
    ranges.sort(key=attrgetter("span"))
    kernels = _list_launches(events)
    phases = []
    optimizers = []
    for event in ranges:
        span = _find_device_span(event.span, kernels)
        if event.name.startswith(PHASE) and event.name not in (STEP, COMPUTE):
            phases.append((event.name.removeprefix(PHASE), span))
        elif event.name.startswith(_OPTIMIZER_STEP):
            optimizers.append((OPTIMIZER, span))
    return phases or optimizers


def _list_launches(events: Iterable[TraceEvent]) -> list[tuple[int, Span]]:
    """Return the launch time and the span of each kernel, copy or memset, sorted by launch time."""
    launch_times = {
        event.correlation: event.start_ns
        for event in events
        if event.correlation and not event.is_device and event.name.startswith(_DEVICE_CALL)
    }
    launches = []
    for event in events:
        if event.is_device and event.correlation in launch_times:
            launches.append((launch_times[event.correlation], event.span))
    return sorted(launches)


def _find_device_span(host_span: Span, launches: Sequence[tuple[int, Span]]) -> Span:
    """Return the span of the kernels that the host launched within ``host_span``.

    Without such kernels it is ``host_span`` itself.
    """
    first, last = (bisect_left(launches, (time, (0, 0))) for time in host_span)
    spans = [span for _, span in launches[first:last]]
    if not spans:
        return host_span
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _list_spans(events: Iterable[TraceEvent]) -> list[Span]:
    """Return the sorted spans of the events."""
    return sorted(event.span for event in events)


def build_rank_timeline(
    rank: int,
    trace: StepTrace,
    comm: Iterable[TimedCall],
    late_ns: int,
) -> RankTimeline:
    """Return the timeline of one rank, which began its step ``late_ns`` after the first rank.

    As in the breakdown, compute and copies are disjoint, and a copy counts only while nothing is
    computed.
    """

    def to_us(stamp: int) -> float:
        return (stamp - trace.step[0] + late_ns) / 1e3

    def make_interval(stream: str, name: str, span: Span, num_bytes: int | None = None) -> Interval:
        return Interval(stream, name, to_us(span[0]), to_us(span[1]), num_bytes)

    computing = intersection(trace.compute, [trace.step])
    copying = difference(intersection(trace.copies, [trace.step]), computing)
    intervals = [make_interval(PHASE_STREAM, name, span) for name, span in trace.phases]
    intervals += [make_interval(COMPUTE_STREAM, COMPUTE_STREAM, span) for span in computing]
    intervals += [make_interval(COPY, COPY, span) for span in copying]
    for call in comm:
        for part in intersection([call.span], [trace.step]):
            intervals.append(make_interval(f"{COMM} {call.axis}", call.op, part, call.num_bytes))
    start, stop = trace.step
    return RankTimeline(
        rank=rank,
        start_us=to_us(start),
        stop_us=to_us(stop),
        intervals=tuple(intervals),
    )
