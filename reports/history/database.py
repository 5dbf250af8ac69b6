"""The history: one SQLite file with each run once, and the points of its series in the order of time."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from parbench.bench.files import convert_read_errors
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run, load_run, require_complete
from parbench.bench.text import UserError
from parbench.reports.compare.counts import ExactCounts
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.history.entries import About, Entry

Added = Literal["added", "updated", "moved", "unchanged"]
Outcome = tuple[Status, str]
SCHEMA = 2
APPLICATION = 0x70627268  # "pbrh", by which SQLite files are distinguished
_WAIT_SECONDS = 60.0
_TABLES = """
CREATE TABLE run (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, started TEXT NOT NULL, host TEXT NOT NULL,
    parbench TEXT NOT NULL, preset TEXT NOT NULL, branch TEXT NOT NULL, commit_id TEXT NOT NULL, path TEXT NOT NULL,
    digest TEXT NOT NULL, num_series INTEGER NOT NULL, num_bad INTEGER NOT NULL
);
CREATE INDEX run_by_time ON run (branch, started, number);
CREATE TABLE series (number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE, content TEXT NOT NULL);
CREATE TABLE beside (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE facts (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE point (
    series INTEGER NOT NULL REFERENCES series, run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    status TEXT NOT NULL, seconds REAL, repetitions INTEGER NOT NULL, reason TEXT NOT NULL,
    beside INTEGER NOT NULL REFERENCES beside, facts INTEGER REFERENCES facts, PRIMARY KEY (series, run)
) WITHOUT ROWID;
CREATE INDEX point_by_run ON point (run);
CREATE TABLE annotation (
    run_id TEXT NOT NULL, started TEXT NOT NULL, branch TEXT NOT NULL, series TEXT NOT NULL, note TEXT NOT NULL,
    UNIQUE (run_id, series, note)
)
"""


@dataclass(frozen=True)
class Line:
    """A run of the history; ``num_bad`` counts its series that were wrong, failed or hung."""

    number: int
    id: str
    started: str
    host: str
    parbench: str
    preset: str
    branch: str
    commit: str
    path: str
    num_series: int
    num_bad: int


@dataclass(frozen=True)
class Annotation:
    """An intended change at a run, on its branch, for the series whose label matches a glob."""

    run_id: str
    started: str
    branch: str
    series: str
    note: str


class History:
    """An open history; every change is one transaction, so that a killed process leaves all of it or nothing."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path

    @contextmanager
    def copied(self) -> Iterator["History"]:
        """Yield a copy in memory, in which a run can be added without a change of the file."""
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            self._connection.backup(connection)
            yield History(connection, self._path)

    def add(self, entry: Entry) -> Added:
        """Add a run once, or replace it if it has grown; it stays on its branch and commit unless others are meant."""
        run_id, branch = entry.run.id, entry.about.branch
        if branch in ("", "last") or set(branch) & set("~: \t\n"):
            other = "'last' and names with ~, : or spaces mean something else, or nothing"
            raise UserError(f"--branch {branch!r} cannot name runs: {other}")
        with _transaction(self._connection):
            rows = self._execute("SELECT digest, branch, commit_id FROM run WHERE id = ?", run_id)
            if not rows:
                self._insert(entry)
                return "added"
            [(digest, *about_row)] = rows
            known = About(branch=about_row[0], commit=about_row[1])
            about = replace(known, **{name: getattr(entry.about, name) for name in entry.meant})
            if digest != entry.digest:
                self._execute("DELETE FROM run WHERE id = ?", run_id)
                self._insert(replace(entry, about=about))
            change = "UPDATE run SET branch = ?, commit_id = ?, path = ? WHERE id = ?"
            self._execute(change, about.branch, about.commit, str(entry.path), run_id)
            self._execute("UPDATE annotation SET branch = ? WHERE run_id = ?", about.branch, run_id)
            if about != known:
                return "moved"
            return "unchanged" if digest == entry.digest else "updated"

    def runs(self, branch: str | None = None) -> tuple[Line, ...]:
        names = "number, id, started, host, parbench, preset, branch, commit_id, path, num_series, num_bad"
        where = "branch = coalesce(?, branch)"
        rows = self._execute(
            f"SELECT {names} FROM run WHERE {where} ORDER BY started, number", branch
        )
        return tuple(Line(*row) for row in rows)

    def line(self, run_id: str) -> Line:
        if found := [line for line in self.runs() if line.id == run_id]:
            return found[0]
        raise UserError(
            f"{self._path} has no run {run_id!r}: parbench history list shows what it has"
        )

    def run(self, line: Line) -> Run:
        """Return a run with its records, from its folder; ``UserError`` if the folder is gone."""
        path = Path(line.path)
        if not (path / "run.json").exists():
            needed = "the history has its metrics only, and a comparison requires its records"
            raise UserError(f"run {line.id} is not in {path} any more: {needed}")
        return require_complete(load_run(path))

    def series(self, run: int | None = None) -> dict[int, SeriesIdentity]:
        where = "? IS NULL OR number IN (SELECT series FROM point WHERE run = ?)"
        rows = self._execute(
            f"SELECT number, content FROM series WHERE {where} ORDER BY number", run, run
        )
        with convert_read_errors(f"{self._path}, a series"):
            return {
                number: msgspec.json.decode(content, type=SeriesIdentity)
                for number, content in rows
            }

    def outcomes(self, run: int) -> dict[int, Outcome]:
        rows = self._execute("SELECT series, status, reason FROM point WHERE run = ?", run)
        return {series: (status, reason) for series, status, reason in rows}

    def times(self, series: int, lines: Iterable[Line]) -> tuple[tuple[Line, float], ...]:
        """Return the times of a series in seconds, in the order of lines; runs without a time are left out."""
        rows = self._execute(
            "SELECT run, seconds FROM point WHERE series = ? AND seconds > 0", series
        )
        seconds = dict(rows)
        return tuple((line, seconds[line.number]) for line in lines if line.number in seconds)

    def beside(self, series: int, run: int) -> dict[str, str]:
        """Return the environment of a series in a run that is not part of its fingerprint."""
        query = (
            "SELECT content FROM beside JOIN point ON beside = number WHERE run = ? AND series = ?"
        )
        with convert_read_errors(f"{self._path}, the environment of run {run}"):
            [(content,)] = self._execute(query, run, series)
            return msgspec.json.decode(content, type=dict[str, str])

    def counted(self, series: int, lines: Iterable[Line]) -> tuple[tuple[Line, ExactCounts], ...]:
        """Return the counts of a series, in the order of lines; runs without counts are left out."""
        query = "SELECT run, content FROM point JOIN facts ON facts = number WHERE series = ?"
        with convert_read_errors(f"{self._path}, the counts of a series"):
            facts = {
                run: msgspec.json.decode(content, type=dict[str, list[float | str]])
                for run, content in self._execute(query, series)
            }
        return tuple((line, facts[line.number]) for line in lines if line.number in facts)

    def annotate(self, run_id: str, series: str, note: str) -> None:
        """Mark a change at a run as intended; a second identical annotation changes nothing."""
        line = self.line(run_id)
        row = (run_id, line.started, line.branch, series, note)
        with _transaction(self._connection):
            self._execute("INSERT OR IGNORE INTO annotation VALUES (?, ?, ?, ?, ?)", *row)

    def annotations(self) -> tuple[Annotation, ...]:
        columns = "run_id, started, branch, series, note"
        rows = self._execute(f"SELECT {columns} FROM annotation ORDER BY started, note")
        return tuple(Annotation(*row) for row in rows)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Forget all but the newest runs of each branch and preset, and return their ids; annotations stay."""
        place = "row_number() OVER (PARTITION BY branch, preset ORDER BY started DESC, number DESC) AS place"
        query = f"SELECT number, id FROM (SELECT number, id, {place} FROM run) WHERE place > ?"
        with _transaction(self._connection):
            old = self._execute(query, keep)
            self._connection.executemany(
                "DELETE FROM run WHERE number = ?", [(number,) for number, _ in old]
            )
            self._execute(
                "DELETE FROM facts WHERE number NOT IN (SELECT facts FROM point WHERE facts IS NOT NULL)"
            )
            self._execute("DELETE FROM series WHERE number NOT IN (SELECT series FROM point)")
            self._execute("DELETE FROM beside WHERE number NOT IN (SELECT beside FROM point)")
        self._execute("VACUUM")
        return tuple(run_id for _, run_id in old)

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _insert(self, entry: Entry) -> None:
        run, about, insert_all = entry.run, entry.about, self._connection.executemany
        bad = sum(point.status in ("wrong", "failed", "hang") for point in entry.points)
        texts = (
            run.id,
            run.started,
            run.host,
            run.parbench,
            run.plan.preset,
            about.branch,
            about.commit,
        )
        row = (*texts, str(entry.path), entry.digest, len(entry.points), bad)
        insert = "INSERT INTO run VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        number = self._connection.execute(insert, row).lastrowid
        series, besides, facts, points = [], [], [], []
        for point in entry.points:
            fingerprint = point.series.fingerprint
            beside = msgspec.json.encode(point.explanatory, order="sorted").decode()
            counts = (
                msgspec.json.encode(point.counts, order="sorted").decode() if point.counts else None
            )
            series.append((fingerprint, msgspec.json.encode(point.series).decode()))
            besides.append((beside,))
            if counts is not None:
                facts.append((counts,))
            times = (point.status, point.seconds, point.repetitions, point.reason)
            points.append((fingerprint, number, *times, beside, counts))
        insert_all("INSERT OR IGNORE INTO series VALUES (NULL, ?, ?)", series)
        insert_all("INSERT OR IGNORE INTO beside VALUES (NULL, ?)", besides)
        insert_all("INSERT OR IGNORE INTO facts VALUES (NULL, ?)", facts)
        columns = {"series": "fingerprint", "beside": "content", "facts": "content"}
        keys = {
            table: f"(SELECT number FROM {table} WHERE {column} = ?)"
            for table, column in columns.items()
        }
        insert_all(
            f"INSERT INTO point VALUES ({keys['series']}, ?, ?, ?, ?, ?, {keys['beside']}, {keys['facts']})",
            points,
        )


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Yield the history in a file, made where it may be; ``UserError`` if absent, foreign, damaged, newer or locked."""
    if not (create or path.exists()):
        raise UserError(f"history not found: {path}; parbench history add RUN begins one")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the history's file with --history HISTORY_FILE")
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"{path} cannot be opened: {error}") from error
    try:
        _prepare(connection, path, create=create)
        yield History(connection, path)
    except sqlite3.Error as error:
        busy = f"is being written by other processes for more than {_WAIT_SECONDS:.0f} s; try again later"
        told = {sqlite3.SQLITE_BUSY: busy, sqlite3.SQLITE_LOCKED: busy}
        told[sqlite3.SQLITE_NOTADB] = (
            "is not an SQLite file: name a history with --history HISTORY_FILE"
        )
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise UserError(
            f"{path} {told.get(code, f'cannot be used as a history: {error}')}"
        ) from error
    finally:
        connection.close()


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    # a rollback journal, for the write-ahead log needs shared memory and a second file, which an artifact would lack
    connection.execute("PRAGMA foreign_keys = ON")
    with _transaction(connection) if create else nullcontext():
        if number("SELECT count(*) FROM sqlite_master") == number("PRAGMA application_id") == 0:
            if not create:
                raise UserError(
                    f"{path} is empty, not a history: begin one with parbench history add RUN"
                )
            made = (
                f"{_TABLES}; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}"
            )
            for statement in made.split(";"):
                connection.execute(statement)
        if (application := number("PRAGMA application_id")) != APPLICATION:
            other = (
                f"an SQLite file of another program, not a history (application_id {application})"
            )
            raise UserError(f"{path} is {other}")
        version = number("PRAGMA user_version")
        if version != SCHEMA:
            age = "newer" if version > SCHEMA else "older"
            raise UserError(
                f"{path}: schema {version} is {age} than {SCHEMA}, the one that this parbench reads"
            )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a block one transaction, which waits for other writers first: all of it is kept, or nothing."""
    with connection:  # which commits, or takes back
        connection.execute("BEGIN IMMEDIATE")
        yield
