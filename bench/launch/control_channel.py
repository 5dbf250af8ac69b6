"""The connection between the driver and each rank, on the standard library's authenticated listener.

A rank whose driver is gone ends itself; the driver learns of a rank's death when its connection closes.
"""

import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from parbench.bench.launch.flight_recorder import GroupSeen
from parbench.bench.machine.environment import RankPlace
from parbench.bench.plan.plan import Plan
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import (
    Arrival,
    Check,
    Culprit,
    RankState,
    SkipReason,
    Status,
    Stop,
)

ADDRESS_VARIABLE = "PARBENCH_DRIVER"
KEY_VARIABLE = "PARBENCH_KEY"
DEVICE_VARIABLE = "PARBENCH_DEVICE"  # ranks on the CPU leave CUDA alone, even to say who they are


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has connected; ``environment`` is its own, before what all share is hoisted."""

    rank: int
    size: int
    host: str
    pid: int
    environment: dict[str, Any]
    place: RankPlace | None = None
    meeting: str = ""  # address of the store that rank 0 has bound for all, where no launcher gave them one
    step: str = ""  # Slurm's job step


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank begins the visit at ``index`` of its job."""

    index: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of work done by one sample: ``amount / seconds`` is the metric ``name``."""

    name: str
    amount: float
    unit: str = ""  # of a rate that parbench.bench.results.metrics does not declare


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks saw of one case; ``seconds`` holds one sample per iteration, ``raw`` every rank's (an npz).

    ``visits`` are the counts of samples taken in turn; where ``more`` visits are to come, it is what was seen so far.
    """

    status: Status
    reason: str = ""
    skip_reason: SkipReason | None = None
    wrong_by_rank: dict[int, int] = {}
    culprits: tuple[Culprit, ...] = ()
    stop: Stop | None = None
    check: Check = Check()
    more: bool = False
    headline: str = "time"
    seconds: list[float] = []
    visits: list[int] = []
    skew_seconds: list[float] = []
    transfer_seconds: list[float] = []
    issue_seconds: list[float] = []
    last_arriver_seconds: list[float] = []
    arrival: Arrival | None = None
    injected: str = ""
    ranks: list[RankState] = []  # where each was, told by the driver alone: a gang that broke has no other outcome
    explained: dict[str, MetricValue] = {}
    work: list[Work] = []
    details: dict[str, Any] = {}
    notes: list[str] = []
    raw: bytes = b""
    timeline: bytes = b""  # of one step of all ranks, as parbench.bench.results.records writes it
    wall_seconds: float = 0.0


OUT_OF_BUDGET = Outcome(status="skipped", reason="out of time", skip_reason=SkipReason.OUT_OF_BUDGET)


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 tells the outcome of the case that was visited at ``index``."""

    index: int
    outcome: Outcome


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank cannot go on: an exception in the visit at ``index``, or before any if None."""

    index: int | None
    error: str
    stack: str


class StatusReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's answer: the phase it is in, the steps it has begun, whether it is inside torch.distributed.

    What torch recorded of its ``groups`` comes in a second one, where ``more`` promises it: reading may take for ever.
    """

    phase: str
    steps: int
    communicates: bool
    stack: str
    groups: dict[str, GroupSeen] | None = None
    more: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has done its whole job, in so much time of cores."""

    cpu_seconds: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver's order: the plan's cases that are left, which of them to visit in turn, and each one's weight.

    A visit's share of the budget is its part of its case's price (s), as far as known, and of what all prices leave by
    its case's weight. The last ``more`` visits are for time left over, and for what is not yet known well enough.
    """

    plan: Plan
    visits: list[int]
    weights: list[float]
    prices: list[float] = []
    more: int = 0
    budget_seconds: float  # of this launch: when they are spent, no case is visited again
    run_seconds: float  # of the whole run: when they are spent, what is left is left out
    hosts: tuple[str, ...] = ()  # of each rank, as they told
    meeting: str = ""  # as rank 0 told


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver asks where a rank is."""


FromRank = Hello | Started | Finished | Raised | StatusReply | Done
FromDriver = Job | StatusRequest
Event = tuple[int, FromRank | None]  # a rank and what it said; None when its connection has closed

