"""The nodes of a Slurm job: the layout of ranks, their machines, and the driver's addresses."""

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

from parbench.bench.limits import NumRanks
from parbench.bench.machine.environment import find_host_address
from parbench.bench.machine.machine import Machine, inspect_machine, parse_count
from parbench.bench.machine.world_spec import check_known
from parbench.bench.text import UserError, get_last_line

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
OPTIONS_VARIABLE = "PARBENCH_SRUN_OPTIONS"
_NODE_TIMEOUT_SECONDS = 90  # longer than NVML may take
_MAX_RANGE = 1 << 14  # nodes
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
# The machine is that of the whole node. With these variables Slurm would give one task its share,
# or would require of one node the GPUs of the whole job.
_TASK_VARIABLES = re.compile(
    r"SLURM_(GPUS|GPUS_PER_TASK|NTASKS_PER_GPU|GPU_BIND|TRES_PER_TASK|TRES_BIND|CPU_BIND)"
)


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of ranks over the nodes of an allocation."""

    nodes: NumRanks
    ntasks_per_node: NumRanks
    distribution: Literal["block", "cyclic"] = "block"
    """``block`` fills a node with successive ranks, ``cyclic`` takes turns among the nodes."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ntasks_per_node


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a Slurm job."""

    job: str
    """The id of the job."""
    nodes: int
    nodelist: str
    """The names of the nodes as Slurm writes them, such as ``n[1-3,7]``."""
    ntasks_per_node: int | None = None
    """The number of tasks on each node, None if it was not set or differs between nodes."""

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Allocation":
        """Return the Slurm allocation of this process. Raises ``UserError`` if there is none."""
        if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NUM_NODES" not in environ:
            raise UserError(
                "--launcher srun needs an allocation, and SLURM_JOB_ID is not set",
                hint="start it in an sbatch script or under salloc, or use parbench slurm submit",
            )
        return Allocation(
            job=environ["SLURM_JOB_ID"],
            nodes=_parse_tasks(environ["SLURM_JOB_NUM_NODES"]) or 1,
            nodelist=environ.get("SLURM_JOB_NODELIST", ""),
            ntasks_per_node=_parse_tasks(environ.get("SLURM_NTASKS_PER_NODE", "")),
        )


def _parse_tasks(text: str) -> int | None:
    """Return the number in Slurm's ``2`` or ``2(x4)``, two tasks on each of four nodes."""
    return parse_count(re.sub(r"\(x\d+\)$", "", text))


def parse_nodes(text: str) -> tuple[int, str | None]:
    """Return the number of nodes, and the text if it is a list such as ``n1,n[3-4]``.

    The second value is None if the text is a number.
    """
    if re.fullmatch(r"-?\d+", text):
        return int(text), None
    return len(expand_nodes(text, "--nodes")), text


def expand_nodes(text: str, option: str) -> list[str]:
    """Return the names in a list of nodes such as ``n[01-03,7],login``.

    Raises UserError that names the option if a range is not valid.
    """
    names = []
    for entry in _COMMA_OUTSIDE_BRACKETS.split(text):
        if entry.strip():
            names += _expand_node(entry.strip(), option)
    return names


def _expand_node(entry: str, option: str) -> list[str]:
    """Return the names in one entry of a node list, such as ``n[01-03]``."""
    match = _BRACKETS.search(entry)
    if match is None:
        return [entry]
    names = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        last = last or first
        is_range = first.isdecimal() and last.isdecimal()
        if not is_range or int(last) - int(first) not in range(_MAX_RANGE):
            raise UserError(f"{option}: {part!r} in {entry!r} is not a range such as 01-03")
        for number in range(int(first), int(last) + 1):
            name = f"{entry[: match.start()]}{number:0{len(first)}d}{entry[match.end() :]}"
            names += _expand_node(name, option)
    return names


def check_srun() -> None:
    """Raise ``UserError`` if srun is not installed."""
    if shutil.which("srun") is None:
        raise UserError(
            "--launcher srun: srun is not in the PATH",
            hint="load Slurm's module, or leave out --launcher",
        )


