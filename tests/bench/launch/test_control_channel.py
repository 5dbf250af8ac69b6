"""The control channel: only ranks with the key are heard, and no rank outlives its driver."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from parbench.bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    KEY_VARIABLE,
    DriverServer,
    Hello,
    RankClient,
)
from tests.support.fakes import (
    connect_ranks,
    time_limit,
)

PATIENCE = 20.0
RANK = """
import os, sys, threading
from parbench.bench.launch.control_channel import Done, Hello, RankClient
client = RankClient(sys.argv[1], sys.argv[2])
client.say(Hello(rank=0, size=1, host="n1", pid=os.getpid(), environment={}))
client.listen(answer=lambda: [Done()], on_gone=lambda: os._exit(7))
threading.Event().wait()
"""
DRIVER = """
import threading
from parbench.bench.launch.control_channel import ADDRESS_VARIABLE, KEY_VARIABLE, DriverServer
server = DriverServer()
print(server.variables()[ADDRESS_VARIABLE], server.variables()[KEY_VARIABLE], flush=True)
server.next(60)
print("connected", flush=True)
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with time_limit(60):
        yield


@pytest.fixture
def server() -> Iterator[DriverServer]:
    with DriverServer() as driver_server:
        yield driver_server


def next_rank(server: DriverServer) -> int:
    event = server.next(PATIENCE)
    assert event is not None
    assert isinstance(event[1], Hello)
    return event[0]


def start_python(code: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True
    )


def test_strangers_are_not_heard(server: DriverServer) -> None:
    address = server.variables()[ADDRESS_VARIABLE]
    host, _, port = address.rpartition(":")
    with pytest.raises(AuthenticationError):
        RankClient(address, "00" * 32)
    with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
        Client((host, int(port)), authkey=b"not the key")
    with (
        socket.create_connection((host, int(port))),
        socket.create_connection((host, int(port))) as stranger,
    ):
        # A silent stranger and one with another protocol do not stop the ranks.
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        ranks = connect_ranks(server)
        assert sorted([next_rank(server), next_rank(server)]) == [0, 1]
        assert server.next(0.05) is None
    assert len(ranks) == 2


def test_rank_tries_the_addresses_in_turn() -> None:
    with (
        DriverServer("192.0.2.1", "127.0.0.1") as server,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        key = server.variables()[KEY_VARIABLE]
        first, second = server.variables()[ADDRESS_VARIABLE].split(",")
        assert first.startswith("192.0.2.1:")
        for addresses in (f"{refusing},{second}", f"{second},{refusing}"):
            assert RankClient(addresses, key).own_address == "127.0.0.1"
        with pytest.raises(ConnectionError):
            RankClient(refusing, key)


def test_rank_ends_itself_when_the_driver_is_killed() -> None:
    with start_python(DRIVER) as driver:
        assert driver.stdout is not None
        with start_python(RANK, *driver.stdout.readline().split()) as rank:
            assert driver.stdout.readline() == "connected\n"
            driver.kill()
            assert rank.wait(PATIENCE) == 7


FIRST_MESSAGES_AT_ONCE = """
import sys, threading
sys.setswitchinterval(1e-6)
from parbench.bench.launch.control_channel import ADDRESS_VARIABLE, KEY_VARIABLE, DriverServer
from parbench.bench.launch.control_channel import Hello, RankClient

NUM_RANKS = 16
with DriverServer() as server:
    address, key = server.variables()[ADDRESS_VARIABLE], server.variables()[KEY_VARIABLE]
    start = threading.Barrier(NUM_RANKS)

    def connect(rank):
        client = RankClient(address, key)
        start.wait()
        client.say(Hello(rank=rank, size=NUM_RANKS, host="n1", pid=1, environment={}))

    for rank in range(NUM_RANKS):
        threading.Thread(target=connect, args=(rank,), daemon=True).start()
    for _ in range(NUM_RANKS):
        assert server.next(60) is not None
"""


def test_driver_survives_first_messages_at_once() -> None:
    """Threads that build the same decoder crash a process, here one of three processes."""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", FIRST_MESSAGES_AT_ONCE], check=True)
