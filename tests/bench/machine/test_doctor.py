"""The doctor compares the state of a machine with limits and names fixes."""

import os
from typing import Any

import psutil
import pytest

from parbench.bench.machine import doctor
from parbench.bench.machine.disturbance import UNKNOWN, Disturbance
from parbench.bench.machine.doctor import (
    examine_cores,
    examine_gpus,
    examine_this_host,
    render,
)
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine

GIB = 1 << 30


def diagnose(
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_cores: int = 4,
    host_cores: int = 4,
    load: float = 0.1,
    governor: str | None = "performance",
) -> dict[str, Disturbance]:
    """Return the findings by topic on a host that is good except for these changes."""
    monkeypatch.setattr(doctor, "get_affinity", lambda: frozenset(range(4)))
    monkeypatch.setattr(doctor, "read_governors", lambda: governor)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: host_cores)
    return {finding.topic: finding for finding in examine_cores(num_cores)}


def test_good_machine_has_no_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    for finding in diagnose(monkeypatch).values():
        assert not finding.disturbs
        assert not finding.fix
        assert finding.facts != UNKNOWN


def test_unknown_governor_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = diagnose(monkeypatch, governor=None)["cpu governor"]
    assert (finding.facts, finding.disturbs) == (UNKNOWN, False)


def test_examine_here_reports_this_machine() -> None:
    findings = {finding.topic: finding.facts for finding in examine_this_host(os.environ)}
    for topic in ("cores", "load average"):
        assert findings[topic] != UNKNOWN


@pytest.mark.parametrize(
    ("topic", "state", "fact", "disturbs"),
    [
        ("cores", {"num_cores": 3}, "3 available of 4", True),
        ("load average", {"load": 1.01}, "1.01", True),
        ("load average", {"load": 32.0, "host_cores": 128}, "128 cores", False),
        ("cpu governor", {"governor": "performance,powersave"}, "powersave", True),
    ],
)
def test_limits_of_host(
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    state: dict[str, Any],
    fact: str,
    disturbs: bool,
) -> None:
    finding = diagnose(monkeypatch, **state)[topic]
    assert fact in finding.facts
    assert finding.disturbs is disturbs
    assert bool(finding.fix) is disturbs


CLOCKS = {"sm_clock": 1300, "sm_clock_max": 1980, "slowed_by": ("software power cap",)}
CAPPED_POWER = {"power_limit_watts": 500.0, "power_default_watts": 700.0}


@pytest.mark.parametrize(
    ("topic", "fields", "fact", "disturbs"),
    [
        ("gpu memory in use", {"memory_used_bytes": 2 * GIB}, "2.00 GiB", True),
        ("gpu memory in use", {"memory_used_bytes": GIB // 2}, "0.50 GiB", False),
        ("gpu clocks", CLOCKS, "1300 of 1980 MHz (SM), software power cap", False),
        ("gpu clocks", {"slowed_by": ("applications clocks setting",)}, "setting", True),
        ("gpu clocks", {"slowed_by": ("idle", "hardware power brake")}, "power brake", True),
        ("gpu power", CAPPED_POWER, "500 of", True),
        ("gpu mig", {"mig": True}, "on", True),
        ("gpu fabric", {"fabric": "in progress"}, "in progress", True),
        ("gpu memory errors", {"errors_uncorrected": 0}, "0 uncorrected", False),
        ("gpu memory errors", {"errors_uncorrected": 1}, "1 uncorrected", True),
        ("gpu pcie", {"pcie_width": 8, "pcie_width_max": 16}, "8 of 16 lanes", True),
        ("gpu persistence", {"persistence": False}, "off", True),
    ],
)
def test_limits_of_gpus(topic: str, fields: dict[str, Any], fact: str, disturbs: bool) -> None:
    gpus = (Gpu(name="H100", index=4), Gpu(name="H100", index=6, **fields))
    findings = {finding.topic: finding for finding in examine_gpus(Machine(cores=4, gpus=gpus))}
    unknown, known = findings[topic].facts.split("; GPU 6: ")
    assert unknown == "GPU 4: -"
    assert fact in known
    assert findings[topic].disturbs is disturbs


@pytest.mark.parametrize("gpus", [(), (Gpu(name="H100"),)])
def test_silent_gpu_is_a_finding(gpus: tuple[Gpu, ...]) -> None:
    lost = "NVML reported 'GPU is lost (GPU 0)'"
    machine = Machine(cores=4, gpus=gpus, silent_gpus=("0",), gpu_failure=lost)
    finding = examine_gpus(machine)[0]
    assert (finding.topic, finding.disturbs) == ("gpus", True)
    assert finding.facts == f"no answer from GPU 0: {lost}"


def test_render_has_verdict_and_fix() -> None:
    governor = Disturbance(
        topic="cpu governor",
        facts="powersave",
        disturbs=True,
        fix="set it",
    )
    swap = Disturbance(topic="swap", facts=UNKNOWN)
    *lines, last_line = [line.split() for line in render((governor, swap)).splitlines()]
    assert lines == [
        ["cpu", "governor", "disturbs", "powersave"],
        ["set", "it"],
    ]
    assert last_line[:4] == ["swap", "-", "not", "readable,"]
