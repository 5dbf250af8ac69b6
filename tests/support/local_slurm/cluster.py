"""The inside of a cluster on one machine: the first process of its namespaces starts Slurm and then a command.

It starts everything, each node's daemon in namespaces of its own, so the kernel ends all of it with this process.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parbench.bench.machine.environment import EMULATED_VARIABLE
from parbench.bench.machine.machine import available_cores
from parbench.bench.text import last_line
from tests.support.local_slurm.cluster_conf import (
    CONTROLLER,
    CONTROLLER_PORT,
    ClusterSpec,
    address,
    config_files,
    emulated,
)
from tests.support.local_slurm.links import ClusterError, Node, lay_fabric, plug, port, shape

PROGRAM = ("-m", "tests.support.local_cluster")
"""The command line of this package."""

FOLDER_VARIABLE = "PARBENCH_CLUSTER"
ORDER_FILE = "cluster.json"
NODES_FILE = "run/nodes.json"
_FOREIGN = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SINFO_", "SQUEUE_", "SCANCEL_"),
    *(
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ),  # interfaces of this machine, which nodes do not have
)
_START_SECONDS = 30.0
_NODE = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
read -r go
exec slurmd -D -N "$1" < /dev/null >&2
"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The contents of ``cluster.json``: the cluster, the command, and the descriptor of the pipe to the outside."""

    spec: ClusterSpec
    command: tuple[str, ...]
    lifeline: int


def main(folder: Path) -> int:
    """Start the cluster of a folder, run its command, and return the command's exit code, 4 without a cluster."""
    order = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=Order)
    running: list[subprocess.Popen[bytes]] = []
    starting = threading.Lock()
    threading.Thread(
        target=_watch_lifeline, args=(order.lifeline, running, starting), daemon=True
    ).start()
    inside = inner_environment(os.environ, folder, order.spec)
    os.environ.clear()  # all that this process starts is inside
    os.environ.update(inside)
    try:
        start_cluster(folder, order.spec)
    except (ClusterError, OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"local_cluster: the cluster did not come up: {error}\n")
        return 4
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # the terminal's Ctrl-C is the command's; SIG_IGN it would inherit
    try:
        with starting:  # a command that has begun is told of a signal, however early
            process = subprocess.Popen(order.command)
            running.append(process)
    except OSError as error:
        sys.stderr.write(f"local_cluster: {order.command[0]} cannot be started: {error.strerror}\n")
        return 126
    while True:  # what else ends meanwhile has nobody but us to be reaped by
        pid, status = os.wait()
        if pid == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _watch_lifeline(
    lifeline: int, running: Sequence["subprocess.Popen[bytes]"], starting: threading.Lock
) -> None:
    """Forward each byte of the pipe as a signal to the command; end everything when the pipe ends."""
    while received := os.read(lifeline, 1):
        with starting, suppress(ProcessLookupError):  # it has just ended
            if not running:
                os._exit(128 + received[0])
            os.kill(running[0].pid, received[0])
    os._exit(128 + signal.SIGKILL)


def inner_environment(
    environ: Mapping[str, str], folder: Path, spec: ClusterSpec
) -> dict[str, str]:
    """Return the environment inside the cluster, without variables of an outer Slurm or network."""
    return {
        **{name: value for name, value in environ.items() if not name.startswith(_FOREIGN)},
        "SLURM_CONF": f"{folder}/slurm.conf",
        FOLDER_VARIABLE: str(folder),
        EMULATED_VARIABLE: emulated(spec, available_cores()),
    }


