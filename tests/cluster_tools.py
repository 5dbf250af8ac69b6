"""What tests run inside a cluster on one machine: a TCP stream between two nodes, its rate, its latency, its stall.

``python cluster_tools.py between SENDER RECEIVER`` prints ``bits per second`` and ``round trip seconds``;
``stall NODE`` prints how long a stream to NODE stood still while its link was cut for a second;
``interrupts`` counts SIGINT.
"""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

PORT = 5555
STREAM_SECONDS = 1.5
TRIPS = 100
CUT_SECONDS = 1.0
TICK_SECONDS = 0.01


def between(sender: str, receiver: str) -> None:
    """Start both ends with srun, and let the receiver print what it saw."""
    here = [sys.executable, __file__]
    step = ["srun", "--nodes", "1", "--immediate=20", "--nodelist"]
    receiving = subprocess.Popen([*step, receiver, *here, "receive"])
    subprocess.run([*step, sender, *here, "send", receiver], check=True, timeout=60)
    assert receiving.wait(60) == 0


def receive() -> None:
    """Echo the sender's round trips, then take its stream."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
    for _ in range(TRIPS):
        connection.sendall(connection.recv(1))
    num_bytes = 0
    first: float | None = None
    while received := connection.recv(1 << 20):
        if first is None:  # what came first filled the bucket's burst: it is not counted
            first = time.monotonic()
        else:
            num_bytes += len(received)
    assert first is not None
    print("bits per second", num_bytes * 8 / (time.monotonic() - first))


def send(host: str) -> None:
    """Time round trips of one byte, then send as much as the link takes."""
    connection = connect(host)
    trips = []
    for _ in range(TRIPS):
        start = time.monotonic()
        connection.sendall(b".")
        connection.recv(1)
        trips.append(time.monotonic() - start)
    print("round trip seconds", statistics.median(trips))
    end = time.monotonic() + STREAM_SECONDS
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 16))


def connect(host: str) -> socket.socket:
    end = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, PORT), timeout=20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        assert time.monotonic() < end, f"{host} does not answer"
        time.sleep(0.05)


def stall(node: str) -> None:
    """Send ticks to a node, cut its link and heal it; print the longest silence that the node saw, and what it got."""
    seen: list[float] = []
    ticks = 0
    with subprocess.Popen(
        ["srun", "--nodes", "1", "--nodelist", node, sys.executable, __file__, "stamp"], stdout=subprocess.PIPE
    ) as stamping:
        connection = connect(node)
        breaking = threading.Thread(target=cut_and_heal, args=(node,))
        breaking.start()
        while breaking.is_alive() or ticks < 3 / TICK_SECONDS:
            connection.sendall(b".")
            ticks += 1
            time.sleep(TICK_SECONDS)
        connection.close()
        assert stamping.stdout is not None
        seen = [float(line) for line in stamping.stdout]
    print("ticks lost", ticks - len(seen))
    print("longest silence seconds", max(after - before for before, after in pairwise(seen)))


def cut_and_heal(node: str) -> None:
    time.sleep(0.5)
    fault("cut", node)
    time.sleep(CUT_SECONDS)
    fault("heal", node)


def fault(action: str, *words: str) -> None:
    subprocess.run(
        [str(Path(sys.executable).with_name("parbench")), "slurm", "local-fault", action, *words], check=True
    )


def stamp() -> None:
    """Print when each byte came."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
    stamps = []
    while received := connection.recv(1 << 16):
        stamps += [time.monotonic()] * len(received)
    print(*stamps, sep="\n")


def count_interrupts() -> None:
    """Say ``up``, then the number of each SIGINT as it comes; end half a second after the second one."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    print("up", os.environ["PARBENCH_CLUSTER"], flush=True)
    told = 0
    end = float("inf")
    while time.monotonic() < end:
        time.sleep(0.01)
        if len(received) > told:
            told = len(received)
            print("interrupt", told, flush=True)
            if told == 2:
                end = time.monotonic() + 0.5


VERBS: dict[str, Callable[..., None]] = {
    "between": between,
    "receive": receive,
    "send": send,
    "stall": stall,
    "stamp": stamp,
    "interrupts": count_interrupts,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
