"""What the records of pipeline steps tell: schedule, timelines, idle time by cause, other schedules' simulations. Pure.

Timelines are whole microseconds since the step's first action.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import msgspec

from bench.results.records import Record
from bench.text import UserError
from reports.summary import Row, Summary

Kind = Literal["F", "B", "I", "W"]
Cause = Literal["schedule", "imbalance", "p2p", "rest"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CAUSES: tuple[Cause, ...] = get_args(Cause)
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_TIMELINES = ("measured", "predicted", "idle")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """An action on a rank: forward, whole backward, or backward's input or weight half, of a stage's microbatch."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    start_microseconds: int
    stop_microseconds: int

    @property
    def name(self) -> str:
        """The action as schedules write it: ``2F0`` is stage 2's forward of microbatch 0."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A time in which a rank runs no action, and why."""

    rank: int
    cause: Cause
    start_microseconds: int
    stop_microseconds: int

    @property
    def name(self) -> str:
        """The cause."""
        return self.cause


Timeline = tuple[tuple[Ran, ...], ...]
T = TypeVar("T", Ran, Idle)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Another schedule as simulated with the times that a step measured; ``why_not`` says why it cannot run."""

    schedule: str
    chunks: int
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    in_flight: float | None = None
    activation_bytes: float | None = None
    measured: bool = False
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a record says of its pipeline as a whole; None and empty are unknown."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    stages_by_rank: tuple[tuple[int, ...], ...]
    activation_bytes_by_rank: tuple[float | None, ...] | None = None
    clock: str | None = None
    clock_uncertainty_seconds: float | None = None
    comparison: tuple[Simulated, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline step's row with what its first telling launch adds; a timeline has each rank's actions in order."""

    row: Row
    launch: int
    facts: Facts
    measured: Timeline | None
    predicted: Timeline | None
    idle: tuple[tuple[Idle, ...], ...] | None

    def chunk_of(self, ran: Ran) -> int:
        """Return which of its rank's stages an action belongs to, from 0."""
        return self.facts.stages_by_rank[ran.rank].index(ran.stage)

    @property
    def activation_bytes(self) -> float | None:
        """The activations of the fullest rank."""
        measured = self.row.value("memory.activations")
        known = [one for one in self.facts.activation_bytes_by_rank or () if one is not None]
        return max(known, default=None) if measured is None else measured


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Timelines as records hold them."""

    measured: list[list[tuple[str, int, int]]] | None = None
    predicted: list[list[tuple[str, int, int]]] | None = None
    idle: list[tuple[int, int, int, Cause]] | None = None


def pipelines(rows: Iterable[Row]) -> tuple[Pipeline, ...]:
    """Return the rows that are pipeline steps and whose facts can be read."""
    return tuple(found for row in rows if isinstance(found := _tried(row), Pipeline))


def unreadable(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return why the pipeline facts of rows that have some cannot be read, a sentence each."""
    return tuple(f"No pipeline facts: {found}." for row in rows if isinstance(found := _tried(row), UserError))


def read_pipeline(row: Row) -> Pipeline | None:
    """Return a row's pipeline, None if it is no pipeline step; ``UserError`` if its facts contradict themselves.

    The first launch with a measured timeline tells it, else the first that has any facts.
    """
    telling = [record for record in row.measured if isinstance(record.details.get("pipeline"), Mapping)]
    if not telling:
        return None
    record = next((one for one in telling if one.details["pipeline"].get("measured")), telling[0])
    try:
        facts = msgspec.convert(record.details["pipeline"], Facts)
        stored = msgspec.convert(record.details["pipeline"], _Stored)
        return _checked(row, record, facts, stored)
    except ValueError as error:
        raise UserError(f"the pipeline of {row.case.label} is not as it should be: {error}") from error


def without_timelines(summary: Summary) -> Summary:
    """Return the summary without the timelines in its records' details, which are pictures rather than facts."""
    return replace(summary, rows=tuple(_without_timelines(row) for row in summary.rows))


def _tried(row: Row) -> Pipeline | UserError | None:
    try:
        return read_pipeline(row)
    except UserError as error:
        return error


def _checked(row: Row, record: Record, facts: Facts, stored: _Stored) -> Pipeline:
    _expect(len(facts.stages_by_rank) == facts.ranks, f"stages_by_rank({len(facts.stages_by_rank)}) != {facts.ranks}")
    for shown in (stored.measured, stored.predicted):
        _expect(shown is None or len(shown) == facts.ranks, f"a timeline has {len(shown or ())} of {facts.ranks} ranks")
    return Pipeline(
        row=row,
        launch=record.launch,
        facts=facts,
        measured=_timeline(stored.measured, facts),
        predicted=_timeline(stored.predicted, facts),
        idle=_idle(stored.idle, facts),
    )


def _timeline(stored: list[list[tuple[str, int, int]]] | None, facts: Facts) -> Timeline | None:
    if not stored or not any(stored):
        return None
    return tuple(_in_order([_ran(rank, *one, facts) for one in actions]) for rank, actions in enumerate(stored))


def _ran(rank: int, name: str, start: int, stop: int, facts: Facts) -> Ran:
    match = _ACTION.fullmatch(name)
    if match is None:
        raise UserError(f"{name!r} on rank {rank} is no action: those read 2F0, with F, B, I or W between numbers")
    stage, held = int(match[1]), facts.stages_by_rank[rank]
    _expect(stage in held, f"{name} ran on rank {rank}, which holds stages {', '.join(map(str, held)) or 'none'}")
    kind = next(kind for kind in KINDS if kind == match[2])
    return Ran(
        rank=rank,
        stage=stage,
        kind=kind,
        microbatch=int(match[3]),
        start_microseconds=start,
        stop_microseconds=stop,
    )


def _idle(stored: list[tuple[int, int, int, Cause]] | None, facts: Facts) -> tuple[tuple[Idle, ...], ...] | None:
    if stored is None:
        return None
    by_rank: list[list[Idle]] = [[] for _ in range(facts.ranks)]
    for rank, start, stop, cause in stored:
        _expect(0 <= rank < facts.ranks, f"idle time of rank {rank} of {facts.ranks}")
        by_rank[rank].append(Idle(rank=rank, cause=cause, start_microseconds=start, stop_microseconds=stop))
    return tuple(map(_in_order, by_rank))


def _in_order(found: Sequence[T]) -> tuple[T, ...]:
    """Return what happened on a rank in order of time; refuse what overlaps, for a rank does one thing at a time."""
    ordered = sorted(found, key=lambda one: (one.start_microseconds, one.stop_microseconds))
    for one in ordered:
        start, stop = one.start_microseconds, one.stop_microseconds
        _expect(start <= stop, f"{one.name} on rank {one.rank} ends at {stop} us, before it begins at {start} us")
    for before, after in pairwise(ordered):
        start, stop = after.start_microseconds, before.stop_microseconds
        both = f"{after.name} on rank {after.rank} begins at {start} us, before {before.name} ends at {stop} us"
        _expect(start >= stop, both)
    return tuple(ordered)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UserError(otherwise)


def _without_timelines(row: Row) -> Row:
    if not any(isinstance(record.details.get("pipeline"), Mapping) for record in row.records):
        return row
    return replace(row, records=tuple(msgspec.structs.replace(one, details=_thinned(one)) for one in row.records))


def _thinned(record: Record) -> dict[str, Any]:
    pipeline = record.details.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return record.details
    return record.details | {"pipeline": {name: pipeline[name] for name in pipeline if name not in _TIMELINES}}
