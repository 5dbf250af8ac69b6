"""The status of a sweep: the runs of its points, and the jobs that Slurm still has."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Literal

import click
import msgspec

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.text import format_table
from parbench.slurm.sweep.folder import (
    Point,
    SweepJob,
    load_attempt,
    load_jobs,
    load_sweep,
)
from parbench.slurm.sweep.progress import SweepProgress, read_progress
from parbench.slurm.system import SLURM, QueuedJob, Slurm, SlurmError

PointState = Literal["done", "failed", "running", "waiting", "partial", "absent"]
"""The state of a point, see ``PointStatus.state``."""
_MIN_PAUSE_SECONDS = 4.0
"""The shortest pause between two reads of a sweep's status."""
_PAUSE_FACTOR = 10.0
"""The pause between two reads of a sweep's status, relative to the duration of a read."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a job of the sweep, or of an array of jobs."""

    id: str
    """The id of the job or of the whole array."""
    state: str
    """The state in Slurm in lower case: ``running``, or ``pending (priority)`` with the reason.

    For an array, the states of its tasks with their counts, such as ``2 running, 3 pending``.
    ``ended`` if Slurm no longer has the job, ``unknown`` if Slurm does not answer.
    """
    is_alive: bool | None
    """True if the job waits or runs, False if it has ended, None if Slurm does not answer."""

    def format(self) -> str:
        """Return the id and the state as text, such as ``job 17 running``."""
        return f"job {self.id} {self.state}"


class PointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a point, which is one run of a sweep with one value per setting."""

    id: str
    """The id of the point, see ``Point.id``."""
    label: str
    """The settings of the point as text for people."""
    state: PointState
    """The progress of the point.

    A point with a complete run is ``done``, or ``failed`` if a record failed. Another point is
    ``running`` or ``waiting`` if a job in Slurm's queue has the point. Otherwise the point is
    ``partial`` if a run exists, and ``absent`` if none exists.
    """
    nodes: tuple[str, ...] = ()
    """The names of the nodes of the last attempt to measure the point, empty if none began."""
    reason: str = ""
    """The reason why the point is not done, empty if it is done or no reason is known."""
    run: str = ""
    """The folder of the last run, relative to the folder of the sweep. Empty without a run."""

    @property
    def is_complete(self) -> bool:
        """True if all measurements of the point were made, whether or not they failed."""
        return self.state in ("done", "failed")


class SweepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a submitted sweep: of its jobs in Slurm, and of its points (runs)."""

    name: str
    """The name of the sweep."""
    folder: str
    """The path of the sweep's folder."""
    jobs: tuple[JobStatus, ...]
    """The status of each submitted job or array of jobs, oldest submission first."""
    points: tuple[PointStatus, ...]
    """The status of each point in the order of execution."""
    code: int
    """The exit code of the sweep: 0, 1 or 4, see ``compute_exit_code``."""
    problem: str = ""
    """The error of squeue if Slurm did not answer, empty if it answered."""

    @property
    def is_alive(self) -> bool:
        """True if a job of the sweep waits or runs, or if Slurm does not answer."""
        return any(job.is_alive is not False for job in self.jobs)

    def summarize(self) -> str:
        """Return the status in one line: ``8 of 12 done, 1 failed, 3 to do; job 17 running``."""
        counts = Counter(point.state for point in self.points)
        num_incomplete = len(self.points) - counts["done"] - counts["failed"]
        parts = [f"{counts['done']} of {len(self.points)} done"]
        if counts["failed"]:
            parts.append(f"{counts['failed']} failed")
        if num_incomplete:
            parts.append(f"{num_incomplete} to do")
        jobs = [job.format() for job in self.jobs if job.is_alive is not False]
        return f"{', '.join(parts)}; {', '.join(jobs or ['no job is left'])}"


def get_status(folder: Path, slurm: Slurm = SLURM) -> SweepStatus:
    """Return the status of the sweep in ``folder`` from its runs and from Slurm's queue.

    If Slurm does not answer, ``SweepStatus.problem`` has the error, and jobs are ``unknown``.
    """
    sweep, jobs = load_sweep(folder), load_jobs(folder)
    problem = ""
    queue: tuple[QueuedJob, ...] | None = None
    try:
        queue = slurm.queue()
    except SlurmError as error:
        problem = str(error)
    # After the queue: a job that has left it has written all of its records.
    progress = {point.id: read_progress(folder, point.id) for point in sweep.points}
    job_statuses = {job.id: _get_job_status(job, queue, slurm) for job in jobs}
    points = []
    for index, point in enumerate(sweep.points):
        own_jobs = [job_statuses[job.id] for job in jobs if point.id in job.points]
        tasks = [entry for entry in queue or () if _covers_point(entry, jobs, index, point)]
        points.append(_get_point_status(folder, point, progress[point.id], own_jobs, tasks))
    return SweepStatus(
        name=sweep.name,
        folder=str(folder),
        jobs=tuple(job_statuses.values()),
        points=tuple(points),
        code=compute_exit_code(progress.values()),
        problem=problem,
    )


