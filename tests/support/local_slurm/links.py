"""The network of a cluster on one machine: the link of each node, its rate, and its faults.

A link is a pair of interfaces: ``eth0`` in the network namespace of the node, and ``v<node>`` in
that of the controller, where a bridge joins them.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.text import UserError
from tests.support.local_slurm.cluster_conf import CONTROLLER, address

_CONTROLLER_PID = 1
_CONTROLLER_INTERFACE = "ctl0"


class ClusterError(UserError):
    """The cluster did not start, or a program of its network failed."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's name, and the process in its namespaces, numbered as inside the cluster."""

    name: str
    pid: int


def controller_port(name: str) -> str:
    """Return the controller's interface at the other end of a node's link."""
    return f"v{name}"


def create_bridge() -> None:
    """Create the controller's side of the network, in the network namespace of this process."""
    changes = [
        f"link add {_CONTROLLER_INTERFACE} type bridge forward_delay 0 stp_state 0",
        "link set lo up",
        f"addr add {address(CONTROLLER)}/24 dev {_CONTROLLER_INTERFACE}",
        f"link set {_CONTROLLER_INTERFACE} up",
    ]
    _run_batch("ip", changes, _CONTROLLER_PID)


def connect_nodes(nodes: Sequence[Node]) -> None:
    """Give each node its link, its address and its loopback."""
    changes = []
    for node in nodes:
        port = controller_port(node.name)
        changes.append(f"link add {port} type veth peer name eth0 netns {node.pid}")
        changes.append(f"link set {port} master {_CONTROLLER_INTERFACE}")
        changes.append(f"link set {port} up")
    _run_batch("ip", changes, _CONTROLLER_PID)
    for node in nodes:
        node_address = f"addr add {address(node.name)}/24 dev eth0"
        _run_batch("ip", ["link set lo up", node_address, "link set eth0 up"], node.pid)


def shape_link(node: Node, rate: str | None) -> None:
    """Limit a link to ``rate`` in each direction; "" removes the limit, None drops everything."""
    for interface, pid in ((controller_port(node.name), _CONTROLLER_PID), ("eth0", node.pid)):
        changes = [f"qdisc replace dev {interface} root blackhole"]
        if rate is not None:
            # A changed token bucket would keep the tokens of the previous one.
            changes.append(f"qdisc del dev {interface} root")
        if rate:
            bucket = f"tbf rate {rate} burst 128kb latency 50ms"
            changes.append(f"qdisc add dev {interface} root {bucket}")
        _run_batch("tc", changes, pid)


def _run_batch(program: str, changes: Sequence[str], pid: int) -> None:
    """Run ``ip`` or ``tc`` with one change per line, in the network namespace of a process."""
    command = ["nsenter", "--target", str(pid), "--net", program, "-batch", "-"]
    done = subprocess.run(
        command, input="\n".join(changes) + "\n", capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ClusterError(f"{program}: {' '.join(done.stderr.split())}")
