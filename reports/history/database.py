"""The history: an SQLite file with the results of many runs, by which changes are found.

It contains each run once, and a result for each series: a case on a number of ranks in one
environment.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from parbench.bench.files import convert_read_errors
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run, RunInfo, load_run, require_complete
from parbench.bench.text import UserError
from parbench.reports.compare.environment import SeriesIdentity, SeriesPoint

AddResult = Literal["added", "updated", "unchanged"]
"""The outcome for a run that is added: new, changed since it was added, or as before."""
SCHEMA_VERSION = 3
"""The version of the tables, which the file stores."""
APPLICATION_ID = 0x70627268  # "pbrh", which distinguishes SQLite files
RESERVED_BRANCH = "last"
"""The name that stands for all branches in selectors such as ``last:10``."""
CANDIDATE = -1  # the number of a run that is not part of the history
_WAIT_SECONDS = 60.0
"""The longest wait for another process that has locked the file."""
_TABLES = """
CREATE TABLE run (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, started TEXT NOT NULL, host TEXT NOT NULL,
    preset TEXT NOT NULL, branch TEXT NOT NULL, commit_id TEXT NOT NULL, path TEXT NOT NULL,
    digest TEXT NOT NULL
);
CREATE INDEX run_by_time ON run (branch, started, number);
CREATE TABLE series (
    number INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE, identity TEXT NOT NULL
);
CREATE TABLE document (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE point (
    series INTEGER NOT NULL REFERENCES series,
    run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    status TEXT NOT NULL, seconds REAL, repetitions INTEGER NOT NULL, reason TEXT NOT NULL,
    environment INTEGER NOT NULL REFERENCES document, counts INTEGER NOT NULL REFERENCES document,
    PRIMARY KEY (series, run)
) WITHOUT ROWID;
CREATE INDEX point_by_run ON point (run);
CREATE TABLE annotation (
    run_id TEXT NOT NULL, started TEXT NOT NULL, branch TEXT NOT NULL, series TEXT NOT NULL,
    note TEXT NOT NULL, UNIQUE (run_id, series, note)
)
"""
_POINT_COLUMNS = "run, identity, status, seconds, repetitions, reason, environment, counts"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run to add to the history, with the results of its cases."""

    info: RunInfo
    """The id, start, host and plan of the run."""
    path: Path
    """The absolute path of the folder of the run."""
    digest: str
    """A SHA-256 of the records of the run, by which a run that has grown is recognized."""
    branch: str
    """The branch of the measured code."""
    commit: str = ""
    """The commit of the measured code, empty if unknown."""
    points: tuple[SeriesPoint, ...]
    """The results of the run, one for each case."""


@dataclass(frozen=True)
class StoredRun:
    """A run of the history, or a candidate that is only compared with it."""

    number: int
    """The key of the run in the tables, ``CANDIDATE`` for a candidate."""
    id: str
    """The id of the run, which is the name of its folder."""
    started: str
    """The time of its start in UTC, in ISO format."""
    host: str
    """The name of the host that started the run."""
    preset: str
    """The preset of its cases, empty for a run without one."""
    branch: str
    """The branch of the measured code."""
    commit: str
    """The commit of the measured code, empty if unknown."""
    path: str
    """The absolute path of its folder, which may no longer exist."""

    @property
    def is_candidate(self) -> bool:
        """True if the run is not part of the history, only compared with it."""
        return self.number == CANDIDATE


@dataclass(frozen=True)
class Annotation:
    """A declaration that times or counts of cases changed intentionally, from a run on."""

    run_id: str
    """The id of the run with which the change began."""
    started: str
    """The start of that run in UTC, in ISO format."""
    branch: str
    """The branch of that run."""
    series: str
    """A glob for the labels of the cases that changed."""
    note: str
    """The reason of the change."""


class History:
    """An open history file, which contains the results of many runs.

    Each method that changes it makes one transaction. So the file stays valid if the process is
    killed.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._documents: dict[int, Any] = {}
        """The documents (environments and counts) that were read, keyed by number."""

    def add(self, entry: RunEntry, explicit: Iterable[str] = ()) -> AddResult:
        """Add a run, or update it if its records, folder, branch or commit changed.

        Args:
            entry: the run with its results.
            explicit: the fields that the user gave: ``branch``, ``commit`` or both. A run that
                exists keeps the other ones.

        Returns ``added``, ``updated`` or ``unchanged``. Raises ``UserError`` if the name of the
        branch cannot be used in selectors such as ``main~1``.
        """
        if entry.branch in ("", RESERVED_BRANCH) or set(entry.branch) & set("~: \t\n"):
            hint = f"a branch is not {RESERVED_BRANCH!r} and contains no space, ~ or :"
            raise UserError(f"--branch {entry.branch!r} cannot be used in the history: {hint}")
        with _transaction(self._connection):
            query = "SELECT digest, path, branch, commit_id FROM run WHERE id = ?"
            rows = self._execute(query, entry.info.id)
            for _, _, branch, commit in rows:
                stored = {"branch": branch, "commit": commit}
                kept = {name: value for name, value in stored.items() if name not in explicit}
                entry = replace(entry, **kept)
            if (entry.digest, str(entry.path), entry.branch, entry.commit) in rows:
                return "unchanged"
            self._execute("DELETE FROM run WHERE id = ?", entry.info.id)
            self._insert_run(entry)
            change = "UPDATE annotation SET branch = ? WHERE run_id = ?"
            self._execute(change, entry.branch, entry.info.id)
        return "updated" if rows else "added"

    def _insert_run(self, entry: RunEntry) -> None:
        """Insert a run with its results into the tables.

        Equal environments and equal counts of several results are stored once.
        """
        info = entry.info
        row = (info.id, info.started, info.host, info.plan.preset, entry.branch, entry.commit)
        query = "INSERT INTO run VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"
        number = self._connection.execute(query, (*row, str(entry.path), entry.digest)).lastrowid
        for point in entry.points:
            fingerprint = point.series.fingerprint
            environment = msgspec.json.encode(point.explanatory_values, order="sorted").decode()
            counts = msgspec.json.encode(point.counts, order="sorted").decode()
            identity = msgspec.json.encode(point.series).decode()
            query = "INSERT OR IGNORE INTO series VALUES (NULL, ?, ?)"
            self._connection.execute(query, (fingerprint, identity))
            query = "INSERT OR IGNORE INTO document VALUES (NULL, ?)"
            self._connection.executemany(query, [(environment,), (counts,)])
            result = (point.status, point.seconds, point.repetitions, point.reason)
            document = "(SELECT number FROM document WHERE content = ?)"
            series = "(SELECT number FROM series WHERE fingerprint = ?)"
            query = f"INSERT INTO point VALUES ({series}, ?, ?, ?, ?, ?, {document}, {document})"
            self._execute(query, fingerprint, number, *result, environment, counts)

    def list_runs(self, branch: str | None = None) -> tuple[StoredRun, ...]:
        """Return the runs of a branch, or of all branches for None, oldest first."""
        columns = "number, id, started, host, preset, branch, commit_id, path"
        order = "branch = coalesce(?, branch) ORDER BY started, number"
        rows = self._execute(f"SELECT {columns} FROM run WHERE {order}", branch)
        return tuple(StoredRun(*row) for row in rows)

    def find_run(self, run_id: str) -> StoredRun:
        """Return the run with an id. Raises ``UserError`` if the history does not contain it."""
        for run in self.list_runs():
            if run.id == run_id:
                return run
        hint = "parbench history list prints all runs"
        raise UserError(f"{self._path} does not contain run {run_id!r}: {hint}")

    def load_run(self, stored: StoredRun) -> Run:
        """Load a run of the history with its records from its folder.

        Raises ``UserError`` if the folder does not exist, or if a record cannot be read.
        """
        path = Path(stored.path)
        if not (path / "run.json").exists():
            reason = "the history stores only metrics, and a comparison requires the records"
            raise UserError(f"the folder of run {stored.id} does not exist: {path}; {reason}")
        return require_complete(load_run(path))

    def read_points(self, run: StoredRun) -> list[SeriesPoint]:
        """Return the results of a run, one for each case."""
        return [point for _, point in self._select_points("run = ?", run.number)]

    def read_series(
        self, fingerprint: str, runs: Iterable[StoredRun]
    ) -> list[tuple[StoredRun, SeriesPoint]]:
        """Return (run, result) of one case in one environment for each of ``runs`` that measured it.

        They are in the order of ``runs``. ``fingerprint`` is a hash that identifies the case with
        its ranks and environment.
        """
        by_run = dict(self._select_points("fingerprint = ?", fingerprint))
        return [(run, by_run[run.number]) for run in runs if run.number in by_run]

    def list_series(self, run: StoredRun | None = None) -> list[SeriesIdentity]:
        """Return each case with the ranks and environment in which a run measured it.

        If ``run`` is None, the cases of all runs are returned, each environment of a case once.
        """
        condition = "? IS NULL OR number IN (SELECT series FROM point WHERE run = ?)"
        query = f"SELECT identity FROM series WHERE {condition} ORDER BY number"
        number = None if run is None else run.number
        rows = self._execute(query, number, number)
        with convert_read_errors(f"{self._path}, a series"):
            return [msgspec.json.decode(identity, type=SeriesIdentity) for (identity,) in rows]

    def count_series(self) -> dict[int, tuple[int, int]]:
        """Return (number of cases, number of failed cases) of each run.

        The key is the number of the run (``StoredRun.number``). Wrong and hung cases also count as
        failed.
        """
        failed = "sum(status IN ('wrong', 'failed', 'hang'))"
        rows = self._execute(f"SELECT run, count(*), {failed} FROM point GROUP BY run")
        return {run: (num_series, num_failed) for run, num_series, num_failed in rows}

    def read_times(self) -> list[tuple[int, str, float]]:
        """Return (number of the run, fingerprint, seconds) for each case of each run with its time.

        A fingerprint is a hash that identifies a case in one environment.
        """
        tables = "point JOIN series ON series = number"
        query = f"SELECT run, fingerprint, seconds FROM {tables} WHERE seconds > 0"
        return self._connection.execute(query).fetchall()

    def annotate(self, run_id: str, series: str, note: str) -> None:
        """Store the declaration that cases changed intentionally in a run.

        A second identical declaration changes nothing.

        Args:
            run_id: the run with which the change began. ``UserError`` is raised if it does not
                exist.
            series: a glob for the labels of the cases that changed.
            note: the reason of the change.
        """
        run = self.find_run(run_id)
        row = (run_id, run.started, run.branch, series, note)
        with _transaction(self._connection):
            self._execute("INSERT OR IGNORE INTO annotation VALUES (?, ?, ?, ?, ?)", *row)

    def list_annotations(self) -> tuple[Annotation, ...]:
        """Return all declarations of intended changes, in the order of the start of their runs."""
        columns = "run_id, started, branch, series, note"
        rows = self._execute(f"SELECT {columns} FROM annotation ORDER BY started, note")
        return tuple(Annotation(*row) for row in rows)

    def prune(self, keep: int) -> tuple[str, ...]:
        """Delete all but the newest ``keep`` runs of each branch and preset.

        The ids of the deleted runs are returned. Annotations stay.
        """
        window = "PARTITION BY branch, preset ORDER BY started DESC, number DESC"
        ranked = f"SELECT number, id, row_number() OVER ({window}) AS place FROM run"
        with _transaction(self._connection):
            rows = self._execute(f"SELECT number, id FROM ({ranked}) WHERE place > ?", keep)
            for number, _ in rows:
                self._execute("DELETE FROM run WHERE number = ?", number)
            self._execute("DELETE FROM series WHERE number NOT IN (SELECT series FROM point)")
            used = "SELECT environment FROM point UNION SELECT counts FROM point"
            self._execute(f"DELETE FROM document WHERE number NOT IN ({used})")
        self._execute("VACUUM")
        return tuple(run_id for _, run_id in rows)

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute an SQL query with values for its placeholders, and return all rows."""
        return self._connection.execute(query, values).fetchall()

    def _select_points(self, condition: str, value: object) -> list[tuple[int, SeriesPoint]]:
        """Return (number of the run, result) for each result that meets an SQL condition.

        ``value`` replaces the placeholder of the condition, such as ``run = ?``.
        """
        tables = "point JOIN series ON series = series.number"
        query = f"SELECT {_POINT_COLUMNS} FROM {tables} WHERE {condition}"
        points = []
        for run, identity, *result, environment, counts in self._execute(query, value):
            status, seconds, repetitions, reason = result
            with convert_read_errors(f"{self._path}, a series"):
                series = msgspec.json.decode(identity, type=SeriesIdentity)
                known_status = msgspec.convert(status, Status)
            point = SeriesPoint(
                series=series,
                status=known_status,
                seconds=seconds,
                repetitions=repetitions,
                reason=reason,
                explanatory_values=self._read_document(environment, dict[str, str]),
                counts=self._read_document(counts, dict[str, list[float | str]]),
            )
            points.append((run, point))
        return points

    def _read_document(self, number: int, kind: Any) -> Any:
        """Return the environment or the exact counts that a row of the table ``document`` contains.

        ``number`` is the key of the row, and ``kind`` the type of its content, which is stored as
        JSON. Each row is read from the file once.
        """
        if number not in self._documents:
            query = "SELECT content FROM document WHERE number = ?"
            [(content,)] = self._execute(query, number)
            with convert_read_errors(f"{self._path}, document {number}"):
                self._documents[number] = msgspec.json.decode(content, type=kind)
        return self._documents[number]


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Open the history in a file, and close it at the end of the ``with`` block.

    If ``create`` is True, a missing file is created. Otherwise ``UserError`` is raised for it. It
    is also raised for a file that is damaged or locked, and for another schema version.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file of the history with --history FILE")
    if not create and not path.exists():
        raise UserError(f"the history {path} does not exist: parbench history add RUN creates it")
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"{path} cannot be opened: {error}") from error
    with closing(connection):
        try:
            _prepare(connection, path, create=create)
            yield History(connection, path)
        except sqlite3.Error as error:
            raise UserError(f"{path} {_describe_error(error)}") from error


