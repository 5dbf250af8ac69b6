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
from reports.regression.history_entry import ABOUT, About, Entry, Identity, Point

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


SCHEMA = 1
APPLICATION = 0x70627268
"""``pbrh``, by which SQLite files are told apart."""
_WAIT_SECONDS = 60.0
_TABLES = """
CREATE TABLE run (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, started TEXT NOT NULL, host TEXT NOT NULL,
    parbench TEXT NOT NULL, preset TEXT NOT NULL, branch TEXT NOT NULL, commit_id TEXT NOT NULL, digest TEXT NOT NULL,
    num_series INTEGER NOT NULL, num_bad INTEGER NOT NULL
);
CREATE INDEX run_by_time ON run (branch, started, number);
CREATE TABLE folder (
    run INTEGER PRIMARY KEY REFERENCES run ON DELETE CASCADE, info BLOB NOT NULL, records BLOB NOT NULL
);
CREATE TABLE series (number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE, content TEXT NOT NULL);
CREATE TABLE beside (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE point (
    series INTEGER NOT NULL REFERENCES series, run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    status TEXT NOT NULL, seconds REAL, launches INTEGER NOT NULL, reason TEXT NOT NULL,
    beside INTEGER NOT NULL REFERENCES beside, PRIMARY KEY (series, run)
) WITHOUT ROWID;
CREATE INDEX point_by_run ON point (run);
CREATE TABLE annotation (
    run_id TEXT NOT NULL, started TEXT NOT NULL, branch TEXT NOT NULL, series TEXT NOT NULL, note TEXT NOT NULL,
    UNIQUE (run_id, series, note)
);
"""


@contextmanager
def open_database(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """Yield the database, made where it may be; ``UserError`` if it is absent, foreign, damaged, newer or locked."""
    if not create and not path.exists():
        raise UserError(f"{path} is no history, it does not exist: begin one with parbench history add RUN")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the history's file with --history FILE")
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"{path} cannot be opened: {error}") from error
    try:
        _prepare(connection, path, create=create)
        yield connection
    except sqlite3.Error as error:
        raise UserError(_in_words(path, error)) from error
    finally:
        connection.close()


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a block one transaction, which waits for other writers first: all of it is kept, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # SQLite itself takes back what a full disk did not take
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    # a rollback journal, for the write-ahead log needs shared memory and a second file, which an artifact would lack
    connection.execute("PRAGMA foreign_keys = ON")
    if _is_empty(connection):
        if not create:
            raise UserError(f"{path} is empty, not a history: begin one with parbench history add RUN")
        _make(connection)
    application = _pragma(connection, "application_id")
    if application != APPLICATION:
        raise UserError(f"{path} is an SQLite file of another program, not a history (application_id {application})")
    version = _pragma(connection, "user_version")
    if version > SCHEMA:
        raise UserError(f"{path}: schema {version} is newer than {SCHEMA}, the newest this parbench reads")


def _make(connection: sqlite3.Connection) -> None:
    with writing(connection):
        if not _is_empty(connection):  # another writer was first
            return
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    return empty and _pragma(connection, "application_id") == 0


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _in_words(path: Path, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is being written by other processes for more than {_WAIT_SECONDS:.0f} s; try again later"
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is not an SQLite file: name a history with --history FILE"
    return f"{path} cannot be used as a history: {error}"
