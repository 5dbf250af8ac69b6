"""``parbench slurm``: the command line of sweeps over nodes, and of node screening."""

from pathlib import Path
from typing import Any

import click

from parbench.bench.command_line import OUT_HELP, format_option

_EPILOG = """\b
Examples:
  parbench slurm submit sweep.toml --dry-run
  parbench slurm screen --nodes 16
"""
_PATH = click.Path(path_type=Path)
_FOLDER = click.argument("folder", type=_PATH)
"""The argument of most commands: the folder of a submitted sweep."""


@click.group(epilog=_EPILOG)
def slurm() -> None:
    """Sweep over the nodes of a Slurm cluster; find slow nodes."""


@slurm.command(epilog="Example: parbench slurm submit sweep.toml --wait")
@click.argument("file", type=_PATH)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the points, the cost and the batch scripts, and submit nothing.",
)
@click.option("--wait", is_flag=True, help="Wait for the jobs and exit with the sweep's code.")
@click.option(
    "--out",
    type=_PATH,
    help="Folder in which the sweep's folder is created. Default: the file's, or sweeps.",
)
@click.pass_context
def submit(context: click.Context, file: Path, dry_run: bool, wait: bool, out: Path | None) -> None:
    """Submit a sweep described by a TOML file, after checking it.

    Prints points, expected time and node-hours. Submits all jobs, or none.
    """
    from parbench.slurm.sweep.submit import submit as submit_sweep

    context.exit(submit_sweep(file, context.obj.modules, dry_run=dry_run, wait=wait, out=out))


@slurm.command(hidden=True, epilog="Example: parbench slurm work sweeps/SWEEP")
@_FOLDER
@click.option("--array", is_flag=True, help="Measure only the point of this task of an array.")
@click.pass_context
def work(context: click.Context, folder: Path, array: bool) -> None:
    """Measure the missing points of a sweep in this allocation. Batch scripts run this.

    In a job array (--array) a task measures only its own point.
    """
    from parbench.slurm.job.work import work as measure_points

    context.exit(measure_points(folder, array=array))


@slurm.command(epilog="Example: parbench slurm status sweeps/SWEEP")
@_FOLDER
@format_option(type=click.Choice(("tables", "json")), default="tables")
@click.pass_context
def status(context: click.Context, folder: Path, form: str) -> None:
    """Show the jobs and points of a sweep, and why points are not complete."""
    from parbench.slurm.sweep.status import print_status

    context.exit(print_status(folder, as_json=form == "json"))


@slurm.command(epilog="Example: parbench slurm collect sweeps/SWEEP")
@_FOLDER
@click.pass_context
def collect(context: click.Context, folder: Path) -> None:
    """Write one report of the runs of a sweep.

    The report is report.html in the folder of the sweep. Also prints the status of the sweep.

    Exit codes: 0 fine; 1 a wrong result; 4 something was not measured.
    """
    from parbench.slurm.sweep.status import collect as collect_runs

    context.exit(collect_runs(folder, context.obj.write_report))


@slurm.command(epilog="Example: parbench slurm cancel sweeps/SWEEP")
@_FOLDER
@click.pass_context
def cancel(context: click.Context, folder: Path) -> None:
    """Cancel the jobs of a sweep. Results are kept."""
    from parbench.slurm.sweep.submit import cancel as cancel_jobs

    context.exit(cancel_jobs(folder))


@slurm.command(epilog="Example: parbench slurm resume sweeps/SWEEP")
@_FOLDER
@click.pass_context
def resume(context: click.Context, folder: Path) -> None:
    """Submit the points of a sweep that are not complete."""
    from parbench.slurm.sweep.submit import resume as resume_sweep

    context.exit(resume_sweep(folder))


@slurm.command(epilog="Example: parbench slurm screen --nodes 4 --size 16M")
@click.option(
    "--nodes", type=click.IntRange(min=3), help="Number of nodes. Default: all of the allocation."
)
@click.option("--partition", metavar="NAME", help="Partition of a new allocation.")
@click.option(
    "--time",
    metavar="TIME",
    default="10m",
    show_default=True,
    help="Time limit of a new allocation.",
)
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs of a new allocation.")
@click.option(
    "--rounds", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds of pairs."
)
@click.option(
    "--size",
    metavar="SIZE",
    help="Bytes of an exchange. Default: 128M between GPUs, otherwise 4M.",
)
@click.option(
    "--timeout",
    metavar="TIME",
    default="20s",
    show_default=True,
    help="Time after which a round counts as hung.",
)
@click.option("--devices/--no-devices", default=True, help="First run parbench check. The default.")
@click.option("--out", type=_PATH, default=Path("runs/screen"), show_default=True, help=OUT_HELP)
@format_option(type=click.Choice(("tables", "json")), default="tables")
def screen(form: str, **values: Any) -> None:
    """Find nodes with bad devices, slow nodes and slow rails.

    Each node first checks all its GPUs or cores (parbench check). Then pairs of nodes exchange
    data, local rank i with local rank i, one rank for each GPU. A node or rail is slow if its
    exchanges take longer than those of other pairs, by a ratio above a threshold, in both of two
    measurements. The last line is an --exclude= option for srun and sbatch. Outside of an
    allocation, salloc makes one.

    Exit codes: 0 fine; 1 a node, a rail or a device is bad; 2 bad input; 4 something did not run.
    """
    import os
    import sys

    from parbench.slurm.screen.screen import ScreenOptions
    from parbench.slurm.screen.screen import screen as screen_cluster

    code, text = screen_cluster(
        ScreenOptions(as_json=form == "json", **values), os.environ, sys.argv[1:]
    )
    if text:
        click.echo(text)
    click.get_current_context().exit(code)
