"""The outside of a cluster on one machine: it creates namespaces and removes everything."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from parbench.bench.text import UserError
from tests.support.local_slurm.cluster import (
    FOLDER_VARIABLE,
    NODES_FILE,
    ORDER_FILE,
    PROGRAM,
    Order,
)
from tests.support.local_slurm.cluster_conf import ClusterSpec
from tests.support.local_slurm.links import Node, shape_link
from tests.support.paths import environment

_PROGRAMS = "slurmctld slurmd srun munged ip tc unshare nsenter mount hostname"

_NAMESPACES = "--net --mount --uts --ipc --pid --fork --mount-proc --kill-child"
_USER_NAMESPACE = "--user --map-current-user --keep-caps"


def run_local(spec: ClusterSpec, command: Sequence[str]) -> int:
    """Run a command in a new cluster on this machine and return its exit code.

    The code is 4 if the cluster does not start. Raises UserError if programs are missing.
    """
    # The path of a user may lack the commands of this Python and the daemons of the system.
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*folders, "/usr/local/sbin", "/usr/sbin", "/sbin"])
    check_programs(path)
    namespaces = ["unshare", *_NAMESPACES.split()]
    if os.geteuid() != 0:
        # Root must not have a user namespace: its daemons of Slurm drop groups.
        namespaces += _USER_NAMESPACE.split()
    with _cluster_folder() as (folder, alive):
        read_end, lifeline = os.pipe()
        order = Order(spec=spec, command=tuple(command), lifeline=read_end)
        (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
        process = subprocess.Popen(
            [*namespaces, sys.executable, *PROGRAM, "inside", str(folder)],
            env={**environment(), "PATH": path},
            pass_fds=(read_end, alive),
        )
        os.close(read_end)
        try:
            return process.wait()
        finally:
            os.close(lifeline)
            process.wait()


def check_programs(path: str) -> None:
    """Raise UserError if programs are missing."""
    missing = [name for name in _PROGRAMS.split() if shutil.which(name, path=path) is None]
    if missing:
        raise UserError(f"install {', '.join(missing)}: tests/README.md names the packages")


@contextmanager
def _cluster_folder() -> Iterator[tuple[Path, int]]:
    """Create the folder of a cluster, and yield it with a descriptor.

    A shell removes the folder when every process that holds the descriptor has ended, even if this
    process is killed.
    """
    # A socket of Slurm lies deep in the folder, and its path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="parbench-", dir="/tmp"))
    read_end, alive = os.pipe()
    script = 'trap "" INT TERM HUP; read -r nothing; rm -rf -- "$1"'
    remover = subprocess.Popen(
        ["sh", "-c", script, "sh", str(folder)], stdin=read_end, start_new_session=True
    )
    os.close(read_end)
    try:
        yield folder, alive
    finally:
        os.close(alive)
        remover.wait()


def inject_fault(action: str, name: str) -> None:
    """``cut`` or ``heal`` the link of a node.

    Raises UserError outside of a cluster.
    """
    folder = _running_cluster()
    spec = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=Order).spec
    nodes = msgspec.json.decode((folder / NODES_FILE).read_bytes(), type=list[Node])
    [node] = [node for node in nodes if node.name == name]
    shape_link(node, None if action == "cut" else spec.rate(name))


def _running_cluster() -> Path:
    """Return the folder of the cluster around this process.

    The check protects the links of the machine itself.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or folder.encode() not in Path("/proc/1/cmdline").read_bytes():
        raise UserError("faults can only be injected inside of a running cluster")
    return Path(folder)
