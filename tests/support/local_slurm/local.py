"""The outside of a cluster on one machine: makes its namespaces and removes everything afterwards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from tests.support.local_slurm.links import Node, shape
from tests.support.paths import environment

_PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""Each program that a cluster needs, and the Debian package that has it."""

_MAX_PARENT_LENGTH = 55
"""Slurm's sockets lie deep in the folder, and the path of a socket has at most 107 characters."""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(spec: ClusterSpec, command: Sequence[str], *, keep: bool) -> int:
    """Run a command in a new cluster on this machine and return its exit code, 4 if the cluster does not come up.

    Raises UserError, before anything starts, if this machine cannot run a cluster.
    """
    # the user's path may lack the commands of this Python and the daemons of the system
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*places, "/usr/local/sbin", "/usr/sbin", "/sbin"])
    check_programs(path)
    if shutil.which(command[0], path=path) is None:
        raise UserError(f"the command {command[0]!r} is not found")
    namespaces = sandbox(os.geteuid())
    with _folder(keep=keep) as (folder, alive):
        end, lifeline = os.pipe()
        order = Order(spec=spec, command=tuple(command), lifeline=end)
        (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
        process = subprocess.Popen(
            [*namespaces, sys.executable, *PROGRAM, "inside", str(folder)],
            env={**environment(), "PATH": path},
            pass_fds=(end, alive),
        )
        os.close(end)
        try:
            return _wait(process, lifeline)
        finally:
            os.close(lifeline)
            process.wait()


def check_programs(path: str) -> None:
    """Raise UserError, with the command that installs them, if programs are missing."""
    missing = [name for name in _PACKAGES if shutil.which(name, path=path) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        raise UserError(
            f"a cluster on this machine needs {', '.join(missing)}, not found in PATH: "
            f"apt-get install -y --no-install-recommends {packages}"
        )


def sandbox(user: int) -> list[str]:
    """Return the command prefix for new namespaces; UserError if the kernel refuses them to ``user``.

    Other users need a user namespace. Root must not have one, because Slurm's daemons drop groups when they are root.
    """
    command = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--ipc",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ]
    command += ["--user", "--map-current-user", "--keep-caps"] if user != 0 else []
    refusal = _run_quietly([*command, "true"])
    if refusal is not None:
        raise UserError(
            f"the kernel refuses namespaces ({refusal}): run as root, or allow user namespaces"
        )
    return command


def _run_quietly(command: Sequence[str]) -> str | None:
    """Run a command; return None if it succeeds, otherwise its message in one line."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return " ".join((done.stderr or done.stdout).split()) if done.returncode else None


def check_parent(parent: Path) -> None:
    """Raise UserError if Slurm cannot keep its sockets and files in a folder."""
    is_plain = re.fullmatch(r"[\w/.+-]+", str(parent), re.ASCII)
    if len(str(parent)) > _MAX_PARENT_LENGTH or not is_plain or parent.is_relative_to("/dev/shm"):
        raise UserError(
            f"Slurm cannot work in {str(parent)!r}: set TMPDIR to a shorter, plain path, such as /tmp"
        )


@contextmanager
def _folder(*, keep: bool) -> Iterator[tuple[Path, int]]:
    """Make the folder of a cluster; it is removed when every process that holds the yielded descriptor has ended."""
    parent = Path(tempfile.gettempdir()).resolve()
    check_parent(parent)
    folder = Path(tempfile.mkdtemp(prefix="parbench-", dir=parent))
    watched, alive = os.pipe()
    # the folder goes when the pipe ends, even if this process is killed
    sweep = ["sh", "-c", 'trap "" INT TERM HUP; read -r nothing; rm -rf -- "$1"', "sh", str(folder)]
    sweeper = None if keep else subprocess.Popen(sweep, stdin=watched, start_new_session=True)
    os.close(watched)
    try:
        yield folder, alive
    finally:
        os.close(alive)
        if sweeper is None:
            sys.stderr.write(f"local_cluster: the cluster's folder is kept: {folder}\n")
        else:
            sweeper.wait()


def _wait(process: subprocess.Popen[bytes], lifeline: int) -> int:
    """Return the exit code; forward the first signal, and end everything at a second one or after 30 s."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_WATCHED, signal.SIGCHLD))
    deadline = None
    try:
        while process.poll() is None:
            got = signal.sigtimedwait((*_WATCHED, signal.SIGCHLD), 1.0)
            if deadline is not None and (
                time.monotonic() > deadline or (got and got.si_signo in _WATCHED)
            ):
                return 128 + signal.SIGKILL
            # the kernel's own signal (SI_KERNEL) is a terminal's Ctrl-C, which the command gets as well
            if got and got.si_signo in _WATCHED and got.si_code != 0x80:
                with suppress(BrokenPipeError):  # it is ending anyway
                    os.write(lifeline, bytes([got.si_signo]))
                deadline = time.monotonic() + 30
        return process.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_WATCHED, signal.SIGCHLD))


def inject_fault(action: str, name: str) -> None:
    """``cut`` the link of a node, or ``heal`` it. Raises UserError outside of a cluster and for an unknown node."""
    folder = _cluster_folder()
    spec = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=Order).spec
    nodes = {
        node.name: node
        for node in msgspec.json.decode((folder / NODES_FILE).read_bytes(), type=list[Node])
    }
    if name not in nodes:
        raise UserError(f"{name!r} is not a node of the cluster: {', '.join(nodes)}")
    shape(nodes[name], None if action == "cut" else spec.rate(name))


def _cluster_folder() -> Path:
    """Return the folder of the cluster around this process. The links of this machine itself must never be changed."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder or folder.encode() not in Path("/proc/1/cmdline").read_bytes():
        raise UserError("faults can only be injected inside of a running cluster")
    return Path(folder)
