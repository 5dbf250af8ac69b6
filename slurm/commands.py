"""``parbench slurm``: the command line of sweeps over nodes."""

from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)
_EXAMPLES = """\b
Examples:
  parbench slurm submit sweep.toml --dry-run
  parbench slurm screen --nodes 16
"""


@click.group(epilog=_EXAMPLES)
def slurm() -> None:
    """Sweep over the nodes of a Slurm cluster; find slow nodes."""


@slurm.command(epilog="Example: parbench slurm submit sweep.toml --wait")
@click.argument("file", type=_PATH)
@click.option(
    "--dry-run", is_flag=True, help="Print points, cost and batch scripts; submit nothing."
)
@click.option("--wait", is_flag=True, help="Wait for the jobs to end; exit with the sweep's code.")
@click.option("--out", type=_PATH, help="Where sweeps go; default: the file's, else sweeps.")
@click.pass_context
def submit(context: click.Context, file: Path, dry_run: bool, wait: bool, out: Path | None) -> None:
    """Submit a sweep described by a TOML file, after checking it.

    Points, expected time and node-hours are printed. All jobs are submitted, or none.
    """
    from parbench.slurm.sweep.submit import submit as send

    context.exit(send(file, context.obj.modules, dry_run=dry_run, wait=wait, out=out))


_FOLDER = click.argument("folder", type=_PATH)


@slurm.command(
    hidden=True, epilog="Example: parbench slurm work sweeps/20260102T030405Z-nodes-1a2b3c"
)
@_FOLDER
@click.option("--array", is_flag=True, help="Measure only the point of this task of an array.")
def work(folder: Path, array: bool) -> None:
    """Measure the missing points of a sweep in this allocation. Batch scripts run this."""
    from parbench.slurm.job.work import work as measure

    click.get_current_context().exit(measure(folder, array=array))


@slurm.command(epilog="Example: parbench slurm status sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(folder: Path, as_json: bool) -> None:
    """Show a sweep's jobs and points: done, to do, failed and why."""
    from parbench.slurm.sweep.status import show

    click.get_current_context().exit(show(folder, as_json=as_json))


@slurm.command(epilog="Example: parbench slurm collect sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
@click.pass_context
def collect(context: click.Context, folder: Path) -> None:
    """Build one report of a sweep's runs, with a verdict each.

    Exit codes: 0 fine; 1 a wrong result; 4 something is not measured.
    """
    from parbench.slurm.sweep.status import collect as bring_together

    context.exit(bring_together(folder, context.obj.write_report))


@slurm.command(epilog="Example: parbench slurm cancel sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
def cancel(folder: Path) -> None:
    """Cancel a sweep's own jobs; results are kept."""
    from parbench.slurm.sweep.submit import cancel as end_jobs

    click.get_current_context().exit(end_jobs(folder))


@slurm.command(epilog="Example: parbench slurm resume sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
def resume(folder: Path) -> None:
    """Submit again what a sweep has not measured yet."""
    from parbench.slurm.sweep.submit import resume as go_on

    click.get_current_context().exit(go_on(folder))


@slurm.command(epilog="Example: parbench slurm screen --nodes 4 --size 16M")
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Number of nodes; default: all of this allocation."
)
@click.option("--partition", help="Partition to ask for nodes, outside an allocation.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds of pairs.")
@click.option(
    "--size", default="4M", show_default=True, help="Bytes that two nodes send each other."
)
@click.option(
    "--time", default="5m", show_default=True, help="Time limit of an allocation that it asks for."
)
@click.option(
    "--budget", metavar="TIME", help="Time for start and all rounds; default: 60 s and 2 s a round."
)
@click.option(
    "--timeout", default="20s", show_default=True, help="Time after which a round counts as hung."
)
@click.option(
    "--devices/--no-devices",
    default=True,
    show_default=True,
    help="parbench check on every node, first.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    help="GPUs to ask for, of an allocation that it asks for.",
)
@click.option(
    "--out", type=_PATH, default=Path("runs/screen"), show_default=True, help="Where runs go."
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def screen(**given: Any) -> None:
    """Find nodes with bad devices, slow nodes and slow links.

    Every node first checks all its GPUs or cores by itself (parbench check), and they are compared over nodes; then
    pairs of nodes are measured, and what looks slow once more: a node is named only if it was slow twice, with several
    good partners. The last line is an --exclude= option for srun and sbatch. Outside an allocation it asks for one with
    salloc.

    Exit codes: 0 all fine; 1 a node, a link or a device is slow or bad; 2 bad input; 4 something did not run.
    """
    import os

    from parbench.slurm.screen.run import Options
    from parbench.slurm.screen.screen import screen as screen_cluster

    code, text = screen_cluster(Options(**given), os.environ)
    if text:
        click.echo(text)
    click.get_current_context().exit(code)
