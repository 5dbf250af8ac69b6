"""Prepares the fork server, which imports this module first, and begins its ranks.

The server starts no thread (those of numpy's OpenBLAS end at a fork) and touches no GPU. Ranks
share nothing else: each has its own variables, output, random numbers and addresses of buffers.
"""

import mmap
import os
import secrets
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType

from parbench.bench.launch.launchers import (
    SERVER_LOG_VARIABLE,
    WORKER,
    kill_descendants,
    redirect_output,
)
from parbench.bench.launch.processes import adopt_orphans, die_with_parent

_SHIFT_PAGES = 1 << 16


def set_up_fork_server(log: Path) -> None:
    """Let this process end with the driver, and let all descendants end with this process."""
    signal.signal(signal.SIGTERM, end_server)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    # The standard library does not expect the processes that ranks have left behind.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    try:
        redirect_output(log)
    except OSError:
        os._exit(1)  # the driver reports that the run folder cannot be written


def end_server(number: int, frame: FrameType | None) -> None:
    """Kill all descendants and exit, as the handler of SIGTERM."""
    kill_descendants(os.getpid())
    os._exit(0)


def begin_rank() -> None:
    """Run the rank that the environment variables describe."""
    import numpy as np

    from parbench.bench.rank import worker
    from parbench.bench.world import accelerator

    if accelerator.has_lost_devices():  # an import has initialized CUDA, which a fork cannot use
        os.execv(sys.executable, [sys.executable, "-m", WORKER])
    np.random.seed()
    # Buffers then have other addresses in each rank, as in separate processes.
    num_bytes = mmap.PAGESIZE * (1 + secrets.randbelow(_SHIFT_PAGES))
    shift = mmap.mmap(-1, num_bytes, prot=0)  # noqa: F841  # main() never returns
    worker.main()


if SERVER_LOG_VARIABLE in os.environ:
    set_up_fork_server(Path(os.environ.pop(SERVER_LOG_VARIABLE)))
