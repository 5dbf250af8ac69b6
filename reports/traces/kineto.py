"""Reads the trace files that PyTorch's profiler (Kineto) exports: JSON, plain or gzip.

Events are decoded one by one, because all decoded events together would take about four times the
memory of the file. Reading takes 1.7 times the memory of the file.
"""

import math
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import (
    OPERATIONS,
    PHASE,
    CallFacts,
    TraceEvent,
    is_communication_kernel,
    parse_operation,
)

_GZIP_START = b"\x1f\x8b"
_GZIP_FORMAT = 31  # zlib's number for gzip with the largest window.
_DTYPE_BYTES = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}
"""The bytes of an element, keyed by data type in lower case and without ``c10::``."""
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
"""The categories of events that ran on a GPU."""
_RANGE_CATEGORIES = {"user_annotation", "gpu_user_annotation"}
"""The categories of named ranges, such as those of ``record_function``."""
_RUNTIME_CATEGORIES = {"cuda_runtime", "cuda_driver"}
"""The categories of calls of CUDA on the host."""
_OPERATORS = ("aten::", "c10d::", "record_param_comms", "_c10d_functional::wait_tensor")
"""The prefixes of the operators that are read."""
_GLOO = "gloo:"
"""The prefix of the ranges in which gloo communicates."""
_SENDRECV_RANGES = ("nccl:all_to_all", "nccl:gather", "nccl:scatter")
"""The prefixes of the ranges in which torch launches a SendRecv kernel for a collective."""
_RANGES = ("ProfilerStep#", PHASE, _GLOO, *_SENDRECV_RANGES)
"""The prefixes of the ranges that are read."""
_NON_FINITE = re.compile(rb"([:,\[]\s*)-?(?:inf|infinity|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""Infinity and NaN as Kineto writes them, although they are not valid in JSON."""
_EMPTY_LIST = msgspec.Raw(b"[]")


class _Args(msgspec.Struct):
    """The metadata (``args``) of an event in a trace of Kineto, as far as it is used."""

    external_id: int = msgspec.field(default=0, name="External id")
    """The number of an operator, which the kernels that it launches repeat. 0 stands for none."""
    correlation: int = 0
    """The number of a kernel launch, which the launched kernel repeats. 0 stands for none."""
    collective: str | None = msgspec.field(default=None, name="Collective name")
    """The name of the collective as torch logs it, such as ``_allgather_base``."""
    dtype: str | None = None
    """The data type of the elements, such as ``BFloat16``."""
    sent_elements: int | None = msgspec.field(default=None, name="In msg nelems")
    """The number of elements that this rank passes to the collective as input."""
    received_elements: int | None = msgspec.field(default=None, name="Out msg nelems")
    """The number of elements that this rank has after the collective."""
    group_size: int | None = msgspec.field(default=None, name="Group size")
    """The number of ranks of the process group."""
    group_name: str | None = msgspec.field(default=None, name="Process Group Name")
    """The name of the process group."""
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    """The description of the process group, such as ``mesh_dp``."""
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    """The global ranks of the process group as text. Kineto shortens a long list with ``...``."""
    input_dims: msgspec.Raw = msgspec.field(default=_EMPTY_LIST, name="Input Dims")
    """The shapes of the inputs in JSON, which only calls of gloo need."""
    input_types: msgspec.Raw = msgspec.field(default=_EMPTY_LIST, name="Input type")
    """The data types of the inputs in JSON."""


class _Event(msgspec.Struct):
    """An event of the Chrome trace format, as the file contains it."""

    ph: str = ""
    """The phase: ``X`` is an event with a duration, and the others are ignored."""
    cat: str = ""
    """The category, such as ``kernel`` or ``cpu_op``."""
    name: str = ""
    """The name of the kernel, operator, call or range."""
    ts: float = 0.0
    """The start in microseconds."""
    dur: float = 0.0
    """The duration in microseconds."""
    tid: int | str | None = None
    """The id of the thread for an event on the host, of the stream for an event on a GPU."""
    args: _Args | None = None
    """The metadata of the event, None without any."""


class ProcessGroup(msgspec.Struct):
    """A process group in the metadata of a trace."""

    ranks: list[int] = []
    """The global ranks of the group."""


class DistributedInfo(msgspec.Struct):
    """The rank and the process groups that a trace file states. None stands for unknown."""

    rank: int | None = None
    """The global rank whose trace the file is."""
    world_size: int | None = None
    """The number of ranks of the job."""
    groups: list[ProcessGroup] = msgspec.field(default_factory=list, name="pg_config")
    """The process groups of the rank."""


class TraceHeader(msgspec.Struct):
    """The metadata of a trace file: all of its content except the events."""

    distributed: DistributedInfo = msgspec.field(
        default_factory=DistributedInfo, name="distributedInfo"
    )
    """The rank and the process groups."""
    host: str | None = msgspec.field(default=None, name="host_name")
    """The name of the host, None if unknown."""
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    """The origin of the times of the events, in ns since 1970. 0 if unknown."""
    other: dict[str, Any] = msgspec.field(default_factory=dict, name="otherData")
    """The metadata that programs other than torch's profiler add, such as ``parbench``."""


class _TraceDocument(TraceHeader, kw_only=True):
    """A decoded trace file: its metadata, and the JSON of each event, which is decoded later."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    """The JSON of each event."""


_DOCUMENT_DECODER = msgspec.json.Decoder(_TraceDocument, strict=False)
_EVENT_DECODER = msgspec.json.Decoder(_Event, strict=False)


def read_trace(path: Path) -> tuple[TraceHeader, list[TraceEvent]]:
    """Return the metadata of a trace file, and the events that show where the time of steps goes.

    These are kernels, copies, launches, operators and ranges. Their times are in ns since 1970. An
    operator of torch that runs within another one on the same thread is left out. Raises
    ``ValueError`` if the file is not a complete trace.
    """
    content = path.read_bytes()
    if content.startswith(_GZIP_START):
        content = zlib.decompress(content, _GZIP_FORMAT)
    try:
        document = _DOCUMENT_DECODER.decode(content)
    except msgspec.DecodeError:
        document = _DOCUMENT_DECODER.decode(_NON_FINITE.sub(rb"\1null", content))
    events = []
    outer_spans: dict[object, Span] = {}
    for raw in document.events:
        event = _EVENT_DECODER.decode(raw)
        if event.ph != "X" or not _is_relevant(event.cat, event.name):
            continue
        start = document.base_ns + round(event.ts * 1000)
        span = start, document.base_ns + round((event.ts + max(event.dur, 0.0)) * 1000)
        if event.name.startswith("aten::"):
            outer_start, outer_stop = outer_spans.get(event.tid, (0, 0))
            if outer_start <= span[0] and span[1] <= outer_stop:
                continue
            outer_spans[event.tid] = span
        events.append(_convert_event(event, span))
    document.events.clear()  # They refer to the content of the file.
    _name_sendrecv_kernels(events)
    return document, events


def _name_sendrecv_kernels(events: list[TraceEvent]) -> None:
    """Give SendRecv kernels in ``events`` the operation of the range in which they were launched."""
    on_host = [event for event in events if not event.is_device]
    launch_times = {
        event.correlation: event.start_ns for event in on_host if "Launch" in event.name
    }
    ranges = [event for event in on_host if event.name.startswith(_SENDRECV_RANGES)]
    for index, event in enumerate(events):
        if event.call and event.call.op == "sendrecv":
            launch_ns = launch_times.get(event.correlation, 0)
            for launcher in ranges:
                if launcher.start_ns <= launch_ns < launcher.stop_ns:
                    call = replace(event.call, op=parse_operation(launcher.name))
                    events[index] = replace(event, call=call)


@lru_cache(maxsize=1 << 16)
def _is_relevant(category: str, name: str) -> bool:
    """Return True if events with this category and name show where the time of a step goes."""
    if category in _RANGE_CATEGORIES:
        return name.startswith(_RANGES)
    if category in _RUNTIME_CATEGORIES:
        return "Launch" in name
    if category == "cpu_op":
        return name.startswith(_OPERATORS)
    return category in _DEVICE_CATEGORIES


def _convert_event(event: _Event, span: Span) -> TraceEvent:
    """Return an event with its times in ns and, for communication, operation, group and bytes.

    ``span`` is the start and end of the event in ns.
    """
    args = event.args or _Args()
    name = sys.intern(event.name)
    is_device = event.cat in _DEVICE_CATEGORIES or event.cat == "gpu_user_annotation"
    is_launched = is_device or event.cat in _RUNTIME_CATEGORIES
    is_gloo = name.startswith(_GLOO)
    call = None
    if is_gloo:
        call = _read_gloo_call(name, args)
    elif event.cat in _DEVICE_CATEGORIES and is_communication_kernel(name):
        call = _read_nccl_call(name, args)
    return TraceEvent(
        name=name,
        start_ns=span[0],
        stop_ns=span[1],
        thread=hash(event.tid),
        is_device=is_device,
        is_async=is_gloo,
        is_annotation=event.cat in _RANGE_CATEGORIES,
        correlation=args.correlation if is_launched else args.external_id,
        operator_correlation=args.external_id if is_launched else 0,
        call=call,
    )


def _read_nccl_call(kernel: str, args: _Args) -> CallFacts:
    """Return the operation, group and bytes of a kernel of NCCL, from the metadata of torch.

    The name of the kernel decides the operation if torch names none, as for a coalesced launch.
    """
    candidates = (parse_operation(args.collective or ""), parse_operation(kernel))
    op = next((op for op in candidates if op in OPERATIONS.values()), "communication")
    # nccl-tests counts what a rank has at the end of an all_gather, otherwise what it has before.
    elements = args.sent_elements
    if op == "all_gather" and args.received_elements is not None:
        elements = args.received_elements
    element_bytes = _get_element_bytes(args.dtype or "")
    ranks = None  # Kineto shortens a long list.
    if args.group_ranks and "..." not in args.group_ranks:
        ranks = tuple(int(number) for number in re.findall(r"\d+", args.group_ranks))
    num_bytes = None
    if elements is not None and element_bytes is not None:
        num_bytes = elements * element_bytes
    return CallFacts(
        op=op,
        group=args.group_description or args.group_name,
        ranks=ranks or None,
        size=args.group_size or (len(ranks) if ranks else None),
        num_bytes=num_bytes,
    )


def _read_gloo_call(name: str, args: _Args) -> CallFacts:
    """Return the operation of a call of gloo, and its bytes, which follow from the input shapes.

    The bytes are None if the trace does not contain shapes and data types. ``name`` is the name of
    the range, such as ``gloo:all_reduce``. The trace does not contain the group.
    """
    op = parse_operation(name)
    dims = msgspec.json.decode(args.input_dims)
    types = [dtype for dtype in msgspec.json.decode(args.input_types) if dtype]
    element_bytes = _get_element_bytes(types[0]) if types else None
    if not dims or element_bytes is None:
        return CallFacts(op)
    return CallFacts(op, num_bytes=element_bytes * _count_elements(dims[: len(types)]))


def _get_element_bytes(dtype: str) -> int | None:
    """Return the bytes of one element of a data type that torch names, such as ``c10::Half``.

    None if the type is unknown.
    """
    return _DTYPE_BYTES.get(dtype.lower().removeprefix("c10::"))


def _count_elements(dims: Sequence[Any]) -> int:
    """Return the number of elements of a tensor shape, or the sum over a nested list of shapes."""
    if any(isinstance(dim, list) for dim in dims):
        return sum(_count_elements(dim) for dim in dims)
    return math.prod(dims)
