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
    repetition: int
    """The index of the repetition, from 0."""
    timeline: Timeline | None
    """The intervals of all ranks on one clock, None if they cannot be drawn."""
    problem: str = ""
    """The reason why the timeline cannot be drawn, empty if it can."""


def load_step_timelines(run: Run, results: Iterable[CaseResult]) -> tuple[StepTimeline, ...]:
    """Load a timeline for each step, from the first repetition that has traces.

    Steps without traces are left out. Unreadable traces give a ``StepTimeline`` with its
    ``problem``.
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

    A stream is ``phase``, ``compute``, ``copy``, or ``comm AXIS`` for the communication of a mesh
    axis. They are in this order. Streams without intervals are left out.
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
    """Return the name of a stream of a profiled step for tables and legends, such as ``copies``."""
    return {PHASE: "phases", COPY: "copies"}.get(stream, stream)


def get_axis(stream: str) -> str | None:
    """Return the mesh axis of a communication stream ``comm AXIS``, None for any other stream."""
    kind, _, axis = stream.partition(" ")
    return axis if kind == COMM else None


def convert_to_spans(intervals: Iterable[Interval | RankTimeline]) -> list[Span]:
    """Return the (start, end) of each interval in nanoseconds, as whole numbers.

    An end before its start is set to the start.
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


def summarize_calls(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row for the calls of each axis, operation and size in a profiled step.

    Only one rank is read: the rank that communicates for the least time, because it waits least. A
    row has ``axis``, ``operation``, ``size`` (bytes of one call, None if unknown), ``calls`` (their
    number), ``seconds`` (of all calls together), and ``exposed`` (the part that neither compute nor
    copies hide). Overlapping calls are counted once. The rows with most exposed seconds come first.
    """

    def sum_calls(rank: RankTimeline) -> float:
        """Return the seconds of a rank's communication, summed over mesh axes."""
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
