"""How near ranks are, and under which addresses their driver is found, from what the system tells."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from parbench.bench.machine import slurm_allocation as addresses
from parbench.bench.machine.environment import RankPlace, rank_place, relation, relations
from parbench.bench.machine.slurm_allocation import reachable
from tests.support.trees import write_tree


def at(
    host: str = "a", cpus: tuple[int, ...] = (0, 1), numa: tuple[int, ...] = (0,), **more: str
) -> RankPlace:
    return RankPlace(host=host, cpus=cpus, numa_nodes=numa, **more)


def test_a_pair_is_as_near_as_the_system_tells() -> None:
    links = {frozenset(("aa", "cc")): "NVLink"}
    switches = [at(name, switches=f"spine.{leaf}.{name}") for name, leaf in ("ax", "bx", "cy")]
    for a, b, expected in (
        (at(cpus=(3,)), at(cpus=(3,)), "same core"),
        (at(), at(cpus=(2, 3)), "same NUMA node"),
        (at(), at(numa=(1,)), "other NUMA node"),
        (at(), at(numa=(0, 1)), None),
        (at(gpu="cc"), at(gpu="cc"), "same GPU"),
        (at(gpu="aa"), at(gpu="cc"), "NVLink"),
        (at(gpu="cc"), at(gpu="77"), None),
        (at(gpu="aa"), at("b", gpu="aa"), "other node"),
        (switches[0], switches[1], "same switch"),
        (switches[0], switches[2], "other node"),
    ):
        assert relation(a, b, links) == relation(b, a, links) == expected, (a, b)


def test_every_pair_is_named_once_and_a_large_world_is_left_out() -> None:
    told = {"0-1": "same NUMA node", "0-2": "other node", "1-2": "other node"}
    assert relations([at(), at(), at("b")], {}) == told
    assert len(relations([at()] * 64, {})) == 64 * 63 / 2
    assert relations([at()] * 65, {}) == {}


def test_this_process_has_a_place(tmp_path: Path) -> None:
    folder = "sys/devices/system/node"
    write_tree(
        tmp_path, {f"{folder}/node0/cpulist": "0-1023\n", f"{folder}/node1/cpulist": "2000-2001\n"}
    )
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    here = rank_place("a", {"SLURM_TOPOLOGY_ADDR": "s.a"}, "aa", tmp_path)
    assert here == at(cpus=cpus, gpu="aa", switches="s.a")


# --- addresses ---

TWO = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["192.168.7.5", "192.168.7.6"]}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> "Host":
    return Host(monkeypatch)


class Host:
    """A host with these interfaces, whose name means one address or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.has(TWO)
        self.is_named(None)

    def has(self, interfaces: Mapping[str, Sequence[str]], down: Sequence[str] = ()) -> None:
        found = {
            name: [SimpleNamespace(family=socket.AF_INET, address=address) for address in found]
            + [SimpleNamespace(family=socket.AF_INET6, address="fe80::1")]
            for name, found in interfaces.items()
        }
        states = {name: SimpleNamespace(isup=name not in down) for name in interfaces}
        self._monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
        self._monkeypatch.setattr(psutil, "net_if_stats", lambda: states)

    def is_named(self, address: str | None) -> None:
        self._monkeypatch.setattr(addresses, "host_address", lambda: address)


def test_a_driver_offers_the_chosen_interface_first_then_what_its_name_means_then_all_but_the_loopback(
    host: Host,
) -> None:
    assert reachable({}) == ("10.0.0.5", "192.168.7.5", "192.168.7.6")
    host.is_named("192.168.7.5")
    assert reachable({}) == ("192.168.7.5", "10.0.0.5", "192.168.7.6")
    host.is_named("192.168.7.6")
    assert reachable({"GLOO_SOCKET_IFNAME": "eth0"}) == ("10.0.0.5", "192.168.7.6", "192.168.7.5")


def test_what_is_of_no_interface_or_of_one_that_is_down_is_not_offered(host: Host) -> None:
    for address in ("127.0.1.1", "10.9.9.9", "fe80::1"):
        host.is_named(address)
        assert reachable({}) == ("10.0.0.5", "192.168.7.5", "192.168.7.6"), address
    host.has(TWO, down=["ib0"])
    assert reachable({"GLOO_SOCKET_IFNAME": "ib0"}) == ("10.0.0.5",)
    host.has({"lo": ["127.0.0.1"]})
    assert reachable({}) == ("127.0.0.1",), "a host with nothing but itself"


def test_this_host_answers_where_it_says_it_can_be_found() -> None:
    with socket.create_server(("", 0)) as server:
        for address in reachable({}):
            socket.create_connection((address, server.getsockname()[1]), timeout=5).close()
