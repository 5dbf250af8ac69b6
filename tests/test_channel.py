"""The channel: who may speak, what is heard and in which order, and that neither end outlives the other."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import msgspec
import pytest
from fakes import FakeRank, case, connect, job, outcome, wait_until, where, within

from bench import channel as module
from bench.channel import ADDRESS_VARIABLE, KEY_VARIABLE, Event, Gone, Hub, Line
from bench.messages import Ask, Bye, Finished, FromRank, Hello, Started

PATIENCE = 10.0
RANK = """
import os, sys, threading
from bench.channel import Line
from bench.messages import Bye, Hello
line = Line(sys.argv[1], sys.argv[2])
line.say(Hello(rank=0, size=1, host="here", pid=os.getpid(), environment={}))
line.listen(answer=Bye, on_gone=lambda: os._exit(7))
threading.Event().wait()
"""
DRIVER = """
import sys, threading
from bench import channel as module
from bench.channel import ADDRESS_VARIABLE, KEY_VARIABLE, Hub
hub = Hub()
print(hub.variables()[ADDRESS_VARIABLE], hub.variables()[KEY_VARIABLE], flush=True)
print(type(hub.next(60).what).__name__, flush=True)
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with within(30):
        yield


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as opened:
        yield opened


def heard(hub: Hub, count: int) -> list[Event]:
    """Return the next ``count`` events."""
    events = [hub.next(PATIENCE) for _ in range(count)]
    assert None not in events, events
    return [event for event in events if event is not None]


