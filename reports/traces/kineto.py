"""Traces of PyTorch's profiler: Kineto's JSON, plain or gzip, a file for each rank, read a few megabytes at a time."""

import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from parbench.bench.files import convert_read_errors
from parbench.bench.results import step_trace
from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import (
    PHASE,
    STEP,
    CallFacts,
    StepTrace,
    TraceEvent,
    list_phases,
    parse_operation,
)
from parbench.bench.text import UserError

ENDINGS = (".json", ".json.gz")
_BLOCK = 4 << 20
_MOST_HEADER = 64 << 20
_NEAR = 1 << 16
_MOST_TRIES = 40
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_BYTES = {
    **dict.fromkeys(("double", "long", "int64"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_RANGES = {"user_annotation", "gpu_user_annotation"}
_HOST = ("aten::", "c10d::", "record_param_comms", "_c10d_functional::wait_tensor")
_RUNTIME = {"cuda_runtime", "cuda_driver"}
_STEP = re.compile(r"ProfilerStep#(\d+)")


_NONE = msgspec.Raw(b"[]")


class _Args(msgspec.Struct, rename="lower"):
    external: int | None = msgspec.field(default=None, name="External id")
    correlation: int | None = None
    op: str | None = msgspec.field(default=None, name="Collective name")
    dtype: str | None = None
    sent: int | None = msgspec.field(default=None, name="In msg nelems")
    received: int | None = msgspec.field(default=None, name="Out msg nelems")
    size: int | None = msgspec.field(default=None, name="Group size")
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    described: str | None = msgspec.field(default=None, name="Process Group Description")
    ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    dims: msgspec.Raw = msgspec.field(default=_NONE, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NONE, name="Input type")


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: _Args | None = None


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


class _Header(msgspec.Struct):
    info: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    host: str | None = msgspec.field(default=None, name="host_name")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")


_EVENTS = msgspec.json.Decoder(list[_Event], strict=False)
_EVENT, _APART = msgspec.json.Decoder(_Event, strict=False), msgspec.json.Decoder(list[msgspec.Raw])
_HEADER = msgspec.json.Decoder(_Header, strict=False)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a rank's file says of itself; ``notes`` say what it lacks."""

    path: Path
    rank: int
    world_size: int | None
    host: str | None
    on_device: bool
    base_ns: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's trace: each step's name and span, and the spans of all."""

    source: Source
    steps: tuple[tuple[str, Span], ...]
    trace: StepTrace


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files that are named, those of a folder in the order of their names."""
    found: list[Path] = []
    for path in paths:
        with convert_read_errors(path):
            inside = (
                sorted(one for one in path.iterdir() if one.name.endswith(ENDINGS))
                if path.is_dir()
                else [path]
            )
        if not inside:
            raise UserError(
                f"{path} holds no trace: allowed are files that end in {' or '.join(ENDINGS)}"
            )
        found += inside
    return found


def read_rank(path: Path, place: int = 0) -> RankTrace:
    """Read one rank's file; ``place`` is its rank where neither the file nor its name tells one."""
    with convert_read_errors(path, "is no trace of PyTorch's profiler"):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no regular file")
        with path.open("rb") as file:
            reader = _Reader(file, path)
            events = _kept(reader)
    return _rank_trace(path, place, events, reader.header, reader.notes)


class _Reader:
    """The events of a file, in pieces; ``header`` is known once all have been read."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._blocks, self._path = _unzipped(file), path
        self.header, self.notes, self._odd = _Header(), list[str](), 0

    def __iter__(self) -> Iterator[list[_Event]]:
        rest = self._before()
        for block in self._blocks:
            rest += block
            if found := self._whole(rest):
                at, events = found
                rest = rest[at:].lstrip().removeprefix(b",")
                yield events
            if len(rest) > _MOST_HEADER:
                raise UserError(
                    f"{self._path} is no trace of PyTorch's profiler: an event is larger than 64 MB"
                )
        yield from self._last(rest)
        if self._odd:
            self.notes.append(
                f"{self._odd} events are not as the profiler writes them, and left out"
            )

    def _before(self) -> bytes:
        """Read up to the events."""
        head = b""
        for block in self._blocks:
            head += block
            if begin := re.search(rb'"traceEvents"\s*:\s*\[', head):
                text = head[: begin.start()].rstrip().removesuffix(b",")
                self._told(text + b"}" if text.lstrip().startswith(b"{") else b"{}")
                return head[begin.end() :]
            if head.lstrip().startswith(b"["):
                return head.lstrip()[1:]
            if len(head) > _MOST_HEADER:
                break
        raise UserError(f"{self._path} is no trace of PyTorch's profiler: it has no traceEvents")

    def _last(self, rest: bytes) -> Iterator[list[_Event]]:
        """Read the last events, and what is told after them."""
        text = "[" + rest.decode(errors="replace")
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            self.notes.append("the file ends within an event: what comes after is missing")
            if found := self._whole(rest):
                yield found[1]
            return
        yield self._decoded(text[:end].encode())
        after = text[end:].strip().removeprefix(",").strip()
        if after not in ("", "}"):
            self._told(b"{" + after.encode())

    def _whole(self, text: bytes) -> tuple[int, list[_Event]] | None:
        """Return where the last whole event of a text ends, and all up to there; None where none is whole."""
        for at in _ends(text):
            with suppress(
                msgspec.DecodeError
            ):  # a place within an event or a text leaves none of its sides whole
                return at, self._decoded(b"[" + text[:at] + b"]")
        return None

    def _decoded(self, text: bytes) -> list[_Event]:
        """Return a list's events; ``DecodeError`` where it is not whole."""
        try:
            return _EVENTS.decode(text)
        except msgspec.ValidationError:
            found = []
            for one in _APART.decode(text):
                try:
                    found.append(_EVENT.decode(one))
                except msgspec.ValidationError:
                    self._odd += 1
            return found

    def _told(self, text: bytes) -> None:
        try:
            found = _HEADER.decode(text)
        except msgspec.DecodeError:
            found = (
                _Header()
            )  # Kineto writes metadata that is no JSON where a value of the user's is none
        known = self.header
        self.header = _Header(
            info=found.info or known.info,
            host=found.host or known.host,
            base_ns=found.base_ns or known.base_ns,
        )


def _unzipped(file: BinaryIO) -> Iterator[bytes]:
    """Yield what is in a file, of a gzip archive what is in that, up to where it breaks off."""
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        yield from iter(lambda: file.read(_BLOCK), b"")
        return
    unzip = zlib.decompressobj(wbits=31)
    while block := unzip.unconsumed_tail or unzip.unused_data or file.read(_BLOCK):
        if unzip.eof:
            unzip = zlib.decompressobj(wbits=31)
        if found := unzip.decompress(block, _BLOCK):
            yield found


def _ends(text: bytes) -> Iterator[int]:
    """Return where the last objects of a text may end that others follow, the last first."""
    near = max(len(text) - _NEAR, 0)
    found = [near + one.start() + 1 for one in _BETWEEN.finditer(text[near:])]
    if not found and near:
        found = [one.start() + 1 for one in _BETWEEN.finditer(text)]
    yield from found[: -_MOST_TRIES - 1 : -1]


def _kept(blocks: _Reader) -> list[TraceEvent]:
    """Return the events that say where time goes; of operators within others on a thread those outside alone."""
    kept: list[TraceEvent] = []
    outer: dict[object, Span] = {}
    for block in blocks:
        for event in block:
            if event.ph != "X" or not _speaks(event.cat, event.name):
                continue
            span = round(event.ts * 1000), round((event.ts + max(event.dur, 0.0)) * 1000)
            if event.name.startswith("aten::"):
                start, stop = outer.get(event.tid, (0, 0))
                if start <= span[0] and span[1] <= stop:
                    continue
                outer[event.tid] = span
            kept.append(_event_of(event, sys.intern(event.name), span))
    return kept


@lru_cache(maxsize=1 << 16)
def _speaks(cat: str, name: str) -> bool:
    if cat in _RANGES:
        return name.startswith(("ProfilerStep#", PHASE, "gloo:", "Optimizer.step#"))
    if cat in _RUNTIME:
        return "Launch" in name or "Synchronize" in name
    return cat in _DEVICE or (cat in ("cpu_op", "Operator") and name.startswith(_HOST))


def _event_of(event: _Event, name: str, span: Span) -> TraceEvent:
    args, device = event.args or _Args(), event.cat in _DEVICE or event.cat == "gpu_user_annotation"
    carried = name.startswith("gloo:")
    external, correlation = args.external or 0, args.correlation or 0
    return TraceEvent(
        name=name,
        start_ns=span[0],
        stop_ns=span[1],
        thread=hash(event.tid),
        is_device=device,
        is_async=carried,
        is_annotation=event.cat in _RANGES,
        correlation=correlation if device or event.cat in _RUNTIME else external,
        operator_correlation=external if device or event.cat in _RUNTIME else 0,
        call=_facts_of(name, args) if carried or (device and name.startswith("nccl")) else None,
    )


def _facts_of(name: str, args: _Args) -> CallFacts:
    """Return what is told of a collective: NCCL's kernels by their metadata, gloo's by the shapes of what went in."""
    # calls that torch joins have a name of their own, or none
    known = [
        one
        for one in map(parse_operation, (args.op or "", name))
        if one in step_trace.OPERATIONS.values()
    ]
    op = known[0] if known else "communication"
    ranks = _ranks(args.ranks)
    size = args.size or (len(ranks) if ranks else None)
    sent, received = args.sent, args.received
    element = _BYTES.get((args.dtype or "").lower())
    if name.startswith("gloo:"):
        dims, types = (msgspec.json.decode(one) for one in (args.dims, args.types))
        if dims and isinstance(dims, list) and isinstance(types, list):
            sent = sum(_elements(one) for one in dims)
            element = next((_BYTES.get(str(one).lower()) for one in types if one), None)
    # as nccl-tests counts: what all ranks end with of a gathering, what one begins with of the others
    whole = received if op == "all_gather" and received is not None else sent
    num_bytes = None if whole is None or element is None else whole * element
    return CallFacts(
        op=op, group=args.described or args.group, ranks=ranks, size=size, num_bytes=num_bytes
    )


def _elements(dims: Any) -> int:
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_elements, dims))
    return math.prod(one if isinstance(one, int) else 0 for one in dims)


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks of ``[0, 1, 2]``; Kineto ends long lists with dots, which tell none."""
    if text is None or "..." in text:
        return None
    return tuple(int(word) for word in re.findall(r"\d+", text)) or None


def _steps(events: Sequence[TraceEvent], *, on_device: bool) -> list[tuple[int, int, str]]:
    """Return start, stop and name of each step; on a device from its first kernel to the next step's."""
    spans: dict[bool, dict[str, Span]] = {True: {}, False: {}}
    for event in events:
        if event.is_annotation and (event.name == STEP or _STEP.fullmatch(event.name)):
            # a device has one for each of its streams
            start, stop = spans[event.is_device].get(event.name, (event.start_ns, event.stop_ns))
            spans[event.is_device][event.name] = (
                min(start, event.start_ns),
                max(stop, event.stop_ns),
            )
    of_host, of_device = (
        sorted((*span, name) for name, span in spans[where].items()) for where in (False, True)
    )
    if not on_device or not of_device:
        return of_host
    starts = [start for start, _, _ in of_device[1:]]
    last = max(e.stop_ns for e in events if e.is_device)
    return [
        (start, stop, name)
        for (start, _, name), stop in zip(of_device, [*starts, last], strict=True)
    ]


def _on_all(facts: CallFacts, ranks: tuple[int, ...]) -> CallFacts:
    """Return a call of gloo's, which tells no group, on the only group that there is."""
    times = len(ranks) if facts.op == "all_gather" else 1
    return replace(
        facts, ranks=ranks, size=len(ranks), num_bytes=facts.num_bytes and times * facts.num_bytes
    )


def _rank_trace(
    path: Path, place: int, events: list[TraceEvent], header: _Header, notes: list[str]
) -> RankTrace:
    info = header.info or _Distributed()
    if not events:
        raise UserError(f"{path} holds no operator, kernel or step of a profile")
    kernels = any(event.is_device and not event.is_annotation for event in events)
    marks = [event for event in events if event.is_annotation and not event.is_device]
    steps = [step for step in _steps(events, on_device=kernels) if step[0] < step[1]]
    if not steps:
        notes.append("no step is marked (profiler.step()): all that was recorded counts as one")
        steps = [(min(e.start_ns for e in events), max(e.stop_ns for e in events), "all")]
        if steps[0][0] == steps[0][1]:
            raise UserError(f"{path} holds nothing that lasts")
    first, last = steps[0], steps[-1]
    main = next((e.thread for e in marks if _STEP.fullmatch(e.name) or e.name == STEP), None)
    if main is None:
        threads = [event.thread for event in events if not event.is_device and not event.is_async]
        main = max(set(threads), key=threads.count, default=0)
    whole = TraceEvent(
        name=STEP,
        start_ns=first[0],
        stop_ns=last[1],
        thread=main,
        is_device=False,
        is_async=False,
        is_annotation=True,
    )
    wall_seconds = (last[1] - first[0]) / 1e9
    divide = step_trace.build_device_trace if kernels else step_trace.build_host_trace
    trace = divide([whole, *(event for event in events if event.name != STEP)], wall_seconds)
    trace.phases.extend(list_phases(events))
    named = re.findall(r"\d+", path.name.split(".")[0])
    rank = info.rank if info.rank is not None else int(named[-1]) if named else place
    if info.rank is None:
        notes.append(
            f"the file does not tell its rank: {rank} by its {'name' if named else 'place'}"
        )
    listed = info.pg_config if isinstance(info.pg_config, list) else []
    told = [one.get("ranks") for one in listed if isinstance(one, dict)]
    lists = [
        one for one in told if isinstance(one, list) and all(isinstance(rank, int) for rank in one)
    ]
    groups = {tuple(one) for one in lists if len(one) > 1}
    if not kernels and len(groups) == 1:
        trace.facts[:] = [one and _on_all(one, *groups) for one in trace.facts]
    source = Source(
        path=path,
        rank=rank,
        world_size=info.world_size,
        host=header.host,
        on_device=kernels,
        base_ns=header.base_ns,
        notes=tuple(notes),
    )
    return RankTrace(
        source=source,
        steps=tuple((name, (start, stop)) for start, stop, name in steps),
        trace=trace,
    )
