"""Exports the timelines of a run as Chrome trace events, for Perfetto and HTA.

HTA is HolisticTraceAnalysis. Ranks are processes and streams are threads. All ranks of a step have
one clock, and each case begins at 0 us.
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
"""An event of the Chrome trace format: its fields by name."""


_CATEGORIES = {PHASE: "user_annotation", COPY: "gpu_memcpy"}
"""The category of events, keyed by stream. Those of other streams are kernels."""
_PREFIXES = {PHASE: "", COMPUTE: "", COPY: "Memcpy "}
"""The prefix of the names of events, keyed by stream, by which HTA recognizes their kind."""
_COMM_PREFIX = "ncclDevKernel_"
"""The prefix of the names of events on all other streams, which communicate."""


class _CaseTrace(NamedTuple):
    """The events of one case: the timelines of all its ranks."""

    label: str
    """The label of the case."""
    clock: Event
    """The fields ``method``, ``uncertainty_seconds`` and ``repetition`` (from 1) of the clock."""
    processes: Mapping[str, Sequence[Event]]
    """The events of each rank without the process id, keyed by the name of the rank's process.

    A rank of a pipeline has a second process for its predicted timeline.
    """


def render_trace(data: RunData) -> bytes:
    """Return a JSON document of Chrome trace events: the timelines of steps.

    Only steps are included whose ranks share a clock.
    ``otherData.omissions`` has the reason for each other step, keyed by the label of the case.
    Raises ``UserError`` if no case has such a timeline.
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
    """Return a JSON document for each rank of each profiled step, keyed by file name, for HTA.

    The name has a folder for each case: ``CASE/rank-0.json``. Raises ``UserError`` if the run has
    no profiled step.
    """
    files = {}
    for step in data.timelines:
        for rank in step.timeline.ranks if step.timeline else ():
            name = f"{make_file_name(step.result.case.id)}/rank-{rank.rank}.json"
            process = {f"rank {rank.rank}": list(_make_rank_events(rank))}
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
    """Return the timelines of steps, and the reasons why other steps have no timeline.

    A timeline needs a clock that all ranks share. The reasons are sentences, keyed by the label of
    the case. Raises ``UserError`` if no case has a timeline.
    """
    traces = []
    omissions = {}
    for result in data.steps:
        label = data.labels[result.case.id]
        repetition, details = find_details(result, PipelineDetails)
        if isinstance(details, str):
            omissions[label] = details
        elif details.measured is None or not details.clock:
            problem = "the record has no measured timeline on a clock that its ranks share"
            omissions[label] = details.why_not_measured or problem
        else:
            clock = {
                "method": details.clock,
                "uncertainty_seconds": details.clock_uncertainty_seconds,
                "repetition": repetition + 1,
            }
            traces.append(_CaseTrace(label, clock, _list_pipeline_processes(details)))
    for step in data.timelines:
        label = data.labels[step.result.case.id]
        timeline = step.timeline
        if timeline is None:
            omissions[label] = step.problem
            continue
        clock = {
            "method": timeline.clock,
            "uncertainty_seconds": timeline.uncertainty_seconds,
            "repetition": step.repetition + 1,
        }
        processes = {f"rank {rank.rank}": list(_make_rank_events(rank)) for rank in timeline.ranks}
        traces.append(_CaseTrace(label, clock, processes))
    if not traces:
        reasons = [f"{label}: {problem}" for label, problem in omissions.items()]
        reasons.append("only training steps with a valid measurement have one")
        raise UserError(f"{data.run.path} contains no timeline to export: {reasons[0]}")
    return traces, omissions


def _number_processes(
    processes: Mapping[str, Sequence[Event]], first_pid: int, prefix: str = ""
) -> Iterator[Event]:
    """Yield the events of all processes with their ids, after events that set their names.

    Args:
        processes: the events of each process without an id, keyed by its name.
        first_pid: the id of the first process. The others follow.
        prefix: a text before the name of each process.
    """
    for pid, (name, events) in enumerate(processes.items(), start=first_pid):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{prefix}{name}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for event in events:
            yield {**event, "pid": pid}


def _name_thread(tid: int, name: str) -> Iterator[Event]:
    """Yield the events that set the name of a thread, and sort threads by their ids."""
    yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _make_rank_events(rank: RankTimeline) -> Iterator[Event]:
    """Yield the events of one rank in a step, with times in us since the first rank began the step.

    Each stream is a thread. A stream with overlapping intervals becomes several threads.
    """
    tid = 0
    for stream, intervals in group_by_stream(rank).items():
        prefix = _PREFIXES.get(stream, _COMM_PREFIX)
        category = _CATEGORIES.get(stream, "kernel")
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
                    "name": f"{prefix}{interval.name}",
                    "cat": category,
                    "args": args,
                }


def _list_pipeline_processes(details: PipelineDetails) -> dict[str, list[Event]]:
    """Return the events of each rank's pipeline actions, keyed by the name of a process.

    The measured timelines of all ranks come first (``rank 0``), then the predicted ones (``rank 0
    (predicted)``).
    """
    processes = {}
    for suffix, schedule in (("", details.measured), (" (predicted)", details.predicted)):
        for rank, actions in enumerate(schedule or ()):
            processes[f"rank {rank}{suffix}"] = list(_make_action_events(actions))
    return processes


def _make_action_events(actions: Sequence[TimedAction]) -> Iterator[Event]:
    """Yield an event for each pipeline action of a rank, such as a forward, with times in us."""
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
