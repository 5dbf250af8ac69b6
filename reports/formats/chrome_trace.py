"""The timelines of a run as Chrome trace events, for Perfetto and HolisticTraceAnalysis (HTA).

Ranks are processes and streams are threads. All ranks of a step have one clock, and each case
begins at 0 us.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from parbench.bench.files import make_file_name
from parbench.bench.results.details import TimedAction
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline, Timeline
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.analysis.labels import short_labels
from parbench.reports.analysis.summary import Row, summarize, unreadable
from parbench.reports.tables.pipelines import (
    RecordedPipeline,
    read_pipeline,
)
from parbench.reports.timelines import (
    get_axis,
    group_by_stream,
    load_step_timelines,
    name_stream,
    split_into_lanes,
)

Event = dict[str, Any]


class _StreamFormat(NamedTuple):
    """The category of a stream's events, and the prefix by which HTA recognizes its kernels."""

    category: str
    hta_category: str
    hta_prefix: str


_STREAMS = {
    PHASE: _StreamFormat("user_annotation", "user_annotation", ""),
    COMPUTE: _StreamFormat("kernel", "kernel", ""),
    COPY: _StreamFormat("gpu_memcpy", "gpu_memcpy", "Memcpy "),
}
_COMM_STREAM = _StreamFormat("communication", "kernel", "ncclDevKernel_")


@dataclass(frozen=True, kw_only=True)
class _CaseTrace:
    """The events of a case, which begin at a process id and have a prefix in process names."""

    case_id: str
    label: str
    repetition: int
    num_processes: int
    make_events: Callable[[int, str], Iterator[Event]]
    clock: str | None
    uncertainty_seconds: float | None


def render_trace(run: Run) -> bytes:
    """Return one document with every case whose ranks share a clock.

    Raises ``UserError`` with the reason if there is none.
    """
    return _encode_document(run, *_list_case_traces(run))


def render_traces(run: Run) -> dict[str, bytes]:
    """Return a document for each case by the name of its file. Raises as ``render_trace``."""
    traces, omissions = _list_case_traces(run)
    return {
        f"{make_file_name(trace.case_id)}.json": _encode_document(run, [trace], omissions)
        for trace in traces
    }


def render_for_analysis(run: Run) -> dict[str, bytes]:
    """Return a document for each rank and profiled step. Raises ``UserError`` if there is none."""
    files = {}
    for step in load_step_timelines(run, _list_measured_rows(run)):
        for rank in step.timeline.ranks if step.timeline else ():
            name = f"{make_file_name(step.result.case.id)}/rank-{rank.rank}.json"
            files[name] = msgspec.json.encode(make_rank_document(rank)) + b"\n"
    if not files:
        hint = "measure some with parbench run --only 'workload.*'"
        raise UserError(f"{run.path} contains no profiled step to export: {hint}")
    return files


def make_rank_document(rank: RankTimeline) -> Event:
    """Return the document of one rank for HTA, which recognizes kernels by their names."""
    events = list(_make_rank_events(rank, rank.rank, is_for_hta=True))
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank.rank}, "traceEvents": events}


def _list_measured_rows(run: Run) -> list[Row]:
    return [row for row in summarize(run).rows if row.metrics]


def _list_case_traces(run: Run) -> tuple[list[_CaseTrace], dict[str, str]]:
    """Return the cases with events, and the reason for each other one by its label."""
    rows = _list_measured_rows(run)
    traces: list[_CaseTrace] = []
    omissions: dict[str, str] = {}
    labels = short_labels([row for row in rows if not row.is_communication])
    for row in rows:
        pipeline = read_pipeline(row)
        if not isinstance(pipeline, RecordedPipeline):
            continue
        details, label = pipeline.details, labels[row.case.id]
        if details.measured is None:
            reason = f": {details.why_not_measured}" if details.why_not_measured else ""
            omissions[label] = f"the record has no measured timeline{reason}"
        elif not details.clock:
            omissions[label] = "the record does not name a clock that its ranks share"
        else:
            traces.append(
                _CaseTrace(
                    case_id=row.case.id,
                    label=label,
                    repetition=pipeline.repetition,
                    num_processes=2 * details.ranks,
                    make_events=partial(make_pipeline_events, pipeline),
                    clock=details.clock,
                    uncertainty_seconds=details.clock_uncertainty_seconds,
                )
            )
    for step in load_step_timelines(run, rows):
        label, timeline = labels[step.result.case.id], step.timeline
        if timeline is None:
            omissions[label] = step.problem
        else:
            traces.append(
                _CaseTrace(
                    case_id=step.result.case.id,
                    label=label,
                    repetition=step.repetition,
                    num_processes=len(timeline.ranks),
                    make_events=partial(make_step_events, timeline),
                    clock=timeline.clock,
                    uncertainty_seconds=timeline.uncertainty_seconds,
                )
            )
    if not traces:
        reasons = [f"{label}: {reason}" for label, reason in omissions.items()]
        reasons += unreadable(rows, read_pipeline)
        reasons.append("only training steps with a valid measurement have one")
        raise UserError(f"{run.path} contains no timeline to export: {reasons[0]}")
    return traces, omissions


