"""The folder of a run.

It has ``run.json``, ``records.jsonl``, ``samples/``, ``traces/``, ``logs/`` and ``report.html``.
Only the driver writes it, and holds a lock meanwhile.
"""

import errno
import fcntl
import os
import secrets
import shutil
import socket
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from parbench.bench.files import (
    convert_out_errors,
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    make_file_name,
    read_file,
    replace_file,
)
from parbench.bench.limits import NonNegative, RepetitionIndex, check_timestamp
from parbench.bench.machine.host_load import HostLoad
from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import (
    SCHEMA,
    Record,
    Timeline,
    check_schema,
    encode_record,
    read_records,
)
from parbench.bench.text import UserError, pluralize

if TYPE_CHECKING:
    import numpy as np

FOLDERS = ("samples", "traces", "logs")
MIN_FREE_BYTES = 8 << 20
_GZIP = 31  # the value of wbits for zlib
_SAMPLE_ARRAYS = (
    "ranks",
    "steps_per_sample",
    "arrival_ns",
    "exit_ns",
    "duration_ns",
    "issue_ns",
)


class RepetitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The time and the host load of a repetition.

    If ranks of a repetition break, the ranks that continue it have an entry of their own.
    """

    repetition: RepetitionIndex
    seconds: NonNegative
    """The time since the previous entry, or since the start of the driver."""
    load: HostLoad | None = None
    """The load of the host, None if ranks are on other hosts than the driver."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``run.json``."""

    schema: int = SCHEMA
    id: str
    started: str
    host: str
    """The name of the host of the driver."""
    parbench: str
    """The version of parbench."""
    plan: Plan
    environment: dict[str, Any] | None = None
    """The facts that all ranks share, None before the first ranks have reported theirs."""
    repetitions: tuple[RepetitionInfo, ...] = ()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or several pooled runs, with the last record of each case and repetition."""

    path: Path
    info: RunInfo
    records: tuple[Record, ...]
    damaged: tuple[str, ...] = ()
    """A message about each line of the file that is not a record."""
    exclusions: tuple[str, ...] = ()
    """Sentences about records that do not fit in the pool."""


def utc_now() -> str:
    """Return the current time in UTC as ISO 8601 text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_run(out: Path, plan: Plan, version: str) -> tuple[Path, RunInfo]:
    """Create the folder of a new run under ``out``, and return the folder and its ``run.json``.

    ``version`` is the version of parbench. Raises ``UserError`` if it cannot be written or the disk
    is full, and then leaves nothing.
    """
    host = socket.gethostname()
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{time}-{host}-{secrets.token_hex(3)}"
    path = out / name
    info = RunInfo(id=name, started=utc_now(), host=host, parbench=version, plan=plan)
    need = f" ({MIN_FREE_BYTES >> 20} MB are needed)"
    try:
        with convert_out_errors(f"--out {out} cannot hold a run", need):
            for folder in FOLDERS:
                (path / folder).mkdir(parents=True)
            # The reported free space of a file system does not include quotas.
            replace_file(path / ".room", bytes(MIN_FREE_BYTES))
            (path / ".room").unlink()
            write_run_info(path, info)
            (path / "records.jsonl").touch()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path, info


def write_run_info(path: Path, info: RunInfo) -> None:
    """Write ``run.json`` in the folder of a run. Raises ``OSError`` if it cannot be written."""
    replace_file(path / "run.json", encode_json(info))


def list_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder, from the oldest to the newest by their names."""
    return sorted(file.parent for file in folder.glob("*/run.json"))


def add_repetition(path: Path, repetition: RepetitionInfo) -> None:
    """Add the time and the load of a repetition to ``run.json``."""
    info = msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
    with convert_write_errors(path / "run.json"):
        write_run_info(path, replace(info, repetitions=(*info.repetitions, repetition)))


def load_run(path: Path) -> Run:
    """Return the run in a folder.

    Raises ``UserError`` if the folder is not a run, has another format version, or has lines of
    records that are all damaged.
    """
    file = path / "run.json"
    if not file.exists():
        raise UserError(_describe_missing_run(path))
    with convert_read_errors(file):
        content = read_file(file)
        check_schema(content, str(file))
        info = decode_json(content, RunInfo)
        check_timestamp(info.started)
    damaged: list[str] = []
    records = {}
    for record in read_records(path / "records.jsonl", damaged):
        records[record.repetition, record.case.id] = record
    if damaged and not records:
        raise UserError(damaged[0])
    return Run(path=path, info=info, records=tuple(records.values()), damaged=tuple(damaged))


def _describe_missing_run(path: Path) -> str:
    if not path.exists():
        return f"no such folder: {path}"
    runs = list_runs(path)
    if not runs:
        return f"{path} is not a run: it holds no readable run.json"
    return f"{path} is not a run: it holds {pluralize(len(runs), 'run')}, the newest is {runs[-1]}"


def require_complete(run: Run) -> Run:
    """Return the run. Raises ``UserError`` if a line of its records is damaged."""
    if run.damaged:
        raise UserError(run.damaged[0])
    return run


def make_trace_path(record: Record) -> str:
    """Return the path of a record's timeline relative to the folder of the run."""
    return f"traces/{make_file_name(record.case.id)}-{record.repetition}.json.gz"


def load_timeline(run: Run, record: Record) -> Timeline | None:
    """Return the timeline of a record, None if there is no file."""
    file = run.path / make_trace_path(record)
    with convert_read_errors(file):
        if not file.exists():
            return None
        return decode_json(zlib.decompress(read_file(file), wbits=_GZIP), Timeline)


def make_samples_path(record: Record) -> str:
    """Return the path of a record's samples relative to the folder of the run."""
    return f"samples/{make_file_name(record.case.id)}-{record.repetition}.npz"


def load_rank_samples(run: Run, record: Record) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the arrays in the samples of a record, an empty dictionary without a file.

    They are arrays of 64-bit integers. ``ranks`` are the measured ranks. The stamps have a row for
    each of them and a column for each sample of ``steps_per_sample`` steps. Raises ``UserError`` if
    the file is damaged.
    """
    import numpy as np

    file = run.path / make_samples_path(record)
    with convert_read_errors(file, "holds no samples that can be read"):
        if not file.exists():
            return {}
        try:
            with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
                return {name: archive[name] for name in _SAMPLE_ARRAYS if name in archive}
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error)) from error


class RecordWriter:
    """Appends records to a run and writes the files that belong to them.

    Each record is on disk before the next case begins.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path

    def write(self, record: Record) -> None:
        """Append a record. Raises ``UserError`` if it cannot be written."""
        line = encode_record(record)
        with convert_write_errors(self._path / "records.jsonl", "takes no more records"):
            # The file is not buffered, and a full disk may take only a part.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file. ``name`` is relative to the folder of the run."""
        with convert_write_errors(self._path / name):
            (self._path / name).write_bytes(content)


@contextmanager
def open_writer(path: Path) -> Iterator[RecordWriter]:
    """Yield the writer of a run, after removing a line that was cut short by a kill.

    Raises ``UserError`` if another process writes the run.
    """
    with convert_write_errors(path / "records.jsonl"):
        file = (path / "records.jsonl").open("r+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{path} is being written by another process; wait until it ends"
            raise UserError(message) from None
        except OSError as error:  # for example Lustre, if it is mounted without flock
            message = f"{path} cannot be locked: {error.strerror}; choose another folder with --out"
            raise UserError(message) from error
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        yield RecordWriter(file, path)
