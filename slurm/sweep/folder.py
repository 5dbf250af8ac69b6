"""The folder of a submitted sweep, on the file system that all nodes share.

``sweep.json`` holds the submitted sweep, ``points/<id>.json`` a plan file for each point,
``jobs/<number>/`` the batch scripts and jobs of a submission, ``runs/<id>/`` the runs of a point,
``attempts/<id>.json`` its last attempt, and ``logs/`` the messages of jobs and points.
"""

import hashlib
import re
import secrets
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from parbench.bench.files import (
    convert_out_errors,
    convert_read_errors,
    decode_json,
    encode_json,
    read_file,
    replace_file,
)
from parbench.bench.plan.plan import Entry
from parbench.bench.text import UserError
from parbench.slurm.sweep.sweepfile import Distribution, SweepFile

FOLDERS = ("points", "jobs", "attempts", "runs", "logs")
_SWEEP = "sweep.json"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep: cases on a number of nodes with environment variables."""

    id: str
    label: str
    nodes: int
    ntasks_per_node: int
    distribution: Distribution
    repeat: int  # from 1
    environment: str  # the variables that differ between points
    variables: dict[str, str]  # of the environment; an empty value removes a variable
    cases: tuple[Entry, ...]  # empty for those of the preset
    seconds: float  # expected

    def with_id(self) -> "Point":
        """Return the point with its id, which is a hash of its cases and its resources."""
        content = asdict(self)
        for name in ("id", "label", "seconds"):
            del content[name]
        canonical = msgspec.json.encode(content, order="deterministic")
        return replace(self, id=hashlib.sha256(canonical).hexdigest()[:12])


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted sweep. The index of a point is its task in an array of jobs."""

    name: str
    created: str
    file: SweepFile
    points: tuple[Point, ...]  # in the order of execution, large to small
    python: str
    working_directory: str


class SweepJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a sweep, or an array of jobs, and the points that it is to measure."""

    id: str
    name: str
    nodes: int
    submitted: str
    points: tuple[str, ...]


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The last attempt of a job to measure a point. It explains the point's state in the status."""

    job: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""  # why the point is not complete
    is_running: bool = False


def create_folder(out: Path, name: str) -> Path:
    """Create the folder of a sweep, ``out/<utc>-<name>-<hex>``."""
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = out.absolute() / f"{time}-{make_slug(name)}-{secrets.token_hex(3)}"
    try:
        with convert_out_errors(f"out = {str(out)!r} cannot hold a sweep"):
            path.mkdir(parents=True)
            for folder in FOLDERS:
                (path / folder).mkdir()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def make_slug(name: str) -> str:
    """Return the name with only characters that files and Slurm accept."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "sweep"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json`` and the plan file of every point."""
    with convert_out_errors(f"{folder} cannot be written"):
        for point in sweep.points:
            plan = replace(sweep.file.make_plan_file(), case=point.cases)
            replace_file(make_plan_path(folder, point.id), encode_json(plan))
        replace_file(folder / _SWEEP, encode_json(sweep))


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder. Raises ``UserError`` if it cannot be read."""
    file = folder / _SWEEP
    if not file.exists():
        raise UserError(f"{folder} is not a sweep: it has no {_SWEEP}")
    with convert_read_errors(file):
        return decode_json(read_file(file), Sweep)


def write_job(file: Path, job: SweepJob) -> None:
    """Write a job that Slurm has accepted, next to its script."""
    with convert_out_errors(f"{file} cannot be written"):
        replace_file(file, msgspec.json.encode(job))


def load_jobs(folder: Path) -> tuple[SweepJob, ...]:
    """Return the jobs that were submitted for a sweep, oldest submission first."""
    jobs = []
    for file in sorted((folder / "jobs").glob("*/*.json")):
        with convert_read_errors(file):
            jobs.append(decode_json(read_file(file), SweepJob))
    return tuple(jobs)


def write_attempt(folder: Path, point_id: str, attempt: JobAttempt) -> None:
    """Write the last attempt at a point. Raises ``OSError`` if it cannot be written."""
    replace_file(folder / "attempts" / f"{point_id}.json", msgspec.json.encode(attempt))


def load_attempt(folder: Path, point_id: str) -> JobAttempt:
    """Return the last attempt at a point, an empty one if it does not exist or is damaged."""
    with suppress(OSError, ValueError):
        return decode_json(read_file(folder / "attempts" / f"{point_id}.json"), JobAttempt)
    return JobAttempt()


def make_plan_path(folder: Path, point_id: str) -> Path:
    """Return the path of the plan file of a point."""
    return folder / "points" / f"{point_id}.json"


def make_runs_path(folder: Path, point_id: str) -> Path:
    """Return the folder of the runs of a point."""
    return folder / "runs" / point_id
