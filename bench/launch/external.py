"""Ranks that torchrun, mpirun, srun or Kubernetes has started as ``parbench run``. Imports torch.

Each of these processes is an agent. It starts the measuring process of its rank, the worker, as a
child. So no measuring process also drives the run, and new workers can follow those that failed.

Agents meet in the launcher's torch store at MASTER_ADDR and MASTER_PORT. Messages of workers pass
through this store, because their hosts may share no file system.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from parbench.bench.launch.launchers import (
    FOLDER_VARIABLE,
    WORKER,
    apply_variables,
    kill_descendants,
)
from parbench.bench.launch.messages import MESSAGE_DECODER, Mailbox, Message, RankExit
from parbench.bench.launch.processes import adopt_orphans, die_with_parent
from parbench.bench.launch.ranks import Ranks

STORE_VARIABLE = "PARBENCH_STORE"
"""The environment variable of a measuring process with its prefix in the launcher's store.

The prefix is the number of the start of all ranks, from 0.
"""
_CONNECT_SECONDS = 120.0
"""The seconds that a connection to a store and an operation on it may take."""
_POLL_SECONDS = 0.25
"""The seconds between two checks for an order of the driver or the end of a measuring process.

The process that the launcher has started for a rank other than 0, its agent, makes these checks.
"""
_PART_LENGTH = 1 << 20
"""The maximum number of characters in a value of the store, which accepts up to 8 MiB."""
_RELEASE_SECONDS = 5.0
"""The seconds that rank 0 waits at the end of a run until the other ranks have left the store.

The store is torch's key-value store of the launcher, such as torchrun.
"""


class StoreMailbox(Mailbox):
    """A mailbox whose messages and published values are in a torch store instead of files.

    ``store`` is the key-value store of the launcher (such as torchrun), with a key prefix that is
    unique to this start of ranks.
    """

    def __init__(self, store: Store) -> None:
        """Keep the store in which all messages and values are exchanged."""
        self._store = store
        self._num_received = 0

    def put(self, name: str, content: bytes) -> None:
        """Publish a value under a name in the store, in parts that the store accepts."""
        text = content.decode()
        for start in range(0, len(text), _PART_LENGTH):
            self._store.set(f"{name}/{start}", text[start : start + _PART_LENGTH])
        self._store.set(name, str(len(text)))

    def get(self, name: str) -> bytes | None:
        """Return the value published under a name in the store, None if there is none yet."""
        if not self._store.check([name]):
            return None
        starts = range(0, int(self._store.get(name)), _PART_LENGTH)
        return b"".join(self._store.get(f"{name}/{start}") for start in starts)

    def post(self, rank: int, message: Message) -> None:
        """Send a message to the driver. ``rank`` is the rank that sends the message."""
        content = msgspec.json.encode((rank, message))  # before the number, because it may raise
        self.put(f"message/{self._store.add('messages', 1)}", content)

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages since the last call as pairs: the rank that sent it and the message.

        The messages of a rank are in the order of sending.
        """
        messages = []
        while content := self.get(f"message/{self._num_received + 1}"):
            self._num_received += 1
            messages.append(MESSAGE_DECODER.decode(content))
        return messages


def connect_store(environ: Mapping[str, str]) -> Store:
    """Return a new client of the launcher's store, which puts a prefix of parbench before each key.

    The address of the store is MASTER_ADDR and MASTER_PORT in ``environ``. The prefix contains the
    number of restarts that torchrun has made, because torchrun may start the same ranks again with
    the same store.
    """
    prefix = f"parbench/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    store = open_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_server=False)
    return PrefixStore(prefix, store)


def open_store(host: str, port: int, *, is_server: bool) -> TCPStore:
    """Return a client of the torch store at a host and port, and serve it if ``is_server``."""
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=timeout)


class ExternalLauncher:
    """The launcher of ranks in a run that torchrun, mpirun or srun has started.

    Each process that torchrun, mpirun or srun has started is the agent of one rank. An agent starts
    the measuring process of its rank as a child. This class runs in the agent of rank 0, which is
    also the driver of the run, and orders all agents to start their measuring processes. ``size``
    is the number of ranks.
    """

    def __init__(self, size: int) -> None:
        """Connect to the torch store of the launcher, and serve the store unless torchrun does."""
        adopt_orphans()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # which torchrun sets
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._server = open_store(*address, is_server=True)
        self._store = connect_store(os.environ)
        self._size = size
        self._number = 0

    def start_ranks(self, folder: Path, variables: Mapping[str, str]) -> "ExternalRanks":
        """Start the measuring processes of all ranks and return an object that controls them.

        The process that torchrun, mpirun or srun has started for a rank, its agent, starts the
        measuring process of the rank when this method orders that.

        Args:
            folder: the folder for the files of the measuring processes.
            variables: environment variables of all ranks. An empty value removes a variable.
        """
        number = self._number
        self._number += 1
        return ExternalRanks(self._store, number, self._size, folder, variables)

    def close(self) -> None:
        """Order the processes that the launcher started for other ranks to exit, and wait for that.

        These processes are the agents of the ranks. The wait lasts until they have left the torch
        store of the launcher, at most 5 s.
        """
        deadline = time.monotonic() + _RELEASE_SECONDS
        with suppress(RuntimeError):
            self._store.set(f"order/{self._number}", "null")
            while self._store.add("released", 0) < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)


