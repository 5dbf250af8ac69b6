"""The history: an SQLite file with the results of many runs, by which changes are found.

It contains each run once, and a result for each series: a case on a number of ranks in one
environment.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from parbench.bench.files import convert_read_errors, convert_write_errors
from parbench.bench.text import UserError
from parbench.reports.compare.environment import SeriesIdentity, SeriesPoint

SCHEMA_VERSION = 4
"""The version of the tables, which the file stores."""
WAIT_SECONDS = 60.0
"""The longest wait for another process that has locked the file."""
_TABLES = """
CREATE TABLE run (
    id TEXT PRIMARY KEY, started TEXT NOT NULL, preset TEXT NOT NULL, branch TEXT NOT NULL,
    commit_id TEXT NOT NULL, path TEXT NOT NULL
);
CREATE TABLE series (fingerprint TEXT PRIMARY KEY, identity TEXT NOT NULL);
CREATE TABLE point (
    fingerprint TEXT NOT NULL REFERENCES series,
    run TEXT NOT NULL REFERENCES run ON DELETE CASCADE,
    seconds REAL, content TEXT NOT NULL, PRIMARY KEY (fingerprint, run)
) WITHOUT ROWID;
CREATE INDEX point_by_run ON point (run);
CREATE TABLE annotation (
    run TEXT NOT NULL REFERENCES run ON DELETE CASCADE, series TEXT NOT NULL, note TEXT NOT NULL,
    UNIQUE (run, series, note)
)
"""
"""The tables. ``identity`` and ``content`` are JSON, which together are a ``SeriesPoint``."""


@dataclass(frozen=True)
class HistoryRun:
    """A run of the history, or a run that is compared with it."""

    id: str
    """The id of the run, which is the name of its folder."""
    started: str
    """The time at which the run started, in UTC and ISO format."""
    preset: str
    """The preset of the cases of the run, empty for a run without a preset."""
    branch: str
    """The branch of the measured code."""
    commit: str
    """The commit of the measured code, empty if unknown."""
    path: str
    """The absolute path of the folder of the run, which may no longer exist."""
    is_candidate: bool = False
    """True if the run is only compared with the history, and not part of it."""


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

    Each method that changes the file makes one transaction, so that the file stays valid if the
    process is killed.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Use an open connection to the file ``path``. ``open_history`` makes and closes it."""
        self._connection = connection
        self._path = path

    def add(self, run: HistoryRun, points: Sequence[SeriesPoint]) -> Literal["added", "updated"]:
        """Add a run with its results, or update a run that the history contains.

        An updated run gets the new results and path, and keeps its branch and commit. ``points``
        has one result for each case. Returns ``added`` or ``updated``.
        """
        values = (run.id, run.started, run.preset, run.branch, run.commit, run.path)
        update = "ON CONFLICT (id) DO UPDATE SET path = excluded.path"
        with _transaction(self._connection):
            is_new = not self._execute("SELECT id FROM run WHERE id = ?", run.id)
            self._execute(f"INSERT INTO run VALUES (?, ?, ?, ?, ?, ?) {update}", *values)
            self._execute("DELETE FROM point WHERE run = ?", run.id)
            for point in points:
                fingerprint = point.series.fingerprint
                content = msgspec.to_builtins(point)
                identity = msgspec.json.encode(content.pop("series")).decode()
                text = msgspec.json.encode(content).decode()
                self._execute("INSERT OR IGNORE INTO series VALUES (?, ?)", fingerprint, identity)
                row = (fingerprint, run.id, point.seconds, text)
                self._execute("INSERT INTO point VALUES (?, ?, ?, ?)", *row)
        return "added" if is_new else "updated"

    def list_runs(self, branch: str | None = None) -> list[HistoryRun]:
        """Return the runs of a branch, or of all branches for None, oldest first."""
        order = "branch = coalesce(?, branch) ORDER BY started, id"
        return [
            HistoryRun(*row) for row in self._execute(f"SELECT * FROM run WHERE {order}", branch)
        ]

    def read_points(self, run: HistoryRun) -> dict[str, SeriesPoint]:
        """Return the results of a run, one for each case.

        The key is the fingerprint, a hash of the case with its ranks and environment.
        """
        tables = "point JOIN series USING (fingerprint)"
        query = f"SELECT fingerprint, identity, content FROM {tables} WHERE run = ?"
        points = {}
        with convert_read_errors(f"{self._path}, a result"):
            for fingerprint, identity, content in self._execute(query, run.id):
                fields = msgspec.json.decode(content)
                fields["series"] = msgspec.json.decode(identity)
                points[fingerprint] = msgspec.convert(fields, SeriesPoint)
        return points

    def list_series(self) -> list[SeriesIdentity]:
        """Return the identities of all series: each measured case once for each environment."""
        rows = self._execute("SELECT identity FROM series ORDER BY rowid")
        with convert_read_errors(f"{self._path}, a series"):
            return [msgspec.json.decode(identity, type=SeriesIdentity) for (identity,) in rows]

    def read_times(self) -> list[tuple[str, str, float]]:
        """Return (id of the run, fingerprint, seconds) for each time of a case in a run.

        A fingerprint is a hash that identifies a case in one environment.
        """
        return self._execute("SELECT run, fingerprint, seconds FROM point WHERE seconds > 0")

    def annotate(self, run: HistoryRun, series: str, note: str) -> None:
        """Store the declaration that cases changed intentionally in a run.

        ``series`` is a glob for the labels of the cases. ``note`` is the reason. A second identical
        declaration changes nothing.
        """
        with _transaction(self._connection):
            row = (run.id, series, note)
            self._execute("INSERT OR IGNORE INTO annotation VALUES (?, ?, ?)", *row)

    def list_annotations(self) -> list[Annotation]:
        """Return all declarations of intended changes, in the order of the start of their runs."""
        columns = "run, started, branch, series, note"
        tables = "annotation JOIN run ON run = id"
        rows = self._execute(f"SELECT {columns} FROM {tables} ORDER BY started, note")
        return [Annotation(*row) for row in rows]

    def prune(self, keep: int) -> list[str]:
        """Delete all but the newest ``keep`` runs of each branch and preset, and their annotations.

        The ids of the deleted runs are returned.
        """
        window = "PARTITION BY branch, preset ORDER BY started DESC, id DESC"
        ranked = f"SELECT id, row_number() OVER ({window}) AS place FROM run"
        rows = self._execute(f"SELECT id FROM ({ranked}) WHERE place > ?", keep)
        run_ids = [run_id for (run_id,) in rows]
        self.remove(run_ids)
        return run_ids

    def remove(self, run_ids: Sequence[str]) -> None:
        """Delete runs with their results and annotations."""
        with _transaction(self._connection):
            rows = [(run_id,) for run_id in run_ids]
            self._connection.executemany("DELETE FROM run WHERE id = ?", rows)
            used = "SELECT fingerprint FROM point"
            self._execute(f"DELETE FROM series WHERE fingerprint NOT IN ({used})")
        self._execute("VACUUM")

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute an SQL query with values for its placeholders, and return all rows."""
        return self._connection.execute(query, values).fetchall()


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Open the history in a file, and close it at the end of the ``with`` block.

    If ``create`` is True, a missing file is created. Otherwise ``UserError`` is raised for it. It
    is also raised for a file that is damaged or locked, and for another schema version.
    """
    if create:
        with convert_write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise UserError(f"the history {path} does not exist: parbench history add RUN creates it")
    try:
        # The journal is a rollback journal, because a write-ahead log would be a second file.
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
        with closing(connection):
            connection.execute("PRAGMA foreign_keys = ON")
            if create:
                _create_tables(connection)
            [version] = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise UserError(
                    f"{path} has schema version {version}, and parbench reads {SCHEMA_VERSION}: "
                    "name another file with --history FILE"
                )
            yield History(connection, path)
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be used as a history: {error}") from error


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of a history in a file that has no table yet."""
    with _transaction(connection):
        if connection.execute("SELECT name FROM sqlite_master").fetchone() is None:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a ``with`` block one transaction, which waits for other writers first."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
