"""The timelines of a run as Chrome's trace events, for Perfetto, chrome://tracing and HolisticTraceAnalysis. Pure.

Ranks are processes and streams threads, all ranks of a step on one clock; each case begins at 0 us.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from bench.machine.world_spec import FUNCTIONAL_ONLY
from bench.results.details import Idle, Ran
from bench.results.records import COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from bench.results.runs import Run
from bench.text import UserError
from reports.analysis.labels import short_labels
from reports.analysis.pipelines import Pipeline, pipelines, read_pipeline, schedule_labels
from reports.analysis.summary import Row, summarize, unreadable
from reports.analysis.timelines import Traced, axis_of, by_stream, lanes, stream_words, traced_steps

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Told:
    """A case that can be drawn: its events from a process id on, with a prefix to its processes' names."""

    case_id: str
    label: str
    num_processes: int
    events: Callable[[int, str], Iterator[Event]]
    clock: Event


@dataclass(frozen=True, kw_only=True)
class Traces:
    """All that a run has to draw, and by case why the rest is left out."""

    run: Run
    told: tuple[Told, ...]
    left_out: dict[str, str]


def render_trace(run: Run) -> bytes:
    """Return one JSON document with every step whose ranks share a clock, times in us.

    ``UserError`` if there is none, with the reason of the first that cannot be drawn.
    """
    traces = _traces(run)
    return _document(traces, traces.told)


def render_traces(run: Run) -> dict[str, bytes]:
    """Return a document for each case, by the name of its file; ``UserError`` as for one document."""
    traces = _traces(run)
    return {f"{one.case_id}.json": _document(traces, [one]) for one in traces.told}


def render_for_analysis(run: Run) -> dict[str, bytes]:
    """Return a document for each rank of each traced step, as HolisticTraceAnalysis wants them: a folder for each case.

    ``UserError`` if no step left a trace; pipelines, whose timelines know no streams, are not among them.
    """
    shown = [row for row in summarize(run).rows if row.metrics]
    files = {
        f"{one.row.case.id}/rank-{rank.rank}.json": msgspec.json.encode(for_analysis(rank)) + b"\n"
        for one in traced_steps(run, shown)
        if one.timeline
        for rank in one.timeline.ranks
    }
    if not files:
        raise UserError(f"{run.path} holds no traced step to export: parbench run --only 'workload.*' measures some")
    return files


def _traces(run: Run) -> Traces:
    shown = [row for row in summarize(run).rows if row.metrics]
    found, traced = pipelines(shown), traced_steps(run, shown)
    names, labels = schedule_labels(found), _labels(shown)
    told = (*_told_pipelines(found, names), *_told_steps(traced, labels))
    left_out = {names[one.row.case.id]: reason for one in found if (reason := why_not(one))}
    left_out |= {labels[one.row.case.id]: one.why_not for one in traced if one.why_not}
    if not told:
        reasons = [f"{label}: {reason}" for label, reason in left_out.items()] or unreadable(shown, read_pipeline)
        why = reasons[0] if reasons else "no case with a valid measurement left one, as training steps do"
        raise UserError(f"{run.path} holds no timeline to export: {why}")
    return Traces(run=run, told=told, left_out=left_out)


def _labels(rows: Sequence[Row]) -> dict[str, str]:
    return short_labels([row for row in rows if not row.is_communication])


def _told_pipelines(found: Sequence[Pipeline], names: dict[str, str]) -> Iterator[Told]:
    for one in found:
        if not why_not(one):
            yield Told(
                case_id=one.row.case.id,
                label=names[one.row.case.id],
                num_processes=2 * one.facts.ranks,
                events=partial(pipeline_events, one),
                clock=pipeline_clock(one),
            )


def _told_steps(traced: Sequence[Traced], labels: dict[str, str]) -> Iterator[Told]:
    for one in traced:
        if one.timeline is not None:
            clock: dict[str, Any] = {
                "method": one.timeline.clock,
                "uncertainty_seconds": one.timeline.uncertainty_seconds,
                "launch": one.launch + 1,
            }
            yield Told(
                case_id=one.row.case.id,
                label=labels[one.row.case.id],
                num_processes=len(one.timeline.ranks),
                events=partial(step_events, one.timeline),
                clock=clock,
            )


def _document(traces: Traces, told: Sequence[Told]) -> bytes:
    events: list[Event] = []
    first = 0
    for one in told:
        events += one.events(first, f"{one.label}: " if len(told) > 1 else "")
        first += one.num_processes
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": traces.run.info.id,
            "parbench": traces.run.info.parbench,
            "clocks": {one.label: one.clock for one in told},
            "left_out": traces.left_out,
        },
    }
    return msgspec.json.encode(document) + b"\n"


_FIRST_COMM = 8
_THREADS = {PHASE: 1, COMPUTE: 2, COPY: 3}
_CATEGORIES = {PHASE: "user_annotation", COMPUTE: "kernel", COPY: "gpu_memcpy"}
# by these beginnings of names, HolisticTraceAnalysis tells communication and copies from arithmetic
_COMM, _COPY = "ncclDevKernel_", "Memcpy "


