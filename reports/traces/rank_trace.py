"""The traced steps of one rank: the spans of computation, communication and copies of each."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from parbench.bench.files import convert_read_errors
from parbench.bench.results.spans import Breakdown, Span, compute_breakdown, intersection
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
    ProcessGroup,
    TraceFile,
    read_trace,
)

TRACE_SUFFIXES = (".json", ".json.gz")
POINT_TO_POINT = {"send", "recv", "sendrecv"}
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of communication on one rank, with its span on the clock of this rank."""

    facts: CallFacts
    span: Span

    @property
    def label(self) -> str:
        """The operation and the group of ranks."""
        group = self.facts.group or (f"{self.facts.size} ranks" if self.facts.size else "")
        return f"{self.facts.op} {group}".strip()

    @property
    def is_point_to_point(self) -> bool:
        """True for sends and receives."""
        return self.facts.op in POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class TracedStep(StepTrace):
    """A step of one rank, with its calls and the breakdown of its time."""

    name: str
    calls: list[TracedCall]
    parts: Breakdown

    @property
    def busy(self) -> list[Span]:
        """The spans of computation and copies, which hide communication."""
        return [*self.compute, *self.copies]


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """The trace of one rank with its steps in order."""

    path: Path
    rank: int
    """The global rank."""
    world_size: int | None
    host: str | None
    has_device: bool
    has_pipeline_ranges: bool
    base_ns: int
    """The origin of the file's clock in nanoseconds."""
    notes: tuple[str, ...]
    """The information that the file lacks."""
    steps: tuple[TracedStep, ...]

    @property
    def calls(self) -> Iterator[TracedCall]:
        """The communication calls of all steps of this rank."""
        return (call for step in self.steps for call in step.calls)

    @property
    def median_step(self) -> int:
        """The index of the step of median duration."""
        order = sorted(range(len(self.steps)), key=lambda step: self.steps[step].parts.wall_seconds)
        return order[(len(order) - 1) // 2]

    def compute_median(self, get_part: Callable[[Breakdown], float]) -> float:
        """Return the median over steps of a part of the breakdown."""
        return median(get_part(step.parts) for step in self.steps)


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
    traces = [path for path in sorted(folder.rglob("*")) if path.name.endswith(TRACE_SUFFIXES)]
    folders = list(dict.fromkeys(path.parent for path in traces))
    if folder in folders:
        return [path for path in traces if path.parent == folder]
    if len(folders) > 1:
        count = f"{len(folders)} folders in it contain traces"
        raise UserError(f"{folder}: {count}. Explain one, such as {folders[-1]}")
    if not traces:
        suffixes = " or ".join(TRACE_SUFFIXES)
        raise UserError(f"{folder} contains no trace: traces end with {suffixes}")
    return traces


def read_rank(path: Path) -> TracedRank:
    """Read one rank's file. If it does not state its rank, that is the last number in its name."""
    with convert_read_errors(path, "is not a trace of PyTorch's profiler"):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file")
        file = read_trace(path)
    if file.header.other.parbench:
        raise UserError(
            f"{path} is a timeline that parbench exported, without operators and sizes",
            hint="parbench show --all RUN explains its step, and parbench export RUN --format hta "
            "writes a trace for each rank",
        )
    if not file.events:
        raise UserError(f"{path} contains no operator, kernel or step of a profile")
    return _build_rank(path, file)


def _build_rank(path: Path, file: TraceFile) -> TracedRank:
    """Return the steps of a rank, with notes on missing steps and ranks."""
    events = file.events
    notes = list(file.notes)
    has_device = any(event.is_device and not event.is_annotation for event in events)
    windows = _find_steps(events, has_device=has_device)
    if not windows:
        notes.append("no step is marked with profiler.step(): the recording counts as one step")
        start = min(event.start_ns for event in events)
        stop = max(event.stop_ns for event in events)
        if start == stop:
            raise UserError(f"{path} contains no event with a duration")
        windows = {"all": (start, stop)}
    distributed = file.header.distributed
    rank = distributed.rank
    if rank is None:
        numbers = re.findall(r"\d+", path.name.split(".")[0])
        rank = int(numbers[-1]) if numbers else 0
        notes.append(f"the file does not state its rank, which is {rank} by its name")
    trace = _divide_recording(events, list(windows.values()), has_device=has_device)
    group = None if has_device else _find_single_group(distributed)
    calls = []
    for facts, span in zip(trace.facts or [None] * len(trace.comm), trace.comm, strict=True):
        if facts and group:
            facts = _add_ranks(facts, group)
        calls.append(TracedCall(facts or CallFacts("communication"), span))
    return TracedRank(
        path=path,
        rank=rank,
        world_size=distributed.world_size,
        host=file.header.host,
        has_device=has_device,
        has_pipeline_ranges=any(TORCH_PIPELINE_RANGE.match(event.name) for event in events),
        base_ns=file.header.base_ns,
        notes=tuple(notes),
        steps=tuple(_build_step(name, span, trace, calls) for name, span in windows.items()),
    )


def _is_step_mark(event: TraceEvent) -> bool:
    """Return True if an event marks a step."""
    if not event.is_annotation:
        return False
    return event.name == STEP or _PROFILER_STEP.fullmatch(event.name) is not None


def _find_steps(events: Sequence[TraceEvent], *, has_device: bool) -> dict[str, Span]:
    """Return the spans of steps by name, in order. Each step lasts until the next one starts.

    A step on a device starts with its first kernel, and the last step ends with the last kernel. A
    device has a mark on each of its streams.
    """
    marks = [event for event in events if _is_step_mark(event)]
    on_device = [event for event in marks if event.is_device]
    last_events = marks
    if has_device and on_device:
        marks = on_device
        last_events = [event for event in events if event.is_device]
    starts: dict[str, int] = {}
    for event in sorted(marks, key=lambda event: event.start_ns):
        starts.setdefault(event.name, event.start_ns)
    stops = [*list(starts.values())[1:], max((event.stop_ns for event in last_events), default=0)]
    windows = zip(starts.items(), stops, strict=False)
    return {name: (start, stop) for (name, start), stop in windows if start < stop}


def _divide_recording(
    events: Sequence[TraceEvent], windows: Sequence[Span], *, has_device: bool
) -> StepTrace:
    """Return the trace from the first to the last step, as if it were a single step."""
    start, stop = windows[0][0], windows[-1][1]
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


def _build_step(
    name: str, window: Span, trace: StepTrace, all_calls: Sequence[TracedCall]
) -> TracedStep:
    """Return a step of a rank, with the parts of its trace within the window."""
    start, stop = window
    calls = [call for call in all_calls if start <= call.span[0] < stop]
    compute = intersection(_select_near(trace.compute, window), [window])
    copies = intersection(_select_near(trace.copies, window), [window])
    comm: dict[str, list[Span]] = defaultdict(list)
    for call in calls:
        comm[call.label].append(call.span)
    parts = compute_breakdown(window, compute, comm, copies)
    return TracedStep(
        name=name,
        step=window,
        wall_seconds=parts.wall_seconds,
        compute=compute,
        copies=copies,
        calls=calls,
        phases=[phase for phase in trace.phases if start <= phase[1][0] < stop],
        parts=parts,
    )


def _select_near(spans: Sequence[Span], window: Span) -> Sequence[Span]:
    """Return the sorted, disjoint spans that may overlap a window."""
    first = max(bisect_left(spans, (window[0], window[0])) - 1, 0)
    return spans[first : bisect_left(spans, (window[1], window[1]))]


def _find_main_thread(events: Sequence[TraceEvent]) -> int:
    """Return the id of the thread that marks steps, otherwise of the thread with most events."""
    for event in events:
        if _is_step_mark(event) and not event.is_device:
            return event.thread
    threads = [event.thread for event in events if not event.is_device and not event.is_async]
    return max(set(threads), key=threads.count, default=0)


def _find_single_group(distributed: DistributedInfo) -> tuple[int, ...] | None:
    """Return the ranks of the only group of a job. Calls of gloo do not record their group."""
    try:
        groups = msgspec.convert(distributed.pg_config, list[ProcessGroup])
    except msgspec.ValidationError:
        return None
    ranks = {tuple(group.ranks) for group in groups if len(group.ranks) > 1}
    return ranks.pop() if len(ranks) == 1 else None


def _add_ranks(call: CallFacts, ranks: tuple[int, ...]) -> CallFacts:
    """Return a call with its ranks. The bytes of all_gather become those of all ranks."""
    num_bytes = call.num_bytes
    if call.op == "all_gather" and num_bytes is not None:
        num_bytes *= len(ranks)
    return replace(call, ranks=ranks, size=len(ranks), num_bytes=num_bytes)