def start_cluster(folder: Path, spec: ClusterSpec) -> None:
    """Start the cluster of a folder, and return when every node is idle.

    ``ClusterError``, ``OSError`` or ``subprocess.CalledProcessError`` if it does not come up.
    """
    for name in ("run", "log", "state", "spool", "tmp", *(f"spool/{node}" for node in spec.names)):
        (folder / name).mkdir()
    for name, text in config_files(spec, folder, pwd.getpwuid(os.getuid()).pw_name).items():
        (folder / name).write_text(text)
    run = folder / "run"
    (run / "munge.key").touch(mode=0o600)
    (run / "munge.key").write_bytes(secrets.token_bytes(128))
    socket.sethostname(CONTROLLER)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    lay_fabric(delayed=bool(spec.delay))
    munged = ["munged", "--force", f"--key-file={run}/munge.key", f"--socket={run}/munge.sock"]
    munged += [
        f"--pid-file={run}/munged.pid",
        f"--log-file={folder}/log/munged.log",
        f"--seed-file={run}/munge.seed",
    ]
    for command in (
        munged,
        ["slurmctld", "-c"],
    ):  # both return when they are there for others, and stay
        log = folder / f"log/{command[0]}.out"
        if code := _start(command, log, talks=False).wait():
            raise ClusterError(f"{command[0]} ended with {code}: {_last_line(log)}")
    _wait_for_nodes(folder, _start_nodes(folder, spec))


def _start(command: Sequence[str], log: Path, *, talks: bool = True) -> subprocess.Popen[bytes]:
    """Start a process without the terminal; one that ``talks`` gets pipes, through which it reports ``ready``."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else out,
            stderr=out,
            start_new_session=True,
        )


def _start_nodes(folder: Path, spec: ClusterSpec) -> dict[str, subprocess.Popen[bytes]]:
    """Start every node, and return its slurmd, whose namespaces are the node's."""
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", _NODE, "sh"]
    logs = {name: folder / f"log/slurmd.{name}.out" for name in spec.names}
    holders = {name: _start([*unshare, name], log) for name, log in logs.items()}
    for (
        name,
        holder,
    ) in holders.items():  # each waits for its link; its process becomes the node's slurmd
        _wait_until_ready(holder, f"{name} got no namespaces of its own", logs[name])
    nodes = [Node(name=name, pid=holder.pid) for name, holder in holders.items()]
    plug(nodes, delayed=bool(spec.delay))
    for node in nodes:
        if spec.rate(node.name):
            shape(node, spec.rate(node.name))
    (folder / NODES_FILE).write_bytes(msgspec.json.encode(nodes))
    if spec.delay:
        links = [sys.executable, *PROGRAM, "forward", str(spec.delay_seconds)]
        log = folder / "log/delayed.out"
        carrier = _start([*links, *(port(name) for name in (CONTROLLER, *spec.names))], log)
        _wait_until_ready(carrier, "the delayed fabric ended", log)
    _wait_for_controller(folder)
    for holder in holders.values():
        assert holder.stdin is not None
        assert holder.stdout is not None
        with holder.stdin as go, holder.stdout:
            go.write(b"go\n")
    return holders


def _wait_until_ready(process: subprocess.Popen[bytes], complaint: str, log: Path) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise ClusterError(f"{complaint}: {_last_line(log)}")


def _wait_for_controller(folder: Path) -> None:
    """Wait until slurmctld listens: a slurmd that is earlier waits for seconds before it tries again."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        with (
            suppress(OSError),
            socket.create_connection((address(CONTROLLER), CONTROLLER_PORT), timeout=1),
        ):
            return
        time.sleep(0.003)
    message = _last_line(folder / "log/slurmctld.log")
    raise ClusterError(f"slurmctld is not there within {_START_SECONDS:.0f} s: {message}")


def _wait_for_nodes(folder: Path, daemons: Mapping[str, subprocess.Popen[bytes]]) -> None:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    end = time.monotonic() + _START_SECONDS
    late = set(daemons)
    while time.monotonic() < end:
        for name, daemon in daemons.items():
            if daemon.poll() is not None:
                message = _last_line(folder / f"log/slurmd.{name}.out")
                raise ClusterError(f"slurmd of {name} ended with {daemon.returncode}: {message}")
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        late = set(daemons) - set(done.stdout.split())
        if not late:
            return
        time.sleep(0.03)
    message = _last_line(folder / "log/slurmctld.log")
    raise ClusterError(
        f"not idle within {_START_SECONDS:.0f} s: {', '.join(sorted(late))}; slurmctld: {message}"
    )


def _last_line(path: Path) -> str:
    line = last_line(path.read_text(errors="replace")) if path.exists() else ""
    return line or f"{path.name} is empty"