def step_events(timeline: Timeline, first_pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield a step's events, process by process, names first; times in us since the first rank began."""
    for place, rank in enumerate(timeline.ranks):
        yield from rank_events(rank, first_pid + place, prefix)


def rank_events(rank: RankTimeline, pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield one rank's events: those of a process."""
    yield _named("process_name", pid, name=f"{prefix}rank {rank.rank}")
    yield _named("process_sort_index", pid, sort_index=pid)
    comm = _FIRST_COMM
    for stream, intervals in by_stream(rank).items():
        split = lanes(intervals)
        for number, lane in enumerate(split, start=1):
            tid = _THREADS.get(stream, comm) if number == 1 else comm
            comm += tid >= _FIRST_COMM
            more = f" ({number} of {len(split)})" if len(split) > 1 else ""
            yield from _thread(pid, tid, stream, f"{stream_words(stream)}{more}", lane)


def for_analysis(rank: RankTimeline) -> Event:
    """Return one rank's document as HolisticTraceAnalysis reads it: kernels told apart by their names."""
    events = [_as_kernel(event) for event in rank_events(rank, rank.rank)]
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank.rank}, "traceEvents": events}


def _thread(pid: int, tid: int, stream: str, name: str, lane: Sequence[Interval]) -> Iterator[Event]:
    yield _named("thread_name", pid, tid, name=name)
    yield _named("thread_sort_index", pid, tid, sort_index=tid)
    axis = axis_of(stream)
    # a phase is the host's: with a stream, HolisticTraceAnalysis would take it for a kernel
    args = ({} if stream == PHASE else {"stream": tid}) | ({} if axis is None else {"axis": axis})
    for one in lane:
        # rounded by its ends, not its length, so that neighbours cannot come to overlap
        start, stop = round(one.start_us, 3), round(one.stop_us, 3)
        yield {
            "ph": "X",
            "name": one.name,
            "cat": _CATEGORIES.get(stream, "communication"),
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": round(stop - start, 3),
            "args": args,
        }


def _named(what: str, pid: int, tid: int | None = None, **args: Any) -> Event:
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **place, "args": args}


def _as_kernel(event: Event) -> Event:
    category = event.get("cat")
    if category == "communication":
        return {**event, "cat": "kernel", "name": f"{_COMM}{event['name']}"}
    return {**event, "name": f"{_COPY}{event['name']}"} if category == "gpu_memcpy" else event


_ACTIONS, _CAUSES = (1, "pipeline"), (2, "idle causes")


def why_not(one: Pipeline) -> str:
    """Return why a pipeline's ranks cannot be drawn on one axis of time, empty if they can."""
    if one.facts.measured is None:
        functional = next((f": {note}" for note in one.row.notes if note.startswith(FUNCTIONAL_ONLY)), "")
        return f"the record has no measured timeline{functional}"
    if not one.facts.clock:
        return "the record names no clock that its ranks share, and ranks on different clocks must not be merged"
    return ""


def pipeline_clock(one: Pipeline) -> Event:
    """Return what is known of the clock that the ranks share."""
    return {
        "method": one.facts.clock,
        "uncertainty_seconds": one.facts.clock_uncertainty_seconds,
        "launch": one.launch + 1,
    }


def pipeline_events(one: Pipeline, first: int, start: str = "") -> Iterator[Event]:
    """Yield a case's events from process ``first`` on: each process's names, then what it did, in order of time."""
    ranks = one.facts.ranks
    for rank in range(ranks):
        idle = [gap for gap in one.facts.idle or () if gap.rank == rank]
        yield from _process(first + rank, f"{start}rank {rank}")
        yield from _pipeline_thread(
            first + rank, _ACTIONS, one.facts.measured[rank] if one.facts.measured else (), _of_action
        )
        yield from _pipeline_thread(first + rank, _CAUSES, idle, _of_idle)
    for rank, ran in enumerate(one.facts.predicted or ()):
        yield from _process(first + ranks + rank, f"{start}rank {rank} (predicted)")
        yield from _pipeline_thread(first + ranks + rank, _ACTIONS, ran, _of_action)


def _process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _pipeline_thread(
    pid: int, thread: tuple[int, str], told: Sequence[Ran] | Sequence[Idle], more: Callable[[Any], Event]
) -> Iterator[Event]:
    """Yield a thread's name and its complete events; a thread without any has no name either."""
    tid, name = thread
    if told:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for one in told:
        yield {"ph": "X", "pid": pid, "tid": tid, "ts": one.start_us, "dur": one.stop_us - one.start_us, **more(one)}


def _of_action(ran: Ran) -> Event:
    return {"name": ran.name, "cat": ran.action.kind, "args": asdict(ran.action)}


def _of_idle(idle: Idle) -> Event:
    return {"name": idle.cause, "cat": "idle", "args": {"cause": idle.cause}}
