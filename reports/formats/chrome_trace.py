"""The timelines of a run as Chrome's trace events, for Perfetto, chrome://tracing and HolisticTraceAnalysis. Pure.

Ranks are processes and streams threads, all ranks of a step on one clock; each case begins at 0 us.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from parbench.bench.files import make_file_name
from parbench.bench.results.details import TimedAction
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.analysis.labels import short_labels
from parbench.reports.analysis.summary import summarize, unreadable
from parbench.reports.tables.pipelines import (
    PipelineResult,
    label_schedules,
    read_pipeline,
    read_pipelines,
)
from parbench.reports.timelines import (
    get_axis,
    group_by_stream,
    load_step_timelines,
    name_stream,
    split_into_lanes,
)

Event = dict[str, Any]
# by stream: thread, category, and the beginning of names by which HolisticTraceAnalysis tells it from arithmetic
_STREAMS = {
    PHASE: (1, "user_annotation", ""),
    COMPUTE: (2, "kernel", ""),
    COPY: (3, "gpu_memcpy", "Memcpy "),
}


class _Told(NamedTuple):
    """A case that can be drawn: its events from a process id on, with a prefix to its processes' names."""

    case_id: str
    label: str
    num_processes: int
    events: Callable[[int, str], Iterator[Event]]
    clock: str | None
    uncertainty_seconds: float | None
    repetition: int


def render_trace(run: Run) -> bytes:
    """Return one document with every step whose ranks share a clock, in us; ``UserError`` says why there is none."""
    return _document(run, *_told(run))


def render_traces(run: Run) -> dict[str, bytes]:
    """Return a document for each case, by the name of its file; ``UserError`` as for one document."""
    told, left_out = _told(run)
    return {f"{make_file_name(one.case_id)}.json": _document(run, [one], left_out) for one in told}


def render_for_analysis(run: Run) -> dict[str, bytes]:
    """Return a document of each rank and traced step (pipelines know no streams); ``UserError`` if none left one."""
    shown = [row for row in summarize(run).rows if row.metrics]
    files = {
        f"{make_file_name(one.result.case.id)}/rank-{rank.rank}.json": msgspec.json.encode(
            for_analysis(rank)
        )
        + b"\n"
        for one in load_step_timelines(run, shown)
        if one.timeline
        for rank in one.timeline.ranks
    }
    if not files:
        raise UserError(
            f"{run.path} holds no traced step to export: parbench run --only 'workload.*' measures some"
        )
    return files


def for_analysis(rank: RankTimeline) -> Event:
    """Return one rank's document as HolisticTraceAnalysis reads it: kernels told apart by their names."""
    events = list(_rank_events(rank, rank.rank, for_analysis=True))
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank.rank}, "traceEvents": events}


def _told(run: Run) -> tuple[list[_Told], dict[str, str]]:
    shown = [row for row in summarize(run).rows if row.metrics]
    found, traced = read_pipelines(shown), load_step_timelines(run, shown)
    names, labels = (
        label_schedules(found),
        short_labels([row for row in shown if not row.is_communication]),
    )
    told, left_out = list[_Told](), dict[str, str]()
    for one in found:
        case_id, details = one.result.case.id, one.details
        if reason := _why_not(one):
            left_out[names[case_id]] = reason
            continue
        events, clock = (
            partial(pipeline_events, one),
            (details.clock, details.clock_uncertainty_seconds),
        )
        told.append(
            _Told(case_id, names[case_id], 2 * details.ranks, events, *clock, one.repetition)
        )
    for step in traced:
        case_id, timeline = step.result.case.id, step.timeline
        if timeline is None:
            left_out[labels[case_id]] = step.problem
            continue
        events, clock = (
            partial(step_events, timeline),
            (timeline.clock, timeline.uncertainty_seconds),
        )
        told.append(
            _Told(case_id, labels[case_id], len(timeline.ranks), events, *clock, step.repetition)
        )
    if not told:
        reasons = [f"{label}: {reason}" for label, reason in left_out.items()] or unreadable(
            shown, read_pipeline
        )
        why = (
            reasons[0]
            if reasons
            else "no case with a valid measurement left one, as training steps do"
        )
        raise UserError(f"{run.path} holds no timeline to export: {why}")
    return told, left_out


