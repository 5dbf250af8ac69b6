"""A run as the history keeps it: a point for each series, under the series' fingerprint. Pure but for reading a folder.

A fingerprint is the case, its world, and what around it makes times comparable: hosts and how they are connected,
hardware, versions, variables. What may change them without making them another series is kept beside the point.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.plan.cases import Case
from bench.plan.params import Value
from bench.results.records import Status, WorldInfo
from bench.results.runs import Run, RunInfo, load_run
from bench.text import reading
from reports.analysis.summary import Row, summarize
from reports.regression.environment import HARMLESS, surroundings

ABOUT = "history.json"
"""The file in an exported run's folder that holds its branch and commit."""
_BESIDE = {f"host.{name}" for name in ("clock_source", "governor", "kernel", "os", "virtualised")}
_BESIDE |= {"versions.numpy", "versions.python"}  # what may explain a step and so must not begin another series


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does not know of itself: the branch that was measured, and the commit, empty where unknown."""

    branch: str
    commit: str = ""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a series is; ``around`` are the surroundings that belong to it, as text by path."""

    case: Case
    world: WorldInfo
    around: dict[str, str]

    @property
    def fingerprint(self) -> str:
        whole = {"case": self.case.id, "world": self.world, "around": self.around}
        return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()[:20]

    @property
    def family(self) -> tuple[object, ...]:
        """What it shares with the series that differ from it in size alone."""
        return (self.case.name, self.case.target, *shared_params(self.case).items(), self.world)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A series in one run; ``seconds`` is None where nothing was measured, ``beside`` what else was around it."""

    series: Identity
    status: Status
    seconds: float | None
    launches: int
    reason: str = ""
    beside: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run with its points and the bytes of its two files; ``meant`` names what of ``about`` moves a known run."""

    run: RunInfo
    about: About
    meant: frozenset[str] = frozenset()
    points: tuple[Point, ...]
    info_json: bytes
    records_jsonl: bytes

    @property
    def digest(self) -> str:
        """The hash of what was read, by which a run that has grown since is told from one that has not."""
        return hashlib.sha256(self.info_json + b"\0" + self.records_jsonl).hexdigest()


def read_entry(path: Path, about: About, meant: frozenset[str] = frozenset()) -> Entry:
    """Return a run's folder as an entry; the folder's own ``history.json``, where it has one, says the branch."""
    run, file = load_run(path), path / ABOUT
    with reading(file):
        own = msgspec.json.decode(file.read_bytes(), type=About) if file.exists() else None
    records = (path / "records.jsonl").read_bytes()
    return Entry(
        run=run.info,
        about=own or about,
        meant=frozenset() if own else meant,
        points=points_of(run),
        info_json=(path / "run.json").read_bytes(),
        records_jsonl=records[: records.rfind(b"\n") + 1],  # a line cut short is no record
    )


def points_of(run: Run, rows: Iterable[Row] | None = None) -> tuple[Point, ...]:
    """Return a point for each row of a run, those given or all, except what was skipped in every launch."""
    found = summarize(run).rows if rows is None else rows
    return tuple(_point(run, row) for row in found if row.launches or row.status != "skipped")


def shared_params(case: Case) -> dict[str, Value]:
    """Return a case's parameters but its size."""
    return {name: value for name, value in case.params.items() if name != "size_bytes"}


def _point(run: Run, row: Row) -> Point:
    seen = surroundings(run, row.measured or row.records)
    around = {path: " then ".join(map(", ".join, seen[path])) for path in seen if path not in HARMLESS}
    beside = {path: around.pop(path) for path in seen if path in _BESIDE}
    if injected := sorted({record.injected for record in row.records if record.injected}):
        around["injected"] = ", ".join(injected)
    value = row.value(row.headline)
    return Point(
        series=Identity(case=row.case, world=row.world, around=around),
        status=row.status,
        seconds=value if value and value > 0 and row.status in ("ok", "skipped") else None,
        launches=row.launches,
        reason="; ".join(row.reasons),
        beside=beside,
    )
