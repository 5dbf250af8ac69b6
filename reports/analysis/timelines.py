"""Timelines of profiled steps: loading them from a run's folder, and the times of their streams.

A stream is a sequence of intervals of one type on a rank: compute, copies, phases, or the
communication of one mesh axis.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from parbench.bench.results.records import (
    COMM,
    COMPUTE,
    COPY,
    PHASE,
    Interval,
    RankTimeline,
    Record,
    Timeline,
)
from parbench.bench.results.runs import Run, load_timeline
from parbench.bench.results.spans import Span, difference, length
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.stragglers import Straggler, StragglerVote, elect_straggler

_MIN_SLOWDOWN = 1.1
"""The smallest ratio of a slow rank's computation to the median of the other ranks."""
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
        by_repetition = (_load_step_timeline(run, result, record) for record in result.measured)
        first = next((timeline for timeline in by_repetition if timeline), None)
        if first:
            timelines.append(first)
    return tuple(timelines)


def _load_step_timeline(run: Run, result: CaseResult, record: Record) -> StepTimeline | None:
    """Return the timeline of a step in one repetition, or the problem with its traces.

    None if the repetition has no traces.
    """
    problem = ""
    try:
        timeline = load_timeline(run, record)
    except UserError as error:
        timeline = None
        problem = str(error)
    if timeline and not timeline.clock:
        timeline = None
        problem = _NO_SHARED_CLOCK
    if timeline is None and not problem:
        return None
    return StepTimeline(
        result=result, repetition=record.repetition, timeline=timeline, problem=problem
    )


def group_by_stream(rank: RankTimeline) -> dict[str, list[Interval]]:
    """Return the intervals of work of one rank in a profiled step, keyed by stream.

    A stream is ``phase``, ``compute``, ``copy``, or ``comm AXIS`` for the communication of a mesh
    axis. They are in this order. Streams without intervals are left out.
    """
    streams: dict[str, list[Interval]] = {PHASE: [], COMPUTE: [], COPY: []}
    for interval in rank.intervals:
        streams.setdefault(interval.stream, []).append(interval)
    return {stream: intervals for stream, intervals in streams.items() if intervals}


def name_stream(stream: str) -> str:
    """Return the name of a stream or phase of a profiled step for tables and legends.

    ``copy`` becomes ``copies``, ``phase forward`` becomes ``forward``, ``comm dp`` is unchanged.
    """
    names = {PHASE: "phases", COMPUTE: "compute", COPY: "copies"}
    return names.get(stream, stream.removeprefix(f"{PHASE} "))


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
    """Return the busy seconds of one rank in a profiled step, keyed by stream and by phase.

    The keys are ``compute``, ``copy``, ``comm AXIS`` and ``phase NAME``. Overlapping intervals are
    counted once.
    """
    groups: dict[str, list[Interval]] = {}
    for stream, intervals in group_by_stream(rank).items():
        for interval in intervals:
            key = f"{PHASE} {interval.name}" if stream == PHASE else stream
            groups.setdefault(key, []).append(interval)
    return {key: length(convert_to_spans(intervals)) / 1e9 for key, intervals in groups.items()}


def summarize_calls(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row for the calls of each axis, operation and size in a profiled step.

    Only one rank is read: the rank whose calls take the least time, because it waits least in them.
    A row has ``axis``, ``operation``, ``size`` (bytes of one call, None if unknown), ``calls``
    (their number), ``seconds`` (of all calls together), and ``exposed`` (the part that neither
    compute nor copies hide). Overlapping calls are counted once. The rows with most exposed seconds
    come first.
    """
    by_rank = [_summarize_rank_calls(rank) for rank in timeline.ranks]
    rows = min(by_rank, key=lambda rows: sum(row["seconds"] for row in rows), default=[])
    return sorted(rows, key=lambda row: (-row["exposed"], -row["seconds"]))


def _summarize_rank_calls(rank: RankTimeline) -> list[dict[str, Any]]:
    """Return a row for the calls of each axis, operation and size of one rank.

    A row has the keys that ``summarize_calls`` lists. Rows are in the order of the first calls.
    """
    streams = group_by_stream(rank)
    work = convert_to_spans([*streams.get(COMPUTE, []), *streams.get(COPY, [])])
    rows = []
    for stream, intervals in streams.items():
        by_call: dict[tuple[str, int | None], list[Interval]] = {}
        for interval in intervals:
            by_call.setdefault((interval.name, interval.num_bytes), []).append(interval)
        for (operation, num_bytes), calls in by_call.items():
            spans = convert_to_spans(calls)
            rows.append(
                {
                    "axis": get_axis(stream),
                    "operation": operation,
                    "size": num_bytes,
                    "calls": len(calls),
                    "seconds": length(spans) / 1e9,
                    "exposed": length(difference(spans, work)) / 1e9,
                }
            )
    return [row for row in rows if row["axis"]]


def find_slow_computing_rank(run: Run, result: CaseResult) -> Straggler | None:
    """Return the rank that computes longest in more repetitions than chance explains.

    ``result`` is a training step. In the returned ``Straggler``, ``time_share`` is the rank's
    compute time over the median of the other ranks, and ``seconds`` is the difference of the two
    per step. Both are medians over repetitions. None if no rank exceeds this median by over 10 %.
    """
    votes: dict[int, list[StragglerVote]] = {}
    num_timelines = 0
    for record in result.measured:
        with suppress(UserError):
            timeline = load_timeline(run, record)
            if timeline:
                num_timelines += 1
                vote = _vote_for_slowest(timeline)
                if vote:
                    votes[record.repetition] = [vote]
    return elect_straggler(votes, num_timelines, result.world.size)


def _vote_for_slowest(timeline: Timeline) -> StragglerVote | None:
    """Return the rank that computes longest in one profiled step, with its delay.

    ``time_share`` of the result is the rank's compute time over the median of the other ranks, and
    ``seconds`` is the difference of the two. None if this ratio is at most 1.1.
    """
    seconds = {rank.rank: measure_busy_seconds(rank).get(COMPUTE, 0.0) for rank in timeline.ranks}
    if len(seconds) < 2:
        return None
    slowest = max(seconds, key=lambda rank: seconds[rank])
    others = median([value for rank, value in seconds.items() if rank != slowest])
    if not others or seconds[slowest] <= _MIN_SLOWDOWN * others:
        return None
    return StragglerVote(slowest, seconds[slowest] - others, seconds[slowest] / others)