def _why_not(one: PipelineResult) -> str:
    if one.details.measured is None:
        reason = f": {one.details.why_not_measured}" if one.details.why_not_measured else ""
        return f"the record has no measured timeline{reason}"
    if not one.details.clock:
        return "the record names no clock that its ranks share, and ranks on different clocks must not be merged"
    return ""


def _document(run: Run, told: Sequence[_Told], left_out: dict[str, str]) -> bytes:
    events, first = list[Event](), 0
    for one in told:
        events += one.events(first, f"{one.label}: " if len(told) > 1 else "")
        first += one.num_processes
    clocks = {
        one.label: {
            "method": one.clock,
            "uncertainty_seconds": one.uncertainty_seconds,
            "repetition": one.repetition + 1,
        }
        for one in told
    }
    about = {
        "run": run.info.id,
        "parbench": run.info.parbench,
        "clocks": clocks,
        "left_out": left_out,
    }
    return (
        msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
        + b"\n"
    )


def _named(what: str, name: str, **place: int) -> Iterator[Event]:
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": f"{what}_sort_index",
        **place,
        "args": {"sort_index": place.get("tid", place["pid"])},
    }


def step_events(timeline: Timeline, first_pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield a step's events, process by process, names first; times in us since the first rank began."""
    for pid, rank in enumerate(timeline.ranks, start=first_pid):
        yield from _rank_events(rank, pid, prefix)


def _rank_events(
    rank: RankTimeline, pid: int, prefix: str = "", *, for_analysis: bool = False
) -> Iterator[Event]:
    yield from _named("process", f"{prefix}rank {rank.rank}", pid=pid)
    comm = 8  # the next thread of communication
    for stream, intervals in group_by_stream(rank).items():
        other = (comm, "kernel" if for_analysis else "communication", "ncclDevKernel_")
        thread, category, beginning = _STREAMS.get(stream, other)
        start_of_name = beginning if for_analysis else ""
        split, axis = split_into_lanes(intervals), get_axis(stream)
        for number, lane in enumerate(split, start=1):
            tid = thread if number == 1 else comm
            comm += tid == comm
            more = f" ({number} of {len(split)})" if len(split) > 1 else ""
            yield from _named("thread", f"{name_stream(stream)}{more}", pid=pid, tid=tid)
            # a phase is the host's: with a stream, HolisticTraceAnalysis would take it for a kernel
            args = ({} if stream == PHASE else {"stream": tid}) | (
                {} if axis is None else {"axis": axis}
            )
            for one in lane:
                # rounded by its ends, not its length, so that neighbours cannot come to overlap
                start, stop = round(one.start_us, 3), round(one.stop_us, 3)
                place = {
                    "pid": pid,
                    "tid": tid,
                    "ts": start,
                    "dur": round(stop - start, 3),
                    "args": args,
                }
                yield {"ph": "X", "name": start_of_name + one.name, "cat": category, **place}


def pipeline_events(one: PipelineResult, first: int, start: str = "") -> Iterator[Event]:
    details = one.details
    for pid, ran in enumerate(details.measured or (), start=first):
        yield from _named("process", f"{start}rank {pid - first}", pid=pid)
        yield from _work(pid, ran)
    for rank, ran in enumerate(details.predicted or ()):
        pid = first + details.ranks + rank
        yield from _named("process", f"{start}rank {rank} (predicted)", pid=pid)
        yield from _work(pid, ran)


def _work(pid: int, actions: Sequence[TimedAction]) -> Iterator[Event]:
    if actions:
        yield from _named("thread", "pipeline", pid=pid, tid=1)
    for one in actions:
        action = one.action
        parts = {"stage": action.stage, "kind": action.kind, "microbatch": action.microbatch}
        yield {
            "ph": "X",
            "pid": pid,
            "tid": 1,
            "ts": one.start_us,
            "dur": one.stop_us - one.start_us,
            "name": one.name,
            "cat": action.kind,
            "args": parts,
        }
