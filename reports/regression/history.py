"""The history: runs kept in one file, each once, with the points of their series in the order of time."""

import hashlib
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.plan.cases import renewed
from bench.results.records import Status
from bench.results.runs import Run, RunInfo, load_run, runs_in
from bench.text import UserError, reading, writing
from reports.regression.compare import pool
from reports.regression.counted import Facts
from reports.regression.environment import Identity, Point, points_of

Added = Literal["added", "updated", "moved", "unchanged"]
Outcome = tuple[Status, str]
SCHEMA = 1
APPLICATION = 0x70627268  # pbrh, by which SQLite files are told apart
ABOUT = "history.json"  # in an exported run's folder: its branch and commit
ANNOTATIONS = "annotations.json"  # beside exported runs
_SELECTOR = re.compile(r"(?P<name>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>\d{1,9}))?")
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
_COUNTS = """
CREATE TABLE IF NOT EXISTS facts (number INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS counted (
    series INTEGER NOT NULL REFERENCES series, run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    facts INTEGER NOT NULL REFERENCES facts, PRIMARY KEY (series, run)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS counted_by_run ON counted (run)
"""
"""What histories of before counts were kept lack; they get it when a run is added."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does not know of itself: the branch that was measured, and the commit, empty where unknown."""

    branch: str
    commit: str = ""


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


class Line(msgspec.Struct, frozen=True):
    """A run of the history; ``num_bad`` counts its series that were wrong, failed or hung."""

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


class Annotation(msgspec.Struct, frozen=True):
    """A change at a run that was meant, on its branch, for the series whose label fits a glob."""

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
        rows = self._execute(f"SELECT {names} FROM run WHERE {where} ORDER BY started, number", branch)
        return tuple(Line(*row) for row in rows)

    def line(self, run_id: str) -> Line:
        if found := [line for line in self.runs() if line.id == run_id]:
            return found[0]
        raise UserError(f"{self._path} has no run {run_id!r}: parbench history list shows what it has")

    def run(self, line: Line) -> Run:
        """Return a run with its records; its path is its id."""
        with tempfile.TemporaryDirectory() as folder:
            self._write_files(line, Path(folder))
            return msgspec.structs.replace(load_run(Path(folder)), path=Path(line.id))

    def series(self, run: int | None = None) -> dict[int, Identity]:
        where = "? IS NULL OR number IN (SELECT series FROM point WHERE run = ?)"
        rows = self._execute(f"SELECT number, content FROM series WHERE {where} ORDER BY number", run, run)
        decoder = msgspec.json.Decoder(Identity)
        found = {number: decoder.decode(content) for number, content in rows}
        return {number: msgspec.structs.replace(one, case=renewed(one.case)) for number, one in found.items()}

    def any_series(self) -> dict[int, int]:
        """Return a series of each run that has one: where it ran, the run did."""
        return dict(self._execute("SELECT run, min(series) FROM point GROUP BY run"))

    def outcomes(self, run: int) -> dict[int, Outcome]:
        rows = self._execute("SELECT series, status, reason FROM point WHERE run = ?", run)
        return {series: (status, reason) for series, status, reason in rows}

    def times(self, series: Iterable[int], lines: Iterable[Line]) -> tuple[tuple[Line, float], ...]:
        """Return the times of series as one, such as those that differ in their hosts alone, in the order of lines."""
        query = "SELECT run, seconds FROM point WHERE series = ? AND seconds IS NOT NULL"
        seconds = dict(chain.from_iterable(self._execute(query, one) for one in series))
        return tuple((line, seconds[line.number]) for line in lines if line.number in seconds)

    def beside(self, series: Sequence[int], run: int) -> dict[str, str]:
        """Return what was around that one of these series that the run has."""
        query = "SELECT content FROM beside JOIN point ON beside = number WHERE run = ? AND series IN (%s)"
        [[content]] = self._execute(query % ", ".join("?" * len(series)), run, *series)
        return msgspec.json.decode(content, type=dict[str, str])

    def counted(self, series: Iterable[int], lines: Iterable[Line]) -> tuple[tuple[Line, Facts], ...]:
        """Return what series as one counted, in the order of lines; those that kept no counts are left out."""
        if not self._execute("SELECT 1 FROM sqlite_master WHERE name = 'counted'"):
            return ()
        query = "SELECT run, content FROM counted JOIN facts ON facts = number WHERE series = ?"
        told = dict(chain.from_iterable(self._execute(query, one) for one in series))
        decoder = msgspec.json.Decoder(dict[str, list[float | str]])
        return tuple((line, decoder.decode(told[line.number])) for line in lines if line.number in told)

    def annotate(self, run_id: str, series: str, note: str) -> None:
        """Say that what changed at a run was meant; said again it changes nothing."""
        line = self.line(run_id)
        self._annotate([Annotation(run_id, line.started, line.branch, series, note)])

    def annotations(self) -> tuple[Annotation, ...]:
        return tuple(Annotation(*row) for row in self._execute("SELECT * FROM annotation ORDER BY started, note"))

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
                target = folder / line.id
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
            content = file.read_bytes() if file.exists() else b"[]"
            self._annotate(msgspec.json.decode(content, type=list[Annotation]))

    def _execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

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
        [[info, records]] = self._execute("SELECT info, records FROM folder WHERE run = ?", line.number)
        (folder / "run.json").write_bytes(zlib.decompress(info))
        (folder / "records.jsonl").write_bytes(zlib.decompress(records))


