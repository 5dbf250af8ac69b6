"""The first import of the fork server: sets the server up and runs the ranks that it forks.

The server starts no thread, because numpy's OpenBLAS threads would be missing after a fork, and it
does not initialize CUDA. Each rank has its own variables, output, random numbers and addresses of
buffers.
"""

import mmap
import os
import secrets
import signal
import sys
import warnings
from pathlib import Path

from parbench.bench.launch.launchers import (
    DRIVER_VARIABLE,
    SERVER_LOG_VARIABLE,
    WORKER,
    redirect_output,
)
from parbench.bench.launch.processes import adopt_orphans, die_with_parent

_SHIFT_PAGES = 1 << 16
"""The largest number of pages by which the addresses of a rank's buffers are shifted."""


def set_up_fork_server(log: Path, driver: int) -> None:
    """Set this process up as the fork server, whose output goes to the file ``log``.

    When the driver (the process of ``parbench run``, with the process id ``driver``) ends, the
    kernel kills this process. When this process ends, the kernel kills the ranks.
    """
    die_with_parent(signal.SIGKILL, driver)
    adopt_orphans()
    # The standard library does not expect the processes that ranks have left behind.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
    try:
        redirect_output(log)
    except OSError:
        os._exit(1)  # the driver reports that the run folder cannot be written


def begin_rank() -> None:
    """Run this forked process as the rank that its environment variables describe.

    It never returns. If the fork cannot use CUDA, a new Python interpreter replaces the process.
    """
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
    set_up_fork_server(
        Path(os.environ.pop(SERVER_LOG_VARIABLE)), int(os.environ.pop(DRIVER_VARIABLE))
    )
