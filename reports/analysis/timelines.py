"""The traced steps of a run: which launch tells of each, and whether its ranks can be drawn on one axis of time. Pure.

Communication of one axis may overlap itself, so it is spread over lanes in which nothing overlaps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench.results.records import COMM, COMPUTE, COPY, PHASE, Interval, RankTimeline, Timeline
from bench.results.runs import Run, load_timeline
from bench.text import UserError
from reports.analysis.summary import Row

NO_CLOCK = "the trace names no clock that its ranks share, and ranks on different clocks must not be merged"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A step's row with one launch's timeline of all ranks; ``why_not`` says why there is none to draw."""

    row: Row
    launch: int
    timeline: Timeline | None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """What one rank of a traced step was busy with, in seconds: each stream's union, and each phase's sum."""

    traced: Traced
    rank: int
    wall_seconds: float
    by_stream: Mapping[str, float]
    by_phase: Mapping[str, float]


def traced_steps(run: Run, rows: Iterable[Row]) -> tuple[Traced, ...]:
    """Return the rows of which some launch left a trace, the first such launch's; one that is damaged says so."""
    found: dict[str, Traced] = {}
    launches = ((row, record) for row in rows for record in row.measured)
    for row, record in launches:
        if row.case.id not in found:
            why_not = ""
            try:
                timeline = load_timeline(run, record)
            except UserError as error:
                timeline, why_not = None, str(error)
            if timeline and not timeline.clock:
                timeline, why_not = None, NO_CLOCK
            if timeline or why_not:
                found[row.case.id] = Traced(row=row, launch=record.launch, timeline=timeline, why_not=why_not)
    return tuple(found.values())


def timelines_of(run: Run, row: Row) -> tuple[tuple[int, Timeline], ...]:
    """Return each launch with its timeline, of those that left one which can be read."""
    found = []
    for record in row.measured:
        with suppress(UserError):
            found += [(record.launch, one)] if (one := load_timeline(run, record)) else []
    return tuple(found)


def busy_ranks(traced: Sequence[Traced]) -> tuple[Busy, ...]:
    found, drawn = [], [(one, rank) for one in traced if one.timeline for rank in one.timeline.ranks]
    for one, rank in drawn:
        streams, phases = by_stream(rank), defaultdict[str, float](float)
        for phase in streams.pop(PHASE, []):
            phases[phase.name] += (phase.stop_us - phase.start_us) / 1e6
        busy = {stream: covered_us(intervals) / 1e6 for stream, intervals in streams.items()}
        wall = (rank.stop_us - rank.start_us) / 1e6
        found.append(Busy(traced=one, rank=rank.rank, wall_seconds=wall, by_stream=busy, by_phase=phases))
    return tuple(found)


def lanes(intervals: Iterable[Interval]) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals in as few lanes as hold them without overlap, each in order of time."""
    found: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda one: (one.start_us, one.stop_us)):
        free = next((lane for lane in found if lane[-1].stop_us <= interval.start_us), [])
        found += [] if free else [free]
        free.append(interval)
    return tuple(map(tuple, found))


def by_stream(rank: RankTimeline) -> dict[str, list[Interval]]:
    """Return a rank's intervals by stream, in the order in which streams are shown."""
    found: dict[str, list[Interval]] = {PHASE: [], COMPUTE: [], COPY: []}
    for interval in rank.intervals:
        found.setdefault(interval.stream, []).append(interval)
    return {stream: intervals for stream, intervals in found.items() if intervals}


def stream_words(stream: str) -> str:
    """Return a stream as tables and legends call it: ``exposed dp`` there is part of ``comm dp`` here."""
    return {PHASE: "phases", COMPUTE: "compute", COPY: "copies"}.get(stream, stream)


def axis_of(stream: str) -> str | None:
    kind, _, axis = stream.partition(" ")
    return axis if kind == COMM else None


def covered_us(intervals: Iterable[Interval]) -> float:
    covered, end = 0.0, float("-inf")
    for one in sorted(intervals, key=lambda one: one.start_us):
        covered += max(0.0, one.stop_us - max(end, one.start_us))
        end = max(end, one.stop_us)
    return covered
