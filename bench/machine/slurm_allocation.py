"""The nodes that Slurm has given to this job, and how ranks are to be spread over them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError
from bench.plan.plan import Spread
from bench.words import did_you_mean, listed

PLACEMENTS = ("block", "cyclic")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A job's nodes; ``ntasks_per_node`` is None where it was not asked for, or is not the same on all nodes."""

    job: str
    nodes: int
    nodelist: str
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Allocation":
        """Return the allocation that this process is in; ``UserError`` if it is in none."""
        if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NUM_NODES" not in environ:
            raise UserError(
                "--launcher srun needs an allocation, and SLURM_JOB_ID is not set: start it in an sbatch script or "
                "under salloc, or let parbench slurm submit do so"
            )
        return Allocation(
            job=environ["SLURM_JOB_ID"],
            nodes=_whole(environ, "SLURM_JOB_NUM_NODES") or 1,
            nodelist=environ.get("SLURM_JOB_NODELIST", ""),
            ntasks_per_node=_whole(environ, "SLURM_NTASKS_PER_NODE"),
            cpus_per_task=_whole(environ, "SLURM_CPUS_PER_TASK"),
        )


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable's number; Slurm also writes ``2(x4)``, two on each of four."""
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get(name, ""))
    return int(found[1]) if found else None


def choose_spread(allocation: Allocation, *, nodes: int | None, ntasks_per_node: int, placement: str | None) -> Spread:
    """Return how ranks are spread for what was asked; ``UserError`` if the allocation cannot hold it."""
    wanted = allocation.nodes if nodes is None else nodes
    for option, number in (("--nodes", wanted), ("--ntasks-per-node", ntasks_per_node)):
        if number < 1:
            raise UserError(f"{option} {number}: at least 1 is needed")
    if wanted > allocation.nodes:
        raise UserError(f"--nodes {wanted}: job {allocation.job} has {allocation.nodes} ({allocation.nodelist})")
    if wanted * ntasks_per_node < 2:
        raise UserError("one node with one rank moves nothing: use --nodes 2, or --ntasks-per-node 2")
    return Spread(nodes=wanted, ntasks_per_node=ntasks_per_node, placement=_placement(placement or "block"))


def _placement(text: str) -> Literal["block", "cyclic"]:
    if text in ("block", "cyclic"):
        return "block" if text == "block" else "cyclic"
    raise UserError(f"--placement {text!r} is not known{did_you_mean(text, PLACEMENTS)}; allowed: {listed(PLACEMENTS)}")
