"""``parbench slurm``: the command line of sweeps over nodes."""

from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)
_EXAMPLES = """\b
Examples:
  parbench slurm submit sweep.toml --dry-run
  parbench slurm screen --nodes 16
  parbench slurm local -- srun --nodes 4 hostname
"""


@click.group(epilog=_EXAMPLES)
def slurm() -> None:
    """Measure over the nodes of a SLURM cluster, or of one that parbench makes on this machine."""


@slurm.command(
    epilog="Example: parbench slurm local --nodes 4 --link 200mbit -- srun --nodes 4 hostname",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--nodes", type=click.IntRange(1, 200), default=4, show_default=True, help="How many nodes, n1 and on.")
@click.option("--cpus", type=click.IntRange(1, 1024), default=2, show_default=True, help="CPUs that a node claims.")
@click.option("--link", metavar="RATE", help="The rate of every node's link, both ways, such as 200mbit.")
@click.option("--delay", metavar="TIME", help="One-way latency between any two nodes, such as 500us.")
@click.option("--slow", multiple=True, metavar="NODE:RATE", help="A node with a slower link, such as n3:50mbit.")
@click.option("--keep", is_flag=True, help="Keep the cluster's folder with its logs, and say where it is.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def local(keep: bool, command: tuple[str, ...], **given: Any) -> None:
    """Run COMMAND inside a throw-away SLURM cluster on this machine, and exit with its code.

    Every node is a real one to SLURM: its own address, host name and /dev/shm. What is measured there says how the
    machine was shared, not how a cluster performs. Nothing of it is left when COMMAND ends.
    """
    from slurm.local.cluster_conf import cluster_spec
    from slurm.local.local import run_local

    click.get_current_context().exit(run_local(cluster_spec(**given), command, keep=keep))


@slurm.command("local-fault", epilog="Example: parbench slurm local-fault cut n3")
@click.argument("action", metavar="ACTION", type=click.Choice(("cut", "heal", "rate", "down", "up")))
@click.argument("node")
@click.argument("rate", required=False)
def local_fault(action: str, node: str, rate: str | None) -> None:
    """Break or mend a node of the cluster of parbench slurm local, from inside: cut, heal, rate RATE, down, up.

    cut: nothing passes NODE's link any more, without a word to either side; heal undoes it. rate: its link has RATE,
    such as 50mbit. down: SLURM is told that NODE is down, and ends its jobs; up undoes it.
    """
    from slurm.local.local import break_or_mend

    break_or_mend(action, node, rate)


@slurm.command(epilog="Example: parbench slurm submit sweep.toml --wait")
@click.argument("file", type=_PATH)
@click.option("--dry-run", is_flag=True, help="Show the points, what they cost and the batch script; submit nothing.")
@click.option("--wait", is_flag=True, help="Stay until the jobs end, and exit with the sweep's code.")
@click.option("--out", type=_PATH, help="Where sweeps go; default: the file's, else sweeps.")
@click.pass_context
def submit(context: click.Context, file: Path, dry_run: bool, wait: bool, out: Path | None) -> None:
    """Submit the sweep that a TOML file describes, after everything that can be checked before was checked.

    The points, their expected time and the node-hours are shown. All jobs are submitted, or none.
    """
    from slurm.sweep.submit import submit as send

    context.exit(send(file, context.obj.modules, dry_run=dry_run, wait=wait, out=out))


_FOLDER = click.argument("folder", type=_PATH)


@slurm.command(hidden=True, epilog="Example: parbench slurm work sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
@click.option("--point", metavar="ID", help="This point alone.")
@click.option("--array", is_flag=True, help="The point of this task of an array.")
def work(folder: Path, point: str | None, array: bool) -> None:
    """Measure what is missing of a sweep in this allocation: what its batch scripts run."""
    from slurm.job.work import work as measure

    click.get_current_context().exit(measure(folder, point_id=point, array=array))


@slurm.command(epilog="Example: parbench slurm status sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(folder: Path, as_json: bool) -> None:
    """Show the jobs and points of a sweep: what is done, what is to do, and why what failed did."""
    from slurm.sweep.status import show

    click.get_current_context().exit(show(folder, as_json=as_json))


@slurm.command(epilog="Example: parbench slurm collect sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
@click.pass_context
def collect(context: click.Context, folder: Path) -> None:
    """Print each point's verdict and the place of its run, and build one report of all.

    The exit code is the sweep's: 0 fine, 1 a wrong result, 4 something is not measured.
    """
    from slurm.sweep.status import collect as bring_together

    context.exit(bring_together(folder, context.obj.report))


@slurm.command(epilog="Example: parbench slurm cancel sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
def cancel(folder: Path) -> None:
    """End the jobs of a sweep that still wait or run, and no others; what is measured is kept."""
    from slurm.sweep.submit import cancel as end_jobs

    click.get_current_context().exit(end_jobs(folder))


@slurm.command(epilog="Example: parbench slurm resume sweeps/20260102T030405Z-nodes-1a2b3c")
@_FOLDER
def resume(folder: Path) -> None:
    """Submit once more what a sweep lacks; nothing that is measured is measured again."""
    from slurm.sweep.submit import resume as go_on

    click.get_current_context().exit(go_on(folder))


@slurm.command(epilog="Example: parbench slurm screen --nodes 4 --size 16M")
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes; default: all of this allocation.")
@click.option("--partition", help="Where to ask for nodes, outside an allocation.")
@click.option("--rounds", type=int, default=5, show_default=True, help="In how many rounds each node meets another.")
@click.option("--size", default="4M", show_default=True, help="What two nodes send each other at once.")
@click.option("--time", default="5m", show_default=True, help="The limit of an allocation of its own.")
@click.option("--budget", metavar="TIME", help="Time for ranks to start and all rounds; default: 60 s and 2 s each.")
@click.option("--timeout", default="20s", show_default=True, help="Time after which a round counts as hung.")
@click.option("--out", type=_PATH, default=Path("runs/screen"), show_default=True, help="Where runs go.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def screen(**given: Any) -> None:
    """Find slow nodes and links: nodes meet in pairs, round by round, and what looks slow is measured again.

    Only what is slow with several good partners, twice, is blamed. The last line is an option for srun and sbatch that
    leaves the bad nodes out. Outside an allocation it asks for one with salloc.

    Exit codes: 0 all fine; 1 a node or a link is slow; 2 bad input; 4 something did not run.
    """
    import os

    from slurm.screen.run import Options
    from slurm.screen.screen import screen as screen_cluster

    code, text = screen_cluster(Options(**given), os.environ)
    if text:
        click.echo(text)
    click.get_current_context().exit(code)
