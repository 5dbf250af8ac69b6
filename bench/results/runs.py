"""The folder of a run.

It has ``run.json``, ``records.jsonl``, ``samples/``, ``traces/``, ``logs/`` and ``report.html``.
Only the driver writes it, and holds a lock meanwhile.
"""

import errno
import fcntl
import os
import secrets
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
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    replace_file,
    write_output,
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
from parbench.bench.text import UserError

if TYPE_CHECKING:
    import numpy as np

FOLDERS = ("samples", "traces", "logs")
"""The subfolders of the folder of a run."""


class RepetitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The wall time and the host load of one start of all ranks.

    A repetition has one start of all ranks. If ranks fail, or if cases need different environment
    variables, a repetition has several starts, and each start has its own entry.
    """

    repetition: RepetitionIndex
    """The number of the repetition, from 0."""
    seconds: NonNegative
    """The seconds since the previous entry, or since the start of the driver.

    The latter is for the first entry, and for the first one after a resumption.
    """
    load: HostLoad | None = None
    """The load of the driver's host, None if ranks are on other hosts."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``run.json``."""

    schema: int = SCHEMA
    """The version of the format of the file."""
    id: str
    """The name of the run's folder, from time, host and random digits."""
    started: str
    """The time in UTC, as ISO 8601, at which the run was created."""
    host: str
    """The name of the host of the driver."""
    parbench: str
    """The version of parbench."""
    plan: Plan
    """The cases to measure, the ranks that measure them, and the settings of the measurement."""
    environment: dict[str, Any] | None = None
    """The facts about hosts and software that all ranks share.

    None until the first ranks have reported them.
    """
    repetitions: tuple[RepetitionInfo, ...] = ()
    """The repetitions that have ended, in order of time."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run's folder, or of several runs that are pooled into one.

    A pooled run has the repetitions of all its runs.
    """

    path: Path
    """The folder of the run, or the name of pooled runs."""
    info: RunInfo
    """The content of ``run.json``, for pooled runs of the newest run that has all cases."""
    records: tuple[Record, ...]
    """The records, one for each case and repetition.

    If the file has several records of a case in a repetition, only the last one is here.
    """
    exclusions: tuple[str, ...] = ()
    """Sentences about runs that were not pooled, because their ranks or devices differ."""


def utc_now() -> str:
    """Return the current time in UTC as ISO 8601 text with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_run(out: Path, plan: Plan, version: str) -> tuple[Path, RunInfo]:
    """Create the folder of a new run in ``out``, and return its path and the content of run.json.

    ``version`` is the version of parbench. Raises ``UserError`` if the folder cannot be written.
    """
    host = socket.gethostname()
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{time}-{host}-{secrets.token_hex(3)}"
    path = out / name
    info = RunInfo(id=name, started=utc_now(), host=host, parbench=version, plan=plan)
    with convert_write_errors(f"--out {out}", "cannot hold a run"):
        for folder in FOLDERS:
            (path / folder).mkdir(parents=True)
        write_run_info(path, info)
        (path / "records.jsonl").touch()
    return path, info


def write_run_info(path: Path, info: RunInfo) -> None:
    """Replace ``run.json`` in the folder of a run. Raises ``OSError`` if it cannot be written."""
    replace_file(path / "run.json", encode_json(info))


def list_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs directly in ``folder``, from the oldest to the newest.

    They are sorted by name, which begins with the time at which the run was created.
    """
    return sorted(file.parent for file in folder.glob("*/run.json"))


def add_repetition(path: Path, repetition: RepetitionInfo) -> None:
    """Append the wall time and the host load of a start of all ranks to a run's ``run.json``.

    ``path`` is the folder of the run.
    """
    info = msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
    with convert_write_errors(path / "run.json"):
        write_run_info(path, replace(info, repetitions=(*info.repetitions, repetition)))


