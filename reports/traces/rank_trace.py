"""The profiled steps of one rank, read from its trace: computation, communication and copies."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

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
from parbench.bench.text import UserError, name_first
from parbench.reports.traces.kineto import TraceHeader, read_trace

TRACE_SUFFIXES = (".json", ".json.gz")
"""The ends of the names of trace files."""
UNMARKED = "all"
"""The name of the only step of a trace that marks no steps."""
_POINT_TO_POINT = {"send", "recv", "sendrecv"}
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
        return self.facts.op in _POINT_TO_POINT


@dataclass(frozen=True, kw_only=True)
class TracedStep(StepTrace):
    """A profiled step of one rank, with its communication calls and the breakdown of its time."""

    name: str
    """The name of the range that marks the step, such as ``ProfilerStep#5``, or ``UNMARKED``."""
    calls: list[TracedCall]
    """The communication calls that start within the step, in the order of the trace."""
    parts: Breakdown
    """The seconds of the step by computation, communication, copies and idle time.

    Exposed communication is keyed by the labels of calls.
    """

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
    """True if the trace has kernels of a GPU, so that spans are those of kernels.

    Otherwise spans are those of operators on the host.
    """
    steps: tuple[TracedStep, ...]
    """The steps, oldest first."""

    @property
    def calls(self) -> Iterator[TracedCall]:
        """The communication calls of all steps of this rank, in the order of time."""
        return (call for step in self.steps for call in step.calls)

    def compute_mean(self, get_part: Callable[[Breakdown], float]) -> float:
        """Return the mean over the rank's steps of one part of the step time, in seconds.

        ``get_part`` returns the part, in seconds, of the breakdown of a step. The means of all
        parts add up to the mean step time.
        """
        return fmean(get_part(step.parts) for step in self.steps)


def list_trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files that the user named, and the traces in folders that the user named.

    The traces of a folder are sorted by name. Raises ``UserError`` if a folder has none, with a
    hint on its folders that have traces.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        with convert_read_errors(path):
            traces = [file for file in sorted(path.iterdir()) if file.name.endswith(TRACE_SUFFIXES)]
        if not traces:
            suffixes = " or ".join(TRACE_SUFFIXES)
            folders = sorted({str(file.parent) for file in path.glob("*/*.json*")})
            hint = f"choose one folder: {', '.join(name_first(folders, 3))}" if folders else ""
            raise UserError(f"{path} contains no trace: traces end with {suffixes}", hint=hint)
        files += traces
    return files


def read_rank(path: Path) -> TracedRank:
    """Read the trace file of one rank.

    If the file does not state the rank, it is the last number in the name of the file, or 0. Raises
    ``UserError`` if the file is not a trace of torch's profiler with operators or kernels.
    """
    with convert_read_errors(path, "is not a trace of PyTorch's profiler"):
        header, events = read_trace(path)
    if "parbench" in header.other:
        raise UserError(
            f"{path} is a timeline that parbench exported, without operators and sizes",
            hint="parbench show --all RUN explains its step",
        )
    has_device = any(event.is_device and not event.is_annotation for event in events)
    windows = _find_steps(events, has_device=has_device)
    if not windows:
        raise UserError(f"{path} contains no operator, kernel or step with a duration")
    rank = header.distributed.rank
    if rank is None:
        numbers = re.findall(r"\d+", path.name.split(".")[0])
        rank = int(numbers[-1]) if numbers else 0
    trace = _join_steps(events, list(windows.values()), has_device=has_device)
    calls = _list_calls(trace, header)
    return TracedRank(
        path=path,
        rank=rank,
        world_size=header.distributed.world_size,
        host=header.host,
        has_device=has_device,
        steps=tuple(_build_step(name, span, trace, calls) for name, span in windows.items()),
    )


def _is_step_mark(event: TraceEvent) -> bool:
    """Return True if an event is a range that marks a step of parbench or of torch's profiler."""
    if not event.is_annotation:
        return False
    return event.name == STEP or _PROFILER_STEP.fullmatch(event.name) is not None


