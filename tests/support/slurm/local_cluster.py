"""Start a Slurm cluster on this machine, run a command in it, and inject faults from inside.

python -m tests.support.slurm.local_cluster run --nodes 4 --link 200mbit -- srun -N 4 hostname
python -m tests.support.slurm.local_cluster fault cut n3
"""

import sys
from pathlib import Path

import click

from parbench.bench.text import UserError
from tests.support.local_slurm import cluster
from tests.support.local_slurm.cluster_conf import ClusterSpec
from tests.support.local_slurm.local import inject_fault, run_local


@click.group()
def main() -> None:
    """Run commands in a temporary Slurm cluster on this machine."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes",
    type=click.IntRange(1, 200),
    default=4,
    show_default=True,
    help="Number of nodes: n1, n2, ...",
)
@click.option(
    "--link",
    metavar="RATE",
    default="",
    help="Rate of every link in each direction, such as 200mbit.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="NODE:RATE",
    help="A node with a slower link, such as n3:50mbit.",
)
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
)
def run(nodes: int, link: str, slow: tuple[str, ...], command: tuple[str, ...]) -> None:
    """Run COMMAND in a new cluster and exit with its code. Nothing is left when it ends."""
    rates = tuple((name, rate) for name, _, rate in (text.partition(":") for text in slow))
    spec = ClusterSpec(nodes=nodes, link=link, slow=rates)
    sys.exit(run_local(spec, command))


@main.command()
@click.argument("action", type=click.Choice(("cut", "heal")))
@click.argument("node")
def fault(action: str, node: str) -> None:
    """Cut or heal the link of NODE, from inside of the cluster.

    A link that is cut silently drops everything.
    """
    inject_fault(action, node)


@main.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def inside(folder: Path) -> None:
    """Be the first process of a cluster's namespaces."""
    sys.exit(cluster.main(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"local_cluster: {error}")
