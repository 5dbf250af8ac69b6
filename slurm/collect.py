"""A sweep's runs brought together: a verdict for each point, and one report of all."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from slurm.status import Picture, PointState, look
from slurm.system import Slurm

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
