"""A submitted sweep and its folder on the file system that all nodes share: the same values for every process.

``sweep.json`` (what was submitted), ``points/<id>.json`` (a plan file for each point), ``scripts/*.sh``, ``jobs.jsonl``
(one line for each sbatch), ``states/<id>.json`` (what became of a point), ``runs/<id>/<run>``, ``logs/``.
"""

import hashlib
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from parbench.bench.files import (
    convert_out_errors,
    convert_read_errors,
    decode_json,
    encode_json,
    read_file,
    replace_file,
)
from parbench.bench.plan.plan import Entry, PlanFile
from parbench.bench.results.records import check_schema
from parbench.bench.text import UserError

SCHEMA = 1
Mode = Literal["one", "array"]
Distribution = Literal["block", "cyclic"]
OnDeadNode = Literal["fail", "go-on"]

FOLDERS = ("points", "scripts", "states", "runs", "logs")
_SWEEP, _JOBS = "sweep.json", "jobs.jsonl"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the sweep; ``cases`` empty means the preset's, ``seconds`` is what it is expected to take.

    ``environment`` is empty where the sweep compares none; ``repeat`` counts from 1.
    """

    id: str
    label: str
    nodes: int
    ntasks_per_node: int
    distribution: Distribution
    repeat: int
    environment: str
    variables: dict[str, str]
    cases: tuple[Entry, ...]
    seconds: float

    def identified(self) -> "Point":
        """Return it with its id: a hash of what is measured and where, neither of the label nor of what is expected."""
        measured = msgspec.structs.asdict(self)
        for name in ("id", "label", "seconds"):
            del measured[name]
        canonical = msgspec.json.encode(measured, order="deterministic")
        return msgspec.structs.replace(self, id=hashlib.sha256(canonical).hexdigest()[:12])


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """``sweep.json``: what was submitted; ``points`` stand in the order of execution, large to small.

    The index of a point in ``points`` is its task in an array job. ``plan`` is what the plan files of all points
    contain, without cases. ``time_seconds`` is the limit of each job, None where the estimate decides. ``options``
    are sbatch's long options without dashes, ``srun_options`` words for every srun. ``python`` starts parbench in the
    job, from the folder ``working_directory``, after the lines of ``prologue``.
    """

    schema: int = SCHEMA
    name: str
    file: str
    created: str
    mode: Mode
    points: tuple[Point, ...]
    plan: PlanFile = PlanFile()
    link: str | None = None
    partition: str | None = None
    time_seconds: int | None = None
    options: dict[str, str | bool] = {}
    srun_options: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    python: str
    working_directory: str
    requeue: bool = True
    on_dead_node: OnDeadNode = "fail"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One sbatch: the job it made (``id``, that of the whole array for an array), and the points it is to measure."""

    id: str
    name: str
    nodes: int
    submitted: str
    points: tuple[str, ...]


def create_folder(out: Path, name: str) -> Path:
    """Make the folder of a sweep, ``out/<utc>-<name>-<hex>``."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = out.absolute() / f"{stamp}-{slug(name)}-{secrets.token_hex(3)}"
    try:
        with convert_out_errors(f"out = {str(out)!r} cannot hold a sweep"):
            path.mkdir(parents=True)
            for folder in FOLDERS:
                (path / folder).mkdir()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def slug(name: str) -> str:
    """Return a name made fit for files and for Slurm: letters, digits, ``.``, ``_`` and ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "sweep"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json`` and the plan file of every point; ``UserError`` if the folder does not take them."""
    with convert_out_errors(f"{folder} cannot be written"):
        for point in sweep.points:
            replace_file(plan_path(folder, point.id), encode_json(plan_of(sweep, point)))
        replace_file(folder / _SWEEP, encode_json(sweep))


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder; ``UserError`` if it is none, damaged, or of a newer parbench."""
    file = folder / _SWEEP
    if not file.exists():
        found = f"{folder} is no sweep: it holds no readable {_SWEEP}"
        raise UserError(found if folder.exists() else f"no such folder: {folder}")
    with convert_read_errors(file):
        content = read_file(file)
        check_schema(content, str(file), SCHEMA)
        return decode_json(content, Sweep)


def append_job(folder: Path, job: Job) -> None:
    """Append a job that Slurm has taken, at once and durably: the sweep must know its own jobs."""
    with (
        convert_out_errors(f"{folder / _JOBS} cannot be written"),
        (folder / _JOBS).open("a+b") as file,
    ):
        file.seek(-1 if file.tell() else 0, os.SEEK_END)
        cut_short = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * cut_short + msgspec.json.encode(job) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def load_jobs(folder: Path) -> tuple[Job, ...]:
    """Return the jobs submitted for a sweep, oldest first; a line cut short by a kill is passed over."""
    file = folder / _JOBS
    with convert_read_errors(file):
        lines = read_file(file).splitlines() if file.exists() else []
        return tuple(decode_json(line, Job) for line in lines if line.endswith(b"}"))


def plan_path(folder: Path, point_id: str) -> Path:
    return folder / "points" / f"{point_id}.json"


def runs_path(folder: Path, point_id: str) -> Path:
    return folder / "runs" / point_id


def plan_of(sweep: Sweep, point: Point) -> PlanFile:
    """Return the plan file with which ``parbench run`` measures the point."""
    return msgspec.structs.replace(sweep.plan, case=point.cases)
