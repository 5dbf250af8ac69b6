"""Reads the trace files that PyTorch's profiler (Kineto) exports: JSON, plain or gzip.

Events are decoded one by one, because all decoded events together would take about four times the
memory of the file. Reading takes 1.7 times the memory of the file.
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
"""The text after which the events of a file begin."""
_MAX_ENDS = 40
"""The number of last braces at which the last complete event may end."""
_DTYPE_BYTES = {
    **dict.fromkeys(("double", "long", "int64"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}
"""The bytes of an element, keyed by the names of data types in traces, in lower case."""
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
"""The categories of events that ran on a GPU."""
_RANGE_CATEGORIES = {"user_annotation", "gpu_user_annotation"}
"""The categories of named ranges, such as those of ``record_function``."""
_RUNTIME_CATEGORIES = {"cuda_runtime", "cuda_driver"}
"""The categories of calls of CUDA on the host."""
_OPERATOR_CATEGORIES = {"cpu_op", "Operator"}
"""The categories of operators of torch on the host."""
_OPERATORS = ("aten::", "c10d::", "record_param_comms", "_c10d_functional::wait_tensor")
"""The prefixes of the operators that are read."""
_NCCL_RANGE = "nccl:"
"""The prefix of the ranges in which torch issues a collective of NCCL."""
_RANGES = ("ProfilerStep#", PHASE, "gloo:", _NCCL_RANGE, "Optimizer.step#")
"""The prefixes of the ranges that are read."""
_NON_FINITE = re.compile(rb"([:,\[]\s*)-?(?:inf|infinity|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""Numbers that Kineto writes, although JSON has none of them."""
_EMPTY_LIST = msgspec.Raw(b"[]")


class _Args(msgspec.Struct):
    """The arguments of an event, without those that are not used."""

    external_id: int = msgspec.field(default=0, name="External id")
    """The number of an operator, which the kernels that it launches repeat. 0 stands for none."""
    correlation: int = 0
    """The number of a launch, which its kernel repeats. 0 stands for none."""
    collective: str | None = msgspec.field(default=None, name="Collective name")
    """The name of the collective as torch logs it, such as ``_allgather_base``."""
    dtype: str | None = None
    """The data type of the elements, such as ``BFloat16``."""
    sent_elements: int | None = msgspec.field(default=None, name="In msg nelems")
    """The number of elements that this rank sends."""
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
    """The thread on a host, the stream on a GPU."""
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
    pg_config: Any = None
    """The process groups, usually a list in the form of ``ProcessGroup``."""


class OtherData(msgspec.Struct):
    """The metadata that programs other than torch's profiler add to a trace file."""

    parbench: str | None = None
    """The version of parbench that exported the file, None for a trace of torch's profiler."""


class Header(msgspec.Struct):
    """The metadata of a trace file, which surround its events."""

    distributed: DistributedInfo = msgspec.field(
        default_factory=DistributedInfo, name="distributedInfo"
    )
    """The rank and the process groups."""
    host: str | None = msgspec.field(default=None, name="host_name")
    """The name of the host, None if unknown."""
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    """The origin of the times of the events, in ns since 1970. 0 if unknown."""
    other: OtherData = msgspec.field(default_factory=OtherData, name="otherData")
    """The metadata that programs other than torch's profiler add."""


class _TraceDocument(Header, kw_only=True):
    """A trace file with its metadata and the JSON of each event, which is decoded later."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    """The JSON of each event."""


_DOCUMENT_DECODER = msgspec.json.Decoder(_TraceDocument, strict=False)
_HEADER_DECODER = msgspec.json.Decoder(Header, strict=False)
_LIST_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_EVENT_DECODER = msgspec.json.Decoder(_Event, strict=False)


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """The content of a trace file that is needed to explain a step."""

    events: Sequence[TraceEvent]
    """The events that show where time goes: kernels, copies, launches, operators and ranges."""
    header: Header
    """The rank, the process groups, the host and the clock that the file states."""
    notes: list[str]
    """Sentences about events that are missing or ambiguous."""


def read_trace(path: Path) -> TraceFile:
    """Read a trace file, also one that is cut short.

    Raises ``UserError`` if it has no list of events.
    """
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
    """Return the metadata, the events and the completeness of a file whose JSON is invalid.

    Kineto writes infinite numbers and unescaped text into a file, and may be killed before its end.
    Metadata that is not valid is left out. The third value is True if the list of events has an
    end. Raises ``UserError`` for a file without a list of events, whose ``path`` the message names.
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

    An operator of torch that runs within another one on the same thread is left out.
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
    """Yield a note that names kernels that both compute and communicate, with their total time.

    Such kernels count as computation.
    """
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
    """Return the events, where calls of NCCL without metadata get the operation that torch issued.

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
    """Return True if events with this category and name show where the time of a step goes."""
    if category in _RANGE_CATEGORIES:
        return name.startswith(_RANGES) or TORCH_PIPELINE_RANGE.match(name) is not None
    if category in _RUNTIME_CATEGORIES:
        return "Launch" in name or "Synchronize" in name
    if category in _OPERATOR_CATEGORIES:
        return name.startswith(_OPERATORS)
    return category in _DEVICE_CATEGORIES


def _convert_event(event: _Event, span: Span) -> TraceEvent:
    """Return an event of the file with its times in ns and, for communication, its call.

    ``span`` is the start and end of the event in ns.
    """
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
    """Return the operation, group and bytes of a kernel of NCCL, from the metadata of torch.

    ``name`` is the name of the kernel. ``args`` has the metadata, which older versions of torch
    lack.
    """
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
    """Return the operation and the bytes of a call of gloo. The bytes follow from its input shapes.

    ``name`` is the name of the range, such as ``gloo:all_reduce``. The trace does not contain the
    group.
    """
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
    """Return the first known operation in these names of kernels, calls and ranges.

    The result is ``communication`` if none is known.
    """
    operations = map(parse_operation, names)
    known = [op for op in operations if op in step_trace.OPERATIONS.values()]
    by_kernel = list(filter(None, map(parse_kernel_operation, names)))
    return [*known, *by_kernel, "communication"][0]


def _count_elements(dims: Any) -> int:
    """Return the number of elements of a tensor shape, or the sum over a list of shapes.

    Anything else has 0 elements.
    """
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_count_elements, dims))
    return math.prod(dim if isinstance(dim, int) else 0 for dim in dims)


def _parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks of a text such as ``[0, 1, 2]``, None without ranks.

    None also stands for a long list, which Kineto shortens.
    """
    if text is None or "..." in text:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)) or None