@contextmanager
def open_history(path: Path, *, create: bool = False) -> Iterator[History]:
    """Yield the history in a file, made where it may be; ``UserError`` if absent, foreign, damaged, newer or locked."""
    if not (create or path.exists()):
        raise UserError(f"history not found: {path}; parbench history add RUN begins one")
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
        yield History(connection, path)
    except sqlite3.Error as error:
        busy = f"is being written by other processes for more than {_WAIT_SECONDS:.0f} s; try again later"
        told = {sqlite3.SQLITE_BUSY: busy, sqlite3.SQLITE_LOCKED: busy}
        told[sqlite3.SQLITE_NOTADB] = "is not an SQLite file: name a history with --history FILE"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise UserError(f"{path} {told.get(code, f'cannot be used as a history: {error}')}") from error
    finally:
        connection.close()


def add_folders(
    file: Path, paths: Sequence[Path], *, branch: str, commit: str, meant: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Added]]:
    """Yield each run's id and what became of it, kept before the next is read; ``meant`` names what moves it."""
    folders: dict[Path, None] = {}
    for path in paths:
        with reading(path):
            found = [path] if (path / "run.json").exists() else runs_in(path)
        if not found:
            told = f"{path} is no run and holds none: name runs' folders, or a folder of such folders"
            raise UserError(told if path.exists() else f"no such folder: {path}")
        folders |= dict.fromkeys(found)
    with open_history(file, create=True) as history:
        for folder in folders:
            entry = read_entry(folder, About(branch=branch, commit=commit), meant)
            yield entry.run.id, history.add(entry)
        for parent in dict.fromkeys(paths):
            history.import_annotations(parent)


def means_run(word: str) -> bool:
    return (found := _SELECTOR.fullmatch(word)) is not None and found.lastgroup != "name" and "/" not in word


def select_run(path: Path, word: str, *, without: str = "") -> Run:
    """Return the run that a word means in a file's history; several, but that of the id ``without``, become one."""
    with open_history(path) as history:
        lines = select_lines(history.runs(), word, without=without)
        return pool([history.run(line) for line in lines], word)


def select_lines(lines: Sequence[Line], word: str, *, without: str = "") -> tuple[Line, ...]:
    """Return what a word means among runs in the order of time; ``UserError`` if it means none."""
    if named := tuple(line for line in lines if line.id == word):
        return named
    newest = "BRANCH~1 for the run before its newest, BRANCH:10 or last:10 for the newest ten as one"
    allowed = f"a branch, {newest}, or an id"
    if (found := _SELECTOR.fullmatch(word)) is None:
        raise UserError(f"{word!r} names no run of the history: write {allowed}")
    own = [line for line in lines if found["name"] in (line.branch, "last")]
    if not own:
        known = ", ".join(sorted({line.branch for line in lines})) or "no run at all"
        raise UserError(f"{word!r} names no run of the history, which has {known}: write {allowed}")
    if found["count"] is not None:
        count, others = int(found["count"]), [line for line in own if line.id != without]
        if not (count and others):
            raise UserError(f"{word!r} means no run beside the one it is compared with: at least 1 is needed")
        return tuple(others[-count:])
    back = int(found["back"] or 0)
    if back >= len(own):
        raise UserError(f"{word!r} goes back {back} runs, and the history has {len(own)} of {found['name']!r}")
    return (own[-1 - back],)


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
        is_ours = number("PRAGMA application_id") == APPLICATION and number("PRAGMA user_version") <= SCHEMA
        for statement in _COUNTS.split(";") if create and is_ours else ():
            connection.execute(statement)
    if (application := number("PRAGMA application_id")) != APPLICATION:
        raise UserError(f"{path} is an SQLite file of another program, not a history (application_id {application})")
    if (version := number("PRAGMA user_version")) > SCHEMA:
        raise UserError(f"{path}: schema {version} is newer than {SCHEMA}, the newest this parbench reads")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make a block one transaction, which waits for other writers first: all of it is kept, or nothing."""
    with connection:  # which commits, or takes back
        connection.execute("BEGIN IMMEDIATE")
        yield
