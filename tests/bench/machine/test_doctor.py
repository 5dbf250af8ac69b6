"""The doctor: each topic at its limits, nothing unknown disturbing, and a table that can be read."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from parbench.bench.machine.doctor import UNKNOWN, Finding, examine, examine_here, render, sample_load
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine, inspect_machine
from parbench.bench.machine.world_spec import choose_world

GIB = 1 << 30
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
MACHINE = Machine(cores=4, physical_cores=4, memory_bytes=16 * GIB, torch_version="2.13.0+cpu", torch_has_cuda=False)
HOST = {"name": "n1", "address": "10.0.0.1", "governor": "performance", "clock_source": "tsc"}
ENVIRONMENT: dict[str, dict[str, Any]] = {
    "host": {**HOST, "virtualised": False},
    "process": {"cores": 4, "affinity": "0-3", "interface": "eth0"},
    "variables": {"OMP_NUM_THREADS": "1"},
    "load": {"one_minute": 0.1, "steal_percent": 0.0, "swap_used_bytes": 0, "shm_bytes": 8 * GIB},
}
NO_TORCH = {"torch_version": None, "torch_has_cuda": None}
TOPICS = [
    *("torch", "device", "ranks", "cores", "load average", "cpu governor", "clock source"),
    *("steal time", "virtual machine", "interface", "memory", "/dev/shm", "swap", "threads"),
]
GPU_TOPICS = [
    *("gpu driver", "gpu processes", "gpu clocks", "gpu power", "gpu mig", "gpu memory", "gpu pcie", "gpu nvlink"),
    "gpu persistence",
]


def with_gpus(count: int, **more: Any) -> dict[str, Any]:
    return {"gpus": (GPU,) * count, "torch_has_cuda": True, **more}


def examined(**changes: Mapping[str, Any]) -> dict[str, Finding]:
    """Return the findings, by topic, on a good machine of which these values are changed; ``...`` leaves one out."""
    machine = dataclasses.replace(MACHINE, **changes.get("machine", {}))
    merged = {group: {**values, **changes.get(group, {})} for group, values in ENVIRONMENT.items()}
    within = {group: {k: v for k, v in values.items() if v is not ...} for group, values in merged.items()}
    found = {finding.topic: finding for finding in examine(machine, within)}
    assert list(found) == (TOPICS + GPU_TOPICS if machine.gpus else TOPICS)
    for finding in found.values():
        assert finding.found
        assert finding.remedy or not finding.disturbs, "what disturbs can be mended"
    return found


def test_a_good_machine_and_what_is_unknown_do_not_disturb() -> None:
    good = examined().values()
    assert [(found.topic, found.remedy) for found in good if found.disturbs or found.remedy] == []
    assert UNKNOWN not in [found.found for found in good]
    findings = examine(Machine(cores=4, torch_has_cuda=False), {})
    assert not any(found.disturbs or found.remedy for found in findings)
    assert [found.topic for found in findings if found.found != UNKNOWN] == ["device", "ranks", "cores", "threads"]


def test_this_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=30, used=10, free=20))
    here, sampled = inspect_machine(os.environ), sample_load(0.05)
    assert (sampled["shm_bytes"], sampled["swap_used_bytes"]) == (shutil.disk_usage("/dev/shm").total, 10)
    assert sampled["steal_percent"] is not None
    by_topic = {found.topic: found.found for found in examine_here(os.environ)}
    assert ([*by_topic][: len(TOPICS)], by_topic["torch"]) == (TOPICS, here.torch_version)
    assert UNKNOWN not in [by_topic[topic] for topic in ("load average", "steal time", "swap", "/dev/shm")]
    chosen = choose_world(here, nproc=None, backend=None, device=None, allow_single=False)
    assert by_topic["ranks"].startswith(f"{chosen.nproc} on ")

    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: None)
    unknown = sample_load()
    assert (unknown["shm_bytes"], unknown["steal_percent"]) == (None, None)


def test_each_topic_disturbs_beyond_its_limit() -> None:
    interface, name = {"interface": "lo"}, {"address": "127.0.1.1"}
    table: list[tuple[str, dict[str, Any], str, bool]] = [
        ("torch", {"machine": {"torch_version": "2.10.1"}}, "2.10.1", True),
        ("torch", {"machine": {"torch_version": "2.11.0"}}, "2.11.0", False),
        ("torch", {"machine": NO_TORCH}, "not installed", True),
        ("device", {"machine": NO_TORCH}, UNKNOWN, False),
        ("device", {}, "cpu with gloo; no GPU", False),
        ("device", {"machine": with_gpus(2)}, "cuda with nccl; 2 x NVIDIA H100", False),
        ("ranks", {"machine": {"physical_cores": 2}}, "4 on 4 cores (2 physical)", True),
        ("ranks", {"machine": {"cores": 1, "physical_cores": 1}}, "2 on 1 core", True),
        ("cores", {"machine": {"cores": 3}}, "3 available, by a CPU quota on 4, 4 physical in the machine", True),
        ("load average", {"load": {"one_minute": 1.0}}, "1.00 on 4 cores", False),
        ("load average", {"load": {"one_minute": 1.01}}, "1.01 on 4 cores", True),
        ("steal time", {"load": {"steal_percent": 2.1}}, "2.1 %", True),
        ("memory", {"machine": {"memory_bytes": GIB - 1}}, "1.00 GiB available", True),
        ("/dev/shm", {"machine": with_gpus(1), "load": {"shm_bytes": 10**9}}, "0.93 GiB in all", False),
        ("/dev/shm", {"machine": with_gpus(2), "load": {"shm_bytes": 10**9 - 1}}, "0.93 GiB in all", True),
        ("cpu governor", {"host": {"governor": "performance,powersave"}}, "performance,powersave", True),
        ("virtual machine", {"host": {"virtualised": True}}, "yes", True),
        ("interface", {}, "eth0 (n1 resolves to 10.0.0.1)", False),
        ("interface", {"host": name, "process": interface}, "lo (n1 resolves to 127.0.1.1)", True),
        ("interface", {"host": {"address": None}, "process": {"interface": None}}, "- (n1 resolves to nothing)", True),
        ("interface", {"host": {"address": ...}}, UNKNOWN, False),
        ("interface", {"host": name, "variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, "ib0 (GLOO_SOCKET_IFNAME)", False),
        ("threads", {"variables": {"OMP_NUM_THREADS": "2"}}, "OMP_NUM_THREADS=2", True),
        ("threads", {"variables": {"OMP_NUM_THREADS": ...}}, "OMP_NUM_THREADS is not set", False),
    ]
    for topic, change, found, disturbs in table:
        finding = examined(**change)[topic]
        assert (finding.found, finding.disturbs) == (found, disturbs), (topic, change)


def test_a_gpu_disturbs_beyond_its_limits_and_not_where_they_are_unknown() -> None:
    """Each is one of two GPUs, the other telling nothing."""
    clock = {"sm_clock": 1300, "sm_clock_max": 1980, "utilization_percent": 50}
    links = (26.562, 26.562)
    table: list[tuple[str, dict[str, Any], str, bool]] = [
        ("gpu processes", {"processes": ()}, "none", False),
        ("gpu processes", {"memory_used_bytes": 3 * GIB}, "none shown, but 3.00 GiB in use", True),
        ("gpu processes", {"processes": ("python (pid 7)",)}, "python (pid 7)", True),
        ("gpu clocks", {**clock, "utilization_percent": 49}, "SM 1300 of 1980 MHz", False),
        ("gpu clocks", clock, "SM 1300 of 1980 MHz", True),
        ("gpu clocks", {**clock, "sm_clock": 1782}, "SM 1782 of 1980 MHz", False),
        (
            "gpu clocks",
            {"memory_clock": 1215, "slowed_by": ("idle", "software power cap")},
            "memory 1215 MHz, idle",
            False,
        ),
        ("gpu clocks", {"slowed_by": ("software power cap",)}, "slowed by software power cap", True),
        ("gpu clocks", {"slowed_by": ("idle", "hardware power brake")}, "slowed by hardware power brake", True),
        ("gpu power", {"power_limit_watts": 700.0, "power_default_watts": 700.0}, "700 of 700 W", False),
        ("gpu power", {"power_limit_watts": 500.0, "power_default_watts": 700.0}, "500 of 700 W", True),
        ("gpu mig", {"mig": False}, "off", False),
        ("gpu mig", {"mig": True}, "on", True),
        (
            "gpu memory",
            {"errors_uncorrected": 0, "errors_corrected": 9},
            "0 uncorrected errors, 9 corrected errors",
            False,
        ),
        ("gpu memory", {"errors_uncorrected": 1}, "1 uncorrected errors", True),
        ("gpu memory", {"rows_remapped": 2, "remap_pending": True}, "2 rows remapped, a remap pending", True),
        ("gpu memory", {"remap_failed": True}, "a remap failed", True),
        (
            "gpu pcie",
            {"pcie_width_max": 16, "pcie_generation": 1, "pcie_generation_max": 5},
            "generation 1 of 5",
            False,
        ),
        ("gpu pcie", {"pcie_width": 8, "pcie_width_max": 16}, "8 of 16 lanes", True),
        ("gpu nvlink", {"nvlinks": (*links, 0.0)}, "2 of 3 active", False),
        ("gpu persistence", {"persistence": True}, "on", False),
        ("gpu persistence", {"persistence": False}, "off", True),
    ]
    for topic, told, words, disturbs in table:
        gpus = (Gpu(name="H100", index=4), Gpu(name="H100", index=6, **told))
        finding = examined(machine={"gpus": gpus, "torch_has_cuda": True})[topic]
        expected = UNKNOWN if words == UNKNOWN else f"GPU 4: -; GPU 6: {words}"
        assert (finding.found, finding.disturbs) == (expected, disturbs), (topic, told)


def test_gpus_with_unlike_links_disturb() -> None:
    links = (26.562, 26.562)
    uneven = (Gpu(name="H100", nvlinks=links), Gpu(name="H100", nvlinks=(26.562, 0.0)), Gpu(name="H100", nvlinks=()))
    for pair in (uneven[:2], uneven[::2]):
        assert examined(machine={"gpus": pair, "torch_has_cuda": True})["gpu nvlink"].disturbs


def test_what_is_proposed_depends_on_what_there_is() -> None:
    threads = {"machine": with_gpus(2, cores=5), "variables": {"OMP_NUM_THREADS": "3"}}
    table: list[tuple[str, dict[str, Any], str]] = [
        ("torch", {"machine": NO_TORCH}, "pip install 'torch>=2.11'"),
        ("device", {"machine": with_gpus(1)}, "--nproc 1 --allow-single --device cuda"),
        ("ranks", {"machine": {"physical_cores": 2}}, "use --nproc 2: ranks that share a core"),
        ("threads", threads, "6 threads on 5 cores: set OMP_NUM_THREADS=2"),
    ]
    for topic, change, words in table:
        assert words in examined(**change)[topic].remedy, (topic, change)
    for machine in (with_gpus(2), {"cores": 1}):  # that ranks share cores is said of ranks
        assert examined(machine=machine)["device"].remedy == ""


def test_findings_are_an_aligned_table_with_what_to_do_under_them_or_json() -> None:
    findings = (
        Finding(topic="torch", found="2.13.0", disturbs=False),
        Finding(topic="cpu governor", found="powersave", disturbs=True, remedy="set it to performance"),
        Finding(topic="swap", found=UNKNOWN, disturbs=False),
    )
    assert render(findings).splitlines() == [
        "torch         ok        2.13.0",
        "cpu governor  disturbs  powersave",
        "                        set it to performance",
        "swap          -         -",
    ]
    assert render(()) == ""