def build_srun_command(environ: Mapping[str, str], *options: str) -> list[str]:
    """Return the srun command of a job step that shares its nodes with other steps.

    The lines of PARBENCH_SRUN_OPTIONS are its last options. A site or a sweep sets them, for
    example for a container.
    """
    site_options = [line for line in environ.get(OPTIONS_VARIABLE, "").splitlines() if line]
    shared_options = ["--mpi=none", "--overlap", "--input=none", "--export=ALL"]
    return ["srun", *options, *shared_options, *site_options]


def choose_layout(
    allocation: Allocation, *, nodes: int | None, ntasks_per_node: int, distribution: str | None
) -> NodeLayout:
    """Return the distribution of ranks over the nodes of an allocation.

    If ``nodes`` is None, all nodes are used. If ``distribution`` is None, it is ``block``. Raises
    ``UserError`` if the allocation is too small.
    """
    num_nodes = allocation.nodes if nodes is None else nodes
    if num_nodes < 1:
        raise UserError(f"--nodes {num_nodes}: at least 1 is needed")
    if num_nodes > allocation.nodes:
        available = f"{allocation.nodes} ({allocation.nodelist})"
        raise UserError(f"--nodes {num_nodes}: job {allocation.job} has {available}")
    if num_nodes * ntasks_per_node < 2:
        raise UserError(
            "one rank on one node: at least 2 ranks are needed",
            hint="--nodes 2 or --nproc 2",
        )
    check_known("--distribution", distribution, ("block", "cyclic"))
    return NodeLayout(
        nodes=num_nodes,
        ntasks_per_node=ntasks_per_node,
        distribution="cyclic" if distribution == "cyclic" else "block",
    )


def inspect_rank_machine(environ: Mapping[str, str], allocation: Allocation | None) -> Machine:
    """Return the machine of the first node of the allocation, or of this host without one.

    Raises ``UserError`` if the node does not answer.
    """
    if allocation is None or "SLURMD_NODENAME" in environ:
        return inspect_machine(environ)
    options = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--relative=0", "--cpu-bind=none"]
    module = "parbench.bench.machine.slurm_allocation"
    command = [*build_srun_command(environ, *options), sys.executable, "-m", module]
    node_environ = {
        name: value for name, value in environ.items() if not _TASK_VARIABLES.fullmatch(name)
    }
    try:
        completed = subprocess.run(
            command, env=node_environ, capture_output=True, timeout=_NODE_TIMEOUT_SECONDS
        )
        errors = completed.stderr.decode(errors="replace")
        problem = get_last_line(errors) or f"it ended with {completed.returncode}"
        if completed.returncode == 0:
            return msgspec.json.decode(completed.stdout.strip().rpartition(b"\n")[2], type=Machine)
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_NODE_TIMEOUT_SECONDS} s"
    except (OSError, msgspec.DecodeError) as error:
        problem = str(error)
    raise UserError(
        f"--launcher srun: this host is not a node of job {allocation.job}, "
        f"and srun did not report what its nodes have: {problem}",
        hint="start parbench in an sbatch script, or on a node",
    )


def list_host_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this host's IPv4 addresses, the most likely one for communication first.

    First comes the address of the chosen interface, then that of the host name, then all others.
    The loopback address is returned only if there is no other, because Debian resolves a host name
    to 127.0.1.1.
    """
    states = psutil.net_if_stats()
    chosen_interface = environ.get(INTERFACE_VARIABLE)
    own_address = find_host_address()
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        is_up = name in states and states[name].isup
        for entry in entries:
            address = entry.address
            if is_up and entry.family == socket.AF_INET and not address.startswith("127."):
                addresses.append((name != chosen_interface, address != own_address, address))
    addresses.sort(key=lambda item: item[:2])
    return tuple(dict.fromkeys(address for *_, address in addresses)) or ("127.0.0.1",)


def main() -> None:
    """Print the machine of this node as JSON."""
    sys.stdout.write(f"\n{msgspec.json.encode(inspect_machine(os.environ)).decode()}\n")


if __name__ == "__main__":
    main()
