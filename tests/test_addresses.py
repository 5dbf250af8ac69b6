"""Under which addresses a driver is found: the chosen interface's first, the loopback's last."""

import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import psutil
import pytest

from bench import addresses as module
from bench.addresses import reachable

TWO = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["192.168.7.5", "192.168.7.6"]}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> "Host":
    return Host(monkeypatch)


class Host:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.has(TWO)
        self.is_named(None)

    def has(self, interfaces: Mapping[str, Sequence[str]], down: Sequence[str] = ()) -> None:
        found = {
            name: [SimpleNamespace(family=socket.AF_INET, address=address) for address in addresses]
            + [SimpleNamespace(family=socket.AF_INET6, address="fe80::1")]
            for name, addresses in interfaces.items()
        }
        states = {name: SimpleNamespace(isup=name not in down) for name in interfaces}
        self._monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
        self._monkeypatch.setattr(psutil, "net_if_stats", lambda: states)

    def is_named(self, address: str | None) -> None:
        self._monkeypatch.setattr(module, "host_address", lambda: address)


def test_all_addresses_but_the_loopbacks_are_offered(host: Host) -> None:
    assert reachable({}) == ("10.0.0.5", "192.168.7.5", "192.168.7.6")


def test_what_the_host_name_means_comes_first(host: Host) -> None:
    host.is_named("192.168.7.5")
    assert reachable({}) == ("192.168.7.5", "10.0.0.5", "192.168.7.6")


def test_the_chosen_interface_comes_before_the_name(host: Host) -> None:
    host.is_named("10.0.0.5")
    assert reachable({"GLOO_SOCKET_IFNAME": "ib0"}) == ("192.168.7.5", "192.168.7.6", "10.0.0.5")


@pytest.mark.parametrize("address", ["127.0.1.1", "10.9.9.9", "fe80::1"])
def test_a_name_that_means_no_interface_of_this_host_is_not_offered(host: Host, address: str) -> None:
    host.is_named(address)
    assert reachable({}) == ("10.0.0.5", "192.168.7.5", "192.168.7.6")


def test_an_interface_that_is_down_is_not_offered(host: Host) -> None:
    host.has(TWO, down=["ib0"])
    assert reachable({"GLOO_SOCKET_IFNAME": "ib0"}) == ("10.0.0.5",)


def test_a_host_with_nothing_but_itself_offers_that(host: Host) -> None:
    host.has({"lo": ["127.0.0.1"]})
    assert reachable({}) == ("127.0.0.1",)


def test_this_host_answers_where_it_says_it_can_be_found() -> None:
    with socket.create_server(("", 0)) as server:
        for address in reachable({}):
            socket.create_connection((address, server.getsockname()[1]), timeout=5).close()
