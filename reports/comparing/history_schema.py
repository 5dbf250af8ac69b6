"""The history's file: an SQLite database that is ours, of a schema that we read, safe among several writers.

History of the schema (``user_version``):
1  first: run, folder, series, beside, point, annotation.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.text import UserError

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
