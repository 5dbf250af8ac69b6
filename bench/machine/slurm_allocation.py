"""The nodes that Slurm gave to this job: how ranks are laid out on them, what they have, where they find the driver."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import psutil

from parbench.bench.limits import Ranks
from parbench.bench.machine.environment import host_address
from parbench.bench.machine.machine import Machine, inspect_machine, parse_count
from parbench.bench.machine.world_spec import check_known
from parbench.bench.text import UserError, last_line

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANSWER_SECONDS = 90  # more than the first query of GPUs may take
# the machine is that of the whole node; Slurm would give one task its share, or ask one node for the whole job's GPUs
_OF_TASKS = re.compile(r"SLURM_(GPUS|GPUS_PER_TASK|NTASKS_PER_GPU|GPU_BIND|TRES_PER_TASK|TRES_BIND|CPU_BIND)")


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How srun spreads ranks over nodes: ``block`` fills a node first, ``cyclic`` deals to all in turn."""

    nodes: Ranks
    ntasks_per_node: Ranks
    placement: Literal["block", "cyclic"] = "block"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ntasks_per_node


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A job's nodes; ``ntasks_per_node`` is None where it was not asked for, or is not the same on all nodes."""

    job: str
    nodes: int
    nodelist: str
    ntasks_per_node: int | None = None

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Allocation":
        """Return the allocation that this process is in; ``UserError`` if it is in none."""
        if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NUM_NODES" not in environ:
            how = "start it in an sbatch script or under salloc, or let parbench slurm submit do so"
            raise UserError(f"--launcher srun needs an allocation, and SLURM_JOB_ID is not set: {how}")
        # Slurm also writes "2(x4)", two on each of four
        words = (environ.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"))
        nodes, ntasks = (parse_count(re.sub(r"\(x\d+\)$", "", word)) for word in words)
        job, nodelist = environ["SLURM_JOB_ID"], environ.get("SLURM_JOB_NODELIST", "")
        return Allocation(job=job, nodes=nodes or 1, nodelist=nodelist, ntasks_per_node=ntasks)


def check_srun() -> None:
    if shutil.which("srun") is None:
        raise UserError("--launcher srun: srun is not in the PATH; load Slurm's module, or leave out --launcher")


def srun_words(environ: Mapping[str, str], *options: str) -> list[str]:
    """Return the words of a job step beside others; last come options of the site or the sweep, as for a container."""
    of_site = filter(None, environ.get("PARBENCH_SRUN_OPTIONS", "").splitlines())  # one a line
    return ["srun", *options, "--mpi=none", "--overlap", "--input=none", "--export=ALL", *of_site]


def choose_layout(
    allocation: Allocation, *, nodes: int | None, ntasks_per_node: int, placement: str | None
) -> NodeLayout:
    """Return how ranks are spread for what was asked; ``UserError`` if the allocation cannot hold it."""
    wanted = allocation.nodes if nodes is None else nodes
    if wanted < 1:
        raise UserError(f"--nodes {wanted}: at least 1 is needed")
    if wanted > allocation.nodes:
        raise UserError(f"--nodes {wanted}: job {allocation.job} has {allocation.nodes} ({allocation.nodelist})")
    if wanted * ntasks_per_node < 2:
        raise UserError("needs at least 2 ranks, and this is one node with one: use --nodes 2 or --ntasks-per-node 2")
    check_known("--placement", placement, ("block", "cyclic"))
    dealt: Literal["block", "cyclic"] = "cyclic" if placement == "cyclic" else "block"
    return NodeLayout(nodes=wanted, ntasks_per_node=ntasks_per_node, placement=dealt)


def machine_of_ranks(environ: Mapping[str, str], allocation: Allocation | None) -> Machine:
    """Return the machine that ranks of the allocation, None for this host's, have; ``UserError`` if no node answers."""
    if allocation is None or "SLURMD_NODENAME" in environ:
        return inspect_machine(environ)
    told: Machine | str = ""
    for number in range(min(allocation.nodes, 2)):  # one node may be the one that does not answer
        if isinstance(told := _ask(number, environ), Machine):
            return told
    why = f"this host is no node of job {allocation.job}, and srun could not tell what its nodes have: {told}"
    raise UserError(f"--launcher srun: {why}; start parbench in an sbatch script, or on a node")


def _ask(number: int, environ: Mapping[str, str]) -> Machine | str:
    words = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--relative={number}", "--cpu-bind=none"]
    command = [*srun_words(environ, *words), sys.executable, "-m", "parbench.bench.machine.slurm_allocation"]
    env = {name: value for name, value in environ.items() if not _OF_TASKS.fullmatch(name)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=_ANSWER_SECONDS)
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Machine)
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_SECONDS} s"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return last_line(done.stderr.decode(errors="replace")) or f"it ended with {done.returncode}"


def reachable(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this host's IPv4 addresses, the likeliest first: the chosen interface's, the host name's, all others."""
    states, chosen, named = psutil.net_if_stats(), environ.get(INTERFACE_VARIABLE), host_address()
    found = [
        (0 if name == chosen else 1 if entry.address == named else 2, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    # the loopback's only if there are no others: Debian lets a host name mean 127.0.1.1
    likeliest = sorted(found, key=lambda ranked: ranked[0])
    return tuple(dict.fromkeys(address for _, address in likeliest)) or ("127.0.0.1",)


def main() -> None:
    sys.stdout.write(f"\n{msgspec.json.encode(inspect_machine(os.environ)).decode()}\n")


if __name__ == "__main__":
    main()