def load_run(path: Path) -> Run:
    """Read and return the run in a folder.

    Raises ``UserError`` if the folder is not a run, has another format version, or has a line that
    is not a record. A last line that was cut short is left out.
    """
    file = path / "run.json"
    if not file.exists():
        problem = "has no run.json" if path.exists() else "does not exist"
        runs = list_runs(path)
        hint = f"name one of its runs, such as {runs[-1]}" if runs else ""
        raise UserError(f"{path} is not a run: it {problem}", hint=hint)
    with convert_read_errors(file):
        content = file.read_bytes()
        check_schema(content, str(file))
        info = decode_json(content, RunInfo)
        check_timestamp(info.started)
    records = {
        (record.repetition, record.case.id): record
        for record in read_records(path / "records.jsonl")
    }
    return Run(path=path, info=info, records=tuple(records.values()))


def make_trace_path(record: Record) -> str:
    """Return the path of the file with a record's timeline, relative to the run's folder."""
    return f"traces/{record.case.id}-{record.repetition}.json.gz"


def load_timeline(run: Run, record: Record) -> Timeline | None:
    """Read and return the timeline of a record's profiled step.

    Returns None if the record has no file. Raises ``UserError`` if the file is damaged.
    """
    file = run.path / make_trace_path(record)
    with convert_read_errors(file):
        if not file.exists():
            return None
        # 31 stands for the format of gzip.
        return decode_json(zlib.decompress(file.read_bytes(), wbits=31), Timeline)


def make_samples_path(record: Record) -> str:
    """Return the path of the file with a record's samples by rank, relative to the run's folder."""
    return f"samples/{record.case.id}-{record.repetition}.npz"


def load_rank_samples(run: Run, record: Record) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the times of all samples of a record on each rank, as arrays of integers by name.

    ``ranks`` holds the global ranks that were measured, ``steps_per_sample`` the number of steps in
    a sample. The other arrays have a row for each of these ranks and a column for each sample:
    ``arrival_ns`` and ``exit_ns`` are the start and end of a sample on rank 0's clock, in ns since
    the earliest start of any sample on any rank, ``duration_ns`` the time from start to end of all
    steps of the sample, and ``issue_ns`` the part of the
    duration until an asynchronous call returned. The dictionary is empty if the record has no file.
    Raises ``UserError`` if the file is damaged.
    """
    import numpy as np

    file = run.path / make_samples_path(record)
    with convert_read_errors(file, "holds no samples that can be read"):
        if not file.exists():
            return {}
        try:
            with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
                return dict(archive)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error


class RecordWriter:
    """Appends records to the ``records.jsonl`` of a run, and writes their samples and timelines.

    A record is the result of one case in one repetition. The samples by rank are a file in
    ``samples/`` and the timeline of a profiled step is a file in ``traces/``. ``file`` is
    ``records.jsonl``, open without a buffer, and ``path`` the folder of the run. When ``write``
    returns, the record is on disk.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        """Store the open file of the records and the folder of the run."""
        self._file = file
        self._path = path

    def write(self, record: Record) -> None:
        """Append a record to the file. Raises ``UserError`` if it cannot be written."""
        line = encode_record(record)
        with convert_write_errors(self._path / "records.jsonl", "takes no more records"):
            # The file is not buffered, and a full disk may take only a part.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())

    def write_file(self, name: str, content: bytes) -> None:
        """Write the file with a record's samples or timeline into the run's folder.

        ``name`` is the path of the file relative to this folder. Raises ``UserError`` if the file
        cannot be written.
        """
        write_output(self._path / name, content)


@contextmanager
def open_writer(path: Path) -> Iterator[RecordWriter]:
    """Lock the run in the folder ``path`` during the block, and yield its writer.

    If the last line of its records was cut short by a kill, the line is removed. Raises
    ``UserError`` if another process writes the run, or if the file cannot be locked.
    """
    with convert_write_errors(path / "records.jsonl"):
        file = (path / "records.jsonl").open("r+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing {path}", hint="wait until it ends"
            ) from error
        except OSError as error:  # for example Lustre, if it is mounted without flock
            hint = "choose a folder on another file system with --out"
            raise UserError(f"{path} cannot be locked: {error.strerror}", hint=hint) from error
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        yield RecordWriter(file, path)
