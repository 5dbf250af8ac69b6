"""The nodes of a Slurm job: placement of ranks on nodes, hardware of nodes, own addresses."""

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
from parbench.bench.text import UserError

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
    """The distribution of ranks over the nodes of a Slurm allocation."""

    nodes: NumRanks
    """The number of nodes with ranks."""
    ntasks_per_node: NumRanks
    """The number of ranks on each node."""
    distribution: Literal["block", "cyclic"] = "block"
    """The order of ranks on nodes, as in ``srun --distribution``.

    ``block`` fills a node with successive ranks, ``cyclic`` assigns successive ranks to the nodes
    round-robin.
    """

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.ntasks_per_node


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes that Slurm has allocated to the job of this process."""

    job: str
    """The id of the job."""
    nodes: int
    """The number of nodes."""
    nodelist: str
    """The names of the nodes as Slurm writes them, such as ``n[1-3,7]``."""
    ntasks_per_node: int | None = None
    """The number of tasks that the job requests on each node.

    None if it was not set or differs between nodes.
    """

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Allocation":
        """Return the Slurm allocation that the variables ``SLURM_...`` in ``environ`` describe.

        Raises ``UserError`` if this process is not in a Slurm job.
        """
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
    """Return the number of tasks on each node from Slurm's text, such as ``2`` or ``2(x4)``.

    ``2(x4)`` means two tasks on each of four nodes, so both texts give 2. The result is None for
    other texts, such as ``2(x3),1``.
    """
    return parse_count(re.sub(r"\(x\d+\)$", "", text))


def parse_nodes(text: str) -> tuple[int, str | None]:
    """Parse the value of ``--nodes``, which is a number or a list of nodes such as ``n1,n[3-4]``.

    Returns the number of nodes and the list. The list is None if the value is a number.
    """
    if re.fullmatch(r"-?\d+", text):
        return int(text), None
    return len(expand_nodes(text, "--nodes")), text


def expand_nodes(text: str, option: str) -> list[str]:
    """Return each name in a list of nodes such as ``n[01-03,7],login``, in the order of the list.

    ``option`` is the command-line option that the error message names, such as ``--nodes``. Raises
    ``UserError`` if a range is not valid.
    """
    names = []
    for entry in _COMMA_OUTSIDE_BRACKETS.split(text):
        if entry.strip():
            names += _expand_node(entry.strip(), option)
    return names


def _expand_node(entry: str, option: str) -> list[str]:
    """Return each node name in one entry of a node list: ``n[01-02]`` gives ``n01`` and ``n02``.

    ``option`` is the command-line option that the error message names, such as ``--nodes``. Raises
    ``UserError`` if a range is not valid.
    """
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
    """Return the words ``srun`` and its options, to which the caller appends a program.

    The options are ``options``, then fixed ones that let the job step share its nodes with other
    steps, then the lines of PARBENCH_SRUN_OPTIONS in ``environ``, one option each. A site or a
    sweep sets this variable, for example to start ranks in a container.
    """
    site_options = [line for line in environ.get(OPTIONS_VARIABLE, "").splitlines() if line]
    shared_options = ["--mpi=none", "--overlap", "--input=none", "--export=ALL"]
    return ["srun", *options, *shared_options, *site_options]


def choose_layout(
    allocation: Allocation, *, nodes: int | None, ntasks_per_node: int, distribution: str | None
) -> NodeLayout:
    """Choose the distribution of ranks over the nodes of an allocation.

    ``nodes`` is the number of nodes to use, all if it is None. ``ntasks_per_node`` is the number of
    ranks on each node. ``distribution`` is ``block`` or ``cyclic``, and None stands for ``block``.
    Raises ``UserError`` if the allocation has fewer nodes, if there would be only one rank, or if a
    value is not valid.
    """
    num_nodes = allocation.nodes if nodes is None else nodes
    if num_nodes < 1:
        raise UserError(f"--nodes {num_nodes}: at least 1 is needed")
    if num_nodes > allocation.nodes:
        available = f"{allocation.nodes} ({allocation.nodelist})"
        raise UserError(f"--nodes {num_nodes}: job {allocation.job} has {available}")
    if num_nodes * ntasks_per_node < 2:
        raise UserError(
            "the run has 1 rank, and at least 2 are needed", hint="use --nodes 2 or --nproc 2"
        )
    return NodeLayout(
        nodes=num_nodes,
        ntasks_per_node=ntasks_per_node,
        distribution="cyclic" if distribution == "cyclic" else "block",
    )


def inspect_rank_machine(environ: Mapping[str, str], allocation: Allocation | None) -> Machine:
    """Return the cores, memory, GPUs and torch of a node on which ranks will run.

    The node is this host if ``allocation`` is None or if this host is a node of a Slurm job.
    Otherwise it is the first node of the allocation, on which srun runs this module. Raises
    ``UserError`` if that node does not answer. The errors of srun go to standard error.
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
        output = subprocess.check_output(command, env=node_environ, timeout=_NODE_TIMEOUT_SECONDS)
        return msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=Machine)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise UserError(
            f"--launcher srun: this host is not a node of job {allocation.job}, "
            f"and srun did not report what its nodes have: {error}",
            hint="start parbench in an sbatch script, or on a node",
        ) from error


def list_host_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this host's IPv4 addresses, at which other hosts may reach it, the best first.

    First come the addresses of the interface GLOO_SOCKET_IFNAME, if it is set in ``environ``. Then
    follow the address of the host name and all other addresses. The result is ``127.0.0.1`` if no
    other address exists. Loopback addresses are left out otherwise, because Debian resolves a host
    name to 127.0.1.1.
    """
    chosen_interface = environ.get(INTERFACE_VARIABLE)
    own_address = find_host_address()
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            address = entry.address
            if entry.family == socket.AF_INET and not address.startswith("127."):
                addresses.append((name != chosen_interface, address != own_address, address))
    addresses.sort(key=lambda item: item[:2])
    return tuple(dict.fromkeys(address for *_, address in addresses)) or ("127.0.0.1",)


def main() -> None:
    """Print the cores, memory, GPUs and torch of this node as a ``Machine`` in JSON.

    ``inspect_rank_machine`` runs this on a node through srun.
    """
    sys.stdout.write(f"\n{msgspec.json.encode(inspect_machine(os.environ)).decode()}\n")


if __name__ == "__main__":
    main()
