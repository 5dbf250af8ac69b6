"""The jobs of a sweep ended, and no others."""

from pathlib import Path

import click

from slurm.folder import load_jobs, load_sweep
from slurm.system import Slurm


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
