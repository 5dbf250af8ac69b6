"""Records: one JSON line for each case and launch."""

import enum
import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from parbench.bench.files import decode_json, read_lines
from parbench.bench.limits import (
    Count,
    Launch,
    Positive,
    Rank,
    Ranks,
    check_time,
)
from parbench.bench.plan.cases import Case
from parbench.bench.results.metrics import MetricValue, schema_of_metrics
from parbench.bench.results.stats import Grade, effective_count, grade, spread, steadiness
from parbench.bench.text import UserError, reading


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that most often arrives last and in what share of iterations; the same for leaving last.

    ``uncertainty`` (s) is the clock's; where it exceeds the skew, the late rank is not known.
    """

    method: str
    uncertainty: Positive
    late_rank: Rank | None
    share: Positive | None
    last_out_rank: Rank | None
    last_out_share: Positive | None


def blame(
    last_in: Sequence[int], last_out: Sequence[int], skew_seconds: Sequence[float], method: str, uncertainty: float
) -> Arrival:
    """Return who was last, from the rank that was last in each iteration; nobody where the clock cannot tell."""
    told = [rank for rank, skew in zip(last_in, skew_seconds, strict=True) if skew > uncertainty]
    most: dict[str, Any] = dict.fromkeys(("late_rank", "share", "last_out_rank", "last_out_share"))
    for ranks, who, share in ((told, "late_rank", "share"), (last_out, "last_out_rank", "last_out_share")):
        for rank, count in Counter(ranks).most_common(1):
            most |= {who: rank, share: round(count / len(last_in), 4)}
    return Arrival(method=method, uncertainty=uncertainty, **most)


COMPUTE, COPY, PHASE, COMM = "compute", "copy", "phase", "comm"  # communication's streams are named "comm AXIS"


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """What a stream of a rank was doing, in microseconds since the first rank began."""

    stream: str
    name: str
    start_us: float
    stop_us: float


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step, from ``start_us`` to ``stop_us``; of its streams only communication's may overlap themselves."""

    rank: Rank
    start_us: float
    stop_us: float
    intervals: tuple[Interval, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The same step of every rank; ``clock`` says how their clocks were brought together, and how well."""

    clock: str
    uncertainty_seconds: Positive
    ranks: tuple[RankTimeline, ...]


def encode_timeline(timeline: Timeline) -> bytes:
    """Return a file's content; the same timeline is the same bytes."""
    return gzip.compress(msgspec.json.encode(timeline), mtime=0)


SCHEMA = 2

Status = Literal["ok", "failed", "hang", "wrong", "skipped"]
Stop = Literal["precision", "converged", "max-iters", "budget", "visits"]


class SkipReason(enum.Enum):
    """Why a case that was asked for has no measurement in a launch."""

    IMPOSSIBLE = "impossible"
    """The ranks or this machine cannot run it, for example because it needs more memory than is free."""
    OUT_OF_BUDGET = "out-of-budget"
    """The time budget ended before it."""
    EARLIER_FAILURE = "earlier-failure"
    """It failed, hung or was wrong in an earlier launch."""


CulpritCause = Literal["died", "terminated", "raised", "absent", "waiting"]


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that may have broken a case, with its host."""

    rank: Rank
    host: str
    cause: CulpritCause
    """``terminated`` ranks got SIGTERM, ``absent`` ranks did not arrive where others waited, ``waiting`` ranks wait for
    one another. A ``terminated`` or ``raised`` rank may only have suffered from another one."""


class WorldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks a case ran on."""

    size: Ranks
    nodes: Count
    backend: str
    device: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Whether results equal the reference; None where nothing could be checked."""

    passed: bool | None = None
    wrong: Count | None = None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """One value per iteration, each the maximum over ranks of that iteration's duration.

    ``visits`` are the counts that were taken in turn, other cases between them; one where they were taken in one go.
    """

    unit: str = "s"
    values: list[Positive] = []
    visits: list[Count] = []


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How far samples scatter: ``spread`` is the interquartile range over the median.

    ``effective`` is how many independent samples would tell the median as well; None where visits are too few.
    """

    grade: Grade
    spread: Positive
    steady: str
    effective: Positive | None = None


def noise_of(samples: Samples) -> Noise | None:
    if not samples.values:
        return None
    scatter, effective = spread(samples.values), effective_count(samples.values, samples.visits)
    steady, known = steadiness(samples.values), None if effective is None else round(effective, 1)
    return Noise(grade=grade(scatter), spread=round(scatter, 4), steady=steady, effective=known)


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was when its case ended badly."""

    rank: Rank
    host: str
    pid: Count
    state: str
    stack: str = ""
    is_silent: bool = False
    """True if it did not answer when all ranks were asked for their state."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one launch."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    case: Case
    world: WorldInfo
    launch: Launch
    status: Status
    reason: str = ""
    """A sentence for people about a status other than ok. Programs read the fields that follow."""
    skip_reason: SkipReason | None = None
    """Set where the status is skipped."""
    wrong_by_rank: dict[Rank, Count] = {}
    """The number of wrong elements of each rank that has any."""
    culprits: tuple[Culprit, ...] = ()
    """The ranks that may have broken the case, as far as they can be told from the others."""
    stop: Stop | None = None
    check: Check = Check()
    samples: Samples = Samples()
    metrics: dict[str, MetricValue] = {}
    noise: Noise | None = None
    arrival: Arrival | None = None
    injected: str = ""
    details: dict[str, Any] = {}
    emulation: str = ""
    """Which nodes or links are not real."""
    notes: list[str] = []
    environment: dict[str, Any] = {}
    ranks: list[RankState] = []
    started: str
    seconds: Positive

    @property
    def is_out_of_budget(self) -> bool:
        """True if the time budget ended before the case."""
        return self.skip_reason is SkipReason.OUT_OF_BUDGET


class _Versioned(msgspec.Struct):
    schema: int


def encode(record: Record) -> bytes:
    """Return the record as one line of JSON, with its newline; ``ValueError`` if it could not be read back."""
    line = msgspec.json.encode(record)  # NaN and infinity become null: allowed as a metric or a detail, not a sample
    try:
        _record(line)
    except ValueError as error:
        raise ValueError(f"the record of {record.case.label} could not be read back: {error}") from error
    return line + b"\n"


def read_records(path: Path, damaged: list[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file; a last line that was cut short is passed over.

    Any other bad line is refused, or told in ``damaged`` and left out where that is given.
    """
    with reading(path):
        for number, line in read_lines(path):
            where = f"{path}, line {number}"
            try:
                check_schema(line, where)
                record = _record(line)
            except SchemaError:
                raise
            except (ValueError, RecursionError) as error:
                told = f"{where} is no record: {error}"
                if damaged is None:
                    raise UserError(told) from error
                damaged.append(told)
            else:
                yield record


def _record(line: bytes) -> Record:
    record = decode_json(line, Record)
    check_time(record.started)
    return record


class SchemaError(UserError):
    """A file has a format version that this parbench does not read."""


def check_schema(content: bytes, where: str, expected: int = SCHEMA) -> None:
    """Raise ``SchemaError`` unless JSON has the expected format version, before its other fields are decoded."""
    version = msgspec.json.decode(content, type=_Versioned).schema
    if version != expected:
        age = "newer" if version > expected else "older"
        raise SchemaError(f"{where}: schema {version} is {age} than {expected}, the one that this parbench reads")


def json_schema() -> dict[str, Any]:
    schema = msgspec.json.schema(Record)
    schema["$defs"]["Record"]["properties"]["metrics"] |= schema_of_metrics({"$ref": "#/$defs/MetricValue"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