def compute_exit_code(points: Iterable[SweepProgress]) -> int:
    """Return the exit code of a sweep from the progress of all of its points (runs).

    It is 0 if all measurements were made without a failure, 1 if a result is wrong, and 4 if
    another measurement failed or is missing. The code 1 takes precedence over 4.
    """
    codes = []
    for progress in points:
        if any(record.status == "wrong" for record in progress.failures):
            codes.append(ExitCode.BAD)
        if progress.failures or not progress.is_complete:
            codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def _get_job_status(job: SweepJob, queue: Sequence[QueuedJob] | None, slurm: Slurm) -> JobStatus:
    """Return the status of a job from ``queue``, Slurm's queue of waiting and running jobs.

    The state of a job that is not in the queue is read with ``scontrol show job``, or ``ended`` if
    Slurm no longer has the job. ``queue`` is None if Slurm did not answer. The result then has the
    state ``unknown``, and its ``is_alive`` is None.
    """
    if queue is None:
        return JobStatus(id=job.id, state="unknown", is_alive=None)
    queued = [entry for entry in queue if entry.id == job.id]
    states = []
    for entry in queued:
        has_reason = entry.state == "PENDING" and entry.reason != "None"
        states.append(f"{entry.state} ({entry.reason})" if has_reason else entry.state)
    if not queued:
        with suppress(SlurmError):
            states = [facts.get("JobState", "unknown") for facts in slurm.show_job(job.id)]
    counts = Counter(states or ["ended"])
    texts = [f"{count} {state}" if len(states) > 1 else state for state, count in counts.items()]
    return JobStatus(id=job.id, state=", ".join(texts).lower(), is_alive=bool(queued))


def _covers_point(entry: QueuedJob, jobs: Sequence[SweepJob], index: int, point: Point) -> bool:
    """Return True if a waiting or running job is to measure a point (run) of the sweep.

    Args:
        entry: the job, or the task of an array of jobs, in Slurm's queue.
        jobs: all submitted jobs of the sweep.
        index: the index of the point in the sweep, which is its task number in an array.
        point: the point.
    """
    if entry.task is not None and entry.task != index:
        return False
    return any(job.id == entry.id and point.id in job.points for job in jobs)


def _get_point_status(
    folder: Path,
    point: Point,
    progress: SweepProgress,
    jobs: Sequence[JobStatus],
    tasks: Sequence[QueuedJob],
) -> PointStatus:
    """Return the status of a point, which is one run of the sweep in ``folder``.

    Args:
        folder: the folder of the sweep.
        point: the point.
        progress: the progress of the point's last run in measurements.
        jobs: the status of each submitted job that is to measure the point.
        tasks: the entries of Slurm's queue that wait or run to measure the point.
    """
    attempt = load_attempt(folder, point.id)
    state: PointState
    reason = progress.not_done_reason
    if progress.state == "complete":
        state = "failed" if progress.failures else "done"
    elif tasks or any(job.is_alive is None for job in jobs):
        running = [task.own_id for task in tasks if task.state != "PENDING"]
        state = "running" if attempt.is_running and attempt.job in running else "waiting"
    else:
        state = progress.state
        reason = attempt.reason or reason
        if attempt.is_running or not reason:
            ends = ", ".join(job.format() for job in jobs) or "no job was submitted"
            reason = f"interrupted: {ends}" if attempt.is_running else f"not begun: {ends}"
    return PointStatus(
        id=point.id,
        label=point.label,
        state=state,
        nodes=attempt.nodes,
        reason=reason,
        run=str(progress.run.relative_to(folder)) if progress.run else "",
    )


def format_status(status: SweepStatus) -> str:
    """Return the status as text: a line per job, a table of the points (runs), and a summary."""
    rows = [("point", "label", "state", "nodes", "reason")]
    for point in status.points:
        nodes = ",".join(point.nodes) or "-"
        rows.append((point.id, point.label, point.state, nodes, point.reason))
    lines = [f"{status.name}: {status.folder}"]
    lines += [job.format() for job in status.jobs] or ["no job was submitted"]
    if status.problem:
        lines.append(status.problem)
    return "\n".join([*lines, "", format_table(rows), "", status.summarize()])


def print_status(folder: Path, *, as_json: bool = False, slurm: Slurm = SLURM) -> int:
    """Print the status of the sweep in a folder, as text or as JSON, and return exit code 0."""
    status = get_status(folder, slurm)
    click.echo(msgspec.json.encode(status).decode() if as_json else format_status(status))
    return 0


def follow_sweep(
    folder: Path, slurm: Slurm = SLURM, pause: Callable[[float], None] = time.sleep
) -> int:
    """Print a sweep's status line when it changes, until no job of the sweep waits or runs.

    At the end, the jobs and points are printed as a table. Returns the exit code of the sweep.
    ``pause`` is called with the seconds to wait between two reads of the status.
    """
    summary = ""
    while True:
        start = time.monotonic()
        status = get_status(folder, slurm)
        if status.summarize() != summary:
            summary = status.summarize()
            click.echo(summary)
        if not status.is_alive:
            click.echo(format_status(status))
            return status.code
        pause(max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * (time.monotonic() - start)))


WriteReport = Callable[[Sequence[Path], Path], None]
"""A function ``write_report(runs, file)`` that writes one HTML page about several runs.

``runs`` are the folders of the runs, and ``file`` is the path of the page.
"""


def collect(folder: Path, write_report: WriteReport, slurm: Slurm = SLURM) -> int:
    """Print the status of a sweep, and write one HTML page about all of its complete runs.

    The page is ``report.html`` in ``folder``, the folder of the sweep. It is not written if
    no run is complete. Returns the exit code of the sweep, see ``compute_exit_code``.

    Args:
        folder: the folder of the sweep.
        write_report: the function that writes the page. Its arguments are the folders of the
            complete runs and the path of the page.
        slurm: the programs of Slurm.
    """
    folder = folder.absolute()
    status = get_status(folder, slurm)
    click.echo(format_status(status))
    runs = [folder / point.run for point in status.points if point.is_complete]
    if runs:
        write_report(runs, folder / "report.html")
        click.echo(folder / "report.html")
    if any(point.state in ("partial", "absent") for point in status.points):
        click.echo(f"next: parbench slurm resume {quote(str(folder))}")
    return status.code