def _encode_document(run: Run, traces: Sequence[_CaseTrace], omissions: Mapping[str, str]) -> bytes:
    events: list[Event] = []
    clocks = {}
    first_pid = 0
    for trace in traces:
        events += trace.make_events(first_pid, f"{trace.label}: " if len(traces) > 1 else "")
        first_pid += trace.num_processes
        clocks[trace.label] = {
            "method": trace.clock,
            "uncertainty_seconds": trace.uncertainty_seconds,
            "repetition": trace.repetition + 1,
        }
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.info.id,
            "parbench": run.info.parbench,
            "clocks": clocks,
            "left_out": omissions,
        },
    }
    return msgspec.json.encode(document) + b"\n"


def _name_process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _name_thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    yield {**place, "name": "thread_name", "args": {"name": name}}
    yield {**place, "name": "thread_sort_index", "args": {"sort_index": tid}}


def make_step_events(timeline: Timeline, first_pid: int, prefix: str = "") -> Iterator[Event]:
    """Yield the events of a step, in microseconds since its first rank began."""
    for pid, rank in enumerate(timeline.ranks, start=first_pid):
        yield from _make_rank_events(rank, pid, prefix)


def _make_rank_events(
    rank: RankTimeline, pid: int, prefix: str = "", *, is_for_hta: bool = False
) -> Iterator[Event]:
    yield from _name_process(pid, f"{prefix}rank {rank.rank}")
    tid = 0
    for stream, intervals in group_by_stream(rank).items():
        form = _STREAMS.get(stream, _COMM_STREAM)
        lane_list = split_into_lanes(intervals)
        for number, lane in enumerate(lane_list, start=1):
            tid += 1
            suffix = f" ({number} of {len(lane_list)})" if len(lane_list) > 1 else ""
            yield from _name_thread(pid, tid, f"{name_stream(stream)}{suffix}")
            args: dict[str, Any] = {}
            if stream != PHASE:  # HTA takes any event with a stream for a kernel.
                args["stream"] = tid
            axis = get_axis(stream)
            if axis is not None:
                args["axis"] = axis
            for interval in lane:
                # Both ends are rounded, so that neighbors do not overlap.
                start, stop = round(interval.start_us, 3), round(interval.stop_us, 3)
                yield {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": start,
                    "dur": round(stop - start, 3),
                    "name": f"{form.hta_prefix if is_for_hta else ''}{interval.name}",
                    "cat": form.hta_category if is_for_hta else form.category,
                    "args": args,
                }


def make_pipeline_events(
    pipeline: RecordedPipeline, first_pid: int, prefix: str = ""
) -> Iterator[Event]:
    """Yield the actions of a pipeline: a process for each rank, measured and then predicted."""
    details = pipeline.details
    schedules = (
        ("", first_pid, details.measured or ()),
        (" (predicted)", first_pid + details.ranks, details.predicted or ()),
    )
    for suffix, schedule_pid, schedule in schedules:
        for rank, actions in enumerate(schedule):
            pid = schedule_pid + rank
            yield from _name_process(pid, f"{prefix}rank {rank}{suffix}")
            yield from _make_action_events(pid, actions)


def _make_action_events(pid: int, actions: Sequence[TimedAction]) -> Iterator[Event]:
    if actions:
        yield from _name_thread(pid, 1, "pipeline")
    for timed in actions:
        action = timed.action
        yield {
            "ph": "X",
            "pid": pid,
            "tid": 1,
            "ts": timed.start_us,
            "dur": timed.stop_us - timed.start_us,
            "name": timed.name,
            "cat": action.kind,
            "args": {
                "stage": action.stage,
                "kind": action.kind,
                "microbatch": action.microbatch,
            },
        }
