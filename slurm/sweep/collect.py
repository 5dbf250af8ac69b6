"""A sweep's runs brought together: a verdict for each point, and one report of all."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from bench.results.runs import utc_now
from bench.text import UserError, writing
from slurm.sweep.folder import Job, append_job, load_jobs, load_sweep
from slurm.sweep.points import Point, Sweep
from slurm.sweep.script import Batch, batches, script_text
from slurm.sweep.status import Picture, PointState, look
from slurm.system import Slurm, SlurmError

Report = Callable[[Sequence[Path], Path], None]
"""Writes one HTML file of several runs."""


def collect(folder: Path, report: Report | None = None, slurm: Slurm | None = None) -> int:
    """Print each point's verdict and its run, and write ``report.html`` where there is a run to show.

    Returns 0 if every point is done, 1 if a result is wrong, 4 if anything is not measured.
    """
    folder = folder.absolute()
    picture = look(folder, slurm)
    for point in picture.points:
        click.echo(verdict(point))
    click.echo(picture.words())
    runs = measured_runs(folder, picture)
    if report is not None and runs:
        report(runs, folder / "report.html")
        click.echo(folder / "report.html")
    if picture.code and any(point.state not in ("done", "failed", "waiting", "running") for point in picture.points):
        click.echo(f"next: parbench slurm resume {folder}")
    return picture.code


def verdict(point: PointState) -> str:
    """Return what became of a point, and where its run is, in one line."""
    words = f"{point.id}  {point.state:11}  {point.label}"
    return "  ".join([words, *([point.run] if point.run else []), *([f"({point.reason})"] if point.reason else [])])


def measured_runs(folder: Path, picture: Picture) -> list[Path]:
    """Return the run folders of the points that came to their end, done or failed, in the sweep's order."""
    ended = (point for point in picture.points if point.state in ("done", "failed") and point.run)
    return [folder / point.run for point in ended if (folder / point.run / "run.json").exists()]


def cancel(folder: Path, slurm: Slurm | None = None) -> int:
    """End the sweep's jobs that still wait or run, by their ids, and print which; what is measured is kept."""
    load_sweep(folder)
    slurm = slurm or Slurm()
    alive = {job.id for job in slurm.queue()}
    ids = [job.id for job in load_jobs(folder) if job.id in alive]
    slurm.scancel(ids)
    for name in ids:
        click.echo(f"job {name}: cancelled")
    if not ids:
        click.echo("no job of this sweep waits or runs")
    return 0


def resume(folder: Path, slurm: Slurm | None = None) -> int:
    """Submit what is missing in the form of the sweep's mode, and print the jobs' ids.

    ``UserError`` if nothing is missing, if jobs of the sweep still live, or if Slurm does not answer.
    """
    folder = folder.absolute()
    slurm = slurm or Slurm()
    sweep = load_sweep(folder)
    points = missing_points(folder, sweep, look(folder, slurm))
    number = len(load_jobs(folder))
    for batch in batches(sweep, points):
        job = _send(folder, sweep, batch, number, slurm)
        click.echo(f"job {job.id}: {len(job.points)} of {len(sweep.points)} points, on {job.nodes} nodes")
    click.echo(f"next: parbench slurm status {folder}")
    return 0


def missing_points(folder: Path, sweep: Sweep, picture: Picture) -> tuple[Point, ...]:
    """Return the points to measure yet; ``UserError`` if there is none, or a job may be at them."""
    if picture.trouble:
        raise SlurmError(f"whether jobs of {folder} still live cannot be told: {picture.trouble}")
    alive = [job.id for job in picture.jobs if job.lives]
    if alive:
        raise UserError(f"jobs of {folder} still wait or run ({', '.join(alive)}): let them end, or cancel them")
    ended = {point.id for point in picture.points if point.state in ("done", "failed")}
    missing = tuple(point for point in sweep.points if point.id not in ended)
    if not missing:
        raise UserError(f"nothing of {folder} is missing: its {len(sweep.points)} points are done or failed")
    return missing


def _send(folder: Path, sweep: Sweep, batch: Batch, number: int, slurm: Slurm) -> Job:
    script = folder / "scripts" / f"{batch.stem}-resumed-{number}.sh"
    with writing(script):
        script.write_text(script_text(sweep, folder, batch), encoding="utf-8")
    job = Job(
        id=slurm.sbatch(script),
        name=script.stem,
        nodes=batch.nodes,
        time_seconds=batch.time_seconds,
        submitted=utc_now(),
        points=tuple(point.id for point in batch.points),
        array=bool(batch.tasks),
    )
    append_job(folder, job)
    return job