def _describe_error(error: sqlite3.Error) -> str:
    """Return the reason why SQLite cannot use a file, as text that follows the file's path."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"was locked by another process for {_WAIT_SECONDS:.0f} s: try again later"
    if code == sqlite3.SQLITE_NOTADB:
        return "is not an SQLite file: name a history with --history FILE"
    return f"cannot be used as a history: {error}"


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    """Create the tables of a new file if ``create`` is True, and check the version of other files.

    The journal is a rollback journal. A write-ahead log would be a second file, which a copy of the
    history would lack. Raises ``UserError`` for another version, or a file of another program.
    """

    def read_number(query: str) -> int:
        """Return the number that an SQL query gives."""
        return int(connection.execute(query).fetchone()[0])

    connection.execute("PRAGMA foreign_keys = ON")
    with _transaction(connection) if create else nullcontext():
        application = read_number("PRAGMA application_id")
        num_tables = read_number("SELECT count(*) FROM sqlite_master")
        if create and not application and not num_tables:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            return
    if application != APPLICATION_ID:
        hint = "name a history with --history FILE"
        raise UserError(f"{path} is an SQLite file of another program: {hint}")
    version = read_number("PRAGMA user_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, and this parbench reads {SCHEMA_VERSION}"
        )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a ``with`` block one transaction, which waits for other writers first."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
