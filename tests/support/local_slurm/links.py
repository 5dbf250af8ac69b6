"""The network of a cluster on one machine: the link of each node, its rate, and its faults.

A link is a pair of interfaces: ``eth0`` in the network namespace of the node, and ``v<node>`` in
that of the controller, where a bridge joins them. A fabric with a delay has no bridge. A process
forwards the frames instead, because kernels without netem cannot delay them.
"""

import ctypes
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from parbench.bench.text import UserError
from tests.support.local_slurm.cluster_conf import CONTROLLER, address

_CONTROLLER_PID = 1
_CONTROLLER_INTERFACE = "ctl0"

_FORWARD_ONLY = "arp off addrgenmode none"
"""Settings of an interface on which the controller itself does not answer."""

# Linux constants that Python does not name: if_packet.h, socket.h, if_ether.h and prctl.h.
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 3
_PR_SET_TIMERSLACK = 29

_VNET_HEADER_BYTES = 10
_SOCKET_BUFFER_BYTES = 8 << 20
_MAX_FRAME_BYTES = 1 << 17
_MAX_FRAMES_PER_TURN = 32
_MAX_QUEUE_SECONDS = 0.05
"""The limit of the queue of a shaped link."""


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


def create_fabric(*, has_delay: bool) -> None:
    """Create the controller's side of the network, in the network namespace of this process."""
    if has_delay:
        own_port = controller_port(CONTROLLER)
        changes = [
            f"link add {_CONTROLLER_INTERFACE} type veth peer name {own_port}",
            f"link set {own_port} {_FORWARD_ONLY}",
            f"link set {own_port} up",
        ]
    else:
        changes = [f"link add {_CONTROLLER_INTERFACE} type bridge forward_delay 0 stp_state 0"]
    changes += [
        "link set lo up",
        f"addr add {address(CONTROLLER)}/24 dev {_CONTROLLER_INTERFACE}",
        f"link set {_CONTROLLER_INTERFACE} up",
    ]
    _run_batch("ip", changes, _CONTROLLER_PID)


def connect_nodes(nodes: Sequence[Node], *, has_delay: bool) -> None:
    """Give each node its link, its address and its loopback."""
    mode = _FORWARD_ONLY if has_delay else f"master {_CONTROLLER_INTERFACE}"
    changes = []
    for node in nodes:
        port = controller_port(node.name)
        changes.append(f"link add {port} type veth peer name eth0 netns {node.pid}")
        changes.append(f"link set {port} {mode}")
        changes.append(f"link set {port} up")
    _run_batch("ip", changes, _CONTROLLER_PID)
    for node in nodes:
        own_address = f"addr add {address(node.name)}/24 dev eth0"
        _run_batch("ip", ["link set lo up", own_address, "link set eth0 up"], node.pid)


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
    done = subprocess.run(command, input="\n".join(changes) + "\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{program}: {' '.join(done.stderr.split())}")


class Switch:
    """A learning switch that delays frames. The caller owns the sockets and the clock.

    ``blocked`` contains the ports that cannot send for now.
    """

    def __init__(self, num_ports: int, delay_seconds: float) -> None:
        self.blocked: set[int] = set()
        self._queues = [deque[tuple[float, bytes]]() for _ in range(num_ports)]
        self._delay_seconds = delay_seconds
        self._port_of_address: dict[bytes, int] = {}

    def receive(self, source: int, frame: bytes, now: float) -> None:
        """Queue a frame for the port of its address, or for all ports if that is unknown."""
        destination = frame[_VNET_HEADER_BYTES : _VNET_HEADER_BYTES + 6]
        sender = frame[_VNET_HEADER_BYTES + 6 : _VNET_HEADER_BYTES + 12]
        self._port_of_address[sender] = source
        port = self._port_of_address.get(destination)
        for number in range(len(self._queues)) if port is None else (port,):
            if number != source and not self._is_full(number, now):
                self._queues[number].append((now + self._delay_seconds, frame))

    def _is_full(self, port: int, now: float) -> bool:
        queue = self._queues[port]
        return port in self.blocked and bool(queue) and queue[0][0] + _MAX_QUEUE_SECONDS < now

    def next_frame(self, port: int, now: float) -> bytes | None:
        """Return the first frame of a port if its delay has passed; ``remove_frame`` removes it."""
        queue = self._queues[port]
        return queue[0][1] if queue and queue[0][0] <= now else None

    def remove_frame(self, port: int) -> None:
        self._queues[port].popleft()
        self.blocked.discard(port)

    def seconds_to_wait(self, now: float) -> float:
        """Return the time until a port that can send has a frame, at most 1 s."""
        due = now + 1.0
        for port, queue in enumerate(self._queues):
            if queue and port not in self.blocked:
                due = min(due, queue[0][0])
        return max(0.0, due - now)


def open_port(interface: str) -> socket.socket:
    """Open a socket that receives every frame of an interface and sends frames through it."""
    # With protocol 0, nothing arrives before the socket is bound.
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setblocking(False)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    with suppress(PermissionError):  # only the machine's root exceeds the limit of the system
        for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
            port.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    port.bind((interface, _ETH_P_ALL))
    return port


def forward(delay_seconds: float, interfaces: Sequence[str]) -> None:
    """Forward frames between interfaces forever, each after a delay; print ``ready`` once."""
    # Wake up when a frame is due, not 50 us later.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    ports = [open_port(interface) for interface in interfaces]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    switch = Switch(len(ports), delay_seconds)
    while True:
        blocked = [ports[number] for number in switch.blocked]
        seconds = switch.seconds_to_wait(time.monotonic())
        readable, writable, _ = select.select(ports, blocked, [], seconds)
        for number, port in enumerate(ports):
            if port in writable:
                switch.blocked.discard(number)
            if port in readable:
                _receive_frames(port, number, switch)
        for number, port in enumerate(ports):
            _send_frames(port, number, switch)


def _receive_frames(port: socket.socket, number: int, switch: Switch) -> None:
    with suppress(OSError):  # no frame is left, or the interface is down
        for _ in range(_MAX_FRAMES_PER_TURN):
            switch.receive(number, port.recv(_MAX_FRAME_BYTES), time.monotonic())


def _send_frames(port: socket.socket, number: int, switch: Switch) -> None:
    while (frame := switch.next_frame(number, time.monotonic())) is not None:
        try:
            port.send(frame)
        except BlockingIOError:
            switch.blocked.add(number)
            return
        except OSError:
            pass  # the queue of the link is full, or the link is down: the frame is lost
        switch.remove_frame(number)