@contextmanager
def process(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a Python process that imports no torch; it is gone at the end."""
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def address(hub: Hub) -> tuple[str, int]:
    host, _, port = hub.variables()[ADDRESS_VARIABLE].rpartition(":")
    return host, int(port)


# --- what is said and heard ---


def test_what_a_rank_says_is_heard_in_order_with_its_rank(hub: Hub) -> None:
    rank = FakeRank(hub.variables(), rank=3, size=4)
    said: list[FromRank] = [Started(index=0), Finished(index=0, outcome=outcome()), Started(index=1), Bye()]
    rank.hello()
    rank.say(*said)
    hello, *rest = heard(hub, 5)
    assert isinstance(hello.what, Hello)
    assert rest == [Event(rank=3, what=message) for message in said]


def test_each_rank_hears_only_what_it_is_told(hub: Hub) -> None:
    ranks = connect(hub)
    heard(hub, 2)
    hub.send(1, job([case(1)]))
    hub.send(0, job([case(0)]))
    assert [rank.job().cases for rank in ranks] == [[case(0)], [case(1)]]


def test_a_rank_answers_from_a_thread_while_it_measures(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    rank.answer(where(steps=41))
    heard(hub, 1)
    hub.send(0, Ask())
    hub.send(0, Ask())
    assert heard(hub, 2) == [Event(rank=0, what=where(steps=41))] * 2


@pytest.mark.measures
def test_nothing_heard_in_time_is_none(hub: Hub) -> None:
    began = time.monotonic()
    assert hub.next(0.05) is None
    assert hub.next(-1.0) is None
    assert 0.05 <= time.monotonic() - began < 1


def test_a_message_of_many_megabytes_arrives_whole(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    raw = os.urandom(1 << 20) * 8
    rank.finish(0, outcome(raw=raw))
    finished = heard(hub, 2)[1].what
    assert isinstance(finished, Finished)
    assert finished.outcome.raw == raw


def test_threads_of_a_rank_do_not_interleave_their_messages(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    large = outcome(raw=b"x" * (1 << 18))
    threads = [threading.Thread(target=rank.say, args=[Finished(index=0, outcome=large)] * 20) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [event.what for event in heard(hub, 81)[1:]] == [Finished(index=0, outcome=large)] * 80


def test_a_hundred_ranks_that_connect_at_once_are_all_heard(hub: Hub) -> None:
    ranks: list[FakeRank] = []

    def start(number: int) -> None:
        rank = FakeRank(hub.variables(), number, 100)
        ranks.append(rank)
        rank.hello()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    assert sorted(event.rank for event in heard(hub, 100)) == list(range(100))
    for thread in threads:
        thread.join()


# --- who may speak ---


def knock_with_wrong_key(at: tuple[str, int]) -> None:
    with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
        Client(at, authkey=b"not the key")


def say_nothing(at: tuple[str, int]) -> socket.socket:
    return socket.create_connection(at)


def speak_http(at: tuple[str, int]) -> socket.socket:
    stranger = socket.create_connection(at)
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return stranger


def hang_up(at: tuple[str, int]) -> None:
    socket.create_connection(at).close()


def break_off(at: tuple[str, int]) -> None:
    with socket.create_connection(at) as stranger:
        stranger.sendall(b"\x00\x00\x00\x10half")


@pytest.mark.parametrize("stranger", [knock_with_wrong_key, say_nothing, speak_http, hang_up, break_off])
def test_a_stranger_neither_stops_the_ranks_nor_is_heard(
    hub: Hub, stranger: Callable[[tuple[str, int]], socket.socket | None]
) -> None:
    kept = [stranger(address(hub)) for _ in range(3)]
    joined: list[FakeRank] = []
    thread = threading.Thread(target=lambda: joined.extend(connect(hub)), daemon=True)
    thread.start()
    assert sorted(event.rank for event in heard(hub, 2)) == [0, 1]
    thread.join(PATIENCE)
    assert len(joined) == 2
    assert hub.next(0.05) is None
    for connection in kept:
        if connection is not None:
            connection.close()


def test_a_rank_with_a_wrong_key_is_refused(hub: Hub) -> None:
    with pytest.raises(AuthenticationError):
        Line(hub.variables()[ADDRESS_VARIABLE], "00" * 32)


def test_every_hub_has_a_key_and_a_port_of_its_own(hub: Hub) -> None:
    with Hub() as other:
        assert hub.variables()[ADDRESS_VARIABLE] != other.variables()[ADDRESS_VARIABLE]
        assert hub.variables()[KEY_VARIABLE] != other.variables()[KEY_VARIABLE]
    assert len(bytes.fromhex(hub.variables()[KEY_VARIABLE])) == 32
    assert address(hub)[0] == "127.0.0.1"


def test_who_does_not_say_who_it_is_is_not_heard(hub: Hub) -> None:
    rank = FakeRank(hub.variables(), rank=0)
    rank.start(0)
    rank.hello()
    rank.start(1)
    assert [event.what for event in heard(hub, 2)][1] == Started(index=1)


def test_a_rank_that_speaks_another_tongue_counts_as_gone(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    rank.line._connection.send_bytes(msgspec.msgpack.encode({"type": "Novelty"}))
    assert heard(hub, 2)[1] == Event(rank=0, what=Gone())


def test_a_rank_tries_one_address_after_the_other() -> None:
    with Hub("192.0.2.1", "127.0.0.1") as hub, socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        good = hub.variables()[ADDRESS_VARIABLE].split(",")[1]
        for addresses in (f"{refusing},{good}", f"{good},{refusing}", good):
            line = Line(addresses, hub.variables()[KEY_VARIABLE])
            assert line.own_address == "127.0.0.1"
        with pytest.raises(ConnectionError):
            Line(f"{refusing},{refusing}", hub.variables()[KEY_VARIABLE])


def test_a_hub_of_several_addresses_tells_them_all_with_one_port() -> None:
    with Hub("10.1.2.3", "10.4.5.6") as hub:
        first, second = (word.rpartition(":") for word in hub.variables()[ADDRESS_VARIABLE].split(","))
        assert (first[0], second[0]) == ("10.1.2.3", "10.4.5.6")
        assert first[2] == second[2]


def test_both_ends_look_after_a_peer_that_says_nothing(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    heard(hub, 1)
    for connection in (rank.line._connection, *hub._open):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, count = (end.getsockopt(socket.IPPROTO_TCP, option) for option, _ in module._KEEPALIVE)
            assert idle + every * count <= 60


# --- the end ---


def test_a_rank_that_dies_is_gone_after_all_that_it_said(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    rank.start(0)
    rank.die()
    assert heard(hub, 3)[1:] == [Event(rank=0, what=Started(index=0)), Event(rank=0, what=Gone())]


def test_a_killed_process_is_gone(hub: Hub) -> None:
    with process(RANK, *hub.variables().values()) as rank:
        heard(hub, 1)
        rank.send_signal(signal.SIGKILL)
        assert heard(hub, 1) == [Event(rank=0, what=Gone())]


def test_telling_a_rank_that_is_gone_or_never_came_does_no_harm(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    rank.die()
    heard(hub, 2)
    for _ in range(3):
        hub.send(0, job([case()] * 1000))
    hub.send(5, Ask())


def test_a_rank_whose_driver_is_gone_hears_none_and_may_go_on_talking(hub: Hub) -> None:
    [rank] = connect(hub, 1)
    heard(hub, 1)
    hub.close()
    assert rank.line.hear() is None
    for index in range(3):
        rank.finish(index, outcome(raw=b"x" * (1 << 20)))


def test_a_rank_ends_itself_when_the_driver_hangs_up() -> None:
    with Hub() as hub, process(RANK, *hub.variables().values()) as rank:
        heard(hub, 1)
        assert rank.poll() is None
        hub.close()
        assert rank.wait(PATIENCE) == 7


def test_a_rank_ends_itself_when_its_driver_is_killed() -> None:
    with process(DRIVER) as driver:
        assert driver.stdout is not None
        with process(RANK, *driver.stdout.readline().split()) as rank:
            assert driver.stdout.readline() == "Hello\n"
            driver.send_signal(signal.SIGKILL)
            assert rank.wait(PATIENCE) == 7


def test_a_closed_hub_leaves_no_thread_whoever_was_connected() -> None:
    before = set(threading.enumerate())
    hub = Hub()
    strangers = [say_nothing(address(hub)), speak_http(address(hub))]
    ranks = connect(hub)
    unnamed = FakeRank(hub.variables(), rank=9)  # has the key, and has not said who it is
    heard(hub, 2)
    assert set(threading.enumerate()) > before
    hub.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert [rank.line.hear() for rank in [*ranks, unnamed]] == [None] * 3
    for stranger in strangers:
        stranger.close()


def test_a_closed_hub_takes_no_more_ranks_and_may_be_closed_again() -> None:
    with Hub() as hub:
        variables = hub.variables()
        hub.close()
        with pytest.raises(ConnectionError):
            FakeRank(variables, rank=0)
