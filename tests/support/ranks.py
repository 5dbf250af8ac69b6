"""Real ranks that are started once and then run functions by name, so no test imports torch again.

``Ranks(2).call("tests.support.faults:name", argument=1)`` runs that function on every rank as
``function(world, argument=1)``, and returns a list of the results in rank order.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Set
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from tests.support.paths import IMPORT_PATH

_TIMEOUT_SECONDS = 180.0
_MOST_THREADS = 20


class RankError(AssertionError):
    """A function raised on a rank; the message is the rank's traceback."""


class RankDiedError(AssertionError):
    """A rank died or gave no answer; the gang is started anew for the tests that follow."""


class Ranks:
    """A gang of ``size`` gloo ranks that does what it is sent; those on cuda may share a GPU, see ``staging``."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size, self._device = size, device
        self._open()

    def _open(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with Listener(authkey=b"tests") as listener:
            self._processes = [
                self._start(rank, str(listener.address)) for rank in range(self.size)
            ]
            connections = [listener.accept() for _ in range(self.size)]
        by_rank = {connection.recv(): connection for connection in connections}
        self._connections = [by_rank[rank] for rank in range(self.size)]

    def call(self, target: str, **arguments: Any) -> list[Any]:
        try:
            for connection in self._connections:
                connection.send((target, arguments))
            answers = [self._answer(connection) for connection in self._connections]
        except (EOFError, ConnectionError, TimeoutError) as error:
            time.sleep(0.5)  # whoever fell with the first has an exit code then
            codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
            self.close()
            self._open()
            raise RankDiedError(
                f"in {target}: {str(error) or 'a connection closed'}; exit codes by rank {codes}"
            ) from None
        errors = [value for failed, value in answers if failed]
        if errors:
            waited = [
                any(words in error for words in ("Timed out", "closed by peer", "closure"))
                for error in errors
            ]
            if any(waited):
                self.close()  # gloo's connections stay broken, for whoever comes next
                self._open()
            raise RankError(
                errors[waited.index(False) if False in waited else 0]
            )  # what the others waited for
        return [value for _, value in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        strict = "error" if self._device == "cpu" else "default"  # CUDA warns of what a machine has
        command = [
            sys.executable,
            "-W",
            strict,
            "-m",
            "tests.support.ranks",
            address,
            self._folder.name,
            self._device,
        ]
        places = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank)}
        variables = {"PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env={**os.environ, **places, **variables})

    def _answer(self, connection: Connection) -> tuple[bool, Any]:
        if not connection.poll(_TIMEOUT_SECONDS):
            raise TimeoutError(f"no answer within {_TIMEOUT_SECONDS:.0f} s")
        answer: tuple[bool, Any] = connection.recv()
        return answer


def serve(address: str, folder: str, device: str) -> None:
    """Do, as one rank, what is sent until the connection closes."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from parbench.bench.world.world import open_world

    connection = Client(address, authkey=b"tests")
    connection.send(int(os.environ["RANK"]))
    store = dist.FileStore(f"{folder}/store", int(os.environ["WORLD_SIZE"]))  # type: ignore[attr-defined]  # not in __all__
    if device == "cuda":
        importlib.import_module("tests.support.staging").stage()
    with open_world("gloo", device, seed=0, timeout_seconds=60, store=store) as world:
        lasting = set(distributed_c10d._world.pg_map)
        while True:
            try:
                target, arguments = connection.recv()
            except EOFError:
                os._exit(0)  # the others may be gone already: a farewell would wait for them
            _give_back_groups(lasting)
            module, _, name = target.partition(":")
            try:
                connection.send(
                    (False, getattr(importlib.import_module(module), name)(world, **arguments))
                )
            except Exception:  # noqa: BLE001 - told to the test, which raises it
                connection.send((True, traceback.format_exc()))


def _give_back_groups(lasting: Set[object]) -> None:
    """Close the groups that earlier work made and left: gloo's threads look for news a hundred times a second, each.

    Nobody uses one any more, for work is sent once every rank has answered for the last.
    """
    import gc

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from parbench.bench.world.torch_compat import forget_meshes

    left = [group for group in distributed_c10d._world.pg_map if group not in lasting]
    for group in left:
        dist.destroy_process_group(group)
    if (
        left or len(list(Path("/proc/self/task").iterdir())) > _MOST_THREADS
    ):  # those of groups that cycles still hold
        forget_meshes()
        gc.collect()


if __name__ == "__main__":
    serve(*sys.argv[1:])
