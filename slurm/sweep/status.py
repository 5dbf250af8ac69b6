"""The status of a sweep: the saved state of each point, and Slurm's state of the jobs that measure the rest."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from parbench.bench.text import format_table
from parbench.slurm.job.state import FINAL, SavedState, exit_code, read_states
from parbench.slurm.sweep.folder import Job, Point, load_jobs, load_sweep
from parbench.slurm.system import SLURM, QueuedJob, Slurm, SlurmError


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the sweep; an array has several ``states``. ``lives`` is None where Slurm does not answer.

    ``reason`` is Slurm's word for why it waits.
    """

    id: str
    states: tuple[str, ...]
    lives: bool | None
    points: tuple[str, ...]
    reason: str = ""

    def words(self) -> str:
        if self.lives is None:
            return f"job {self.id} unknown, for Slurm does not answer"
        if len(self.states) > 1:
            counts = Counter(self.states).most_common()
            return f"array {self.id}: " + ", ".join(
                f"{count} {state.lower()}" for state, count in counts
            )
        return f"job {self.id} {self.states[0].lower()}{f' ({self.reason})' if self.reason else ''}"


class PointState(msgspec.Struct, frozen=True, kw_only=True):
    """A point and what became of it; ``run`` is relative to the sweep's folder.

    ``state`` is done or failed; waiting, running or started of what is in work; interrupted, postponed, lost-node, lost
    or missing of what waits for ``parbench slurm resume``.
    """

    id: str
    label: str
    state: str
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""
    run: str = ""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The whole sweep; ``trouble`` says why Slurm did not answer."""

    name: str
    folder: str
    jobs: tuple[JobState, ...]
    points: tuple[PointState, ...]
    code: int  # 0 if every point is done, 1 if a result is wrong, otherwise 4
    trouble: str = ""

    @property
    def lives(self) -> bool:
        """Whether any job may still measure something."""
        return any(job.lives is not False for job in self.jobs)

    def words(self) -> str:
        """Summarize the sweep in one line: ``8 of 12 done, 1 failed, 3 to do; job 17 running``."""
        counts = Counter(point.state for point in self.points)
        to_do = len(self.points) - counts["done"] - counts["failed"]
        parts = [f"{counts['done']} of {len(self.points)} done"]
        if counts["failed"]:
            parts.append(f"{counts['failed']} failed")
        if to_do:
            parts.append(f"{to_do} to do")
        jobs = [job.words() for job in self.jobs if job.lives is not False] or ["no job is left"]
        return f"{', '.join(parts)}; {', '.join(jobs)}"


def look(folder: Path, slurm: Slurm = SLURM) -> Picture:
    """Return the status of the sweep in a folder; what Slurm does not answer is unknown."""
    sweep, jobs = load_sweep(folder), load_jobs(folder)
    trouble, queue = "", None
    try:
        queue = slurm.queue()
    except SlurmError as error:
        trouble = str(error)
    saved = read_states(
        folder, sweep.points
    )  # after the queue, so that it has the end of a job that is not queued
    states = tuple(_job_state(job, queue, slurm, saved) for job in jobs)
    points = tuple(
        _point_state(point, saved.get(point.id), states, queue) for point in sweep.points
    )
    return Picture(
        name=sweep.name,
        folder=str(folder),
        jobs=states,
        points=points,
        code=exit_code(saved, sweep.points),
        trouble=trouble,
    )


def _job_state(
    job: Job, queue: Sequence[QueuedJob] | None, slurm: Slurm, saved: Mapping[str, SavedState]
) -> JobState:
    if queue is None:
        return JobState(id=job.id, states=(), lives=None, points=job.points)
    alive = [queued for queued in queue if queued.id == job.id]
    why = next(
        (
            queued.reason
            for queued in alive
            if queued.state == "PENDING" and queued.reason != "None"
        ),
        "",
    )
    states = [queued.state for queued in alive]
    if not alive and not all(point in saved and saved[point].is_final for point in job.points):
        with contextlib.suppress(SlurmError):
            states = [*{facts.get("JobState", "unknown"): None for facts in slurm.show_job(job.id)}]
    return JobState(
        id=job.id,
        states=tuple(states or ["ended"]),
        lives=bool(alive),
        points=job.points,
        reason=why,
    )


def _point_state(
    point: Point,
    saved: SavedState | None,
    jobs: Sequence[JobState],
    queue: Sequence[QueuedJob] | None,
) -> PointState:
    own_jobs = [job for job in jobs if point.id in job.points]
    if saved is None:
        if any(job.lives is not False for job in own_jobs):
            return PointState(id=point.id, label=point.label, state="waiting")
        ends = ", ".join(job.words() for job in own_jobs) or "no job was submitted for it"
        return PointState(
            id=point.id, label=point.label, state="missing", reason=f"not begun: {ends}"
        )
    state, reason = str(saved.state), saved.reason
    if queue is not None and state == "started":
        state, reason = _started(saved.job, own_jobs, queue)
    elif queue is not None and not saved.is_final and any(job.lives for job in own_jobs):
        state = "waiting"
    return PointState(
        id=point.id,
        label=point.label,
        state=state,
        nodes=saved.nodes,
        seconds=saved.seconds,
        reason=reason,
        run=saved.run,
    )


def _started(number: str, jobs: Sequence[JobState], queue: Sequence[QueuedJob]) -> tuple[str, str]:
    """Return the state of a point that a job of this number has begun and not ended, and why."""
    own = next((job for job in queue if job.own_id == number), None)
    if own is None:
        told = "".join(f": {job.words()}" for job in jobs if job.id == number)
        return "lost", f"job {number} ended while it was measured{told}"
    if own.state in ("RUNNING", "COMPLETING", "SUSPENDED"):
        return "running", ""
    return "waiting", f"job {number} was requeued while it was measured"


def render(picture: Picture) -> str:
    """Return the jobs, a table of the points, and the line that sums them up."""
    rows = [("point", "what", "state", "nodes", "seconds", "reason")]
    for point in picture.points:
        seconds = f"{point.seconds:.0f}" if point.seconds else "-"
        rows.append(
            (
                point.id,
                point.label,
                point.state,
                ",".join(point.nodes) or "-",
                seconds,
                point.reason,
            )
        )
    jobs = [job.words() for job in picture.jobs] or ["no job was submitted"]
    trouble = [picture.trouble] if picture.trouble else []
    head = [f"{picture.name}: {picture.folder}", *jobs, *trouble]
    return "\n".join([*head, "", format_table(rows), "", picture.words()])


def show(folder: Path, *, as_json: bool = False, slurm: Slurm = SLURM) -> int:
    """Print where a sweep stands; 0 whatever it is."""
    picture = look(folder, slurm)
    click.echo(msgspec.json.encode(picture).decode() if as_json else render(picture))
    return 0


def follow(folder: Path, slurm: Slurm = SLURM, pause: Callable[[float], None] = time.sleep) -> int:
    """Print a line whenever something changes until the sweep's jobs have ended, then the table.

    Returns 0 if every point is done, 1 if a result is wrong, 4 if anything is not measured.
    """
    points = load_sweep(folder).points
    shown: tuple[str, ...] = ()
    while True:
        saved, picture = read_states(folder, points), look(folder, slurm)
        states = tuple(point.state for point in picture.points)
        if states != shown:
            shown = states
            click.echo(picture.words())
        if not picture.lives:
            click.echo(render(picture))
            return picture.code
        for _ in range(4):  # Slurm is asked less often than the states are read
            pause(1.0)
            if read_states(folder, points) != saved:
                break


Report = Callable[[Sequence[Path], Path], None]


def collect(folder: Path, report: Report | None = None, slurm: Slurm = SLURM) -> int:
    """Print each point's verdict and its run, and have ``report`` write one HTML file where there is a run to show.

    Returns 0 if every point is done, 1 if a result is wrong, 4 if anything is not measured.
    """
    folder = folder.absolute()
    picture = look(folder, slurm)
    runs = []
    for point in picture.points:
        why = f"({point.reason})" if point.reason else ""
        click.echo(
            "  ".join(filter(None, [point.id, f"{point.state:11}", point.label, point.run, why]))
        )
        if point.state in FINAL and point.run and (folder / point.run / "run.json").exists():
            runs.append(folder / point.run)
    click.echo(picture.words())
    if report is not None and runs:
        report(runs, folder / "report.html")
        click.echo(folder / "report.html")
    if any(point.state not in (*FINAL, "waiting", "running") for point in picture.points):
        click.echo(f"next: parbench slurm resume {folder}")
    return picture.code
