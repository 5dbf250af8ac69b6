"""A sweep's folder on the file system that all nodes share.

``sweep.json`` (what was submitted), ``points/<id>.toml`` (a plan file for each point), ``scripts/*.sh``, ``jobs.jsonl``
(one line for each sbatch), ``ledger/`` and ``claims/`` (what the jobs did and do), ``runs/<id>/<run>``, ``logs/``.
"""

import errno
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.results.records import refuse_newer
from bench.text import UserError, reading
from slurm.sweep.points import SCHEMA, Point, Sweep

FOLDERS = ("points", "scripts", "ledger", "claims", "runs", "logs")
SWEEP, JOBS = "sweep.json", "jobs.jsonl"
_NAME_BYTES = 40


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One sbatch: the job it made (``id``, that of the whole array for an array), and the points it is to measure."""

    id: str
    name: str
    nodes: int
    time_seconds: int
    submitted: str
    points: tuple[str, ...]
    array: bool = False


def create_folder(out: Path, name: str) -> Path:
    """Make a sweep's folder ``out/<utc>-<name>-<hex>``, proven to be writable; ``UserError`` if it is not.

    Two sweeps begun at the same moment get two folders.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = out.absolute() / f"{stamp}-{slug(name)}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True)
        for folder in FOLDERS:
            (path / folder).mkdir()
        _write_durably(path / ".probe", b"parbench\n")
        (path / ".probe").unlink()
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise UserError(f"out = {str(out)!r} cannot hold a sweep: {_os_reason(error)}") from error
    return path


def slug(name: str) -> str:
    """Return a name made fit for files and for Slurm: letters, digits, ``.``, ``_`` and ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_NAME_BYTES] or "sweep"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json`` and the plan file of every point; ``UserError`` if the folder does not take them."""
    try:
        for point in sweep.points:
            _write_durably(plan_path(folder, point.id), plan_text(sweep, point).encode())
        _write_durably(folder / SWEEP, msgspec.json.format(msgspec.json.encode(sweep), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {_os_reason(error)}") from error


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder; ``UserError`` if it is none, damaged, or of a newer parbench."""
    file = folder / SWEEP
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{folder} is no sweep: it holds no readable {SWEEP}") from error
    with reading(file):
        refuse_newer(content, str(file), SCHEMA)
        return msgspec.json.decode(content, type=Sweep)


def append_job(folder: Path, job: Job) -> None:
    """Append a job that Slurm has taken, at once and durably: the sweep must know its own jobs."""
    try:
        with (folder / JOBS).open("a+b") as file:
            file.seek(-1 if file.tell() else 0, os.SEEK_END)
            cut_short = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * cut_short + msgspec.json.encode(job) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{folder / JOBS} cannot be written: {_os_reason(error)}") from error


def load_jobs(folder: Path) -> tuple[Job, ...]:
    """Return the jobs submitted for a sweep, oldest first; a line cut short by a kill is passed over."""
    file = folder / JOBS
    with reading(file):
        lines = file.read_bytes().splitlines() if file.exists() else []
        return tuple(msgspec.json.decode(line, type=Job) for line in lines if line.endswith(b"}"))


def plan_path(folder: Path, point_id: str) -> Path:
    """Return where a point's plan file is."""
    return folder / "points" / f"{point_id}.toml"


def runs_path(folder: Path, point_id: str) -> Path:
    """Return the folder that holds a point's run folders."""
    return folder / "runs" / point_id


def plan_text(sweep: Sweep, point: Point) -> str:
    """Return a point's plan file, as ``parbench run --plan`` reads it."""
    given = {name: getattr(sweep, name) for name in ("preset", "backend", "device", "launches", "budget", "timeout")}
    lines = [f"# {_toml(point.label)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in given.items() if value is not None]
    for case in point.cases:
        lines += ["", "[[case]]", f"name = {_toml(case.name)}"]
        if case.set:
            lines += ["[case.set]", *(f"{_toml(name)} = {_toml(text)}" for name, text in case.set.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | int) -> str:
    """Return a word or whole number as TOML writes it; a JSON string is one but for DEL, which TOML wants escaped."""
    if isinstance(value, int):
        return str(value)
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and flush it: nodes read it over the network."""
    fresh = path.with_name(f".{path.name}")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _os_reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some, or choose another folder with --out"
    return f"{error.strerror} ({error.filename}); choose another folder with --out"
