"""The timelines of a run as Chrome trace events, for Perfetto and HolisticTraceAnalysis (HTA).

Ranks are processes and streams are threads. All ranks of a step have one clock, and each case
begins at 0 us.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from parbench.bench.files import make_file_name
from parbench.bench.results.details import PipelineDetails, TimedAction
from parbench.bench.results.records import COMPUTE, COPY, PHASE, RankTimeline
from parbench.bench.text import UserError
from parbench.reports.analysis.steps import find_details
from parbench.reports.analysis.timelines import (
    get_axis,
    group_by_stream,
    name_stream,
    split_into_lanes,
)
from parbench.reports.run_data import RunData

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


class _CaseTrace(NamedTuple):
    """The timeline of a case."""

    label: str
    clock: Event
    """The method that compared the clocks of the ranks, and the repetition."""
    processes: Mapping[str, Sequence[Event]]
    """The events of each process by its name, without the process id."""


def render_trace(data: RunData) -> bytes:
    """Return one document with every case whose ranks share a clock.

    Raises ``UserError`` with the reason if there is none.
    """
    traces, omissions = _list_case_traces(data)
    events: list[Event] = []
    first_pid = 0
    for trace in traces:
        prefix = f"{trace.label}: " if len(traces) > 1 else ""
        events += _number_processes(trace.processes, first_pid, prefix)
        first_pid += len(trace.processes)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": data.run.info.id,
            "parbench": data.run.info.parbench,
            "clocks": {trace.label: trace.clock for trace in traces},
            "omissions": omissions,
        },
    }
    return msgspec.json.encode(document) + b"\n"


def render_for_analysis(data: RunData) -> dict[str, bytes]:
    """Return a document for each rank and profiled step. Raises ``UserError`` if there is none."""
    files = {}
    for step in data.timelines:
        for rank in step.timeline.ranks if step.timeline else ():
            name = f"{make_file_name(step.result.case.id)}/rank-{rank.rank}.json"
            process = {f"rank {rank.rank}": list(_make_rank_events(rank, is_for_hta=True))}
            document = {
                "schemaVersion": 1,
                "distributedInfo": {"rank": rank.rank},
                "traceEvents": list(_number_processes(process, first_pid=rank.rank)),
            }
            files[name] = msgspec.json.encode(document) + b"\n"
    if not files:
        hint = "measure some with parbench run 'workload.*'"
        raise UserError(f"{data.run.path} contains no profiled step to export: {hint}")
    return files


def _list_case_traces(data: RunData) -> tuple[list[_CaseTrace], dict[str, str]]:
    """Return the cases with a timeline, and the reasons for cases without one, keyed by label."""
    traces = []
    omissions = {}
    for result in data.steps:
        label = data.labels[result.case.id]
        repetition, details = find_details(result, PipelineDetails)
        if isinstance(details, str):
            omissions[label] = details
        elif details.measured is None:
            omissions[label] = details.why_not_measured or "the record has no measured timeline"
        elif not details.clock:
            omissions[label] = "the record does not name a clock that its ranks share"
        else:
            clock = _describe_clock(details.clock, details.clock_uncertainty_seconds, repetition)
            traces.append(_CaseTrace(label, clock, _list_pipeline_processes(details)))
    for step in data.timelines:
        label = data.labels[step.result.case.id]
        timeline = step.timeline
        if timeline is None:
            omissions[label] = step.problem
            continue
        clock = _describe_clock(timeline.clock, timeline.uncertainty_seconds, step.repetition)
        processes = {f"rank {rank.rank}": list(_make_rank_events(rank)) for rank in timeline.ranks}
        traces.append(_CaseTrace(label, clock, processes))
    if not traces:
        reasons = [f"{label}: {problem}" for label, problem in omissions.items()]
        reasons.append("only training steps with a valid measurement have one")
        raise UserError(f"{data.run.path} contains no timeline to export: {reasons[0]}")
    return traces, omissions


def _describe_clock(
    method: str | None, uncertainty_seconds: float | None, repetition: int
) -> Event:
    """Return the method that compared the clocks of the ranks, its error and the repetition."""
    return {
        "method": method,
        "uncertainty_seconds": uncertainty_seconds,
        "repetition": repetition + 1,
    }


def _number_processes(
    processes: Mapping[str, Sequence[Event]], first_pid: int, prefix: str = ""
) -> Iterator[Event]:
    """Yield the events of processes with their ids, after the name of each process."""
    for pid, (name, events) in enumerate(processes.items(), start=first_pid):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{prefix}{name}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for event in events:
            yield {**event, "pid": pid}


def _name_thread(tid: int, name: str) -> Iterator[Event]:
    """Yield the events that set the name of a thread and its place in the order of threads."""
    yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _make_rank_events(rank: RankTimeline, *, is_for_hta: bool = False) -> Iterator[Event]:
    """Yield the events of a rank in a step, in microseconds since the first rank began."""
    tid = 0
    for stream, intervals in group_by_stream(rank).items():
        form = _STREAMS.get(stream, _COMM_STREAM)
        args: dict[str, Any] = {}
        axis = get_axis(stream)
        if axis is not None:
            args["axis"] = axis
        lanes = split_into_lanes(intervals)
        for number, lane in enumerate(lanes, start=1):
            tid += 1
            suffix = f" ({number} of {len(lanes)})" if len(lanes) > 1 else ""
            yield from _name_thread(tid, f"{name_stream(stream)}{suffix}")
            if stream != PHASE:  # HTA takes any event with a stream for a kernel.
                args = {**args, "stream": tid}
            for interval in lane:
                # Both ends are rounded, so that neighbors do not overlap.
                start, stop = round(interval.start_us, 3), round(interval.stop_us, 3)
                yield {
                    "ph": "X",
                    "tid": tid,
                    "ts": start,
                    "dur": round(stop - start, 3),
                    "name": f"{form.hta_prefix if is_for_hta else ''}{interval.name}",
                    "cat": form.hta_category if is_for_hta else form.category,
                    "args": args,
                }


def _list_pipeline_processes(details: PipelineDetails) -> dict[str, list[Event]]:
    """Return the actions of each rank, measured and then predicted."""
    processes = {}
    for suffix, schedule in (("", details.measured), (" (predicted)", details.predicted)):
        for rank, actions in enumerate(schedule or ()):
            processes[f"rank {rank}{suffix}"] = list(_make_action_events(actions))
    return processes


def _make_action_events(actions: Sequence[TimedAction]) -> Iterator[Event]:
    """Yield an event for each action of a rank's pipeline, with times in microseconds."""
    if actions:
        yield from _name_thread(1, "pipeline")
    for timed in actions:
        action = timed.action
        yield {
            "ph": "X",
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
