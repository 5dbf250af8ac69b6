"""The folder of a submitted sweep, on the file system that all nodes share.

A point is one run of the sweep with one value per setting.
``sweep.json`` holds the submitted sweep, ``points/<id>.json`` the cases of each point,
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
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    replace_file,
)
from parbench.bench.plan.plan import CasesFile, Entry
from parbench.bench.text import UserError
from parbench.slurm.sweep.sweepfile import Distribution, SweepFile

FOLDERS = ("points", "jobs", "attempts", "runs", "logs")
"""The subfolders of a sweep's folder."""
_SWEEP = "sweep.json"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep: one combination of cases, nodes, tasks and environment variables."""

    id: str
    """The first 12 hexadecimal digits of a hash, the name of this point's files and folders."""
    label: str
    """The nodes, tasks and settings of the point as text for people."""
    nodes: int
    """The number of nodes."""
    ntasks_per_node: int
    """The number of ranks on each node."""
    distribution: Distribution
    """The order of ranks over nodes: ``block`` or ``cyclic``, see ``SweepFile.distribution``."""
    repeat: int
    """The number of this run among the runs with the same settings, counted from 1."""
    environment: str
    """The environment variables of this point that differ between points, as text.

    The form is ``NAME=VALUE, NAME=VALUE``. Empty if no variable differs.
    """
    variables: dict[str, str]
    """The values that the point sets environment variables to. An empty value removes one."""
    cases: tuple[Entry, ...]
    """The cases to measure. If there are none, the preset selects the cases."""
    seconds: float
    """The expected duration of the run in seconds: its time budget plus 10 s for its start."""

    def with_id(self) -> "Point":
        """Return a copy of the point with its id.

        The id is a hash of all fields except id, label and seconds. Points that differ only in
        their repeat or in their variables have different ids.
        """
        content = asdict(self)
        for name in ("id", "label", "seconds"):
            del content[name]
        canonical = msgspec.json.encode(content, order="deterministic")
        return replace(self, id=hashlib.sha256(canonical).hexdigest()[:12])


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted sweep: its points, which are its runs, and how its jobs start parbench."""

    name: str
    """The name of the sweep from the sweep file, or the name of this file without extension."""
    created: str
    """The time at which the sweep was submitted, as ISO 8601 text in UTC."""
    file: SweepFile
    """The content of the sweep file."""
    points: tuple[Point, ...]
    """The points in the order of execution. Points on more nodes come first.

    In an array of jobs, the index of a point is the number of its task.
    """
    python: str
    """The path of the Python interpreter that runs parbench in the jobs."""
    working_directory: str
    """The folder in which the sweep was submitted and in which its jobs run."""


class SweepJob(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job of a sweep, or an array of jobs, and the points that it is to measure."""

    id: str
    """The id that sbatch printed, for an array the id of the whole array."""
    name: str
    """The name of the batch script without its extension."""
    nodes: int
    """The number of nodes of each job."""
    submitted: str
    """The time of the submission, as ISO 8601 text in UTC."""
    points: tuple[str, ...]
    """The ids of the points, each of which is one run of the sweep, in the order of execution."""


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The last attempt of a job to measure a point, which is one run of a sweep.

    ``parbench slurm status`` shows its nodes and its reason.
    """

    job: str = ""
    """The id of the job, empty outside of Slurm."""
    nodes: tuple[str, ...] = ()
    """The names of the nodes of the run, empty if the run did not begin."""
    reason: str = ""
    """The reason why the point is not complete, empty if it is complete or still running."""
    is_running: bool = False
    """True from the start of the run until its end. It stays True if the job is killed."""


def create_folder(out: Path, name: str) -> Path:
    """Create a new folder for the sweep ``name``, with its subfolders, and return its path.

    The absolute path is ``out/<utc>-<name>-<hex>``, where ``<hex>`` is random. Raises ``UserError``
    if a folder cannot be created.
    """
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = out.absolute() / f"{time}-{make_slug(name)}-{secrets.token_hex(3)}"
    try:
        with convert_write_errors(f"out = {str(out)!r}", "cannot hold a sweep"):
            path.mkdir(parents=True)
            for folder in FOLDERS:
                (path / folder).mkdir()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def make_slug(name: str) -> str:
    """Return a name for files and Slurm jobs from the first 40 allowed characters of ``name``.

    Letters, digits, dots, hyphens and underscores are allowed. Other characters become hyphens. The
    result is ``sweep`` if no character is left.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "sweep"


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write ``sweep.json`` and the cases of each point (run) to the folder of a sweep.

    Raises ``UserError`` if a file cannot be written.
    """
    with convert_write_errors(folder):
        for point in sweep.points:
            content = encode_json(CasesFile(case=point.cases))
            replace_file(make_cases_path(folder, point.id), content)
        replace_file(folder / _SWEEP, encode_json(sweep))


def load_sweep(folder: Path) -> Sweep:
    """Return the submitted sweep from ``sweep.json`` in its folder, or raise ``UserError``."""
    file = folder / _SWEEP
    if not file.exists():
        raise UserError(f"{folder} is not a sweep: it has no {_SWEEP}")
    with convert_read_errors(file):
        return decode_json(file.read_bytes(), Sweep)


def write_job(file: Path, job: SweepJob) -> None:
    """Write a job that Slurm has accepted to ``file``, which is next to the job's batch script.

    Raises ``UserError`` if the file cannot be written.
    """
    with convert_write_errors(file):
        replace_file(file, msgspec.json.encode(job))


def load_jobs(folder: Path) -> tuple[SweepJob, ...]:
    """Return all jobs that were submitted for the sweep in a folder, oldest submission first.

    Raises ``UserError`` if a job's file cannot be read.
    """
    jobs = []
    for file in sorted((folder / "jobs").glob("*/*.json")):
        with convert_read_errors(file):
            jobs.append(decode_json(file.read_bytes(), SweepJob))
    return tuple(jobs)


def write_attempt(folder: Path, point_id: str, attempt: JobAttempt) -> None:
    """Write the last attempt to measure a point (run of the sweep) to ``attempts/<id>.json``.

    The file is in ``folder``, the folder of the sweep. It replaces the file of earlier attempts.
    Raises ``OSError`` if it cannot be written.
    """
    replace_file(folder / "attempts" / f"{point_id}.json", msgspec.json.encode(attempt))


def load_attempt(folder: Path, point_id: str) -> JobAttempt:
    """Return the last attempt to measure a point (run) of the sweep in ``folder``.

    If ``attempts/<id>.json`` does not exist or is damaged, the result has default values: no job,
    no nodes and no reason.
    """
    with suppress(OSError, ValueError):
        return decode_json((folder / "attempts" / f"{point_id}.json").read_bytes(), JobAttempt)
    return JobAttempt()


def make_cases_path(folder: Path, point_id: str) -> Path:
    """Return the path of the file with the cases of a point, the argument of ``--cases``.

    A point is one run of the sweep in ``folder``.
    """
    return folder / "points" / f"{point_id}.json"


def make_runs_path(folder: Path, point_id: str) -> Path:
    """Return the path of the folder that has a run folder for each attempt to measure a point.

    A point is one run of the sweep in ``folder``. A later attempt usually resumes the run folder of
    the earlier one.
    """
    return folder / "runs" / point_id
