"""What a sweep still lacks, submitted once more: nothing that is measured is measured again."""

from pathlib import Path

import click

from bench.results.runs import utc_now
from bench.text import UserError, writing
from slurm.folder import Job, append_job, load_jobs, load_sweep
from slurm.points import Point, Sweep
from slurm.script import Batch, batches, script_text
from slurm.status import Picture, look
from slurm.system import Slurm, SlurmError


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
