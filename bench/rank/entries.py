"""How ranks begin under srun, or where another launcher has started them."""

import os
import threading
from collections.abc import Mapping
from datetime import timedelta

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bench.launch.driver import StartRanks
from bench.launch.launchers import Launcher, loopback_variables
from bench.launch.processes import leave
from bench.machine.world_spec import Joined
from bench.rank.worker import Meeting, work

_DRIVER_KEY = "parbench/driver"


def srun() -> None:
    rank = os.environ["SLURM_PROCID"]
    os.environ.update(RANK=rank, WORLD_SIZE=os.environ["SLURM_NTASKS"], LOCAL_RANK=os.environ["SLURM_LOCALID"])
    work(os.environ, meeting=Meeting(int(rank)))
    leave(0)


def join(timeout_seconds: float) -> None:
    """Do this rank's part of the run that rank 0 drives; returns when it is done."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    _work(msgspec.json.decode(store.get(_DRIVER_KEY), type=dict[str, str]), store)


def starter(timeout_seconds: float) -> StartRanks:
    """Return what starts the gang on rank 0: it tells the other ranks where the driver is, and works in a thread."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))

    def start(number: int, variables: Mapping[str, str]) -> Launcher:
        store.set(_DRIVER_KEY, msgspec.json.encode(variables).decode())
        threading.Thread(target=_work, args=(variables, store), kwargs={"with_driver": True}, daemon=True).start()
        return Launcher()

    return start


def _work(variables: Mapping[str, str], store: Store, *, with_driver: bool = False) -> None:
    joined = Joined.find(os.environ)
    if joined is not None and joined.one_node:  # gloo takes the loopback interface, if the user has named none
        os.environ.update({**loopback_variables(), **os.environ})
    work(variables, PrefixStore("parbench", store), with_driver=with_driver)


if __name__ == "__main__":
    srun()
