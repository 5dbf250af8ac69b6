"""The traced steps of a run: which launch tells of each, and whether its ranks can be drawn on one axis of time. Pure.

Communication of one axis may overlap itself, so it is spread over lanes in which nothing overlaps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.results.records import COMM, COMPUTE, COPY, PHASE, Arrival, Interval, RankTimeline, Record, Timeline
from bench.results.runs import Run, load_rank_samples, load_timeline
from bench.results.stats import median
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
    return tuple(found for row in rows if (found := _traced(run, row)) is not None)


def busy_ranks(traced: Sequence[Traced]) -> tuple[Busy, ...]:
    """Return a line for each rank of each step that can be drawn."""
    return tuple(_busy(one, rank) for one in traced if one.timeline for rank in one.timeline.ranks)


def lanes(intervals: Iterable[Interval]) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals in as few lanes as hold them without overlap, each in order of time."""
    found: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda one: (one.start_us, one.stop_us)):
        free = next((lane for lane in found if lane[-1].stop_us <= interval.start_us), None)
        if free is None:
            found.append([interval])
        else:
            free.append(interval)
    return tuple(map(tuple, found))


def by_stream(rank: RankTimeline) -> dict[str, list[Interval]]:
    """Return a rank's intervals by stream, in the order in which streams are shown."""
    order, found = {PHASE: 0, COMPUTE: 1, COPY: 2}, dict[str, list[Interval]]()
    for interval in sorted(rank.intervals, key=lambda interval: order.get(interval.stream, 3)):
        found.setdefault(interval.stream, []).append(interval)
    return found


def stream_words(stream: str) -> str:
    """Return a stream as tables and legends call it: ``exposed dp`` there is part of ``comm dp`` here."""
    return {PHASE: "phases", COMPUTE: "compute", COPY: "copies"}.get(stream, stream)


def axis_of(stream: str) -> str | None:
    """Return the mesh's axis of a stream of communication, None for any other."""
    start = f"{COMM} "
    return stream.removeprefix(start) if stream.startswith(start) else None


def covered_us(intervals: Iterable[Interval]) -> float:
    """Return the microseconds that the intervals' union covers."""
    covered, end = 0.0, float("-inf")
    for one in sorted(intervals, key=lambda one: one.start_us):
        covered += max(0.0, one.stop_us - max(end, one.start_us))
        end = max(end, one.stop_us)
    return covered


def _traced(run: Run, row: Row) -> Traced | None:
    for record in row.measured:
        try:
            timeline = load_timeline(run, record)
        except UserError as error:
            return Traced(row=row, launch=record.launch, timeline=None, why_not=str(error))
        if timeline is not None and not timeline.clock:
            return Traced(row=row, launch=record.launch, timeline=None, why_not=NO_CLOCK)
        if timeline is not None:
            return Traced(row=row, launch=record.launch, timeline=timeline)
    return None


def _busy(traced: Traced, rank: RankTimeline) -> Busy:
    streams = by_stream(rank)
    phases: dict[str, float] = {}
    for one in streams.pop(PHASE, []):
        phases[one.name] = phases.get(one.name, 0.0) + (one.stop_us - one.start_us) / 1e6
    return Busy(
        traced=traced,
        rank=rank.rank,
        wall_seconds=(rank.stop_us - rank.start_us) / 1e6,
        by_stream={stream: covered_us(intervals) / 1e6 for stream, intervals in streams.items()},
        by_phase=phases,
    )


MOST_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Late:
    """A row with the seconds by which each rank arrives after the first: medians, over launches that of their medians.

    ``arrival`` is what the first launch that knows it says of the last rank; without readable samples no rank is known.
    """

    row: Row
    arrival: Arrival
    seconds_by_rank: Mapping[int, float]


def late_rows(run: Run, rows: Iterable[Row]) -> tuple[Late, ...]:
    """Return the rows with the largest skew that know who was late, in their own order."""
    known = [row for row in rows if _arrival(row) is not None and row.value("skew") is not None]
    most = sorted(known, key=lambda row: -(row.value("skew") or 0.0))[:MOST_ROWS]
    kept = {row.case.id for row in most}
    return tuple(_late(run, row) for row in known if row.case.id in kept)


def _arrival(row: Row) -> Arrival | None:
    return next((record.arrival for record in row.measured if record.arrival), None)


def _late(run: Run, row: Row) -> Late:
    arrival = _arrival(row)
    assert arrival is not None
    launches = [found for record in row.measured if (found := _read(run, record))]
    ranks = dict.fromkeys(rank for launch in launches for rank in launch)
    seconds = {rank: median([launch[rank] for launch in launches if rank in launch]) for rank in sorted(ranks)}
    return Late(row=row, arrival=arrival, seconds_by_rank=seconds)


def _read(run: Run, record: Record) -> dict[int, float]:
    """Return each rank's median lateness in one launch; nothing where no samples can be read."""
    try:
        samples = load_rank_samples(run, record)
    except UserError:
        return {}
    if "arrival_ns" not in samples:
        return {}
    late = np.median(samples["arrival_ns"] - samples["arrival_ns"].min(axis=0), axis=1) / 1e9
    return dict(zip(samples["ranks"].tolist(), late.tolist(), strict=True))
