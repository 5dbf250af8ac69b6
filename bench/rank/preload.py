"""Prepares the fork server, which imports this module first, and begins its ranks.

The server starts no thread (those of numpy's OpenBLAS end at a fork) and touches no GPU. Ranks share nothing else: each
has its own variables, output, random numbers and addresses of buffers.
"""

import importlib
import json
import mmap
import os
import secrets
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from parbench.bench.launch.launchers import SERVER_VARIABLE, WORKER
from parbench.bench.launch.processes import adopt_orphans, die_with_parent

_SHIFT_PAGES = 1 << 16


def prepare_server(modules: list[str], log: str, ready: str, driver: int) -> None:
    """Import what ranks need, with output to a log, and end with the driver."""
    signal.signal(signal.SIGTERM, end_server)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != driver:
        os._exit(1)
    adopt_orphans()
    # The standard library does not expect the processes that ranks have left behind.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    files = (os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    for number, file in enumerate((files[0], files[1], files[1])):
        os.dup2(file, number)
    for module in (WORKER, *modules):
        with suppress(ImportError):  # the rank that needs it raises
            importlib.import_module(module)
    Path(ready).touch()


def end_server(number: int, frame: FrameType | None) -> None:
    """Kill the ranks and all processes that they have left behind, and exit."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(0)


def begin_rank() -> None:
    """Be the rank that the environment describes."""
    import numpy as np

    from parbench.bench.rank import worker
    from parbench.bench.world.torch_compat import lost_cuda

    if lost_cuda():  # an import has initialized CUDA, which a fork cannot use
        os.execv(sys.executable, [sys.executable, "-m", WORKER])
    np.random.seed()
    # Buffers then have other addresses in each rank, as in separate processes. main() never returns.
    shift = mmap.mmap(-1, mmap.PAGESIZE * (1 + secrets.randbelow(_SHIFT_PAGES)), prot=0)  # noqa: F841
    worker.main()


if SERVER_VARIABLE in os.environ:
    prepare_server(**json.loads(os.environ.pop(SERVER_VARIABLE)))
