"""Reads the traces that PyTorch's profiler (Kineto) exports: JSON, plain or gzip.

Events are decoded one by one. Reading takes 1.7 times the memory of the file. Its decoded events
would take about four times.
"""

import math
import re
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.results import step_trace
from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import (
    PHASE,
    CallFacts,
    TraceEvent,
    classify_kernel,
    parse_kernel_operation,
    parse_operation,
)
from parbench.bench.text import UserError

TORCH_PIPELINE_RANGE = re.compile(r"PP:|(Forward|Backward) \d+$")
"""The ranges that the schedules of torch.distributed.pipelining record."""
_GZIP_START = b"\x1f\x8b"
_GZIP_FORMAT = 31  # zlib's number for gzip with the largest window.
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_ENDS = 40
"""The number of last braces at which the last complete event may end."""
_DTYPE_BYTES = {
    **dict.fromkeys(("double", "long", "int64"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_RANGE_CATEGORIES = {"user_annotation", "gpu_user_annotation"}
_RUNTIME_CATEGORIES = {"cuda_runtime", "cuda_driver"}
_OPERATOR_CATEGORIES = {"cpu_op", "Operator"}
_OPERATORS = ("aten::", "c10d::", "record_param_comms", "_c10d_functional::wait_tensor")
_NCCL_RANGE = "nccl:"
"""The prefix of the ranges in which torch issues a collective of NCCL."""
_RANGES = ("ProfilerStep#", PHASE, "gloo:", _NCCL_RANGE, "Optimizer.step#")
_NON_FINITE = re.compile(rb"([:,\[]\s*)-?(?:inf|infinity|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""Numbers that Kineto writes, although JSON has none of them."""
_EMPTY_LIST = msgspec.Raw(b"[]")


class _Args(msgspec.Struct):
    """The arguments of an event that are read."""

    external_id: int = msgspec.field(default=0, name="External id")
    correlation: int = 0
    collective: str | None = msgspec.field(default=None, name="Collective name")
    dtype: str | None = None
    sent_elements: int | None = msgspec.field(default=None, name="In msg nelems")
    received_elements: int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group_name: str | None = msgspec.field(default=None, name="Process Group Name")
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    input_dims: msgspec.Raw = msgspec.field(default=_EMPTY_LIST, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=_EMPTY_LIST, name="Input type")


class _Event(msgspec.Struct):
    """An event of the Chrome trace format. ``ts`` and ``dur`` are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: _Args | None = None


class ProcessGroup(msgspec.Struct):
    """The global ranks of a process group."""

    ranks: list[int] = []


class DistributedInfo(msgspec.Struct):
    """The process groups of the job, as far as the file states them."""

    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


class OtherData(msgspec.Struct):
    """The metadata that programs other than torch's profiler add."""

    parbench: str | None = None  # the version whose export the file is


class Header(msgspec.Struct):
    """The metadata around the events of a file."""

    distributed: DistributedInfo = msgspec.field(
        default_factory=DistributedInfo, name="distributedInfo"
    )
    host: str | None = msgspec.field(default=None, name="host_name")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    other: OtherData = msgspec.field(default_factory=OtherData, name="otherData")


class _Document(Header, kw_only=True):
    """A file whose events are not decoded."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


_DOCUMENT_DECODER = msgspec.json.Decoder(_Document, strict=False)
_HEADER_DECODER = msgspec.json.Decoder(Header, strict=False)
_LIST_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_EVENT_DECODER = msgspec.json.Decoder(_Event, strict=False)


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """The events of a file that show where time goes, its metadata, and notes on what it lacks."""

    events: Sequence[TraceEvent]
    header: Header
    notes: list[str]


def read_trace(path: Path) -> TraceFile:
    """Read a file. Raises ``UserError`` if it has no list of events."""
    content = path.read_bytes()
    if content.startswith(_GZIP_START):
        content = zlib.decompressobj(_GZIP_FORMAT).decompress(content)  # It may be truncated.
    notes: list[str] = []
    if content.lstrip().startswith(b"["):
        content = b'{"traceEvents": ' + content + b"}"
    header: Header
    try:
        header = document = _DOCUMENT_DECODER.decode(content)
        raw_events = document.events
    except msgspec.DecodeError:
        header, raw_events, is_complete = _repair(content, path)
        if not is_complete:
            notes.append("the file ends within an event: later events are missing")
    events, num_invalid = _decode_events(raw_events)
    if num_invalid:
        notes.append(f"{num_invalid} invalid events are left out")
    notes.extend(_describe_fused_kernels(events))
    return TraceFile(events=_complete_operations(events), header=header, notes=notes)


def _repair(content: bytes, path: Path) -> tuple[Header, list[msgspec.Raw], bool]:
    """Return the metadata and the events of invalid JSON, and True if their list has an end.

    Kineto writes infinite numbers and unescaped text into a file, and may be killed before its end.
    Metadata that is not valid is left out.
    """
    content = _NON_FINITE.sub(rb"\1null", content)
    start = _LIST_START.search(content)
    if start is None:
        raise UserError(f"{path} is not a trace of PyTorch's profiler: it has no traceEvents")
    events: list[msgspec.Raw] = []
    trailer = b""
    stop = len(content)
    for _ in range(_MAX_ENDS):
        stop = content.rfind(b"}", start.end(), stop)
        if stop < 0:
            break
        with suppress(msgspec.DecodeError):
            events = _LIST_DECODER.decode(b"[" + content[start.end() : stop + 1] + b"]")
            trailer = content[stop + 1 :].lstrip()
            break
    is_complete = trailer.startswith(b"]")
    trailer = trailer[1:].strip() if is_complete else b"}"
    leader = content[: start.start()].rstrip().removesuffix(b",")
    for metadata in (leader + trailer, b"{" + trailer.removeprefix(b",")):
        with suppress(msgspec.DecodeError):
            return _HEADER_DECODER.decode(metadata), events, is_complete
    return Header(), events, is_complete


def _decode_events(raw_events: Sequence[msgspec.Raw]) -> tuple[list[TraceEvent], int]:
    """Return the events that show where time goes, and the number of invalid events.

    Only the outermost operators of a thread are returned.
    """
    events: list[TraceEvent] = []
    num_invalid = 0
    outer_spans: dict[object, Span] = {}
    for raw in raw_events:
        try:
            event = _EVENT_DECODER.decode(raw)
        except msgspec.DecodeError:
            num_invalid += 1
            continue
        if event.ph != "X" or not _is_relevant(event.cat, event.name):
            continue
        span = round(event.ts * 1000), round((event.ts + max(event.dur, 0.0)) * 1000)
        if event.name.startswith("aten::"):
            outer_start, outer_stop = outer_spans.get(event.tid, (0, 0))
            if outer_start <= span[0] and span[1] <= outer_stop:
                continue
            outer_spans[event.tid] = span
        events.append(_convert_event(event, span))
    return events, num_invalid


def _describe_fused_kernels(events: Sequence[TraceEvent]) -> Iterator[str]:
    """Yield a note on kernels that may communicate, but count as computation."""
    fused = [
        event for event in events if event.is_device and classify_kernel(event.name) == "fused"
    ]
    if fused:
        milliseconds = sum(event.stop_ns - event.start_ns for event in fused) / 1e6
        names = ", ".join(sorted({event.name.split("<")[0] for event in fused})[:3])
        yield (
            f"kernels that may communicate count as computation: {names} ({milliseconds:.3g} ms)"
        )


def _complete_operations(events: list[TraceEvent]) -> list[TraceEvent]:
    """Return the events, with the operation of calls that a kernel does not state.

    NCCL names a kernel after one of several operations that it implements: SendRecv is also the
    kernel of all_to_all. The range of torch around the launch has the name of the operation.
    """
    ranges = [
        event
        for event in events
        if event.is_annotation and not event.is_device and event.name.startswith(_NCCL_RANGE)
    ]
    if not ranges:
        return events
    ranges.sort(key=lambda event: event.start_ns)
    starts = [event.start_ns for event in ranges]
    names = {event.correlation: event.name for event in ranges if event.correlation}
    launches = {
        event.correlation: event.start_ns
        for event in events
        if event.correlation and not event.is_device and not event.is_annotation
    }
    completed = []
    for event in events:
        call = event.call
        if call and event.is_device and call.group is None and call.num_bytes is None:
            name = names.get(event.operator_correlation, "")
            launch = launches.get(event.correlation)
            if not name and launch is not None:
                index = bisect_right(starts, launch) - 1
                if index >= 0 and launch <= ranges[index].stop_ns:
                    name = ranges[index].name
            op = _find_operation(name.removeprefix(_NCCL_RANGE), call.op)
            event = replace(event, call=replace(call, op=op))
        completed.append(event)
    return completed


@lru_cache(maxsize=1 << 16)
def _is_relevant(category: str, name: str) -> bool:
    """Return True if an event with this category and name shows where time goes."""
    if category in _RANGE_CATEGORIES:
        return name.startswith(_RANGES) or TORCH_PIPELINE_RANGE.match(name) is not None
    if category in _RUNTIME_CATEGORIES:
        return "Launch" in name or "Synchronize" in name
    if category in _OPERATOR_CATEGORIES:
        return name.startswith(_OPERATORS)
    return category in _DEVICE_CATEGORIES


def _convert_event(event: _Event, span: Span) -> TraceEvent:
    """Return an event with its span in nanoseconds and, for communication, its call."""
    args = event.args or _Args()
    name = sys.intern(event.name)
    is_device = event.cat in _DEVICE_CATEGORIES or event.cat == "gpu_user_annotation"
    is_launched = is_device or event.cat in _RUNTIME_CATEGORIES
    is_gloo = name.startswith("gloo:")
    call = None
    if is_gloo:
        call = _read_gloo_call(name, args)
    elif event.cat in _DEVICE_CATEGORIES and classify_kernel(name) == "communication":
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


def _read_nccl_call(name: str, args: _Args) -> CallFacts:
    """Return the facts about a kernel of NCCL from its metadata."""
    # nccl-tests counts what a rank has at the end of an all_gather, otherwise what it has before.
    elements = args.sent_elements
    op = _find_operation(args.collective or "", name)
    if op == "all_gather" and args.received_elements is not None:
        elements = args.received_elements
    element_bytes = _DTYPE_BYTES.get((args.dtype or "").lower())
    ranks = _parse_ranks(args.group_ranks)
    num_bytes = None
    if elements is not None and element_bytes is not None:
        num_bytes = elements * element_bytes
    return CallFacts(
        op=op,
        group=args.group_description or args.group_name,
        ranks=ranks,
        size=args.group_size or (len(ranks) if ranks else None),
        num_bytes=num_bytes,
    )


def _read_gloo_call(name: str, args: _Args) -> CallFacts:
    """Return the facts about a call of gloo, whose bytes follow from the shapes of its inputs."""
    dims = msgspec.json.decode(args.input_dims)
    types = msgspec.json.decode(args.input_types)
    op = _find_operation(name)
    if not dims or not isinstance(dims, list) or not isinstance(types, list):
        return CallFacts(op)
    dtypes = [str(dtype).lower() for dtype in types if dtype]
    element_bytes = _DTYPE_BYTES.get(dtypes[0]) if dtypes else None
    if element_bytes is None:
        return CallFacts(op)
    return CallFacts(op, num_bytes=element_bytes * sum(map(_count_elements, dims)))


def _find_operation(*names: str) -> str:
    """Return the operation of the first known name.

    Torch gives joined calls names of its own.
    """
    operations = map(parse_operation, names)
    known = [op for op in operations if op in step_trace.OPERATIONS.values()]
    by_kernel = list(filter(None, map(parse_kernel_operation, names)))
    return [*known, *by_kernel, "communication"][0]


def _count_elements(dims: Any) -> int:
    """Return the number of elements of a tensor shape, or of a list of shapes."""
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_count_elements, dims))
    return math.prod(dim if isinstance(dim, int) else 0 for dim in dims)


def _parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks of ``[0, 1, 2]``, None for a long list, which Kineto shortens."""
    if text is None or "..." in text:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)) or None
