"""The history: runs kept in one file, each once, with the points of their series in the order of time."""

import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from parbench.bench.files import MOST_BYTES, decode_json, file_name, inflate, open_file, read_file
from parbench.bench.limits import Amount, Count, Id, Long, Name, Whole, Words
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run, load_run, whole
from parbench.bench.text import UserError, reading, writing
from parbench.reports.history.entries import ABOUT, MOST_RECORDS_BYTES, About, Entry
from parbench.reports.regression.counted import Facts
from parbench.reports.regression.environment import Identity

Added = Literal["added", "updated", "moved", "unchanged"]
Outcome = tuple[Status, str]
SCHEMA = 1
APPLICATION = 0x70627268  # pbrh, by which SQLite files are told apart
ANNOTATIONS = "annotations.json"  # beside exported runs
_WAIT_SECONDS = 60.0
_T = TypeVar("_T")
_S = TypeVar("_S", bound=msgspec.Struct)
_Seconds = Annotated[float, msgspec.Meta(ge=1e-15, le=1e15)]
_Around, _Facts = dict[Name, Words], dict[Name, list[Amount | Words]]
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
_COUNTS = """
CREATE TABLE IF NOT EXISTS facts (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS counted (
    series INTEGER NOT NULL REFERENCES series, run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    facts INTEGER NOT NULL REFERENCES facts, PRIMARY KEY (series, run)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS counted_by_run ON counted (run)
"""
"""What histories of before counts were kept lack; they get it when a run is added."""


class Line(msgspec.Struct, frozen=True):
    """A run of the history; ``num_bad`` counts its series that were wrong, failed or hung."""

    number: Whole
    id: Id
    started: Name
    host: Words
    parbench: Name
    preset: Name
    branch: Name
    commit: Name
    num_series: Count
    num_bad: Count


class Annotation(msgspec.Struct, frozen=True):
    """A change at a run that was meant, on its branch, for the series whose label fits a glob."""

    run_id: Id
    started: Name
    branch: Name
    series: Words
    note: Words