def _find_steps(events: Sequence[TraceEvent], *, has_device: bool) -> dict[str, Span]:
    """Return (start, end) of each step in ns, keyed by the name of the step, in the order of time.

    Each step lasts until the next one starts. If ``has_device`` is True, a step starts with its
    first kernel on the GPU, and the last step ends with the last kernel. The profiler repeats the
    mark of a step on each stream of the GPU, and the first of them counts. Without marks, all
    events are one step. Steps without a duration are left out.
    """
    marks = [event for event in events if _is_step_mark(event)]
    on_device = [event for event in marks if event.is_device]
    last_events: Sequence[TraceEvent] = marks
    if has_device and on_device:
        marks = on_device
        last_events = [event for event in events if event.is_device]
    starts: dict[str, int] = {}
    for event in sorted(marks, key=lambda event: event.start_ns):
        starts.setdefault(event.name, event.start_ns)
    if not marks and events:
        starts = {UNMARKED: min(event.start_ns for event in events)}
        last_events = events
    stops = [*list(starts.values())[1:], max((event.stop_ns for event in last_events), default=0)]
    windows = zip(starts.items(), stops, strict=False)
    return {name: (start, stop) for (name, start), stop in windows if start < stop}


def _join_steps(
    events: Sequence[TraceEvent], windows: Sequence[Span], *, has_device: bool
) -> StepTrace:
    """Return the computation, communication and copies from the first step to the end of the last.

    The result is one long step, with what happened between the steps. ``windows`` are the spans of
    the steps in order. If ``has_device`` is True, the result has the
    spans of kernels on a GPU, otherwise those of operators on the host.
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
    trace = build([recording, *others])
    trace.phases.extend(list_phases(events))
    return trace


def _find_main_thread(events: Sequence[TraceEvent]) -> int:
    """Return the id of the host thread that marks steps, otherwise of the one with most events."""
    for event in events:
        if _is_step_mark(event) and not event.is_device:
            return event.thread
    threads = [event.thread for event in events if not event.is_device and not event.is_async]
    return max(set(threads), key=threads.count, default=0)


def _list_calls(trace: StepTrace, header: TraceHeader) -> list[TracedCall]:
    """Return the communication calls in a recording of one rank.

    The calls of gloo do not record their process group. If the job has only one group of several
    ranks (``header``), this group is added to the calls. The bytes of an all_gather of gloo then
    become those of all ranks, by the convention of nccl-tests.
    """
    groups = header.distributed.groups
    rank_lists = {tuple(group.ranks) for group in groups if len(group.ranks) > 1}
    calls = []
    for event in trace.comm:
        facts = event.call or CallFacts("communication")
        if facts.size is None and len(rank_lists) == 1:
            (ranks,) = rank_lists
            num_bytes = facts.num_bytes
            if facts.op == "all_gather" and num_bytes is not None:
                num_bytes *= len(ranks)
            facts = replace(facts, ranks=ranks, size=len(ranks), num_bytes=num_bytes)
        calls.append(TracedCall(facts, event.span))
    return calls


def _build_step(
    name: str, window: Span, trace: StepTrace, all_calls: Sequence[TracedCall]
) -> TracedStep:
    """Return one step of a rank: the parts of the whole recording that are within ``window``.

    Args:
        name: the name of the step.
        window: the start and end of the step in ns.
        trace: the computation, copies and phases of all steps of the rank.
        all_calls: the communication calls of all steps. A call belongs to the step in which it
            starts.
    """
    start, stop = window
    calls = [call for call in all_calls if start <= call.span[0] < stop]
    compute = intersection(trace.compute, [window])
    copies = intersection(trace.copies, [window])
    comm: dict[str, list[Span]] = defaultdict(list)
    for call in calls:
        comm[call.label].append(call.span)
    parts = compute_breakdown(window, compute, comm, copies)
    return TracedStep(
        name=name,
        step=window,
        compute=compute,
        copies=copies,
        calls=calls,
        phases=[phase for phase in trace.phases if start <= phase[1][0] < stop],
        parts=parts,
    )
