"""The profiled steps of one rank, read from its trace: computation, communication and copies."""

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
"""The ends of the names of trace files."""
POINT_TO_POINT = {"send", "recv", "sendrecv"}
"""The operations between two ranks, which are not collectives."""
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
"""The names of the ranges that ``torch.profiler.profile.step`` records."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A communication call of one rank, with its start and end on the clock of this rank."""

    facts: CallFacts
    """The operation, the process group and the bytes of the call, as far as the trace has them."""
    span: Span
    """The start and end of the call in ns.

    On a GPU, these are the start and end of its kernel, otherwise its issue and its end.
    """

    @property
    def label(self) -> str:
        """The operation and its process group, such as ``all_reduce mesh_dp``.

        Without the name of the group, its number of ranks: ``all_reduce 4 ranks``.
        """
        group = self.facts.group or (f"{self.facts.size} ranks" if self.facts.size else "")
        return f"{self.facts.op} {group}".strip()

    @property
    def is_point_to_point(self) -> bool:
        """True for sends and receives, False for collectives."""
        return self.facts.op in POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class TracedStep(StepTrace):
    """A profiled step of one rank, with its communication calls and the breakdown of its time."""

    name: str
    """The name of the range that marks the step, such as ``ProfilerStep#5``.

    ``all`` without marks.
    """
    calls: list[TracedCall]
    """The communication calls that start within the step, in the order of the trace."""
    parts: Breakdown
    """The seconds of the step by computation, communication, copies and idle time."""

    @property
    def busy(self) -> list[Span]:
        """The spans of computation and copies in ns, which hide communication at the same time."""
        return [*self.compute, *self.copies]


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """The profiled steps of one rank, in the order of time, and facts about its trace file."""

    path: Path
    """The trace file."""
    rank: int
    """The global rank."""
    world_size: int | None
    """The number of ranks of the job, None if the file does not state it."""
    host: str | None
    """The name of the rank's host, None if the file does not state it."""
    has_device: bool
    """True if the trace has kernels of a GPU. Otherwise its spans are those of the host."""
    has_pipeline_ranges: bool
    """True if a schedule of torch.distributed.pipelining recorded its ranges."""
    base_ns: int
    """The origin of the file's clock in ns since 1970, to which times of events are relative."""
    notes: tuple[str, ...]
    """Sentences about information that the file lacks."""
    steps: tuple[TracedStep, ...]
    """The steps, oldest first."""

    @property
    def calls(self) -> Iterator[TracedCall]:
        """The communication calls of all steps of this rank, in the order of time."""
        return (call for step in self.steps for call in step.calls)

    @property
    def median_step(self) -> int:
        """The index in ``steps`` of the step of median duration.

        With an even number of steps, it is the shorter of the two in the middle.
        """
        order = sorted(range(len(self.steps)), key=lambda step: self.steps[step].parts.wall_seconds)
        return order[(len(order) - 1) // 2]

    def compute_median(self, get_part: Callable[[Breakdown], float]) -> float:
        """Return the median over the rank's steps of one part of the step time.

        ``get_part`` selects the part of a breakdown in seconds.
        """
        return median(get_part(step.parts) for step in self.steps)


def list_trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files that the user named, and the traces in folders that the user named.

    The traces of a folder are sorted by name. If the folder itself has none, they are taken from
    the only folder in it that has traces. Raises ``UserError`` if there is no trace, or if several
    folders in it have traces.
    """
    files: list[Path] = []
    for path in paths:
        with convert_read_errors(path):
            files += _list_folder(path) if path.is_dir() else [path]
    return files


def _list_folder(folder: Path) -> list[Path]:
    """Return the trace files of a folder, or of the only folder in it that has some.

    They are sorted by name. Raises ``UserError`` if there are none, or if several folders have
    traces.
    """
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
    """Read the trace file of one rank.

    If it does not state its rank, the rank is the last number in its name, or 0. Raises
    ``UserError`` if the file is not a trace of torch's profiler with operators or kernels.
    """
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
    """Return the steps of a rank, with notes on missing steps and ranks.

    ``path`` is named in the error for a trace in which all events have no duration.
    """
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
    """Return True if an event is a range that marks a step of parbench or of torch's profiler."""
    if not event.is_annotation:
        return False
    return event.name == STEP or _PROFILER_STEP.fullmatch(event.name) is not None


def _find_steps(events: Sequence[TraceEvent], *, has_device: bool) -> dict[str, Span]:
    """Return the start and end of each step in ns, keyed by its name, in order.

    Each step lasts until the next one starts. If ``has_device`` is True, a step starts with its
    first kernel on the GPU, and the last step ends with the last kernel. The profiler repeats the
    mark of a step on each stream of the GPU, and the first of them counts.
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
    """Return the computation, communication and copies of all steps together, as one long step.

    ``windows`` are the spans of the steps in order. ``has_device`` selects whether the spans are
    taken from the kernels of a GPU or from the operators on the host.
    """
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
    """Return one step of a rank: the parts of the whole recording that are within its window.

    Args:
        name: the name of the step.
        window: its start and end in ns.
        trace: the computation, copies and phases of all steps of the rank.
        all_calls: the communication calls of all steps. A call belongs to the step in which it
            starts.
    """
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
    """Return the spans that may overlap a window, so that only these need be clipped to it.

    ``spans`` are sorted and disjoint.
    """
    first = max(bisect_left(spans, (window[0], window[0])) - 1, 0)
    return spans[first : bisect_left(spans, (window[1], window[1]))]


def _find_main_thread(events: Sequence[TraceEvent]) -> int:
    """Return the id of the host thread that marks steps, otherwise of the one with most events."""
    for event in events:
        if _is_step_mark(event) and not event.is_device:
            return event.thread
    threads = [event.thread for event in events if not event.is_device and not event.is_async]
    return max(set(threads), key=threads.count, default=0)


def _find_single_group(distributed: DistributedInfo) -> tuple[int, ...] | None:
    """Return the ranks of the process group of a job that has only one, otherwise None.

    The calls of gloo do not record their group. With a single group, it is known. Groups of one
    rank do not count.
    """
    try:
        groups = msgspec.convert(distributed.pg_config, list[ProcessGroup])
    except msgspec.ValidationError:
        return None
    ranks = {tuple(group.ranks) for group in groups if len(group.ranks) > 1}
    return ranks.pop() if len(ranks) == 1 else None


def _add_ranks(call: CallFacts, ranks: tuple[int, ...]) -> CallFacts:
    """Return the facts about a call of gloo, completed with the ranks of its group.

    The bytes of all_gather become those of all ranks, by the convention of nccl-tests.
    """
    num_bytes = call.num_bytes
    if call.op == "all_gather" and num_bytes is not None:
        num_bytes *= len(ranks)
    return replace(call, ranks=ranks, size=len(ranks), num_bytes=num_bytes)
