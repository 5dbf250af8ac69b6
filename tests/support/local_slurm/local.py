"""The outside of a cluster on one machine: it creates namespaces and removes everything."""

import os
import re
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

_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")

_MAX_PARENT_LENGTH = 55
"""The path of a socket has at most 107 characters, and those of Slurm lie deep in the folder."""


def run_local(spec: ClusterSpec, command: Sequence[str], *, keep: bool) -> int:
    """Run a command in a new cluster on this machine and return its exit code.

    The code is 4 if the cluster does not start. ``keep`` leaves its folder. Raises UserError,
    before anything starts, if this machine cannot run a cluster.
    """
    # The path of a user may lack the commands of this Python and the daemons of the system.
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*folders, "/usr/local/sbin", "/usr/sbin", "/sbin"])
    check_programs(path)
    if shutil.which(command[0], path=path) is None:
        raise UserError(f"the command {command[0]!r} is not found")
    namespaces = namespace_command(os.geteuid())
    with _cluster_folder(keep=keep) as (folder, alive):
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


def namespace_command(user: int) -> list[str]:
    """Return the command prefix for new namespaces; UserError if the kernel refuses them.

    Users other than root need a user namespace. Root must not have one, because the daemons of
    Slurm drop groups when they run as root.
    """
    command = ["unshare", *_NAMESPACES, "--kill-child"]
    if user != 0:
        command += ["--user", "--map-current-user", "--keep-caps"]
    done = subprocess.run(
        [*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise UserError(
            f"the kernel refuses namespaces ({message}): run as root, or allow user namespaces"
        )
    return command


def check_parent(parent: Path) -> None:
    """Raise UserError if Slurm cannot keep its sockets and files in a folder."""
    is_plain = re.fullmatch(r"[\w/.+-]+", str(parent), re.ASCII)
    if (
        len(str(parent)) > _MAX_PARENT_LENGTH
        or not is_plain
        or parent.is_relative_to("/dev/shm")
    ):
        raise UserError(
            f"Slurm cannot work in {str(parent)!r}: set TMPDIR to a short, plain path, such as /tmp"
        )


@contextmanager
def _cluster_folder(*, keep: bool) -> Iterator[tuple[Path, int]]:
    """Create the folder of a cluster, and yield it with a descriptor.

    A shell removes the folder when every process that holds the descriptor has ended, even if this
    process is killed.
    """
    parent = Path(tempfile.gettempdir()).resolve()
    check_parent(parent)
    folder = Path(tempfile.mkdtemp(prefix="parbench-", dir=parent))
    read_end, alive = os.pipe()
    script = 'trap "" INT TERM HUP; read -r nothing; rm -rf -- "$1"'
    command = ["true"] if keep else ["sh", "-c", script, "sh", str(folder)]
    remover = subprocess.Popen(command, stdin=read_end, start_new_session=True)
    os.close(read_end)
    try:
        yield folder, alive
    finally:
        os.close(alive)
        remover.wait()
        if keep:
            sys.stderr.write(f"local_cluster: the folder of the cluster is kept: {folder}\n")


def inject_fault(action: str, name: str) -> None:
    """``cut`` or ``heal`` the link of a node.

    Raises UserError outside of a cluster and for an unknown node.
    """
    folder = _running_cluster()
    spec = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=Order).spec
    nodes = msgspec.json.decode((folder / NODES_FILE).read_bytes(), type=list[Node])
    by_name = {node.name: node for node in nodes}
    if name not in by_name:
        raise UserError(f"{name!r} is not a node of the cluster: {', '.join(by_name)}")
    shape_link(by_name[name], None if action == "cut" else spec.rate(name))


def _running_cluster() -> Path:
    """Return the folder of the cluster around this process.

    The check protects the links of the machine itself.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or folder.encode() not in Path("/proc/1/cmdline").read_bytes():
        raise UserError("faults can only be injected inside of a running cluster")
    return Path(folder)
