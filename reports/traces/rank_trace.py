"""The trace of one rank: its steps and the spans of computation, communication and copies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parbench.bench.files import convert_read_errors
from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import (
    STEP,
    CallFacts,
    StepTrace,
    TraceEvent,
    build_device_trace,
    build_host_trace,
    list_phases,
)
from parbench.bench.text import UserError
from parbench.reports.traces.kineto import (
    TORCH_PIPELINE_RANGE,
    DistributedInfo,
    Header,
    TraceFile,
)

TRACE_SUFFIXES = (".json", ".json.gz")
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin of a rank's trace. ``notes`` name the information that the file lacks."""

    path: Path
    rank: int
    world_size: int | None
    host: str | None
    has_device: bool
    has_pipeline_ranges: bool
    base_ns: int
    """The origin of the file's clock in nanoseconds."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A step's name and span."""

    name: str
    span: Span


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The trace of one rank, with the window of each step."""

    source: Source
    steps: tuple[Window, ...]
    trace: StepTrace


def list_trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the given files, and the traces in the given folders in the order of their names.

    A folder without traces may contain a single folder that has some.
    """
    files: list[Path] = []
    for path in paths:
        with convert_read_errors(path):
            files += _list_folder(path) if path.is_dir() else [path]
    return files


def _list_folder(folder: Path) -> list[Path]:
    """Return the traces of a folder, or of the only folder in it that has some."""
    files = _list_traces(folder)
    if files:
        return files
    inner_folders = [path for path in sorted(folder.rglob("*")) if path.is_dir()]
    inner_folders = [path for path in inner_folders if _list_traces(path)]
    if len(inner_folders) == 1:
        return _list_traces(inner_folders[0])
    if inner_folders:
        count = f"{len(inner_folders)} folders in it contain traces"
        raise UserError(f"{folder}: {count}. Explain one, such as {inner_folders[-1]}")
    suffixes = " or ".join(TRACE_SUFFIXES)
    raise UserError(f"{folder} contains no trace: traces end with {suffixes}")


def _list_traces(folder: Path) -> list[Path]:
    """Return the traces in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(TRACE_SUFFIXES))


def read_rank(path: Path) -> RankTrace:
    """Read one rank's file. If it does not state its rank, that is the last number in its name."""
    with convert_read_errors(path, "is not a trace of PyTorch's profiler"):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file")
        with path.open("rb") as file:
            reader = TraceFile(file, path)
            events = reader.read_events()
    if reader.header.other is not None and reader.header.other.parbench:
        raise UserError(
            f"{path} is a timeline that parbench exported, without operators and sizes",
            hint="parbench show --all RUN explains its step, and parbench export RUN --format hta "
            "writes a trace for each rank",
        )
    if not events:
        raise UserError(f"{path} contains no operator, kernel or step of a profile")
    return _build_rank_trace(path, events, reader.header, reader.notes)


def _build_rank_trace(
    path: Path,
    events: Sequence[TraceEvent],
    header: Header,
    notes: list[str],
) -> RankTrace:
    """Return the trace of a rank from the events and the header of its file.

    ``notes`` are extended by notes on missing steps and ranks.
    """
    has_device = any(event.is_device and not event.is_annotation for event in events)
    steps = _find_steps(events, has_device=has_device)
    if not steps:
        notes.append("no step is marked with profiler.step(): the recording counts as one step")
        steps = [Window(name="all", span=_get_extent(events))]
        if steps[0].span[0] == steps[0].span[1]:
            raise UserError(f"{path} contains no event with a duration")
    distributed = header.distributed or DistributedInfo()
    rank = distributed.rank
    if rank is None:
        numbers = re.findall(r"\d+", path.name.split(".")[0])
        rank = int(numbers[-1]) if numbers else 0
        notes.append(f"the file does not state its rank, which is {rank} by its name")
    trace = _divide_recording(events, steps, has_device=has_device)
    if not has_device:
        _complete_gloo_calls(trace, distributed)
    source = Source(
        path=path,
        rank=rank,
        world_size=distributed.world_size,
        host=header.host,
        has_device=has_device,
        has_pipeline_ranges=any(TORCH_PIPELINE_RANGE.match(event.name) for event in events),
        base_ns=header.base_ns,
        notes=tuple(notes),
    )
    return RankTrace(source=source, steps=tuple(steps), trace=trace)


def _is_step_mark(event: TraceEvent) -> bool:
    """Return True if an event marks a step."""
    if not event.is_annotation:
        return False
    return event.name == STEP or _PROFILER_STEP.fullmatch(event.name) is not None


def _find_steps(events: Sequence[TraceEvent], *, has_device: bool) -> list[Window]:
    """Return the steps in order. Each step lasts until the next one starts.

    A step on a device starts with its first kernel, and the last step ends with the last kernel. A
    device has a mark on each of its streams.
    """
    marks = [event for event in events if _is_step_mark(event)]
    on_device = [event for event in marks if event.is_device]
    is_on_device = has_device and bool(on_device)
    if is_on_device:
        marks = on_device
    starts: dict[str, int] = {}
    for event in sorted(marks, key=lambda event: event.start_ns):
        starts.setdefault(event.name, event.start_ns)
    last_events = [event for event in events if event.is_device] if is_on_device else marks
    stops = [*list(starts.values())[1:], max((event.stop_ns for event in last_events), default=0)]
    return [
        Window(name=name, span=(start, stop))
        for (name, start), stop in zip(starts.items(), stops, strict=False)
        if start < stop
    ]


def _get_extent(events: Sequence[TraceEvent]) -> Span:
    """Return the span from the first start to the last stop of events."""
    return min(event.start_ns for event in events), max(event.stop_ns for event in events)


def _divide_recording(
    events: Sequence[TraceEvent], steps: Sequence[Window], *, has_device: bool
) -> StepTrace:
    """Return the trace from the first to the last step, as if it were a single step."""
    start, stop = steps[0].span[0], steps[-1].span[1]
    recording = TraceEvent(
        name=STEP,
        start_ns=start,
        stop_ns=stop,
        thread=_find_main_thread(events),
        is_device=False,
        is_async=False,
        is_annotation=True,
    )
    build = build_device_trace if has_device else build_host_trace
    others = (event for event in events if event.name != STEP)
    trace = build([recording, *others], (stop - start) / 1e9)
    trace.phases.extend(list_phases(events))
    return trace


def _find_main_thread(events: Sequence[TraceEvent]) -> int:
    """Return the id of the thread that marks steps, otherwise of the thread with most events."""
    for event in events:
        if _is_step_mark(event) and not event.is_device:
            return event.thread
    threads = [event.thread for event in events if not event.is_device and not event.is_async]
    return max(set(threads), key=threads.count, default=0)


def _complete_gloo_calls(trace: StepTrace, distributed: DistributedInfo) -> None:
    """Add the ranks to calls of gloo, which record none, if the job has a single group."""
    config = distributed.pg_config if isinstance(distributed.pg_config, list) else []
    groups = set()
    for group in config:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            groups.add(tuple(ranks))
    groups = {ranks for ranks in groups if len(ranks) > 1}
    if len(groups) == 1:
        ranks = groups.pop()
        trace.facts[:] = [call and _add_ranks(call, ranks) for call in trace.facts]


def _add_ranks(call: CallFacts, ranks: tuple[int, ...]) -> CallFacts:
    """Return a call with its ranks. The bytes of all_gather become those of all ranks."""
    num_bytes = call.num_bytes
    if call.op == "all_gather" and num_bytes is not None:
        num_bytes *= len(ranks)
    return replace(call, ranks=ranks, size=len(ranks), num_bytes=num_bytes)
