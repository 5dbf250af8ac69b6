"""What else a host did in a launch: counted from its own clocks, and said where it is much."""

import os
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from parbench.bench.machine import host_load
from parbench.bench.machine.host_load import HostLoad, LoadMeter

Times = namedtuple("Times", "user nice system idle irq softirq steal")


def test_a_host_is_busy_with_ranks_and_with_others_and_the_hypervisor_takes_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [
        Times(100, 0, 10, 50, 1, 1, 7),
        Times(106, 1, 12, 55, 1.5, 1.5, 9),
    ]  # ten seconds busy, two stolen
    monkeypatch.setattr(psutil, "cpu_times", lambda: seen.pop(0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.456, 2.0, 1.0))
    monkeypatch.setattr(host_load, "time", SimpleNamespace(monotonic=iter((100.0, 105.0)).__next__))
    found = LoadMeter().read(own_seconds=6.0)
    assert found == HostLoad(cores=4, one_minute=3.46, other_cores=0.8, steal_percent=10.0)


@pytest.mark.parametrize(("own", "others"), [(None, None), (1e9, 0.0)])
def test_others_are_unknown_without_the_ranks_own_time_and_never_less_than_nothing(
    own: float | None, others: float | None
) -> None:
    assert LoadMeter().read(own).other_cores == others


def test_only_what_is_much_is_told() -> None:
    for load, words in {
        HostLoad(cores=2): "",
        HostLoad(cores=4, one_minute=9.0, other_cores=1.0, steal_percent=2.0): "",
        HostLoad(cores=4, other_cores=1.1): "other processes kept 1.1 of 4 cores busy",
        HostLoad(
            cores=2, other_cores=0.1, steal_percent=2.6
        ): "the hypervisor took 3 % of the cores' time",
        HostLoad(
            cores=2, other_cores=1.5, steal_percent=7.0
        ): "other processes kept 1.5 of 2 cores busy and the "
        "hypervisor took 7 % of the cores' time",
    }.items():
        assert load.disturbance == words
