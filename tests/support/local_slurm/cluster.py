"""The inside of a cluster on one machine: its first process starts Slurm and then a command.

Each node's daemon has namespaces of its own below those of this process. When this process ends,
the kernel ends the whole cluster.
"""

import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parbench.bench.machine.environment import EMULATED_VARIABLE
from parbench.bench.machine.machine import count_available_cores
from parbench.bench.text import get_last_line
from tests.support.local_slurm.cluster_conf import (
    CONTROLLER,
    CONTROLLER_PORT,
    ClusterSpec,
    address,
    config_files,
    describe_emulation,
)
from tests.support.local_slurm.links import (
    ClusterError,
    Node,
    connect_nodes,
    create_bridge,
    shape_link,
)

PROGRAM = ("-m", "tests.support.slurm.local_cluster")
"""The arguments of Python that run this package."""

FOLDER_VARIABLE = "PARBENCH_CLUSTER"
ORDER_FILE = "cluster.json"
NODES_FILE = "run/nodes.json"

_OUTER_VARIABLES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SINFO_",
    "SQUEUE_",
    "SCANCEL_",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""Prefixes of variables that describe another Slurm or the interfaces of this machine."""

_START_SECONDS = 30.0

_NODE_SCRIPT = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
read -r go
exec slurmd -D -N "$1" < /dev/null >&2
"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The contents of ``cluster.json``.

    ``lifeline`` is the descriptor of the pipe to the process outside.
    """

    spec: ClusterSpec
    command: tuple[str, ...]
    lifeline: int


def main(folder: Path) -> int:
    """Start the cluster of a folder, run its command, and return the exit code.

    The code is 4 if the cluster does not start, and 126 if the command does not.
    """
    order = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=Order)
    threading.Thread(target=_watch_lifeline, args=(order.lifeline,), daemon=True).start()
    variables = inner_environment(os.environ, folder, order.spec)
    os.environ.clear()
    os.environ.update(variables)
    try:
        start_cluster(folder, order.spec)
    except (ClusterError, OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"local_cluster: the cluster did not start: {error}\n")
        return 4
    # The command handles a Ctrl-C of the terminal. It would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    return _run_command(order.command)


def _run_command(command: Sequence[str]) -> int:
    """Run the command to its end and return its exit code; reap all orphans meanwhile."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"local_cluster: {command[0]} cannot be started: {error.strerror}\n")
        return 126
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _watch_lifeline(lifeline: int) -> None:
    """End the cluster when the process outside has closed its end of the pipe."""
    os.read(lifeline, 1)
    os._exit(128 + signal.SIGKILL)


def inner_environment(
    environ: Mapping[str, str], folder: Path, spec: ClusterSpec
) -> dict[str, str]:
    """Return the environment inside the cluster."""
    inherited = {
        name: value for name, value in environ.items() if not name.startswith(_OUTER_VARIABLES)
    }
    return {
        **inherited,
        "SLURM_CONF": f"{folder}/slurm.conf",
        FOLDER_VARIABLE: str(folder),
        EMULATED_VARIABLE: describe_emulation(spec, count_available_cores()),
    }


def start_cluster(folder: Path, spec: ClusterSpec) -> None:
    """Start the cluster of a folder, and return when every node is idle.

    Raises ``ClusterError``, ``OSError`` or ``subprocess.CalledProcessError`` if it does not start.
    """
    for name in (
        "run",
        "log",
        "state",
        "spool",
        "tmp",
        *(f"spool/{node}" for node in spec.names),
    ):
        (folder / name).mkdir()
    for name, text in config_files(spec, folder, pwd.getpwuid(os.getuid()).pw_name).items():
        (folder / name).write_text(text)
    socket.sethostname(CONTROLLER)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    create_bridge()
    _start_daemon(_munged_command(folder), folder)
    _start_daemon(["slurmctld", "-c"], folder)
    _wait_until_idle(folder, _start_nodes(folder, spec))


def _munged_command(folder: Path) -> list[str]:
    run = folder / "run"
    key = run / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    return [
        "munged",
        "--force",
        f"--key-file={key}",
        f"--socket={run}/munge.sock",
        f"--pid-file={run}/munged.pid",
        f"--log-file={folder}/log/munged.log",
        f"--seed-file={run}/munge.seed",
    ]


def _start_daemon(command: Sequence[str], folder: Path) -> None:
    """Start a daemon, whose first process ends as soon as it serves."""
    log = folder / f"log/{command[0]}.out"
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    if done.returncode:
        raise ClusterError(f"{command[0]} ended with {done.returncode}: {_last_line(log)}")


def _start_node(name: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the first process of a node, which prints ``ready`` in its new namespaces."""
    namespaces = ["unshare", "--net", "--uts", "--ipc", "--mount"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*namespaces, "sh", "-c", _NODE_SCRIPT, "sh", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )


def _start_nodes(folder: Path, spec: ClusterSpec) -> dict[str, subprocess.Popen[bytes]]:
    """Start every node, and return its slurmd by name.

    The process of a node first waits in its new namespaces until the node has a link. Then it
    becomes slurmd.
    """
    logs = {name: folder / f"log/slurmd.{name}.out" for name in spec.names}
    daemons = {name: _start_node(name, log) for name, log in logs.items()}
    for name, daemon in daemons.items():
        assert daemon.stdout is not None
        if daemon.stdout.readline() != b"ready\n":
            raise ClusterError(f"{name} did not start: {_last_line(logs[name])}")
    nodes = [Node(name=name, pid=daemon.pid) for name, daemon in daemons.items()]
    connect_nodes(nodes)
    for node in nodes:
        if spec.rate(node.name):
            shape_link(node, spec.rate(node.name))
    (folder / NODES_FILE).write_bytes(msgspec.json.encode(nodes))
    _wait_for_controller(folder)
    for daemon in daemons.values():
        assert daemon.stdin is not None
        with daemon.stdin as pipe:
            pipe.write(b"go\n")
    return daemons


def _wait_for(condition: Callable[[], bool], subject: str, folder: Path) -> None:
    """Wait until a condition holds, or raise ``ClusterError`` with the last line of slurmctld."""
    end = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > end:
            message = _last_line(folder / "log/slurmctld.log")
            raise ClusterError(f"{subject} within {_START_SECONDS:.0f} s: {message}")
        time.sleep(0.01)


def _wait_for_controller(folder: Path) -> None:
    """Wait until slurmctld listens. A slurmd that starts earlier waits for seconds."""

    def is_listening() -> bool:
        with suppress(OSError):
            socket.create_connection((address(CONTROLLER), CONTROLLER_PORT), timeout=1).close()
            return True
        return False

    _wait_for(is_listening, "slurmctld does not listen", folder)


def _wait_until_idle(folder: Path, daemons: Mapping[str, subprocess.Popen[bytes]]) -> None:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]

    def are_idle() -> bool:
        for name, daemon in daemons.items():
            if daemon.poll() is not None:
                message = _last_line(folder / f"log/slurmd.{name}.out")
                raise ClusterError(
                    f"slurmd of {name} ended with {daemon.returncode}: {message}"
                )
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return set(daemons) <= set(done.stdout.split())

    _wait_for(are_idle, "not all nodes are idle", folder)


def _last_line(path: Path) -> str:
    line = get_last_line(path.read_text(errors="replace")) if path.exists() else ""
    return line or f"{path.name} is empty"
