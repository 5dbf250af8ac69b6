"""Exports the timelines of a run as Chrome trace events, for Perfetto.

Ranks are processes and streams are threads. All ranks of a step have
one clock, and each case begins at 0 us.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from parbench.bench.results.details import PipelineDetails, TimedAction
from parbench.bench.results.records import COPY, PHASE, RankTimeline
from parbench.bench.text import UserError
from parbench.reports.analysis.steps import find_details
from parbench.reports.analysis.timelines import (
    group_by_stream,
    name_stream,
    split_into_lanes,
)
from parbench.reports.run_data import RunData

Event = dict[str, Any]
"""An event of the Chrome trace format: its fields by name."""


_CATEGORIES = {PHASE: "user_annotation", COPY: "gpu_memcpy"}
"""The category of events, keyed by stream. Those of other streams are kernels."""


def render_trace(data: RunData) -> bytes:
    """Return the timelines of a run's steps as Chrome trace events: an encoded JSON document.

    It includes only profiled steps whose ranks share a clock. Raises ``UserError`` for a run
    without such a step.
    """
    events: list[Event] = []
    for pid, (name, rank_events) in enumerate(_list_processes(data)):
        events += _make_process(pid, name, rank_events)
    if not events:
        raise UserError(
            f"{data.run.path} contains no timeline to export: "
            "only profiled training steps on a common clock have one"
        )
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"parbench": data.run.info.parbench},
    }
    return msgspec.json.encode(document) + b"\n"


def _list_processes(data: RunData) -> Iterator[tuple[str, Iterator[Event]]]:
    """Yield (name, events) for each rank of each profiled step whose ranks share a clock.

    Each pair becomes a process of the Chrome trace. A name is, for example, ``step.ddp: rank 0``.
    The events do not have a process id (``pid``) yet.
    """
    for result in data.steps:
        _, details = find_details(result, PipelineDetails)
        if details and details.clock:
            for rank, actions in enumerate(details.measured or ()):
                name = f"{data.labels[result.case.id]}: rank {rank}"
                yield name, _make_action_events(actions)
    for step in data.timelines:
        for timeline in step.timeline.ranks if step.timeline else ():
            name = f"{data.labels[step.result.case.id]}: rank {timeline.rank}"
            yield name, _make_rank_events(timeline)


def _make_process(pid: int, name: str, events: Iterable[Event]) -> Iterator[Event]:
    """Yield an event that sets the name of a process, then the given ``events``.

    All events get the process id ``pid``.
    """
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for event in events:
        yield {**event, "pid": pid}


def _name_thread(tid: int, name: str) -> Event:
    """Return the event that sets the name of a thread."""
    return {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}


def _make_rank_events(rank: RankTimeline) -> Iterator[Event]:
    """Yield the events of one rank in a step, with times in us since the first rank began the step.

    Each stream is a thread. A stream with overlapping intervals becomes several threads.
    """
    tid = 0
    for stream, intervals in group_by_stream(rank).items():
        category = _CATEGORIES.get(stream, "kernel")
        lanes = split_into_lanes(intervals)
        for number, lane in enumerate(lanes, start=1):
            tid += 1
            suffix = f" ({number} of {len(lanes)})" if len(lanes) > 1 else ""
            yield _name_thread(tid, f"{name_stream(stream)}{suffix}")
            for interval in lane:
                # Both ends are rounded, so that neighbors do not overlap.
                start, stop = round(interval.start_us, 3), round(interval.stop_us, 3)
                yield {
                    "ph": "X",
                    "tid": tid,
                    "ts": start,
                    "dur": round(stop - start, 3),
                    "name": interval.name,
                    "cat": category,
                }


def _make_action_events(actions: Sequence[TimedAction]) -> Iterator[Event]:
    """Yield the events of a rank's pipeline actions, such as a forward, with times in us.

    The first event names the thread of the actions. Nothing is yielded without actions.
    """
    if actions:
        yield _name_thread(1, "pipeline")
    for timed in actions:
        yield {
            "ph": "X",
            "tid": 1,
            "ts": timed.start_us,
            "dur": timed.stop_us - timed.start_us,
            "name": timed.name,
            "cat": timed.action.kind,
        }
