"""What tests run inside a cluster on one machine: a TCP stream between two nodes, its rate and its latency.

``python cluster_tools.py between SENDER RECEIVER`` prints ``bits per second`` and ``round trip seconds``;
``serve`` runs the commands of ``clusters.Cluster``.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

PORT = 5555
STREAM_SECONDS = 1.5
TRIPS = 100


def between(sender: str, receiver: str) -> None:
    """Start both ends with srun, and let the receiver print what it saw."""
    here = [sys.executable, "-m", "tests.support.cluster_tools"]
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


def serve() -> None:
    """Run each order that comes as a line, and answer with its exit code and what it said."""
    for line in sys.stdin:
        order = json.loads(line)
        process = subprocess.Popen(
            order["command"],
            cwd=order["cwd"],
            env={**os.environ, **order["variables"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=order["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"no end within {order['timeout']} s"
        subprocess.run(["scancel", "--me"], check=True)
        print(json.dumps([process.returncode, out, err]), flush=True)


VERBS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (between, receive, send, serve)
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
