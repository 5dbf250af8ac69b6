"""What was seen: one JSON line for each case and launch.

History of the format (``schema``):
1  first: case, world, launch, status, reason, stop, check, samples, metrics, noise, arrival, injected, details, notes,
   environment, ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bench.errors import UserError
from bench.plan.cases import Case
from bench.results.arrival import Arrival
from bench.results.stats import Grade

SCHEMA = 1

Status = Literal["ok", "failed", "hang", "wrong", "skipped"]
Stop = Literal["precision", "converged", "max-iters", "budget"]


class WorldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks a case ran on."""

    size: int
    nodes: int
    backend: str
    device: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Whether results equal the reference; None where nothing could be checked."""

    passed: bool | None = None
    wrong: int | None = None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """One value per iteration, each the maximum over ranks of that iteration's duration."""

    unit: str = "s"
    values: list[float] = []


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its 95 % interval; ``method`` says how both were found, None is unknown."""

    value: float | None
    unit: str
    better: Literal["lower", "higher"]
    low: float | None = None
    high: float | None = None
    method: str = ""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How far samples scatter: ``spread`` is the interquartile range over the median."""

    grade: Grade
    spread: float
    steady: str


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was when its case ended badly."""

    rank: int
    host: str
    pid: int
    state: str
    stack: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one launch."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    case: Case
    world: WorldInfo
    launch: int
    status: Status
    reason: str = ""
    stop: Stop | None = None
    check: Check = Check()
    samples: Samples = Samples()
    metrics: dict[str, Metric] = {}
    noise: Noise | None = None
    arrival: Arrival | None = None
    injected: str = ""
    details: dict[str, Any] = {}
    notes: list[str] = []
    environment: dict[str, Any] = {}
    ranks: list[RankState] = []
    started: str
    seconds: float


class _Versioned(msgspec.Struct):
    schema: int


def encode(record: Record) -> bytes:
    """Return the record as one line of JSON, with its newline; ``ValueError`` if it could not be read back.

    NaN and infinity become null, which is unknown: allowed as a metric or a detail, not as a sample.
    """
    line = msgspec.json.encode(record)
    try:
        msgspec.json.decode(line, type=Record)
    except msgspec.ValidationError as error:
        raise ValueError(f"the record of {record.case.label} could not be read back: {error}") from error
    return line + b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file; a last line that was cut short is passed over, any other bad line is refused."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _decode(line, f"{path}, line {number}")


def _decode(line: bytes, where: str) -> Record:
    try:
        refuse_newer(line, where)
        return msgspec.json.decode(line, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is no record: {error}") from error


def refuse_newer(content: bytes, where: str) -> None:
    """Refuse JSON of a newer schema before its other fields are looked at: they may differ."""
    version = msgspec.json.decode(content, type=_Versioned).schema
    if version > SCHEMA:
        raise UserError(f"{where}: schema {version} is newer than {SCHEMA}, the newest this parbench reads")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of one record."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(Record)
