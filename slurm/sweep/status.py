"""Where a sweep stands: the ledger's word for each point, and Slurm's for the jobs that are to measure the rest."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

import click
import msgspec

from bench.text import format_duration
from slurm.job.ledger import Standing, read_ledger, standings
from slurm.sweep.folder import Job, load_jobs, load_sweep
from slurm.sweep.points import Point, Sweep
from slurm.system import QueuedJob, Slurm, SlurmError, scale

_LEDGER_EVERY_SECONDS, _SLURM_EVERY_SECONDS = 1.0, 4.0
TO_DO = ("waiting", "running", "started", "interrupted", "postponed", "lost-node", "lost", "missing")
"""The states of what is not measured: the first three are in work, the others wait for ``parbench slurm resume``."""


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
        """Return it as a person says it."""
        if self.lives is None:
            return f"job {self.id} unknown, for Slurm does not answer"
        if len(self.states) <= 1:
            why = f" ({self.reason})" if self.reason else ""
            return f"job {self.id} {(self.states or ('unknown',))[0].lower()}{why}"
        counts = Counter(self.states).most_common()
        return f"array {self.id}: " + ", ".join(f"{count} {state.lower()}" for state, count in counts)


class PointState(msgspec.Struct, frozen=True, kw_only=True):
    """A point and what became of it; ``run`` is relative to the sweep's folder."""

    id: str
    label: str
    state: str
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""
    run: str = ""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The whole sweep; ``left_seconds`` is expected, None where nothing is in work or Slurm does not answer."""

    name: str
    folder: str
    jobs: tuple[JobState, ...]
    points: tuple[PointState, ...]
    left_seconds: float | None
    trouble: str = ""

    @property
    def lives(self) -> bool:
        """Whether any job may still measure something."""
        return any(job.lives is not False for job in self.jobs)

    @property
    def code(self) -> int:
        """0 if every point is done, 1 if a result is wrong, else 4."""
        if any(point.state == "failed" and point.reason.startswith("wrong: ") for point in self.points):
            return 1
        return 0 if all(point.state == "done" for point in self.points) else 4

    def words(self) -> str:
        """Return it in one line: ``8 of 12 done, 1 failed, 3 to do; job 17 running, about 3 min left``."""
        counts = Counter(point.state for point in self.points)
        told = [f"{counts['done']} of {len(self.points)} done"]
        told += [f"{counts['failed']} failed"] if counts["failed"] else []
        to_do = sum(counts[state] for state in TO_DO)
        told += [f"{to_do} to do"] if to_do else []
        jobs = [job.words() for job in self.jobs if job.lives is not False] or ["no job is left"]
        left = "" if self.left_seconds is None else f", about {format_duration(self.left_seconds)} left"
        return f"{', '.join(told)}; {', '.join(jobs)}{left}"


def look(folder: Path, slurm: Slurm | None = None, now: float | None = None) -> Picture:
    """Return where the sweep of a folder stands; what Slurm does not tell is unknown."""
    sweep, jobs = load_sweep(folder), load_jobs(folder)
    slurm = slurm or Slurm()
    trouble, queue = "", None
    try:
        queue = slurm.queue()
    except SlurmError as error:
        trouble = str(error)
    found = standings(read_ledger(folder))  # after the queue: what ended between is told by the ledger
    states = tuple(_job_state(job, queue, slurm, found) for job in jobs)
    points = tuple(_point_state(point, found.get(point.id), states, queue) for point in sweep.points)
    left = None if queue is None else _left_seconds(sweep, points, states, found, time.time() if now is None else now)
    return Picture(name=sweep.name, folder=str(folder), jobs=states, points=points, left_seconds=left, trouble=trouble)


def _job_state(job: Job, queue: Sequence[QueuedJob] | None, slurm: Slurm, found: Mapping[str, Standing]) -> JobState:
    if queue is None:
        return JobState(id=job.id, states=(), lives=None, points=job.points)
    alive = [one for one in queue if one.id == job.id]
    if alive:
        why = next((one.reason for one in alive if one.state == "PENDING" and one.reason != "None"), "")
        states = tuple(one.state for one in alive)
        return JobState(id=job.id, states=states, lives=True, points=job.points, reason=why)
    if all(point in found and found[point].is_final for point in job.points):
        return JobState(id=job.id, states=("ended",), lives=False, points=job.points)
    try:
        ended = tuple(facts.get("JobState", "unknown") for facts in slurm.show_job(job.id))
    except SlurmError:
        ended = ()
    return JobState(id=job.id, states=tuple(dict.fromkeys(ended)) or ("ended",), lives=False, points=job.points)


def _point_state(
    point: Point, standing: Standing | None, jobs: Sequence[JobState], queue: Sequence[QueuedJob] | None
) -> PointState:
    mine = [job for job in jobs if point.id in job.points]
    if standing is None:
        state, reason = _not_begun(mine)
        return PointState(id=point.id, label=point.label, state=state, reason=reason)
    state, reason = _begun(standing, mine, queue)
    last = standing.last
    return PointState(
        id=point.id,
        label=point.label,
        state=state,
        nodes=last.nodes,
        seconds=standing.seconds,
        reason=reason,
        run=last.run,
    )


def _not_begun(jobs: Sequence[JobState]) -> tuple[str, str]:
    """Return the state of a point that no job has begun, and why."""
    if any(job.lives is not False for job in jobs):
        return "waiting", ""
    told = ", ".join(job.words() for job in jobs)
    return "missing", f"not begun: {told}" if told else "not begun: no job was submitted for it"


def _begun(standing: Standing, jobs: Sequence[JobState], queue: Sequence[QueuedJob] | None) -> tuple[str, str]:
    """Return the state of a point that the ledger tells of, and why."""
    last = standing.last
    if standing.is_final or queue is None:
        return last.state, last.reason
    if last.state == "started":
        own = next((job for job in queue if job.own_id == last.job), None)
        if own is not None and own.state in ("RUNNING", "COMPLETING", "SUSPENDED"):
            return "running", ""
        lost = f"job {last.job} {'was requeued' if own else 'ended'} while it was measured"
        told = ", ".join(job.words() for job in jobs if job.id == last.job and not own)
        return ("waiting" if own else "lost"), f"{lost}{f': {told}' if told else ''}"
    return ("waiting" if any(job.lives for job in jobs) else last.state), last.reason


def _left_seconds(
    sweep: Sweep, points: Sequence[PointState], jobs: Sequence[JobState], found: Mapping[str, Standing], now: float
) -> float | None:
    """Return what the points in work are expected to take yet, shared among the running jobs; None if none runs."""
    running = sum(state == "RUNNING" for job in jobs for state in job.states)
    if not running:
        return None
    expected = {point.id: point.seconds for point in sweep.points}
    factor = scale([(one.seconds, expected[one.id]) for one in points if one.state == "done"])
    left = 0.0
    for one in points:
        if one.state in ("waiting", "running"):
            spent = 0.0
            if one.state == "running":
                spent = now - datetime.fromisoformat(found[one.id].last.time).timestamp()
            left += max(expected[one.id] * factor - spent, 0.0)
    return left / running


def render(picture: Picture) -> str:
    """Return the jobs, a table of the points, and the line that sums them up."""
    head = ("point", "what", "state", "nodes", "seconds", "reason")
    rows = [head, *(_row(point) for point in picture.points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    jobs = [job.words() for job in picture.jobs] or ["no job was submitted"]
    trouble = [picture.trouble] if picture.trouble else []
    return "\n".join([f"{picture.name}: {picture.folder}", *jobs, *trouble, "", *table, "", picture.words()])


def _row(point: PointState) -> tuple[str, ...]:
    seconds = f"{point.seconds:.0f}" if point.seconds else "-"
    return (point.id, point.label, point.state, ",".join(point.nodes) or "-", seconds, point.reason)


def show(folder: Path, *, as_json: bool = False, slurm: Slurm | None = None) -> int:
    """Print where a sweep stands; 0 whatever it is."""
    picture = look(folder, slurm)
    click.echo(msgspec.json.encode(picture).decode() if as_json else render(picture))
    return 0


def follow(
    folder: Path,
    slurm: Slurm | None = None,
    out: TextIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print a line whenever something changes until the sweep's jobs have ended, then the table.

    Returns 0 if every point is done, 1 if a result is wrong, 4 if anything is not measured.
    """
    out = sys.stdout if out is None else out
    shown: tuple[str, ...] = ()
    while True:
        picture = look(folder, slurm)
        states = tuple(point.state for point in picture.points)
        if states != shown:
            shown = states
            click.echo(picture.words(), file=out)
        if not picture.lives:
            click.echo(render(picture), file=out)
            return picture.code
        pause(_wait_seconds(folder, pause))


def _wait_seconds(folder: Path, pause: Callable[[float], None]) -> float:
    """Wait until the ledger grows or it is time to ask Slurm again; return the rest of the wait."""
    before = read_ledger(folder)
    waited = 0.0
    while waited < _SLURM_EVERY_SECONDS - _LEDGER_EVERY_SECONDS and len(read_ledger(folder)) == len(before):
        pause(_LEDGER_EVERY_SECONDS)
        waited += _LEDGER_EVERY_SECONDS
    return _LEDGER_EVERY_SECONDS