class ExternalRanks(Ranks):
    """The measuring processes of one start of all ranks in a run under torchrun, mpirun or srun.

    The process that torchrun, mpirun or srun has started for a rank is the agent of the rank, and
    starts its measuring process as a child. The output of the measuring processes goes to standard
    error of the launcher.
    """

    def __init__(
        self, store: Store, number: int, size: int, folder: Path, variables: Mapping[str, str]
    ) -> None:
        """Start the measuring process of rank 0, and order the start of those of other ranks.

        The order goes through the store to the process that the launcher has started for each rank.

        Args:
            store: the launcher's store, with the prefix of parbench.
            number: the number of this start of all ranks, from 0.
            size: the number of ranks.
            folder: the folder for the files of these ranks.
            variables: environment variables of all ranks. An empty value removes a variable.
        """
        super().__init__(size, folder)
        self.mailbox = StoreMailbox(PrefixStore(f"{number}/mail", store))
        self._store = PrefixStore(str(number), store)
        store.set(f"order/{number}", msgspec.json.encode(dict(variables)).decode())
        self._process = start_worker(number, folder.absolute(), variables)

    def get_exit_codes(self) -> dict[int, int]:
        """Return the exit code of rank 0 by its rank, if it has ended. A negative code is a signal.

        The processes that the launcher has started for other ranks send a message instead.
        """
        code = self._process.poll()
        return {} if code is None else {0: code}

    def kill(self) -> None:
        """Kill the measuring process of rank 0, and order other ranks to kill theirs.

        The order goes to the process that the launcher has started for each rank.
        """
        with suppress(RuntimeError):
            self._store.set("end", "")
        kill_descendants(os.getpid())
        self._process.wait()


def serve_rank() -> None:
    """Serve a rank other than 0 in the process that torchrun, mpirun or srun has started for it.

    This process, the agent of the rank, starts a measuring process as a child whenever the driver
    of the run on rank 0 orders that. It kills the child when the driver orders that, and reports
    the exit code of the child. It returns when the driver has finished. If rank 0 ends first, this
    process exits with a message.
    """
    adopt_orphans()
    rank = int(os.environ["RANK"])
    try:
        store = connect_store(os.environ)
        for number in itertools.count():
            # Signals would not be handled while this process waits in the store.
            while not store.check([f"order/{number}"]):
                time.sleep(_POLL_SECONDS)
            order = store.get(f"order/{number}")
            variables = msgspec.json.decode(order, type=dict[str, str] | None)
            if variables is None:
                store.add("released", 1)
                return
            own_store = PrefixStore(str(number), store)
            with tempfile.TemporaryDirectory(prefix="parbench-") as folder:
                process = start_worker(number, Path(folder), variables)
                while process.poll() is None and not own_store.check(["end"]):
                    time.sleep(_POLL_SECONDS)
                kill_descendants(os.getpid())
                code = process.wait()
            StoreMailbox(PrefixStore("mail", own_store)).post(rank, RankExit(code=code))
    except RuntimeError as error:  # torch's errors of a store whose server has ended
        sys.exit(f"rank {rank}: rank 0 has ended: {error}")
    finally:
        kill_descendants(os.getpid())


def start_worker(
    number: int, folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the measuring process of a rank as a child of this process and return it.

    torchrun, mpirun or srun has started this process for the rank. The standard output of the child
    is redirected to standard error, because the driver prints results on standard output.

    Args:
        number: the number of this start of all ranks, from 0.
        folder: the folder for the files of the measuring process.
        variables: additional environment variables. An empty value removes a variable.
    """
    env = {**os.environ, FOLDER_VARIABLE: str(folder), STORE_VARIABLE: str(number)}
    apply_variables(env, variables)
    return subprocess.Popen(
        [sys.executable, "-m", WORKER],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
    )
