"""Timelines of profiled steps: loading them from a run's folder, and the times of their streams.

A stream is a sequence of intervals of one type on a rank: compute, copies, phases, or the
communication of one mesh axis.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parbench.bench.results.records import (
    COMM,
    COMPUTE,
    COPY,
    PHASE,
    Interval,
    RankTimeline,
    Timeline,
)
from parbench.bench.results.runs import Run, load_timeline
from parbench.bench.results.spans import Span, difference, length
from parbench.bench.text import UserError
from parbench.reports.analysis.case_results import CaseResult

_NO_SHARED_CLOCK = "its ranks have no common clock"


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The timeline of a training step in one profiled repetition, or the reason for its absence."""

    result: CaseResult
    """The result of the training step."""
    repetition: int
    """The index of the repetition, from 0."""
    timeline: Timeline | None
    """The intervals of all ranks on one clock, None if they cannot be drawn."""
    problem: str = ""
    """A clause with the reason why the timeline cannot be drawn, empty if it can be drawn."""


def load_step_timelines(run: Run, results: Iterable[CaseResult]) -> tuple[StepTimeline, ...]:
    """Load the timeline of each training step, from the first repetition that has one.

    ``results`` are the steps. Timelines are files in the folder of ``run``. Steps without a file
    are left out. If a file is unreadable or its ranks have no common clock, the field ``problem``
    has the reason.
    """
    timelines = []
    for result in results:
        for record in result.measured:
            timeline = None
            problem = ""
            try:
                timeline = load_timeline(run, record)
            except UserError as error:
                problem = str(error)
            if timeline and not timeline.clock:
                timeline = None
                problem = _NO_SHARED_CLOCK
            if timeline or problem:
                step = StepTimeline(
                    result=result, repetition=record.repetition, timeline=timeline, problem=problem
                )
                timelines.append(step)
                break
    return tuple(timelines)


def group_by_stream(rank: RankTimeline) -> dict[str, list[Interval]]:
    """Return the intervals of work of one rank in a profiled step, keyed by stream.

    The keys are ``phase``, ``compute``, ``copy``, and ``comm AXIS`` for the communication of each
    mesh axis, in this order. Streams without intervals are left out.
    """
    streams: dict[str, list[Interval]] = {
        PHASE: [],
        COMPUTE: [],
        COPY: [],
    }
    for interval in rank.intervals:
        streams.setdefault(interval.stream, []).append(interval)
    return {stream: intervals for stream, intervals in streams.items() if intervals}


def name_stream(stream: str) -> str:
    """Return the name of a stream for charts and trace viewers, such as ``copies`` for ``copy``."""
    return {PHASE: "phases", COPY: "copies"}.get(stream, stream)


def get_axis(stream: str) -> str | None:
    """Return the mesh axis of a communication stream ``comm AXIS``, None for any other stream."""
    kind, _, axis = stream.partition(" ")
    return axis if kind == COMM else None


def convert_to_spans(intervals: Iterable[Interval | RankTimeline]) -> list[Span]:
    """Return the (start, end) of each interval in nanoseconds since the first rank began the step.

    The interval of a ``RankTimeline`` is the step on its rank. An end before its start is set to
    the start.
    """
    return [
        (round(1e3 * interval.start_us), round(1e3 * max(interval.start_us, interval.stop_us)))
        for interval in intervals
    ]


def split_into_lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Distribute intervals over the fewest lists in which none overlap.

    Each list is in the order of time, so that a trace viewer can show it as one row.
    """
    lanes: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda interval: (interval.start_us, interval.stop_us)):
        free_lanes = (lane for lane in lanes if lane[-1].stop_us <= interval.start_us)
        lane = next(free_lanes, None)
        if lane is None:
            lanes.append([interval])
        else:
            lane.append(interval)
    return lanes


def measure_busy_seconds(rank: RankTimeline) -> dict[str, float]:
    """Return the busy seconds of one rank in a profiled step, keyed by stream.

    The keys are ``compute``, ``copy`` and ``comm AXIS``. Overlapping intervals are counted once.
    """
    return {
        stream: length(convert_to_spans(intervals)) / 1e9
        for stream, intervals in group_by_stream(rank).items()
        if stream != PHASE
    }


def measure_local_seconds(rank: RankTimeline) -> float:
    """Return the seconds of a profiled step in which a rank computes, copies or is idle.

    This is the step without exposed communication, in which the rank may wait for other ranks.
    """
    calls = convert_to_spans(call for call in rank.intervals if get_axis(call.stream))
    work = convert_to_spans(item for item in rank.intervals if item.stream in (COMPUTE, COPY))
    return length(difference(convert_to_spans([rank]), difference(calls, work))) / 1e9


def summarize_calls(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row for the communication calls of each axis, operation and size in a profiled step.

    Only one rank is read: the rank that communicates for the least time, because it waits least.
    The rows with most exposed seconds come first. A row is a dict with these keys:

    - ``axis``, ``operation``
    - ``size``: the bytes of one call, None if unknown
    - ``calls``: the number of calls
    - ``seconds``: the time in which at least one of the calls runs
    - ``exposed``: the part of ``seconds`` that neither compute nor copies hide
    """

    def sum_calls(rank: RankTimeline) -> float:
        """Return the seconds in which a rank communicates, summed over mesh axes."""
        busy = measure_busy_seconds(rank)
        return sum(seconds for stream, seconds in busy.items() if get_axis(stream))

    streams = group_by_stream(min(timeline.ranks, key=sum_calls))
    work = convert_to_spans([*streams.get(COMPUTE, []), *streams.get(COPY, [])])
    by_call: dict[tuple[str, str, int | None], list[Interval]] = {}
    for stream, intervals in streams.items():
        axis = get_axis(stream)
        for interval in intervals:
            if axis:
                key = (axis, interval.name, interval.num_bytes)
                by_call.setdefault(key, []).append(interval)
    rows = []
    for (axis, operation, num_bytes), calls in by_call.items():
        spans = convert_to_spans(calls)
        rows.append(
            {
                "axis": axis,
                "operation": operation,
                "size": num_bytes,
                "calls": len(calls),
                "seconds": length(spans) / 1e9,
                "exposed": length(difference(spans, work)) / 1e9,
            }
        )
    return sorted(rows, key=lambda row: (-row["exposed"], -row["seconds"]))
