"""SLURM's daemons on one machine, each node's in namespaces of its own; started by a cluster's first process."""

import os
import pwd
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from slurm.local.cluster_conf import CONTROLLER, CONTROLLER_PORT, ClusterSpec, address, hosts, slurm_conf, topology_conf
from slurm.local.links import Node, lay_fabric, plug, port, shape

_START_SECONDS = 30.0
_LOOK_SECONDS = 0.03
_NODE = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
read -r go
exec slurmd -D -N "$1" < /dev/null >&2
"""


class ClusterError(RuntimeError):
    """The cluster did not come up; the message is a sentence."""


def nodes_file(folder: Path) -> Path:
    """Return the file that names the running nodes' processes."""
    return folder / "run/nodes.json"


def rate_file(folder: Path, name: str) -> Path:
    """Return the file that holds the rate of a node's link."""
    return folder / f"run/rate.{name}"


def start_cluster(folder: Path, spec: ClusterSpec, environment: Mapping[str, str]) -> None:
    """Start the cluster of a folder, and return when every node is idle.

    ``ClusterError``, ``FabricError``, ``OSError`` or ``subprocess.CalledProcessError`` if it does not come up.
    """
    _write_files(folder, spec)
    _prepare_controller(folder, spec)
    _start_controller(folder, environment)
    daemons = _start_nodes(folder, spec, environment)
    _wait_for_nodes(folder, daemons, environment)


def _write_files(folder: Path, spec: ClusterSpec) -> None:
    for name in ("run", "log", "state", "spool", "tmp", *(f"spool/{node}" for node in spec.names)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(slurm_conf(spec, folder, pwd.getpwuid(os.getuid()).pw_name))
    (folder / "topology.conf").write_text(topology_conf(spec))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used; looking for one may fail
    (folder / "hosts").write_text(hosts(spec))
    key = folder / "run/munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def _prepare_controller(folder: Path, spec: ClusterSpec) -> None:
    socket.sethostname(CONTROLLER)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    lay_fabric(delayed=bool(spec.delay))


def _start_controller(folder: Path, environment: Mapping[str, str]) -> None:
    run = folder / "run"
    munged = ["munged", "--force", f"--key-file={run}/munge.key", f"--socket={run}/munge.sock"]
    munged += [f"--pid-file={run}/munged.pid", f"--log-file={folder}/log/munged.log", f"--seed-file={run}/munge.seed"]
    for command in (munged, ["slurmctld", "-c"]):  # both return when they are there for others, and stay
        with (folder / f"log/{command[0]}.out").open("wb") as out:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                check=False,
            )
        if done.returncode != 0:
            raise ClusterError(f"{command[0]} ended with {done.returncode}: {_last_line(Path(out.name))}")


def _start_nodes(folder: Path, spec: ClusterSpec, environment: Mapping[str, str]) -> dict[str, subprocess.Popen[bytes]]:
    """Start every node, and return its slurmd, whose namespaces are the node's."""
    holders = {name: _hold_node(folder, name, environment) for name in spec.names}
    for name, holder in holders.items():
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise ClusterError(f"{name} got no namespaces of its own: {_last_line(folder / f'log/slurmd.{name}.out')}")
    nodes = [Node(name=name, pid=holder.pid) for name, holder in holders.items()]
    plug(nodes, delayed=bool(spec.delay))
    for node in nodes:
        rate_file(folder, node.name).write_text(spec.rate(node.name))
        if spec.rate(node.name):
            shape(node, spec.rate(node.name))
    nodes_file(folder).write_bytes(msgspec.json.encode(nodes))
    if spec.delay:
        _start_delay(folder, spec)
    _wait_for_controller(folder)
    for holder in holders.values():
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"go\n")
        holder.stdin.close()
        holder.stdout.close()
    return holders


def _hold_node(folder: Path, name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a node up to the point where it waits for its link; its process becomes the node's slurmd."""
    with (folder / f"log/slurmd.{name}.out").open("wb") as log:
        return subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", _NODE, "sh", name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )


def _start_delay(folder: Path, spec: ClusterSpec) -> None:
    command = [sys.executable, "-P", "-m", "slurm.local.links", str(spec.delay_seconds)]
    with (folder / "log/delayed.out").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(port(name) for name in (CONTROLLER, *spec.names))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise ClusterError(f"the delayed fabric ended: {_last_line(Path(log.name))}")


def _wait_for_controller(folder: Path) -> None:
    """Wait until slurmctld listens: a slurmd that is earlier waits for seconds before it tries again."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((address(CONTROLLER), CONTROLLER_PORT), timeout=1):
            return
        time.sleep(_LOOK_SECONDS / 10)
    raise ClusterError(
        f"slurmctld is not there within {_START_SECONDS:.0f} s: {_last_line(folder / 'log/slurmctld.log')}"
    )


def _wait_for_nodes(
    folder: Path, daemons: Mapping[str, subprocess.Popen[bytes]], environment: Mapping[str, str]
) -> None:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    end = time.monotonic() + _START_SECONDS
    late = set(daemons)
    while time.monotonic() < end:
        for name, daemon in daemons.items():
            if daemon.poll() is not None:
                told = _last_line(folder / f"log/slurmd.{name}.out")
                raise ClusterError(f"slurmd of {name} ended with {daemon.returncode}: {told}")
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        late = set(daemons) - set(done.stdout.split())
        if not late:
            return
        time.sleep(_LOOK_SECONDS)
    told = _last_line(folder / "log/slurmctld.log")
    raise ClusterError(f"not idle within {_START_SECONDS:.0f} s: {', '.join(sorted(late))}; slurmctld: {told}")


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), f"it said nothing in {path.name}")
