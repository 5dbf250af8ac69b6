"""The channel: what is said arrives as it was said, who may speak, and that neither end outlives the other."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from parbench.bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    KEY_VARIABLE,
    Done,
    DriverServer,
    Event,
    Finished,
    FromRank,
    Hello,
    RankClient,
    Started,
    StatusRequest,
)
from tests.support.fakes import (
    FakeRank,
    connect_ranks,
    make_fake_case,
    make_job,
    make_outcome,
    make_status,
    time_limit,
    wait_until,
)

PATIENCE = 20.0
RANK = """
import os, sys, threading
from parbench.bench.launch.control_channel import RankClient
from parbench.bench.launch.control_channel import Done, Hello
line = RankClient(sys.argv[1], sys.argv[2])
line.say(Hello(rank=0, size=1, host="here", pid=os.getpid(), environment={}))
line.listen(answer=lambda: [Done()], on_gone=lambda: os._exit(7))
threading.Event().wait()
"""
DRIVER = """
import sys, threading
from parbench.bench.launch.control_channel import ADDRESS_VARIABLE, KEY_VARIABLE, DriverServer
hub = DriverServer()
print(hub.variables()[ADDRESS_VARIABLE], hub.variables()[KEY_VARIABLE], flush=True)
print(type(hub.next(60)[1]).__name__, flush=True)
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with time_limit(60):
        yield


@pytest.fixture
def hub() -> Iterator[DriverServer]:
    with DriverServer() as opened:
        yield opened


def heard(hub: DriverServer, count: int) -> list[Event]:
    """Return the next ``count`` events."""
    events = [event for _ in range(count) if (event := hub.next(PATIENCE)) is not None]
    assert len(events) == count, events
    return events


