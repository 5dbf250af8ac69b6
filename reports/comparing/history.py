"""The history: runs kept in one file, each once, with the points of their series in the order of time."""

import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.plan.cases import Case, renewed
from bench.results.records import Status, WorldInfo
from bench.results.runs import Run, load_run
from bench.text import UserError, reading
from reports.comparing.history_entry import ABOUT, About, Entry, Identity, Point
from reports.comparing.history_schema import open_database, writing

Added = Literal["added", "updated", "moved", "unchanged"]
_LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A run of the history; ``bad`` counts its series that were wrong, failed or hung."""

    number: int
    id: str
    started: str
    host: str
    parbench: str
    preset: str
    branch: str
    commit: str
    num_series: int
    num_bad: int


@dataclass(frozen=True, kw_only=True)
class Value:
    """A point of a series: the run's number, what became of it, and what was beside it."""

    run: int
    status: Status
    seconds: float | None
    launches: int
    reason: str
    beside: int


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A change at a run that was meant, on its branch, for the series whose label fits a glob."""

    run_id: str
    started: str
    branch: str
    series: str
    note: str


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    world: WorldInfo
    around: dict[str, str]


_LINE = "number, id, started, host, parbench, preset, branch, commit_id, num_series, num_bad"


class History:
    """An open history; every change is one transaction, so that a killed process leaves all of it or nothing."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def add(self, entry: Entry) -> Added:
        """Keep a run, once: the same one again changes nothing, one that has grown since replaces itself.

        It keeps its branch and commit, unless others are meant: these move it, with its annotations.
        """
        if entry.about.branch == _LAST or not entry.about.branch or set(entry.about.branch) & set("~: \t\n"):
            raise UserError(
                f"--branch {entry.about.branch!r} cannot name runs: 'last' and names with ~, : or spaces mean something"
                " else, or nothing"
            )
        with writing(self._connection):
            query = "SELECT number, digest, branch, commit_id FROM run WHERE id = ?"
            known = self._connection.execute(query, (entry.run.id,)).fetchone()
            if not known:
                self._insert(entry)
                return "added"
            number, digest, *place = known
            kept = dict(zip(("branch", "commit"), place, strict=True))
            about = {name: getattr(entry.about, name) if name in entry.meant else old for name, old in kept.items()}
            entry = replace(entry, about=About(**about))
            if digest != entry.digest:
                self._connection.execute("DELETE FROM run WHERE number = ?", (number,))
                self._insert(entry)
            return self._move(entry, place) or ("unchanged" if digest == entry.digest else "updated")

    def runs(self, branch: str | None = None) -> tuple[Line, ...]:
        """Return the runs, of one branch or all, the oldest first."""
        where, values = ("WHERE branch = ?", (branch,)) if branch is not None else ("", ())
        found = self._connection.execute(f"SELECT {_LINE} FROM run {where} ORDER BY started, number", values)
        return tuple(_line(row) for row in found)

    def line(self, run_id: str) -> Line:
        """Return one run; ``UserError`` if the history has none of the id."""
        row = self._connection.execute(f"SELECT {_LINE} FROM run WHERE id = ?", (run_id,)).fetchone()
        if row is None:
            raise UserError(f"{self._path} has no run {run_id!r}: parbench history list shows what it has")
        return _line(row)

    def run(self, run_id: str) -> Run:
        """Return one run with its records; its path is its id."""
        number = self.line(run_id).number
        with tempfile.TemporaryDirectory() as folder:
            self._write_files(number, Path(folder))
            return msgspec.structs.replace(load_run(Path(folder)), path=Path(run_id))

    def series(self, numbers: Iterable[int] | None = None) -> dict[int, Identity]:
        """Return series by their numbers: those that are named, or all."""
        if numbers is None:
            rows = self._connection.execute("SELECT number, content FROM series").fetchall()
        else:
            query = "SELECT number, content FROM series WHERE number = ?"
            rows = [row for number in numbers for row in self._connection.execute(query, (number,))]
        decoder = msgspec.json.Decoder(_Content)
        found = {number: decoder.decode(content) for number, content in rows}
        return {n: Identity(case=renewed(one.case), world=one.world, around=one.around) for n, one in found.items()}

    def points_of_run(self, number: int) -> dict[int, Value]:
        """Return the points of a run by series."""
        query = f"SELECT series, {_VALUE} FROM point WHERE run = ?"
        return {row[0]: _value(row[1:]) for row in self._connection.execute(query, (number,))}

    def points_of_series(self, number: int) -> tuple[Value, ...]:
        """Return the points of a series, in no order of time."""
        query = f"SELECT {_VALUE} FROM point WHERE series = ?"
        return tuple(_value(row) for row in self._connection.execute(query, (number,)))

    def times_of_series(self, number: int) -> list[tuple[int, float]]:
        """Return the runs' numbers and the seconds of a series, where it was measured; in no order of time."""
        query = "SELECT run, seconds FROM point WHERE series = ? AND seconds IS NOT NULL"
        return self._connection.execute(query, (number,)).fetchall()

    def beside(self, number: int) -> Mapping[str, str]:
        """Return what was beside a point."""
        [content] = self._connection.execute("SELECT content FROM beside WHERE number = ?", (number,)).fetchone()
        return msgspec.json.decode(content, type=dict[str, str])

    def annotate(self, run_id: str, series: str, note: str) -> None:
        """Say that what changed at a run was meant; said again it changes nothing."""
        line = self.line(run_id)
        self._keep(Annotation(run_id=run_id, started=line.started, branch=line.branch, series=series, note=note))

    def annotations(self) -> tuple[Annotation, ...]:
        """Return all annotations, in the order of the runs."""
        names = [field.name for field in fields(Annotation)]
        rows = self._connection.execute(f"SELECT {', '.join(names)} FROM annotation ORDER BY started, note")
        return tuple(Annotation(**dict(zip(names, row, strict=True))) for row in rows)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Forget all but the newest runs of each branch and preset, and return their ids; annotations stay."""
        query = (
            "SELECT number, id FROM (SELECT number, id, row_number() OVER"
            " (PARTITION BY branch, preset ORDER BY started DESC, number DESC) AS place FROM run) WHERE place > ?"
        )
        with writing(self._connection):
            old = self._connection.execute(query, (keep,)).fetchall()
            self._connection.executemany("DELETE FROM run WHERE number = ?", [(number,) for number, _ in old])
            self._connection.execute("DELETE FROM series WHERE number NOT IN (SELECT series FROM point)")
            self._connection.execute("DELETE FROM beside WHERE number NOT IN (SELECT beside FROM point)")
        self._connection.execute("VACUUM")
        return tuple(run_id for _, run_id in old)

    def export(self, folder: Path) -> int:
        """Write every run as a folder, and the annotations beside them; return how many there are.

        ``add`` reads them back. Samples of single ranks, traces and logs are not kept by a history.
        """
        lines = self.runs()
        try:
            for line in lines:
                target = folder / line.id
                target.mkdir(parents=True, exist_ok=True)
                self._write_files(line.number, target)
                about = msgspec.json.encode(About(branch=line.branch, commit=line.commit))
                (target / ABOUT).write_bytes(about + b"\n")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ANNOTATIONS).write_bytes(msgspec.json.encode(self.annotations()) + b"\n")
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        return len(lines)

    def import_annotations(self, folder: Path) -> None:
        """Keep the annotations that ``export`` wrote into a folder, if there are any."""
        file = folder / ANNOTATIONS
        with reading(file):
            content = file.read_bytes() if file.exists() else b"[]"
            found = msgspec.json.decode(content, type=tuple[Annotation, ...])
        for one in found:
            self._keep(one)

    def _keep(self, one: Annotation) -> None:
        with writing(self._connection):
            self._connection.execute(
                "INSERT OR IGNORE INTO annotation VALUES (?, ?, ?, ?, ?)",
                (one.run_id, one.started, one.branch, one.series, one.note),
            )

    def _move(self, entry: Entry, place: Sequence[str]) -> Added | None:
        """Say so if a run is not any more where it was, after it and its annotations were taken along."""
        about = entry.about
        if [about.branch, about.commit] == place:
            return None
        change = "UPDATE run SET branch = ?, commit_id = ? WHERE id = ?"
        self._connection.execute(change, (about.branch, about.commit, entry.run.id))
        self._connection.execute("UPDATE annotation SET branch = ? WHERE run_id = ?", (about.branch, entry.run.id))
        return "moved"

    def _insert(self, entry: Entry) -> None:
        run, about = entry.run, entry.about
        bad = sum(point.status in ("wrong", "failed", "hang") for point in entry.points)
        texts = (run.id, run.started, run.host, run.parbench, run.plan.preset, about.branch, about.commit, entry.digest)
        number = self._connection.execute(
            "INSERT INTO run (id, started, host, parbench, preset, branch, commit_id, digest, num_series, num_bad)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*texts, len(entry.points), bad),
        ).lastrowid
        files = (zlib.compress(entry.info_json), zlib.compress(entry.records_jsonl))
        self._connection.execute("INSERT INTO folder VALUES (?, ?, ?)", (number, *files))
        for point in entry.points:
            series, beside = self._series_number(point), self._beside_number(point)
            row = (series, number, point.status, point.seconds, point.launches, point.reason, beside)
            self._connection.execute("INSERT INTO point VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def _series_number(self, point: Point) -> int:
        one = point.series
        content = _Content(case=one.case, world=one.world, around=dict(one.around))
        row = (one.fingerprint, msgspec.json.encode(content).decode())
        return self._number("series", "fingerprint", row)

    def _beside_number(self, point: Point) -> int:
        return self._number("beside", "content", (msgspec.json.encode(point.beside, order="sorted").decode(),))

    def _number(self, table: str, key: str, row: tuple[str, ...]) -> int:
        """Return the number of a row with this key, its first column after the number, made where there is none."""
        found = self._connection.execute(f"SELECT number FROM {table} WHERE {key} = ?", row[:1]).fetchone()
        if found:
            return int(found[0])
        places = ", ".join("?" * len(row))
        made = self._connection.execute(f"INSERT INTO {table} VALUES (NULL, {places})", row).lastrowid
        assert made is not None, "SQLite numbers what it inserts"
        return made

    def _write_files(self, number: int, folder: Path) -> None:
        query = "SELECT info, records FROM folder WHERE run = ?"
        info, records = self._connection.execute(query, (number,)).fetchone()
        (folder / "run.json").write_bytes(zlib.decompress(info))
        (folder / "records.jsonl").write_bytes(zlib.decompress(records))


ANNOTATIONS = "annotations.json"
"""The file beside exported runs that holds the annotations."""
_VALUE = "run, status, seconds, launches, reason, beside"


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Yield the history in a file; ``UserError`` if there is none, and none is to be made, or it cannot be read."""
    with open_database(path, create=create) as connection:
        yield History(connection, path)


def _line(row: tuple[Any, ...]) -> Line:
    names = ("number", "id", "started", "host", "parbench", "preset", "branch", "commit", "num_series", "num_bad")
    return Line(**dict(zip(names, row, strict=True)))


def _value(row: tuple[Any, ...]) -> Value:
    return Value(**dict(zip(("run", "status", "seconds", "launches", "reason", "beside"), row, strict=True)))
