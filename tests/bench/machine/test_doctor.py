"""The doctor: limits of each topic, unknown facts and the printed table."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from types import EllipsisType, SimpleNamespace
from typing import Any

import psutil
import pytest

from parbench.bench.machine.doctor import (
    UNKNOWN,
    Finding,
    examine,
    examine_here,
    render,
    sample_load,
)
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine, inspect_machine

GIB = 1 << 30
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
MACHINE = Machine(
    cores=4,
    physical_cores=4,
    memory_bytes=16 * GIB,
    torch_version="2.13.0+cpu",
    torch_has_cuda=False,
)
ENVIRONMENT: dict[str, dict[str, Any]] = {
    "host": {
        "name": "n1",
        "address": "10.0.0.1",
        "governor": "performance",
        "clock_source": "tsc",
        "virtualised": False,
    },
    "process": {"cores": 4, "affinity": "0-3", "interface": "eth0"},
    "variables": {"OMP_NUM_THREADS": "1"},
    "load": {"one_minute": 0.1, "steal_percent": 0.0, "swap_used_bytes": 0, "shm_bytes": 8 * GIB},
}
NO_TORCH = {"torch_version": None, "torch_has_cuda": None}
LINKS = (26.562, 26.562)


def with_gpus(*gpus: Gpu, **fields: Any) -> dict[str, Any]:
    return {"gpus": gpus, "torch_has_cuda": True, **fields}


def diagnose(**changes: Mapping[str, Any]) -> dict[str, Finding]:
    """Return the findings by topic on a good machine with these changes; ``...`` removes a key."""
    machine = dataclasses.replace(MACHINE, **changes.get("machine", {}))
    environment = {
        group: {
            key: value
            for key, value in {**values, **changes.get(group, {})}.items()
            if not isinstance(value, EllipsisType)
        }
        for group, values in ENVIRONMENT.items()
    }
    findings = {finding.topic: finding for finding in examine(machine, environment)}
    for finding in findings.values():
        assert finding.found
        assert finding.remedy or not finding.disturbs
    return findings


def test_good_machine_has_no_findings() -> None:
    findings = diagnose().values()
    assert not [finding for finding in findings if finding.disturbs or finding.remedy]
    assert UNKNOWN not in [finding.found for finding in findings]


def test_unknown_facts_do_not_disturb() -> None:
    findings = examine(Machine(cores=4, torch_has_cuda=False), {})
    assert not any(finding.disturbs or finding.remedy for finding in findings)
    known = [finding.topic for finding in findings if finding.found != UNKNOWN]
    assert known == ["device", "ranks", "cores", "threads"]


def test_examine_here_reports_this_machine() -> None:
    findings = {finding.topic: finding.found for finding in examine_here(os.environ)}
    assert findings["torch"] == inspect_machine(os.environ).torch_version
    topics = ("load average", "steal time", "swap", "/dev/shm")
    assert UNKNOWN not in [findings[topic] for topic in topics]


def test_sample_load_reads_swap_shm_and_steal(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = SimpleNamespace(total=30, used=10, free=20)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    sample = sample_load(0.05)
    assert sample["swap_used_bytes"] == 10
    assert sample["shm_bytes"] == shutil.disk_usage("/dev/shm").total
    assert sample["steal_percent"] is not None

    def raise_missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", raise_missing)
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: None)
    unknown = sample_load()
    assert (unknown["shm_bytes"], unknown["steal_percent"]) == (None, None)


LOOPBACK = {"host": {"address": "127.0.1.1"}, "process": {"interface": "lo"}}
NO_ADDRESS = {"host": {"address": None}, "process": {"interface": None}}


@pytest.mark.parametrize(
    ("topic", "changes", "fact", "disturbs"),
    [
        ("torch", {"machine": {"torch_version": "2.10.1"}}, "2.10.1", True),
        ("torch", {"machine": {"torch_version": "2.11.0"}}, "2.11.0", False),
        ("torch", {"machine": NO_TORCH}, "not installed", True),
        ("device", {"machine": NO_TORCH}, UNKNOWN, False),
        ("device", {}, "cpu with gloo", False),
        ("device", {"machine": with_gpus(GPU, GPU)}, "2 x NVIDIA H100", False),
        ("ranks", {"machine": {"physical_cores": 2}}, "4 on 4 cores (2 physical)", True),
        ("ranks", {"machine": {"cores": 1, "physical_cores": 1}}, "2 on 1 core", True),
        ("cores", {"machine": {"cores": 3}}, "3 available", True),
        ("load average", {"load": {"one_minute": 1.0}}, "1.00", False),
        ("load average", {"load": {"one_minute": 1.01}}, "1.01", True),
        ("steal time", {"load": {"steal_percent": 2.1}}, "2.1 %", True),
        ("memory", {"machine": {"memory_bytes": GIB - 1}}, "1.00 GiB", True),
        ("/dev/shm", {"machine": with_gpus(GPU), "load": {"shm_bytes": 10**9}}, "0.93", False),
        (
            "/dev/shm",
            {"machine": with_gpus(GPU, GPU), "load": {"shm_bytes": 10**9 - 1}},
            "0.93",
            True,
        ),
        ("cpu governor", {"host": {"governor": "performance,powersave"}}, "powersave", True),
        ("virtual machine", {"host": {"virtualised": True}}, "yes", True),
        ("interface", {}, "eth0 (n1 resolves to 10.0.0.1)", False),
        ("interface", LOOPBACK, "lo (n1 resolves to 127.0.1.1)", True),
        ("interface", NO_ADDRESS, "nothing", True),
        ("interface", {"host": {"address": ...}}, UNKNOWN, False),
        ("interface", {**LOOPBACK, "variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, "ib0", False),
        ("threads", {"variables": {"OMP_NUM_THREADS": "2"}}, "OMP_NUM_THREADS=2", True),
        ("threads", {"variables": {"OMP_NUM_THREADS": ...}}, "not set", False),
    ],
)
def test_topic_limits(topic: str, changes: dict[str, Any], fact: str, disturbs: bool) -> None:
    finding = diagnose(**changes)[topic]
    assert fact in finding.found
    assert finding.disturbs is disturbs


CLOCKS = {"sm_clock": 1300, "sm_clock_max": 1980, "utilization_percent": 50}


@pytest.mark.parametrize(
    ("topic", "fields", "fact", "disturbs"),
    [
        ("gpu processes", {"processes": ()}, "none", False),
        ("gpu processes", {"memory_used_bytes": 3 * GIB}, "3.00 GiB in use", True),
        ("gpu processes", {"processes": ("python (pid 7)",)}, "python (pid 7)", True),
        ("gpu clocks", {**CLOCKS, "utilization_percent": 49}, "SM 1300 of 1980 MHz", False),
        ("gpu clocks", CLOCKS, "SM 1300 of 1980 MHz", True),
        ("gpu clocks", {**CLOCKS, "sm_clock": 1782}, "SM 1782 of 1980 MHz", False),
        ("gpu clocks", {"slowed_by": ("idle", "software power cap")}, "idle", False),
        ("gpu clocks", {"slowed_by": ("software power cap",)}, "software power cap", True),
        ("gpu clocks", {"slowed_by": ("idle", "hardware power brake")}, "power brake", True),
        ("gpu power", {"power_limit_watts": 700.0, "power_default_watts": 700.0}, "700 W", False),
        ("gpu power", {"power_limit_watts": 500.0, "power_default_watts": 700.0}, "500 of", True),
        ("gpu mig", {"mig": False}, "off", False),
        ("gpu mig", {"mig": True}, "on", True),
        ("gpu memory", {"errors_uncorrected": 0, "errors_corrected": 9}, "9 corrected", False),
        ("gpu memory", {"errors_uncorrected": 1}, "1 uncorrected", True),
        ("gpu memory", {"rows_remapped": 2, "remap_pending": True}, "pending", True),
        ("gpu memory", {"remap_failed": True}, "failed", True),
        ("gpu pcie", {"pcie_generation": 1, "pcie_generation_max": 5}, "1 of 5", False),
        ("gpu pcie", {"pcie_width": 8, "pcie_width_max": 16}, "8 of 16 lanes", True),
        ("gpu nvlink", {"nvlinks": (*LINKS, 0.0)}, "2 of 3 active", False),
        ("gpu persistence", {"persistence": True}, "on", False),
        ("gpu persistence", {"persistence": False}, "off", True),
    ],
)
def test_gpu_topic_limits(topic: str, fields: dict[str, Any], fact: str, disturbs: bool) -> None:
    gpus = (Gpu(name="H100", index=4), Gpu(name="H100", index=6, **fields))
    finding = diagnose(machine=with_gpus(*gpus))[topic]
    unknown, _, known = finding.found.partition("; GPU 6: ")
    assert unknown == "GPU 4: -"
    assert fact in known
    assert finding.disturbs is disturbs


@pytest.mark.parametrize("nvlinks", [(26.562, 0.0), ()])
def test_gpus_with_unequal_links_disturb(nvlinks: tuple[float, ...]) -> None:
    gpus = (Gpu(name="H100", nvlinks=LINKS), Gpu(name="H100", nvlinks=nvlinks))
    assert diagnose(machine=with_gpus(*gpus))["gpu nvlink"].disturbs


def test_remedy_names_the_command() -> None:
    threads = {"machine": with_gpus(GPU, GPU, cores=5), "variables": {"OMP_NUM_THREADS": "3"}}
    assert "pip install" in diagnose(machine=NO_TORCH)["torch"].remedy
    assert "--allow-single" in diagnose(machine=with_gpus(GPU))["device"].remedy
    assert "--nproc 2" in diagnose(machine={"physical_cores": 2})["ranks"].remedy
    assert "OMP_NUM_THREADS=2" in diagnose(**threads)["threads"].remedy


def test_render_aligns_findings_and_remedies() -> None:
    findings = (
        Finding(topic="torch", found="2.13.0", disturbs=False),
        Finding(topic="cpu governor", found="powersave", disturbs=True, remedy="set performance"),
        Finding(topic="swap", found=UNKNOWN, disturbs=False),
    )
    assert render(findings).splitlines() == [
        "torch         ok        2.13.0",
        "cpu governor  disturbs  powersave",
        "                        set performance",
        "swap          -         -",
    ]
    assert render(()) == ""
