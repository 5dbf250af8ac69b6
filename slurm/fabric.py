"""The network of a cluster on one machine: a link for each node, its rate, and how it is cut and healed.

A node's link is a pair of interfaces, ``eth0`` in the node's network namespace and one named ``v`` and the node in the
controller's, where a bridge joins them. A delayed fabric has no bridge: ``slurm.delayed`` carries frames between them.
"""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from slurm.cluster_conf import CONTROLLER, address

CONTROLLER_PID = 1
_CONTROLLER_INTERFACE = "ctl0"
_BUCKET = "burst 128kb latency 50ms"


class FabricError(RuntimeError):
    """A program of the network failed; the message is what it said."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's name, and the process whose namespaces it is, as the cluster's own process numbers go."""

    name: str
    pid: int


def port(name: str) -> str:
    """Return the controller's interface at the other end of a node's link."""
    return f"v{name}"


def lay_fabric(*, delayed: bool) -> None:
    """Make the controller's side of the network, in this process's network namespace."""
    if delayed:
        lines = [
            f"link add {_CONTROLLER_INTERFACE} type veth peer name {port(CONTROLLER)}",
            *_quiet(port(CONTROLLER)),
            f"link set {port(CONTROLLER)} up",
        ]
    else:
        lines = [f"link add {_CONTROLLER_INTERFACE} type bridge forward_delay 0 stp_state 0"]
    lines += [
        "link set lo up",
        f"addr add {address(CONTROLLER)}/24 dev {_CONTROLLER_INTERFACE}",
        f"link set {_CONTROLLER_INTERFACE} up",
    ]
    _batch("ip", lines, CONTROLLER_PID)


def plug(nodes: Iterable[Node], *, delayed: bool) -> None:
    """Give each node its link, its address and its loopback."""
    nodes = tuple(nodes)
    lines = []
    for node in nodes:
        lines.append(f"link add {port(node.name)} type veth peer name eth0 netns {node.pid}")
        lines += _quiet(port(node.name)) if delayed else [f"link set {port(node.name)} master {_CONTROLLER_INTERFACE}"]
        lines.append(f"link set {port(node.name)} up")
    _batch("ip", lines, CONTROLLER_PID)
    for node in nodes:
        lines = ["link set lo up", f"addr add {address(node.name)}/24 dev eth0", "link set eth0 up"]
        _batch("ip", lines, node.pid)


def _quiet(interface: str) -> list[str]:
    """Return what keeps the controller itself from answering on an interface that only carries others' frames."""
    return [f"link set {interface} arp off addrgenmode none"]


def shape(node: Node, rate: str) -> None:
    """Let a node's link pass ``rate`` each way, or all it can for ""; a link that was cut is healed."""
    for interface, pid in _ends(node):
        # deleting first: a bucket that changes keeps the old one's tokens, and "" has no discipline of its own
        _batch("tc", [f"qdisc replace dev {interface} root blackhole", f"qdisc del dev {interface} root"], pid)
        if rate:
            _batch("tc", [f"qdisc add dev {interface} root tbf rate {rate} {_BUCKET}"], pid)


def cut(node: Node) -> None:
    """Let nothing pass a node's link, either way, without a word to those who send."""
    for interface, pid in _ends(node):
        _batch("tc", [f"qdisc replace dev {interface} root blackhole"], pid)


def _ends(node: Node) -> tuple[tuple[str, int], tuple[str, int]]:
    return (port(node.name), CONTROLLER_PID), ("eth0", node.pid)


def _batch(program: str, lines: Iterable[str], pid: int) -> None:
    """Run ``ip`` or ``tc`` with one change a line, in the network namespace of a process."""
    command = ["nsenter", "--target", str(pid), "--net", program, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FabricError(f"{program}: {' '.join(done.stderr.split())}")
