"""Real ranks that are started once and then run functions by name, so no test imports torch again.

``Ranks(2).call("tests.support.faults:name", argument=1)`` runs that function on every rank as
``function(world, argument=1)``, and returns a list of the results in rank order.
"""

import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Set
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from tests.support.paths import IMPORT_PATH

ANSWER_SECONDS = 180.0
EXIT_CODE_SECONDS = 0.5
MAX_THREADS = 20
AUTHENTICATION_KEY = b"tests"
BROKEN_CONNECTION_TEXTS = ("Timed out", "closed by peer", "closure")
"""Texts of gloo errors on ranks that waited for another rank."""


class RankError(AssertionError):
    """A function raised on a rank; the message is the traceback of that rank."""


class RankDiedError(AssertionError):
    """A rank died or did not answer; new ranks are started for the tests that follow."""


@dataclass(frozen=True)
class Answer:
    """The result of a function on a rank, or the traceback of its exception."""

    value: Any = None
    error: str = ""


class Ranks:
    """Ranks on this machine; with gloo on ``cuda`` they may share a GPU, see ``staging``.

    ``python`` and ``variables`` start them in another environment.
    """

    def __init__(
        self,
        size: int,
        device: str = "cpu",
        *,
        backend: str = "gloo",
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        self._device = device
        self._backend = backend
        self._python = python
        self._variables = variables or {}
        self._start()

    def call(self, target: str, **arguments: Any) -> list[Any]:
        """Run ``module:function`` on every rank and return the results in rank order."""
        try:
            for connection in self._connections:
                connection.send((target, arguments))
            answers = [receive_answer(connection) for connection in self._connections]
        except (EOFError, ConnectionError, TimeoutError) as error:
            time.sleep(EXIT_CODE_SECONDS)
            exit_codes = [process.poll() for process in self._processes]
            self._restart()
            reason = str(error) or "a connection closed"
            message = f"{target}: {reason}, exit codes {exit_codes}"
            raise RankDiedError(message) from None
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            consequences = [is_broken_connection(error) for error in errors]
            if any(consequences):
                self._restart()
            causes = [
                error
                for error, is_consequence in zip(errors, consequences, strict=True)
                if not is_consequence
            ]
            raise RankError((causes or errors)[0])
        return [answer.value for answer in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _restart(self) -> None:
        """Start new ranks, because connections of gloo stay broken."""
        self.close()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with Listener(authkey=AUTHENTICATION_KEY) as listener:
            address = str(listener.address)
            self._processes = [self._start_rank(rank, address) for rank in range(self.size)]
            connections = [listener.accept() for _ in range(self.size)]
        by_rank = {connection.recv(): connection for connection in connections}
        self._connections = [by_rank[rank] for rank in range(self.size)]

    def _start_rank(self, rank: int, address: str) -> "subprocess.Popen[bytes]":
        # CUDA warns about properties of the machine.
        warnings = "error" if self._device == "cpu" else "default"
        options = ["-W", warnings, "-m", "tests.support.ranks"]
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "PYTHONPATH": IMPORT_PATH,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return subprocess.Popen(
            [self._python, *options, address, self._folder.name, self._device, self._backend],
            env={**os.environ, **self._variables, **variables},
        )


def receive_answer(connection: Connection) -> Answer:
    if not connection.poll(ANSWER_SECONDS):
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} s")
    value, error = connection.recv()
    return Answer(value, error)


def is_broken_connection(error: str) -> bool:
    """Return True if an error follows from the failure of another rank."""
    return any(text in error for text in BROKEN_CONNECTION_TEXTS)


def serve(address: str, folder: str, device: str, backend: str) -> None:
    """Run requested functions as one rank until the connection closes."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from parbench.bench.world.world import open_world

    connection = Client(address, authkey=AUTHENTICATION_KEY)
    connection.send(int(os.environ["RANK"]))
    world_size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # not in __all__
    if (device, backend) == ("cuda", "gloo"):
        importlib.import_module("tests.support.workloads.staging").stage()
    with open_world(backend, device, seed=0, timeout_seconds=60, store=store) as world:
        initial_groups = set(distributed_c10d._world.pg_map)
        while True:
            try:
                target, arguments = connection.recv()
            except EOFError:
                # A regular exit would wait for other ranks, which may be gone.
                os._exit(0)
            world.process_groups.clear()
            destroy_new_groups(initial_groups)
            module, _, name = target.partition(":")
            try:
                function = getattr(importlib.import_module(module), name)
                connection.send((function(world, **arguments), ""))
            except Exception:  # noqa: BLE001 - the test raises it
                connection.send((None, traceback.format_exc()))


def destroy_new_groups(initial_groups: Set[object]) -> None:
    """Destroy process groups of earlier calls, because the threads of each poll the network.

    No rank uses them: a call is sent after every rank has answered the previous one.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from parbench.workloads.torch_internals import forget_meshes

    groups = [group for group in distributed_c10d._world.pg_map if group not in initial_groups]
    for group in groups:
        dist.destroy_process_group(group)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if groups or num_threads > MAX_THREADS:
        # Reference cycles keep groups alive.
        forget_meshes()
        gc.collect()


if __name__ == "__main__":
    serve(*sys.argv[1:])