# msgspec inspects the types of a message when a decoder is built. Two threads that do this for the same types at the
# same time crash the process, so both decoders are built here.
FROM_RANK_DECODER = msgspec.msgpack.Decoder(FromRank)
FROM_DRIVER_DECODER = msgspec.msgpack.Decoder(FromDriver)


class DriverServer(AbstractContextManager["DriverServer"]):
    """The driver's end: listens on a free port and gathers what ranks say, in order of arrival.

    ``hosts`` are the addresses under which ranks may find it, tried in turn; with several it listens on all interfaces.
    """

    def __init__(self, *hosts: str) -> None:
        self._key = secrets.token_bytes(32)
        self._hosts = hosts or ("127.0.0.1",)
        self._listener = Listener((self._hosts[0] if len(self._hosts) == 1 else "", 0), backlog=1024)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: set[Connection] = set()
        self._connections: dict[int, Connection] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="server", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def variables(self) -> dict[str, str]:
        bound, port = self._listener.address
        hosts = self._hosts if len(self._hosts) > 1 else (bound,)
        return {ADDRESS_VARIABLE: ",".join(f"{host}:{port}" for host in hosts), KEY_VARIABLE: self._key.hex()}

    def next(self, timeout_seconds: float) -> Event | None:
        with suppress(queue.Empty):
            return self._events.get(timeout=max(timeout_seconds, 0.0))
        return None

    def send(self, rank: int, message: FromDriver) -> None:
        """Tell one rank; one that is gone is told nothing, and its end is among the events."""
        with suppress(OSError, KeyError):
            self._connections[rank].send_bytes(msgspec.msgpack.encode(message))

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with suppress(OSError):  # to wake the thread that waits in accept: closing a socket does not
            socket.create_connection(self._listener.address, timeout=1).close()
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # a close would leave a thread that reads it waiting

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            self._open.add(connection)
            _keep_alive(connection)
            if self._closed.is_set():
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), name="rank", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Hear one rank; a stranger is tried here and not while others wait to be let in, for it may say nothing."""
        rank: int | None = None
        # until a stranger is turned away, a rank ends, or one of another parbench speaks
        with suppress(AuthenticationError, EOFError, OSError, msgspec.DecodeError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            while True:
                message = FROM_RANK_DECODER.decode(connection.recv_bytes())
                if isinstance(message, Hello):
                    rank = message.rank
                    self._connections[rank] = connection
                if rank is not None:
                    self._events.put((rank, message))
        if rank is not None:
            self._events.put((rank, None))
        self._open.discard(connection)


class RankClient:
    """A rank's end: says what it does, and answers the driver from a thread of its own.

    It connects to the first of ``HOST:PORT,...`` that answers; ``OSError`` of the last if none does.
    """

    def __init__(self, addresses: str, key: str) -> None:
        for address in addresses.split(","):
            host, _, port = address.rpartition(":")
            try:
                with socket.create_connection((host, int(port)), timeout=10.0) as end:
                    end.settimeout(None)
                    self.own_address = str(end.getsockname()[0])
                    self._connection = Connection(end.detach())
                answer_challenge(self._connection, bytes.fromhex(key))
                deliver_challenge(self._connection, bytes.fromhex(key))
                break
            except OSError as error:
                failure = error
        else:
            raise failure
        _keep_alive(self._connection)
        self._lock = threading.Lock()

    def say(self, message: FromRank) -> None:
        """Send a message; a driver that is gone is noticed by the listening thread."""
        with self._lock, suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def hear(self) -> FromDriver | None:
        with suppress(EOFError, OSError):
            message: FromDriver = FROM_DRIVER_DECODER.decode(self._connection.recv_bytes())
            return message
        return None

    def listen(self, answer: Callable[[], Iterable[FromRank]], on_gone: Callable[[], None]) -> None:
        def loop() -> None:
            while self.hear() is not None:
                for message in answer():
                    self.say(message)
            on_gone()

        threading.Thread(target=loop, name="driver", daemon=True).start()


def _keep_alive(connection: Connection) -> None:
    """Let the system find out within half a minute that the other end has vanished, as behind a dead link."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:  # closing it leaves the connection open
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            end.setsockopt(socket.IPPROTO_TCP, option, value)
