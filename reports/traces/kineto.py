"""Reads the traces that PyTorch's profiler (Kineto) exports: JSON, plain or gzip.

Files are read in blocks, because a decoded trace takes about four times the memory of its file:
500 MB of JSON take 1.8 GB at once and 0.4 GB in blocks.
"""

import gzip
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.results import step_trace
from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import (
    PHASE,
    CallFacts,
    TraceEvent,
    is_communication_kernel,
    is_fused_kernel,
    parse_kernel_operation,
    parse_operation,
)
from parbench.bench.text import UserError

TORCH_PIPELINE_RANGE = re.compile(r"PP:|(Forward|Backward) \d+$")
"""The ranges that the schedules of torch.distributed.pipelining record."""
_BLOCK_BYTES = 4 << 20
_MAX_PENDING_BYTES = 64 << 20
"""The limit of the header and of an event."""
_MAX_BORDERS = 40
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")
_LIST_END = re.compile(rb"(\}|^)\s*\]")
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


class DistributedInfo(msgspec.Struct):
    """The process group of the job, as far as the file states it."""

    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


class OtherData(msgspec.Struct):
    """The metadata that programs other than torch's profiler add."""

    parbench: str | None = None  # the version whose export the file is


class Header(msgspec.Struct):
    """The metadata around the events of a file."""

    distributed: DistributedInfo | None = msgspec.field(default=None, name="distributedInfo")
    host: str | None = msgspec.field(default=None, name="host_name")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    other: OtherData | None = msgspec.field(default=None, name="otherData")


_EVENTS_DECODER = msgspec.json.Decoder(list[_Event], strict=False)
_EVENT_DECODER = msgspec.json.Decoder(_Event, strict=False)
_RAW_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_HEADER_DECODER = msgspec.json.Decoder(Header, strict=False)


class TraceFile:
    """The events and the header of a file. The header is complete after all events were read."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.header = Header()
        self.notes: list[str] = []
        self._path = path
        self._blocks = _read_blocks(file)
        self._num_invalid = 0

    def read_events(self) -> list[TraceEvent]:
        """Read the events that show where time goes, only the outermost operators of a thread."""
        events: list[TraceEvent] = []
        outer_spans: dict[object, Span] = {}
        for batch in self._read_batches():
            for event in batch:
                if event.ph != "X" or not _is_relevant(event.cat, event.name):
                    continue
                stop_us = event.ts + max(event.dur, 0.0)
                span = round(event.ts * 1000), round(stop_us * 1000)
                if event.name.startswith("aten::"):
                    outer_start, outer_stop = outer_spans.get(event.tid, (0, 0))
                    if outer_start <= span[0] and span[1] <= outer_stop:
                        continue
                    outer_spans[event.tid] = span
                events.append(_convert_event(event, span))
        if self._num_invalid:
            self.notes.append(f"{self._num_invalid} invalid events are left out")
        self.notes.extend(_describe_fused_kernels(events))
        return _complete_operations(events)

    def _read_batches(self) -> Iterator[list[_Event]]:
        """Yield the events of the file in batches, and update the header after the last one."""
        pending = self._read_header()
        for block in self._blocks:
            pending += block
            batch, pending = self._decode_until(_BETWEEN_EVENTS, pending)
            yield batch
            self._check_pending(pending)
        if _LIST_END.search(pending):
            batch, trailer = self._decode_until(_LIST_END, pending)
            if trailer is not pending:
                yield batch
                self._update_header(b"{" + trailer.strip().removeprefix(b","))
                return
        self.notes.append("the file ends within an event: later events are missing")
        yield self._decode_until(_BETWEEN_EVENTS, pending)[0]

    def _read_header(self) -> bytes:
        """Read up to the first event, and return the bytes that follow."""
        pending = b""
        for block in self._blocks:
            pending += block
            if match := _LIST_START.search(pending):
                metadata = pending[: match.start()].rstrip().removesuffix(b",")
                self._update_header(metadata + b"}")
                return pending[match.end() :]
            if pending.lstrip().startswith(b"["):
                return pending.lstrip()[1:]
            self._check_pending(pending)
        raise UserError(f"{self._path} is not a trace of PyTorch's profiler: it has no traceEvents")

    def _check_pending(self, pending: bytes) -> None:
        """Raise ``UserError`` if the header or an event is too large for a trace."""
        if len(pending) > _MAX_PENDING_BYTES:
            limit = _MAX_PENDING_BYTES >> 20
            raise UserError(
                f"{self._path} is not a trace of PyTorch's profiler: "
                f"its header or an event is larger than {limit} MiB"
            )

    def _decode_until(self, border: re.Pattern[bytes], text: bytes) -> tuple[list[_Event], bytes]:
        """Decode the events before the last border, and return them with the text after the border.

        A border inside an event or a string leaves an incomplete event before it. Then the previous
        border is tried. Without a valid border, the text is returned unchanged and there are no
        events.
        """
        borders = list(border.finditer(text))
        for match in borders[: -_MAX_BORDERS - 1 : -1]:
            stop = match.start()
            if text[stop : stop + 1] == b"}":
                stop += 1
            try:
                return self._decode(b"[" + text[:stop] + b"]"), text[match.end() :]
            except msgspec.DecodeError:
                finite_text = _replace_non_finite(text[:stop])
                if finite_text != text[:stop]:
                    return self._decode_until(border, finite_text + text[stop:])
        return [], text

    def _decode(self, text: bytes) -> list[_Event]:
        """Return the events of a JSON list, without invalid ones, which are counted."""
        try:
            return _EVENTS_DECODER.decode(text)
        except msgspec.ValidationError:
            events = []
            for raw in _RAW_DECODER.decode(text):
                try:
                    events.append(_EVENT_DECODER.decode(raw))
                except msgspec.ValidationError:
                    self._num_invalid += 1
            return events

    def _update_header(self, text: bytes) -> None:
        """Add the metadata in a JSON object to the header, unless the object is invalid."""
        try:
            header = _HEADER_DECODER.decode(_replace_non_finite(text))
        except msgspec.DecodeError:
            return  # Kineto copies values of the user into the metadata without escaping them.
        self.header = Header(
            distributed=header.distributed or self.header.distributed,
            host=header.host or self.header.host,
            base_ns=header.base_ns or self.header.base_ns,
            other=header.other or self.header.other,
        )


def _replace_non_finite(text: bytes) -> bytes:
    """Return JSON in which null replaces infinite and undefined numbers."""
    return _NON_FINITE.sub(rb"\1null", text)


def _describe_fused_kernels(events: Sequence[TraceEvent]) -> Iterator[str]:
    """Yield a note on kernels that may communicate, but count as computation."""
    fused = [event for event in events if event.is_device and is_fused_kernel(event.name)]
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


def _read_blocks(file: BufferedReader) -> Iterator[bytes]:
    """Yield the decompressed content of a file, of a truncated archive up to its end."""
    is_compressed = file.peek(2).startswith(b"\x1f\x8b")
    stream = gzip.GzipFile(fileobj=file) if is_compressed else file
    with suppress(EOFError):
        while block := stream.read1(_BLOCK_BYTES):
            yield block


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
