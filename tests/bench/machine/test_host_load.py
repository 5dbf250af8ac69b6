"""The load of a host during a repetition is computed from its clocks, and much of it is
reported."""

from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from parbench.bench.machine import host_load
from parbench.bench.machine.host_load import HostLoad, LoadMeter

Percent = namedtuple("Percent", "user nice system idle irq softirq steal")


def test_load_of_other_processes_and_stolen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 5 s of four cores, all processes take 10 s, the ranks 6 s and the hypervisor 2 s."""
    percent = Percent(30.0, 5.0, 10.0, 40.0, 2.5, 2.5, 10.0)
    seconds = iter([100.0, 105.0])
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda: percent)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(host_load, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    load = LoadMeter().read(own_seconds=6.0)
    assert load == HostLoad(cores=4, other_cores=0.8, steal_percent=10.0)


def test_load_of_others_is_not_negative() -> None:
    assert LoadMeter().read(own_seconds=1e9).other_cores == 0.0


@pytest.mark.parametrize(
    ("other_cores", "steal_percent", "text"),
    [
        (1.1, 2.0, "other processes kept 1.1 of 4 cores busy"),
        (1.0, 2.6, "the hypervisor took 3 % of the cores' time"),
        (1.0, 2.0, ""),
        (1.0, None, ""),
    ],
)
def test_high_load_is_a_disturbance(
    other_cores: float, steal_percent: float | None, text: str
) -> None:
    load = HostLoad(cores=4, other_cores=other_cores, steal_percent=steal_percent)
    assert load.disturbance == text