class History:
    """An open history; every change is one transaction, so that a killed process leaves all of it or nothing."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path

    @contextmanager
    def copied(self) -> Iterator["History"]:
        """Yield a copy in memory, to ask what would be if."""
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            self._connection.backup(connection)
            connection.executescript(_COUNTS)
            yield History(connection, self._path)

    def add(self, entry: Entry) -> Added:
        """Keep a run once, anew if it has grown; it stays on its branch and commit unless others are meant."""
        run_id, branch = entry.run.id, entry.about.branch
        if branch in ("", "last") or set(branch) & set("~: \t\n"):
            other = "'last' and names with ~, : or spaces mean something else, or nothing"
            raise UserError(f"--branch {branch!r} cannot name runs: {other}")
        with _transaction(self._connection):
            known = self._execute("SELECT digest, branch, commit_id FROM run WHERE id = ?", run_id)
            if not known:
                self._insert(entry)
                return "added"
            [(digest, *place)] = known
            kept = About(branch=place[0], commit=place[1])
            about = msgspec.structs.replace(kept, **{name: getattr(entry.about, name) for name in entry.meant})
            if digest != entry.digest:
                self._execute("DELETE FROM run WHERE id = ?", run_id)
                self._insert(replace(entry, about=about))
            if about == kept:
                return "unchanged" if digest == entry.digest else "updated"
            self._execute("UPDATE run SET branch = ?, commit_id = ? WHERE id = ?", about.branch, about.commit, run_id)
            self._execute("UPDATE annotation SET branch = ? WHERE run_id = ?", about.branch, run_id)
            return "moved"

    def runs(self, branch: str | None = None) -> tuple[Line, ...]:
        names = "number, id, started, host, parbench, preset, branch, commit_id, num_series, num_bad"
        where = "branch = coalesce(?, branch)"
        return self._told(Line, f"SELECT {names} FROM run WHERE {where} ORDER BY started, number", branch)

    def line(self, run_id: str) -> Line:
        if found := [line for line in self.runs() if line.id == run_id]:
            return found[0]
        raise UserError(f"{self._path} has no run {run_id!r}: parbench history list shows what it has")

    def run(self, line: Line) -> Run:
        """Return a run with its records; its path is its id."""
        with tempfile.TemporaryDirectory() as folder:
            self._write_files(line, Path(folder))
            try:
                return msgspec.structs.replace(whole(load_run(Path(folder))), path=Path(line.id))
            except UserError as error:
                raise UserError(str(error).replace(f"{folder}/", f"{self._path}, run {line.id}: ")) from error

    def series(self, run: int | None = None) -> dict[int, Identity]:
        where = "? IS NULL OR number IN (SELECT series FROM point WHERE run = ?)"
        query = f"SELECT number, content FROM series WHERE {where} ORDER BY number"
        rows = self._rows(tuple[int, str], query, run, run)
        with reading(f"{self._path}, a series"):
            return {number: decode_json(content.encode(), Identity) for number, content in rows}

    def any_series(self) -> dict[int, int]:
        """Return a series of each run that has one: where it ran, the run did."""
        query = "SELECT run, min(series) FROM point JOIN series ON series = number GROUP BY run"
        return dict(self._rows(tuple[int, int], query))

    def outcomes(self, run: int) -> dict[int, Outcome]:
        rows = self._rows(tuple[int, Status, Long], "SELECT series, status, reason FROM point WHERE run = ?", run)
        return {series: (status, reason) for series, status, reason in rows}

    def times(self, series: Iterable[int], lines: Iterable[Line]) -> tuple[tuple[Line, float], ...]:
        """Return the times of series as one, such as those that differ in their hosts alone, in the order of lines."""
        query = "SELECT run, seconds FROM point WHERE series = ? AND seconds IS NOT NULL AND seconds <> 0"
        seconds = dict(chain.from_iterable(self._rows(tuple[int, _Seconds], query, one) for one in series))
        return tuple((line, seconds[line.number]) for line in lines if line.number in seconds)

    def beside(self, series: Sequence[int], run: int) -> dict[str, str]:
        """Return what was around that one of these series that the run has."""
        query = "SELECT content FROM beside JOIN point ON beside = number WHERE run = ? AND series IN (%s)"
        rows = self._rows(tuple[str], query % ", ".join("?" * len(series)), run, *series)
        with reading(f"{self._path}, what was around run {run}"):
            return {name: text for (content,) in rows for name, text in decode_json(content.encode(), _Around).items()}

    def counted(self, series: Iterable[int], lines: Iterable[Line]) -> tuple[tuple[Line, Facts], ...]:
        """Return what series as one counted, in the order of lines; those that kept no counts are left out."""
        if not self._execute("SELECT 1 FROM sqlite_master WHERE name = 'counted'"):
            return ()
        query = "SELECT run, content FROM counted JOIN facts ON facts = number WHERE series = ?"
        told = dict(row for one in series for row in self._rows(tuple[int, str], query, one))
        with reading(f"{self._path}, what was counted"):
            return tuple((one, decode_json(told[one.number].encode(), _Facts)) for one in lines if one.number in told)

    def annotate(self, run_id: str, series: str, note: str) -> None:
        """Say that what changed at a run was meant; said again it changes nothing."""
        line = self.line(run_id)
        self._annotate([Annotation(run_id, line.started, line.branch, series, note)])

    def annotations(self) -> tuple[Annotation, ...]:
        columns = "run_id, started, branch, series, note"
        return self._told(Annotation, f"SELECT {columns} FROM annotation ORDER BY started, note")

    def prune(self, keep: int) -> tuple[str, ...]:
        """Forget all but the newest runs of each branch and preset, and return their ids; annotations stay."""
        place = "row_number() OVER (PARTITION BY branch, preset ORDER BY started DESC, number DESC) AS place"
        query = f"SELECT number, id FROM (SELECT number, id, {place} FROM run) WHERE place > ?"
        with _transaction(self._connection):
            old = self._execute(query, keep)
            self._connection.executemany("DELETE FROM run WHERE number = ?", [(number,) for number, _ in old])
            if self._execute("SELECT 1 FROM sqlite_master WHERE name = 'counted'"):
                self._execute("DELETE FROM facts WHERE number NOT IN (SELECT facts FROM counted)")
            self._execute("DELETE FROM series WHERE number NOT IN (SELECT series FROM point)")
            self._execute("DELETE FROM beside WHERE number NOT IN (SELECT beside FROM point)")
        self._execute("VACUUM")
        return tuple(run_id for _, run_id in old)

    def export(self, folder: Path) -> int:
        """Write every run and the annotations for ``add`` to read back; return how many. Samples are not kept."""
        lines = self.runs()
        with writing(folder):
            for line in lines:
                target = folder / file_name(line.id)
                target.mkdir(parents=True, exist_ok=True)
                self._write_files(line, target)
                about = msgspec.json.encode(About(branch=line.branch, commit=line.commit))
                (target / ABOUT).write_bytes(about + b"\n")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ANNOTATIONS).write_bytes(msgspec.json.encode(self.annotations()) + b"\n")
        return len(lines)

    def import_annotations(self, folder: Path) -> None:
        file = folder / ANNOTATIONS
        with reading(file):
            if file.exists():
                self._annotate(decode_json(read_file(file), list[Annotation]))

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def _rows(self, kind: type[_T], query: str, *values: object) -> list[_T]:
        """Return rows as tuples of types; ``UserError`` where a cell holds something else."""
        with reading(self._path, "is damaged"):
            return msgspec.convert(self._execute(query, *values), list[kind])  # type: ignore[valid-type]

    def _told(self, kind: type[_S], query: str, *values: object) -> tuple[_S, ...]:
        """Return rows as structs whose fields stand in the query's order."""
        names = kind.__struct_fields__
        with reading(self._path, "is damaged"):
            rows = [dict(zip(names, row, strict=True)) for row in self._execute(query, *values)]
            return msgspec.convert(rows, tuple[kind, ...])  # type: ignore[valid-type]

    def _annotate(self, found: Sequence[Annotation]) -> None:
        with _transaction(self._connection):
            rows = map(msgspec.structs.astuple, found)
            self._connection.executemany("INSERT OR IGNORE INTO annotation VALUES (?, ?, ?, ?, ?)", rows)

    def _insert(self, entry: Entry) -> None:
        run, about, many = entry.run, entry.about, self._connection.executemany
        bad = sum(point.status in ("wrong", "failed", "hang") for point in entry.points)
        texts = (run.id, run.started, run.host, run.parbench, run.plan.preset, about.branch, about.commit, entry.digest)
        insert = "INSERT INTO run VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        number = self._connection.execute(insert, (*texts, len(entry.points), bad)).lastrowid
        files = (zlib.compress(entry.info_json), zlib.compress(entry.records_jsonl))
        self._execute("INSERT INTO folder VALUES (?, ?, ?)", number, *files)
        series, besides, points, facts, counts = [], [], [], [], []
        for point in entry.points:
            fingerprint = point.series.fingerprint
            beside = msgspec.json.encode(point.beside, order="sorted").decode()
            series.append((fingerprint, msgspec.json.encode(point.series).decode()))
            besides.append((beside,))
            points.append((fingerprint, number, point.status, point.seconds, point.launches, point.reason, beside))
            if point.facts:
                content = msgspec.json.encode(point.facts, order="sorted").decode()
                facts.append((content,))
                counts.append((fingerprint, number, content))
        many("INSERT OR IGNORE INTO series VALUES (NULL, ?, ?)", series)
        many("INSERT OR IGNORE INTO beside VALUES (NULL, ?)", besides)
        many("INSERT OR IGNORE INTO facts VALUES (NULL, ?)", facts)
        of = {"series": "fingerprint", "beside": "content", "facts": "content"}
        keys = {table: f"(SELECT number FROM {table} WHERE {name} = ?)" for table, name in of.items()}
        many(f"INSERT INTO point VALUES ({keys['series']}, ?, ?, ?, ?, ?, {keys['beside']})", points)
        many(f"INSERT INTO counted VALUES ({keys['series']}, ?, {keys['facts']})", counts)

    def _write_files(self, line: Line, folder: Path) -> None:
        files = self._rows(tuple[bytes, bytes], "SELECT info, records FROM folder WHERE run = ?", line.number)
        if not files:
            raise UserError(f"{self._path} is damaged: it has no files of run {line.id}")
        for name, packed, most in zip(
            ("run.json", "records.jsonl"), files[0], (MOST_BYTES, MOST_RECORDS_BYTES), strict=True
        ):
            with reading(f"{self._path}, {name} of run {line.id}"):
                content = inflate(packed, f"{self._path}, {name} of run {line.id}", most=most)
            (folder / name).write_bytes(content)


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Yield the history in a file, made where it may be; ``UserError`` if absent, foreign, damaged, newer or locked."""
    with reading(path):
        is_there = path.exists()
        if not (create or is_there):
            raise UserError(f"history not found: {path}; parbench history add RUN begins one")
        if path.is_dir():
            raise UserError(f"{path} is a folder: name the history's file with --history FILE")
        if is_there:
            with open_file(path):  # SQLite would wait for a pipe
                pass
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
        told[sqlite3.SQLITE_NOTADB] = "is not an SQLite file: name a history with --history FILE"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise UserError(f"{path} {told.get(code, f'cannot be used as a history: {error}')}") from error
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
                raise UserError(f"{path} is empty, not a history: begin one with parbench history add RUN")
            made = f"{_TABLES}; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}"
            for statement in made.split(";"):
                connection.execute(statement)
        if (application := number("PRAGMA application_id")) != APPLICATION:
            other = f"an SQLite file of another program, not a history (application_id {application})"
            raise UserError(f"{path} is {other}")
        if (version := number("PRAGMA user_version")) > SCHEMA:
            raise UserError(f"{path}: schema {version} is newer than {SCHEMA}, the newest this parbench reads")
        _refuse_others(connection, path)
        for statement in _COUNTS.split(";") if create else ():
            connection.execute(statement)


def _refuse_others(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse tables that are not ours before any is asked: a view may never end, a trigger does what it likes."""
    told = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())
    ours, later = (dict(map(_named, made.strip(" ;\n").split(";"))) for made in (_TABLES, _COUNTS))
    known = {**ours, **later}
    strange = [str(name) for name, sql in told.items() if name not in known or _named(str(sql))[1] != known[name]]
    if lacking := sorted({*strange, *(ours.keys() - told.keys())}):
        raise UserError(f"{path} is no history as parbench makes it: look at {', '.join(lacking)[:200]}")


def _named(statement: str) -> tuple[str, str]:
    """Return what a statement makes, and it as SQLite keeps it, but for its spaces."""
    words = statement.replace("IF NOT EXISTS ", "").split()
    return words[2], " ".join(words)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a block one transaction, which waits for other writers first: all of it is kept, or nothing."""
    with connection:  # which commits, or takes back
        connection.execute("BEGIN IMMEDIATE")
        yield
