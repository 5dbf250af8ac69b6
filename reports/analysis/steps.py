"""Where a training step's time and memory went: its metrics by axis and by component, and its traced steps. Pure.

A traced step is that of one repetition; communication of one axis may overlap itself, so it is spread over lanes in
which
nothing overlaps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from parbench.bench.results.details import (
    COMPONENTS,
    BytesFormulaDetails,
    CommunicationDetails,
    CountedCall,
    MeshDetails,
    read_details,
)
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
from parbench.bench.results.spans import Span, length
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, format_size
from parbench.reports.analysis.fits import Curve, size_of
from parbench.reports.analysis.summary import Row, num_ranks
from parbench.reports.stragglers import Straggler, StragglerVote, elect_straggler

SOURCES = ("memory_formula", "memory_counted", "memory")
_AGREES, _LONGER = 0.1, 1.1
# other parameters, such as a load beside it or another reduction, make it another operation
_PLAIN = {"size_bytes", "dtype", "mode", "group", "group_index", "concurrent"}


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """A component of a step's memory: bytes by each of ``SOURCES``, formula, counted and measured; None is unknown."""

    row: Row
    component: str

    def num_bytes(self, source: str) -> float | None:
        return self.row.value(f"{source}.{self.component}")


def by_axis(row: Row, name: str) -> dict[str, float | None]:
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): metric.value
        for key, metric in row.metrics.items()
        if key.startswith(prefix)
    }


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if there is nothing to add, or any of it is unknown."""
    known = list(values)
    return None if None in known or not known else sum(value or 0.0 for value in known)


def furthest_from_one(ratios: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return the axis whose ratio is furthest from 1, and that ratio; None if all are unknown."""
    known = [(axis, ratio) for axis, ratio in ratios.items() if ratio is not None]
    return max(known, key=lambda one: abs(one[1] - 1), default=None)


def exposed_seconds(row: Row) -> float | None:
    return total(by_axis(row, "exposed_comm").values())


