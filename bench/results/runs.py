"""A run's folder: ``run.json``, ``records.jsonl``, ``samples/``, ``traces/``, ``logs/``, ``report.html``.

One process writes it, the driver, and holds a lock while it does.
"""

import errno
import fcntl
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec.structs import replace

from parbench.bench.files import decode_json, encode_json, file_name, read_file
from parbench.bench.limits import Launch, Positive, check_time
from parbench.bench.machine.host_load import HostLoad
from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import SCHEMA, Record, Timeline, check_schema, encode, read_records
from parbench.bench.text import UserError, counted, reading, replace_file, storing, writing

FOLDERS = ("samples", "traces", "logs")


class LaunchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a launch went: its time since the one before, or since the driver began, and the load of a single host.

    One whose ranks broke has an entry more for those that went on.
    """

    launch: Launch
    seconds: Positive
    load: HostLoad | None = None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: what was asked, and the environment that all ranks share (None until the first ranks tell)."""

    schema: int = SCHEMA
    id: str
    started: str
    host: str
    parbench: str
    plan: Plan
    environment: dict[str, Any] | None = None
    launches: tuple[LaunchInfo, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or several that were pooled, with the last record of each case and repetition."""

    path: Path
    info: RunInfo
    records: tuple[Record, ...]
    damaged: tuple[str, ...] = ()
    """A message for each line of the file that is not a record."""
    exclusions: tuple[str, ...] = ()
    """Sentences about records that do not fit in the pool."""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_run(out: Path, plan: Plan, version: str) -> tuple[Path, RunInfo]:
    """Make a new run folder under ``out``; ``UserError`` if it cannot be written or the disk is full."""
    host, room_bytes = socket.gethostname(), 8 << 20
    name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{host}-{secrets.token_hex(3)}"
    path, info = out / name, RunInfo(id=name, started=utc_now(), host=host, parbench=version, plan=plan)
    try:
        with storing(f"--out {out} cannot hold a run", f" ({room_bytes >> 20} MB are needed)"):
            for folder in FOLDERS:
                (path / folder).mkdir(parents=True)
            replace_file(path / ".room", bytes(room_bytes))  # what a run may take: free space alone shows no quotas
            (path / ".room").unlink()
            write_info(path, info)
            (path / "records.jsonl").touch()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path, info


def write_info(path: Path, info: RunInfo) -> None:
    replace_file(path / "run.json", encode_json(info))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, the oldest first: their names begin with their time."""
    return sorted(file.parent for file in folder.glob("*/run.json"))


def add_launch(path: Path, launch: LaunchInfo) -> None:
    info = msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
    with writing(path / "run.json"):
        write_info(path, replace(info, launches=(*info.launches, launch)))


def load_run(path: Path) -> Run:
    """Return a run from its folder; ``UserError`` if it is none, newer than this parbench, or has no line to read."""
    file = path / "run.json"
    if not file.exists():
        if not path.exists():
            raise UserError(f"no such folder: {path}")
        runs = runs_in(path)
        why = f"{counted(len(runs), 'run')}, the newest is {runs[-1]}" if runs else "no readable run.json"
        raise UserError(f"{path} is no run: it holds {why}")
    with reading(file):
        content = read_file(file)
        check_schema(content, str(file))
        info = decode_json(content, RunInfo)
        check_time(info.started)
    damaged = list[str]()
    last = {(record.launch, record.case.id): record for record in read_records(path / "records.jsonl", damaged)}
    if damaged and not last:
        raise UserError(damaged[0])
    return Run(path=path, info=info, records=tuple(last.values()), damaged=tuple(damaged))


def whole(run: Run) -> Run:
    """Return a run of which each line was read, for what must not miss one; ``UserError`` names the first damaged."""
    if run.damaged:
        raise UserError(run.damaged[0])
    return run


def trace_name(record: Record) -> str:
    return f"traces/{file_name(record.case.id)}-{record.launch}.json.gz"


def load_timeline(run: Run, record: Record) -> Timeline | None:
    file = run.path / trace_name(record)
    with reading(file):
        if not file.exists():
            return None
        return decode_json(zlib.decompress(read_file(file), wbits=31), Timeline)  # 31: as gzip writes


class RecordWriter:
    """Appends records, each flushed to disk before the next case begins, and writes the files beside them."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path

    def write(self, record: Record) -> None:
        line = encode(record)
        with writing(self._path / "records.jsonl", "takes no more records"):
            if self._file.write(line) != len(line):  # unbuffered: a full disk may take only a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    def write_file(self, name: str, content: bytes) -> None:
        with writing(self._path / name):
            (self._path / name).write_bytes(content)


@contextmanager
def open_writer(path: Path) -> Iterator[RecordWriter]:
    """Yield the run's writer, first taking off a line cut short by a kill; ``UserError`` if another process writes."""
    with writing(path / "records.jsonl"):
        file = (path / "records.jsonl").open("r+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being written by another process; wait until it ends") from None
        except OSError as error:  # Lustre mounted without flock
            raise UserError(f"{path} cannot be locked: {error.strerror}; choose another folder with --out") from error
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        yield RecordWriter(file, path)
