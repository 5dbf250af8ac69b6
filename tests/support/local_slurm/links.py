"""The network of a cluster on one machine: a link for each node, its rate, and how it is cut and healed.

A link is a pair of interfaces: ``eth0`` in the node's network namespace, and ``v<node>`` in the controller's, where a
bridge joins them. A fabric with a delay has no bridge: a process forwards the frames, because kernels without netem
cannot delay them.
"""

import contextlib
import ctypes
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.text import UserError
from tests.support.local_slurm.cluster_conf import CONTROLLER, address

_CONTROLLER_PID = 1
_CONTROLLER_INTERFACE = "ctl0"
_QUIET = "arp off addrgenmode none"
"""Keeps the controller itself from answering on an interface that only carries others' frames."""


class ClusterError(UserError):
    """The cluster did not come up, or a program of its network failed; the message is a sentence."""


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
    lines = [f"link add {_CONTROLLER_INTERFACE} type bridge forward_delay 0 stp_state 0"]
    if delayed:
        own = port(CONTROLLER)
        lines = [
            f"link add {_CONTROLLER_INTERFACE} type veth peer name {own}",
            f"link set {own} {_QUIET}",
        ]
        lines += [f"link set {own} up"]
    lines += ["link set lo up", f"addr add {address(CONTROLLER)}/24 dev {_CONTROLLER_INTERFACE}"]
    _batch("ip", [*lines, f"link set {_CONTROLLER_INTERFACE} up"], _CONTROLLER_PID)


def plug(nodes: Sequence[Node], *, delayed: bool) -> None:
    """Give each node its link, its address and its loopback."""
    lines = []
    for node in nodes:
        lines.append(f"link add {port(node.name)} type veth peer name eth0 netns {node.pid}")
        lines.append(
            f"link set {port(node.name)} {_QUIET if delayed else f'master {_CONTROLLER_INTERFACE}'}"
        )
        lines.append(f"link set {port(node.name)} up")
    _batch("ip", lines, _CONTROLLER_PID)
    for node in nodes:
        lines = ["link set lo up", f"addr add {address(node.name)}/24 dev eth0", "link set eth0 up"]
        _batch("ip", lines, node.pid)


def shape(node: Node, rate: str | None) -> None:
    """Limit a link to ``rate`` in each direction; "" removes the limit, None silently drops everything."""
    for interface, pid in ((port(node.name), _CONTROLLER_PID), ("eth0", node.pid)):
        lines = [f"qdisc replace dev {interface} root blackhole"]
        if (
            rate is not None
        ):  # a bucket that changes keeps the old one's tokens, and "" has no discipline of its own
            lines.append(f"qdisc del dev {interface} root")
        if rate:
            lines.append(f"qdisc add dev {interface} root tbf rate {rate} burst 128kb latency 50ms")
        _batch("tc", lines, pid)


def _batch(program: str, lines: Sequence[str], pid: int) -> None:
    """Run ``ip`` or ``tc`` with one change a line, in the network namespace of a process."""
    command = ["nsenter", "--target", str(pid), "--net", program, "-batch", "-"]
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"{program}: {' '.join(done.stderr.split())}")


class Switch:
    """A learning switch that delays frames. The caller owns the sockets and the clock.

    ``blocked`` holds the ports that cannot send for now.
    """

    def __init__(self, ports: int, delay_seconds: float) -> None:
        self.blocked: set[int] = set()
        self._waiting = [deque[tuple[float, bytes]]() for _ in range(ports)]
        self._delay_seconds = delay_seconds
        self._where: dict[bytes, int] = {}

    def receive(self, source: int, frame: bytes, now: float) -> None:
        """Queue a frame for the port of its address, or for all other ports if that is unknown."""
        destination, sender = frame[10:16], frame[16:22]  # after struct virtio_net_hdr
        self._where[sender] = source
        known = self._where.get(destination)
        for number in range(len(self._waiting)) if known is None else (known,):
            waiting = self._waiting[number]
            late = (
                number in self.blocked and waiting and waiting[0][0] + 0.05 < now
            )  # a shaped link's own limit
            if number != source and not late:
                waiting.append((now + self._delay_seconds, frame))

    def due(self, number: int, now: float) -> bytes | None:
        """Return the next frame of a port if its delay has passed; it stays queued until ``sent`` is called."""
        waiting = self._waiting[number]
        return waiting[0][1] if waiting and waiting[0][0] <= now else None

    def sent(self, number: int) -> None:
        self._waiting[number].popleft()
        self.blocked.discard(number)

    def seconds_to_wait(self, now: float) -> float:
        """Return the time until the next frame is due at a port that can send; 1 s without frames."""
        dues = [
            queue[0][0]
            for number, queue in enumerate(self._waiting)
            if queue and number not in self.blocked
        ]
        return max(0.0, min(dues, default=now + 1.0) - now)


def open_port(interface: str) -> socket.socket:
    """Open a socket that receives every frame of an interface and sends frames through it."""
    port = socket.socket(
        socket.AF_PACKET, socket.SOCK_RAW, 0
    )  # protocol 0: nothing arrives before it is bound
    port.setblocking(False)
    for option in (15, 23):  # PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING of SOL_PACKET
        port.setsockopt(263, option, 1)
    for option, forced in (
        (socket.SO_RCVBUF, 33),
        (socket.SO_SNDBUF, 32),
    ):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        port.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
        with contextlib.suppress(
            PermissionError
        ):  # beyond the system's limit only as the machine's root
            port.setsockopt(socket.SOL_SOCKET, forced, 8 << 20)
    port.bind((interface, 3))  # ETH_P_ALL
    return port


def carry(ports: Sequence[socket.socket], switch: Switch) -> None:
    number_of = {port: number for number, port in enumerate(ports)}
    while True:
        writers = [ports[number] for number in switch.blocked]
        readable, writable, _ = select.select(
            ports, writers, [], switch.seconds_to_wait(time.monotonic())
        )
        for port in writable:
            switch.blocked.discard(number_of[port])
        for port in readable:
            with contextlib.suppress(OSError):  # nothing left, or the interface is down for now
                for _ in range(32):
                    frame = port.recv(1 << 17)
                    switch.receive(number_of[port], frame, time.monotonic())
        for number, port in enumerate(ports):
            _send(port, number, switch)


def _send(port: socket.socket, number: int, switch: Switch) -> None:
    while (frame := switch.due(number, time.monotonic())) is not None:
        try:
            port.send(frame)
        except BlockingIOError:
            switch.blocked.add(number)
            return
        except (
            OSError
        ):  # the link's own queue is full, or it is down: the frame is lost, as on a wire
            pass
        switch.sent(number)


def forward(delay_seconds: float, interfaces: Sequence[str]) -> None:
    """Forward frames between interfaces for ever, each after ``delay_seconds``; prints ``ready`` once."""
    ctypes.CDLL(None).prctl(
        29, 1, 0, 0, 0
    )  # PR_SET_TIMERSLACK: wake up when a frame is due, not 50 us later
    ports = [open_port(interface) for interface in interfaces]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ports, Switch(len(ports), delay_seconds))