def parts(row: Row) -> dict[str, float]:
    """Return the parts of the traced step that are known, in seconds: what the identity adds up to the wall time."""
    exposed = {f"exposed {axis}": f"exposed_comm.{axis}" for axis in by_axis(row, "exposed_comm")}
    rest = {"copy": "exposed_copy", "idle": "idle"}
    found = {
        name: row.value(metric)
        for name, metric in {"compute": "compute", **exposed, **rest}.items()
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def traced_seconds(row: Row) -> float | None:
    """Return the wall time of the traced step, to which its parts and the residual add up; None if it has none."""
    known = parts(row)
    return (
        (sum(known.values()) + (row.value("residual") or 0.0) or None)
        if "compute" in known
        else None
    )


def differing_trace(row: Row) -> float | None:
    """Return the traced step's seconds where they are more than a tenth off the timed one's, None where they agree."""
    wall, timed = traced_seconds(row), row.seconds
    return wall if wall and timed and abs(wall / timed - 1) > _AGREES else None


def share_of_traced(row: Row, seconds: float | None) -> float | None:
    """Return what part of the traced step some of its seconds are: those of the timed one are others."""
    wall = traced_seconds(row)
    return None if seconds is None or not wall else seconds / wall


def worst_ratio(row: Row) -> tuple[str, float] | None:
    """Return the axis whose bytes differ most from the formula, and the ratio; None if all are unknown."""
    ratios = by_axis(row, "bytes_ratio")
    return furthest_from_one({axis: ratio for axis, ratio in ratios.items() if is_axis(axis)})


def is_axis(name: str) -> bool:
    """Return False for a part of an axis's traffic, such as ``cp.forward``: its whole stands next to it."""
    return "." not in name


def held_bytes(row: Row) -> float | None:
    """Return what the fullest rank holds, activations too; None if any of it is unknown."""
    return total(by_axis(row, "memory").values())


def broken_down(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.value("compute") is not None)


def memory_lines(rows: Sequence[Row]) -> tuple[MemoryLine, ...]:
    """Return a line for each component of each row of which any source knows something, the usual ones first."""
    told = (
        (row, [*COMPONENTS, *(name for source in SOURCES for name in by_axis(row, source))])
        for row in rows
    )
    lines = [
        MemoryLine(row=row, component=component)
        for row, names in told
        for component in dict.fromkeys(names)
    ]
    return tuple(
        line for line in lines if any(line.num_bytes(source) is not None for source in SOURCES)
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a step sends on one axis: the ranks on it, and the equation of the bytes, empty where there is none."""

    row: Row
    axis: str
    ranks: int | None
    formula: str

    def value(self, metric: str) -> float | None:
        return self.row.value(f"{metric}.{self.axis}")


def sent_lines(rows: Sequence[Row]) -> tuple[Sent, ...]:
    """Return a line for each axis of each step on which bytes were counted."""
    lines = []
    for row in rows:
        axes: Mapping[str, Mapping[str, int]] = {}
        formulas: Mapping[str, str] = {}
        for record in row.measured[:1]:
            if isinstance(mesh := read_details(record, MeshDetails), MeshDetails):
                axes = mesh.axes
            if isinstance(told := read_details(record, BytesFormulaDetails), BytesFormulaDetails):
                formulas = told.bytes_formula
        for axis in filter(is_axis, by_axis(row, "bytes_sent")):
            ranks = axes.get(axis, {}).get("ranks")
            lines.append(Sent(row=row, axis=axis, ranks=ranks, formula=formulas.get(axis, "")))
    return tuple(lines)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step's communication by axis, those whose operations have a curve; others are ``missing``."""

    seconds_by_axis: Mapping[str, float]
    missing: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        return None if self.missing else sum(self.seconds_by_axis.values())

    @property
    def notes(self) -> tuple[str, ...]:
        lacking = (
            (f"predicted comm: no blocking float32 curve for {', '.join(self.missing)}",)
            if self.missing
            else ()
        )
        return (
            *lacking,
            *(f"predicted comm is extrapolated: {words}" for words in self.extrapolated),
        )


def predict_comm(row: Row, curves: Sequence[Curve]) -> Prediction | None:
    """Return the time of the step's calls by the run's curves; None if its calls are unknown or repetitions
    disagree."""
    calls = calls_of(row)
    if calls is None:
        return None
    # which ranks an axis joins is not known, and a step waits for the slowest group
    slowest = [
        (
            call,
            max(
                _curves_for(call, row, curves),
                key=lambda curve: curve.fit.predict(call.num_bytes),
                default=None,
            ),
        )
        for call in calls
    ]
    missing = {call.description: call.axis for call, curve in slowest if curve is None}
    seconds: dict[str, float] = {}
    extrapolated = []
    for call, curve in slowest:
        if curve is None:
            continue
        low, high = size_of(curve.rows[0]), size_of(curve.rows[-1])
        if not low <= call.num_bytes <= high:
            measured = f"{format_size(low)} to {format_size(high)} were measured"
            extrapolated.append(
                f"{call.description}, {format_size(call.num_bytes)} a call, {measured}"
            )
        if call.axis not in missing.values():
            seconds[call.axis] = seconds.get(call.axis, 0.0) + call.count * curve.fit.predict(
                call.num_bytes
            )
    told = tuple(dict.fromkeys(extrapolated))
    return Prediction(seconds_by_axis=seconds, missing=tuple(missing), extrapolated=told)


def calls_of(row: Row) -> tuple[CountedCall, ...] | None:
    """Return the calls of one step, None if the records hold none, or not the same."""
    found = [
        told
        for record in row.records
        if (told := read_details(record, CommunicationDetails)) is not None
    ]
    calls = [one.comm_calls for one in found if isinstance(one, CommunicationDetails)]
    return (
        calls[0]
        if calls and len(calls) == len(found) and all(one == calls[0] for one in calls)
        else None
    )


def _curves_for(call: CountedCall, row: Row, curves: Sequence[Curve]) -> list[Curve]:
    """Return the operation's curves of whole worlds, else of all groups at once as on a mesh's axis, else of groups."""
    alike = []
    for curve in curves:
        first = curve.rows[0]
        params, world = first.case.params, first.world
        is_plain = (params.get("mode"), params.get("dtype")) == (
            "blocking",
            "float32",
        ) and params.keys() <= _PLAIN
        is_call = first.case.short_name == call.op and num_ranks(first) == call.ranks
        if (
            is_plain
            and is_call
            and (world.backend, world.device) == (row.world.backend, row.world.device)
        ):
            alike.append(curve)
    worlds = [curve for curve in alike if "group" not in curve.rows[0].case.params]
    together = [curve for curve in alike if curve.rows[0].case.params.get("concurrent")]
    return worlds or together or alike


NO_CLOCK = "the trace names no clock that its ranks share, and ranks on different clocks must not be merged"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A step's row with one repetition's timeline of all ranks; ``why_not`` says why there is none to draw."""

    row: Row
    repetition: int
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
    """Return the rows of which some repetition left a trace, the first such repetition's; one that is damaged says
    so."""
    found: dict[str, Traced] = {}
    repetitions = ((row, record) for row in rows for record in row.measured)
    for row, record in repetitions:
        if row.case.id not in found:
            why_not = ""
            try:
                timeline = load_timeline(run, record)
            except UserError as error:
                timeline, why_not = None, str(error)
            if timeline and not timeline.clock:
                timeline, why_not = None, NO_CLOCK
            if timeline or why_not:
                found[row.case.id] = Traced(
                    row=row, repetition=record.repetition, timeline=timeline, why_not=why_not
                )
    return tuple(found.values())


def timelines_of(run: Run, row: Row) -> tuple[tuple[int, Timeline], ...]:
    """Return each repetition with its timeline, of those that left one which can be read."""
    found = []
    for record in row.measured:
        with suppress(UserError):
            found += [(record.repetition, one)] if (one := load_timeline(run, record)) else []
    return tuple(found)


def busy_ranks(traced: Sequence[Traced]) -> tuple[Busy, ...]:
    found, drawn = (
        [],
        [(one, rank) for one in traced if one.timeline for rank in one.timeline.ranks],
    )
    for one, rank in drawn:
        streams, phases = by_stream(rank), defaultdict[str, float](float)
        for phase in streams.pop(PHASE, []):
            phases[phase.name] += (phase.stop_us - phase.start_us) / 1e6
        busy = {stream: length(spans_of(intervals)) / 1e9 for stream, intervals in streams.items()}
        wall = (rank.stop_us - rank.start_us) / 1e6
        found.append(
            Busy(traced=one, rank=rank.rank, wall_seconds=wall, by_stream=busy, by_phase=phases)
        )
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


def spans_of(intervals: Iterable[Interval | RankTimeline]) -> list[Span]:
    """Return intervals as spans, in whole nanoseconds; none ends before it begins."""
    return [
        (round(1e3 * one.start_us), round(1e3 * max(one.start_us, one.stop_us)))
        for one in intervals
    ]


def longest_computing(run: Run, row: Row) -> Straggler | None:
    """Return the rank that computes longer than the others in traces, more often than chance makes; by what factor."""
    named, traced = dict[int, list[StragglerVote]](), timelines_of(run, row)
    for repetition, timeline in traced:
        busy = {
            one.rank: length(spans_of(by_stream(one).get(COMPUTE, ()))) / 1e9
            for one in timeline.ranks
        }
        rank = max(busy, key=lambda rank: busy[rank], default=0)
        others = (
            median([seconds for other, seconds in busy.items() if other != rank])
            if len(busy) > 1
            else 0.0
        )
        if others and busy[rank] > _LONGER * others:
            named[repetition] = [StragglerVote(rank, busy[rank] - others, busy[rank] / others)]
    return elect_straggler(named, len(traced), row.world.size)
