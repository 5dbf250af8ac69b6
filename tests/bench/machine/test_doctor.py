"""The doctor compares the state of a machine with limits and names fixes."""

import os
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.disturbance import UNKNOWN, Disturbance
from parbench.bench.machine.doctor import (
    CoreState,
    examine_cores,
    examine_gpus,
    examine_this_host,
    render,
)
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine, inspect_machine

GIB = 1 << 30
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
MACHINE = Machine(
    cores=4,
    host_cores=4,
    physical_cores=4,
    memory_bytes=16 * GIB,
    torch_version="2.13.0+cpu",
    torch_has_cuda=False,
)
STATE = CoreState(
    num_allowed=4,
    load_average=0.1,
    governor="performance",
    steal_percent=0.0,
    shm_bytes=8 * GIB,
)
NO_TORCH = {"torch_version": None, "torch_has_cuda": None}
TWO_GPUS = {"gpus": (GPU, GPU), "torch_has_cuda": True}


def diagnose(machine: dict[str, Any], **state: Any) -> dict[str, Disturbance]:
    """Return the findings by topic on a good machine with these changes."""
    changed = replace(MACHINE, **machine)
    findings = [*examine_cores(changed, replace(STATE, **state)), *examine_gpus(changed)]
    for finding in findings:
        assert finding.fix or not finding.disturbs
    return {finding.topic: finding for finding in findings}


def test_good_machine_has_no_disturbance() -> None:
    for finding in diagnose({}).values():
        assert not finding.disturbs
        assert not finding.fix
        assert finding.facts != UNKNOWN


def test_unknown_facts_do_not_disturb() -> None:
    state = replace(STATE, governor=None, steal_percent=None, shm_bytes=None)
    findings = examine_cores(Machine(cores=4, torch_has_cuda=False), state)
    assert not any(finding.disturbs for finding in findings)
    known = [finding.topic for finding in findings if finding.facts != UNKNOWN]
    assert known == ["ranks", "cores"]


def test_examine_here_reports_this_machine() -> None:
    findings = {finding.topic: finding.facts for finding in examine_this_host(os.environ)}
    assert findings["torch"] == inspect_machine(os.environ).torch_version
    for topic in ("load average", "steal time", "/dev/shm"):
        assert findings[topic] != UNKNOWN


BIG_HOST = {"host_cores": 128}  # of which a job may use four


@pytest.mark.parametrize(
    ("topic", "machine", "state", "fact", "disturbs"),
    [
        ("torch", NO_TORCH, {}, "not installed", True),
        ("ranks", TWO_GPUS, {}, "2 on cuda with nccl", False),
        ("ranks", {"physical_cores": 2}, {}, "4 on cpu with gloo; 2 physical cores", True),
        ("cores", {"cores": 3}, {}, "3 available of 4", True),
        ("load average", {}, {"load_average": 1.01}, "1.01", True),
        ("load average", BIG_HOST, {"load_average": 32.0}, "128 cores", False),
        ("steal time", {}, {"steal_percent": 2.1}, "2.1 %", True),
        ("cpu governor", {}, {"governor": "performance,powersave"}, "powersave", True),
        ("/dev/shm", TWO_GPUS, {"shm_bytes": 10**9}, "0.93 GiB", False),
        ("/dev/shm", TWO_GPUS, {"shm_bytes": 10**9 - 1}, "0.93 GiB", True),
    ],
)
def test_limits_of_machine_and_its_state(
    topic: str,
    machine: dict[str, Any],
    state: dict[str, Any],
    fact: str,
    disturbs: bool,
) -> None:
    finding = diagnose(machine, **state)[topic]
    assert fact in finding.facts
    assert finding.disturbs is disturbs


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
    finding = diagnose({"gpus": gpus, "torch_has_cuda": True})[topic]
    unknown, known = finding.facts.split("; GPU 6: ")
    assert unknown == "GPU 4: -"
    assert fact in known
    assert finding.disturbs is disturbs


LOST = "NVML reported 'GPU is lost (GPU 0)'"
ONE_LOST = {**TWO_GPUS, "silent_gpus": ("0000:19:00.0",), "gpu_failure": LOST}


@pytest.mark.parametrize("machine", [ONE_LOST, {**ONE_LOST, "gpus": ()}])
def test_silent_gpu_is_a_finding(machine: dict[str, Any]) -> None:
    findings = diagnose(machine)
    assert findings["gpus"].disturbs
    assert "no answer from GPU 0000:19:00.0" in findings["gpus"].facts
    assert "'GPU is lost (GPU 0)'" in findings["gpus"].facts
    assert findings["ranks"].facts == UNKNOWN


def test_render_has_verdict_and_fix() -> None:
    governor = Disturbance(
        topic="cpu governor",
        facts="powersave",
        disturbs=True,
        fix="set it",
    )
    swap = Disturbance(topic="swap", facts=UNKNOWN)
    lines = [line.split() for line in render((governor, swap)).splitlines()]
    assert lines == [
        ["cpu", "governor", "disturbs", "powersave"],
        ["set", "it"],
        ["swap", "-", "-"],
    ]