@contextmanager
def process(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a Python process that imports no torch; it is gone at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def address(hub: DriverServer) -> tuple[str, int]:
    host, _, port = hub.variables()[ADDRESS_VARIABLE].rpartition(":")
    return host, int(port)


def test_what_a_rank_says_is_heard_in_order_with_its_rank_and_last_that_it_is_gone(
    hub: DriverServer,
) -> None:
    rank = FakeRank(hub.variables(), rank=3, size=4)
    said: list[FromRank] = [
        Started(index=0),
        Finished(index=0, outcome=make_outcome()),
        Started(index=1),
        Done(),
    ]
    rank.start(0)  # nobody hears who has not said who it is
    rank.hello()
    rank.say(*said)
    rank.die()
    hello, *rest = heard(hub, 6)
    assert isinstance(hello[1], Hello)
    assert rest == [(3, message) for message in (*said, None)]
    assert hub.next(0.05) is None
    assert hub.next(-1.0) is None


def test_each_rank_hears_only_what_it_is_told_and_one_that_is_gone_or_never_came_nothing(
    hub: DriverServer,
) -> None:
    ranks = connect_ranks(hub)
    heard(hub, 2)
    hub.send(1, make_job([make_fake_case(1)]))
    hub.send(0, make_job([make_fake_case(0)]))
    assert [rank.job().plan.cases for rank in ranks] == [(make_fake_case(0),), (make_fake_case(1),)]
    ranks[0].die()
    heard(hub, 1)
    for _ in range(3):
        hub.send(0, make_job([make_fake_case()] * 1000))
    hub.send(5, StatusRequest())


def test_a_rank_answers_from_a_thread_while_it_measures(hub: DriverServer) -> None:
    [rank] = connect_ranks(hub, 1)
    rank.answer(make_status(steps=41))
    heard(hub, 1)
    hub.send(0, StatusRequest())
    hub.send(0, StatusRequest())
    assert heard(hub, 2) == [(0, make_status(steps=41))] * 2


def knock_with_wrong_key(at: tuple[str, int]) -> None:
    with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
        Client(at, authkey=b"not the key")


def say(words: bytes) -> Callable[[tuple[str, int]], socket.socket]:
    def stranger(at: tuple[str, int]) -> socket.socket:
        opened = socket.create_connection(at)
        opened.sendall(words)
        return opened

    return stranger


def hang_up(at: tuple[str, int]) -> None:
    with socket.create_connection(at) as stranger:
        stranger.sendall(b"\x00\x00\x00\x10half")


def test_strangers_neither_stop_the_ranks_nor_are_heard(hub: DriverServer) -> None:
    kept = [
        stranger(address(hub))
        for stranger in (knock_with_wrong_key, say(b""), say(b"GET / HTTP/1.1\r\n\r\n"), hang_up)
        for _ in range(2)
    ]
    joined: list[FakeRank] = []
    thread = threading.Thread(target=lambda: joined.extend(connect_ranks(hub)), daemon=True)
    thread.start()
    assert sorted(rank for rank, _ in heard(hub, 2)) == [0, 1]
    thread.join(PATIENCE)
    assert len(joined) == 2
    assert hub.next(0.05) is None
    with pytest.raises(AuthenticationError):
        RankClient(hub.variables()[ADDRESS_VARIABLE], "00" * 32)
    for connection in kept:
        if connection is not None:
            connection.close()


def test_a_hub_of_several_addresses_tells_them_all_and_a_rank_tries_one_after_the_other() -> None:
    with (
        DriverServer("192.0.2.1", "127.0.0.1") as hub,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        first, second = (
            word.rpartition(":") for word in hub.variables()[ADDRESS_VARIABLE].split(",")
        )
        assert (first[0], second[0], first[2]) == ("192.0.2.1", "127.0.0.1", second[2])
        good = "".join(second)
        for addresses in (f"{refusing},{good}", f"{good},{refusing}", good):
            assert RankClient(addresses, hub.variables()[KEY_VARIABLE]).own_address == "127.0.0.1"
        with pytest.raises(ConnectionError):
            RankClient(f"{refusing},{refusing}", hub.variables()[KEY_VARIABLE])


def test_both_ends_look_after_a_peer_that_says_nothing(hub: DriverServer) -> None:
    [rank] = connect_ranks(hub, 1)
    heard(hub, 1)
    for connection in (rank.line._connection, *hub._open):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, every, count = (end.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle + every * count <= 60


def test_a_rank_whose_driver_is_gone_hears_none_and_may_go_on_talking(hub: DriverServer) -> None:
    [rank] = connect_ranks(hub, 1)
    heard(hub, 1)
    hub.close()
    assert rank.line.hear() is None
    for index in range(3):
        rank.finish(index, make_outcome(raw=b"x" * (1 << 20)))


def test_a_rank_ends_itself_when_the_driver_hangs_up_or_is_killed() -> None:
    with DriverServer() as hub, process(RANK, *hub.variables().values()) as rank:
        heard(hub, 1)
        assert rank.poll() is None
        hub.close()
        assert rank.wait(PATIENCE) == 7
    with process(DRIVER) as driver:
        assert driver.stdout is not None
        with process(RANK, *driver.stdout.readline().split()) as rank:
            assert driver.stdout.readline() == "Hello\n"
            driver.send_signal(signal.SIGKILL)
            assert rank.wait(PATIENCE) == 7


def test_a_closed_hub_takes_no_more_ranks_and_leaves_no_thread_whoever_was_connected() -> None:
    before = set(threading.enumerate())
    with DriverServer() as hub:
        strangers = [say(words)(address(hub)) for words in (b"", b"GET / HTTP/1.1\r\n\r\n")]
        ranks = connect_ranks(hub)
        unnamed = FakeRank(hub.variables(), rank=9)  # has the key, and has not said who it is
        heard(hub, 2)
        assert set(threading.enumerate()) - before
        variables = hub.variables()
        hub.close()
        wait_until(lambda: set(threading.enumerate()) <= before)
        assert [rank.line.hear() for rank in [*ranks, unnamed]] == [None] * 3
        for stranger in strangers:
            stranger.close()
        with pytest.raises(ConnectionError):
            FakeRank(variables, rank=0)
