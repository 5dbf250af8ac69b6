"""One rank under srun: which it is, Slurm tells; where the others meet, rank 0 decides and the driver passes on."""

import os
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in __all__

from bench.launch.control_channel import ADDRESS_VARIABLE, KEY_VARIABLE
from bench.machine.addresses import INTERFACE_VARIABLE
from bench.machine.environment import interface_of
from bench.rank.worker import work

_MEETING_SECONDS = 120


class Meeting:
    """The store of all ranks: rank 0 binds a free port of the address by which it reaches the driver.

    No port is computed, so that two gangs on one node never meet on the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: TCPStore | None = None

    def offer(self, own_address: str) -> str:
        """Bind the store on rank 0 and return where; nothing on other ranks. Gloo is told the interface, too."""
        interface = interface_of(own_address)
        if interface is not None:
            os.environ.setdefault(INTERFACE_VARIABLE, interface)  # a host name may mean 127.0.1.1
        if self._rank != 0:
            return ""
        self._store = _store(own_address, 0, is_master=True)
        return f"{own_address}:{self._store.port}"

    def join(self, where: str) -> TCPStore:
        """Return the store that rank 0 bound."""
        if self._store is None:
            host, _, port = where.rpartition(":")
            self._store = _store(host, int(port), is_master=False)
        return self._store


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    timeout = timedelta(seconds=_MEETING_SECONDS)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def main() -> None:
    """Do the driver's job as the rank that SLURM_PROCID names."""
    rank = os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])
    work(os.environ[ADDRESS_VARIABLE], os.environ[KEY_VARIABLE], meeting=Meeting(int(rank)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way out takes a noticeable part of a launch


if __name__ == "__main__":
    main()
