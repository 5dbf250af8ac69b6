"""Forks the ranks of each launch from one process that has imported what they need: only the first waits for that.

Launches share nothing else. This process starts no thread (those of numpy's OpenBLAS end at a fork) and touches no GPU;
each rank has its own variables, output and chance, its buffers lie elsewhere, and it ends with this process. What a
rank started and left behind ends with its launch.
"""

import importlib
import mmap
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import select

import msgspec
import numpy as np
import psutil

from parbench.bench.launch.launchers import EXITS, Order
from parbench.bench.launch.processes import adopt_orphans, die_with_parent, leave
from parbench.bench.rank import worker
from parbench.bench.text import replace_file
from parbench.bench.world.torch_compat import has_lost_cuda

_SHIFT_PAGES = 1 << 16


def main() -> None:
    """Import the modules that are named, then start ranks as each line of stdin orders; an empty one ends them."""
    for module in sys.argv[1:]:
        with suppress(ImportError):  # the rank that needs it will say so
            importlib.import_module(module)
    adopt_orphans()
    die_with_parent(0)
    os.write(1, b"ready")
    orders, [ended, tell_ended] = open(0, "rb", buffering=0), os.pipe()  # noqa: SIM115 - never closed
    os.set_blocking(tell_ended, False)
    signal.set_wakeup_fd(tell_ended)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, tuple[int, Path]] = {}  # by process: of what launch
    exits: dict[Path, dict[int, int]] = {}
    while True:
        ready, _, _ = select([orders.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            for pid, status in _ended_children():
                if pid in ranks:
                    rank, folder = ranks.pop(pid)
                    exits[folder][rank] = os.waitstatus_to_exitcode(status)
                    replace_file(folder / EXITS, msgspec.json.encode(exits[folder]))
        else:
            line = orders.readline()
            _kill_children()
            if line.strip():
                order = msgspec.json.decode(line, type=Order)
                exits[Path(order.folder)] = {}
                for rank in range(order.size):
                    if (pid := os.fork()) == 0:
                        _be_rank(rank, order)
                    ranks[pid] = rank, Path(order.folder)
            elif not line:
                leave(0)  # the driver is gone


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _ended_children() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _be_rank(rank: int, order: Order) -> None:
    die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(f"{order.folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus[rank])  # before any thread of the rank's own
    os.environ.update(order.variables, RANK=str(rank), WORLD_SIZE=str(order.size), LOCAL_RANK=str(rank))
    if has_lost_cuda():  # should an import of some release of torch have asked for GPUs
        os.execv(sys.executable, [sys.executable, "-m", "parbench.bench.rank.worker"])
    np.random.seed()
    # Buffers then lie elsewhere in each rank, as in separate processes. main() never returns, which keeps the mapping.
    shift = mmap.mmap(-1, mmap.PAGESIZE * (1 + secrets.randbelow(_SHIFT_PAGES)), prot=0)  # noqa: F841
    worker.main()


if __name__ == "__main__":
    main()
