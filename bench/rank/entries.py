"""A run inside ranks that another launcher started: rank 0 drives and does its own part in a thread; others join it."""

import os
import threading
from collections.abc import Mapping
from datetime import timedelta

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bench.launch.control_channel import ADDRESS_VARIABLE, KEY_VARIABLE
from bench.launch.driver import StartGang
from bench.launch.launchers import Gang, JoinedGang, loopback_variables
from bench.plan.options import Joined
from bench.rank.worker import work

_DRIVER_KEY = "parbench/driver"


def join(timeout_seconds: float) -> None:
    """Do this rank's part of the run that rank 0 drives; returns when it is done."""
    store = _rendezvous(timeout_seconds)
    _work(msgspec.json.decode(store.get(_DRIVER_KEY), type=dict[str, str]), store)


def starter(timeout_seconds: float) -> StartGang:
    """Return what starts the gang on rank 0: it tells the other ranks where the driver is, and works in a thread."""
    store = _rendezvous(timeout_seconds)

    def start(number: int, variables: Mapping[str, str]) -> Gang:
        store.set(_DRIVER_KEY, msgspec.json.encode(variables).decode())
        threading.Thread(target=_work, args=(variables, store), kwargs={"with_driver": True}, daemon=True).start()
        return JoinedGang()

    return start


def _work(variables: Mapping[str, str], store: Store, *, with_driver: bool = False) -> None:
    _stay_on_node()
    address, key = variables[ADDRESS_VARIABLE], variables[KEY_VARIABLE]
    work(address, key, PrefixStore("parbench", store), with_driver=with_driver)


def _stay_on_node() -> None:
    """Give gloo the loopback interface where all ranks are known to share a node, and the user has named none."""
    joined = Joined.find(os.environ)
    if joined is not None and joined.one_node:
        for name, value in loopback_variables().items():
            os.environ.setdefault(name, value)


def _rendezvous(timeout_seconds: float) -> Store:
    store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))[0]
    return store
