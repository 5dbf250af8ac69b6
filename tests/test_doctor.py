"""The doctor: each topic at its limits, nothing unknown disturbing, and a table that can be read."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil
import pytest

from bench.doctor import UNKNOWN, Finding, Load, as_json, examine, render, sample_load
from bench.environment import capture
from bench.machine import Gpu, Machine, look
from bench.setting import choose_setting

GIB = 1 << 30
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
GOOD_MACHINE = Machine(
    cores=4, physical_cores=4, memory_bytes=16 * GIB, torch_version="2.13.0+cpu", torch_has_cuda=False
)
GOOD_ENVIRONMENT: dict[str, dict[str, Any]] = {
    "host": {
        "name": "n1",
        "address": "10.0.0.1",
        "governor": "performance",
        "clock_source": "tsc",
        "virtualised": False,
    },
    "process": {"cores": 4, "affinity": "0-3", "interface": "eth0"},
    "variables": {"OMP_NUM_THREADS": "1"},
}
GOOD_LOAD = Load(one_minute=0.1, steal_percent=0.0, swap_used_bytes=0, shm_bytes=8 * GIB)
TOPICS = [
    "torch",
    "device",
    "ranks",
    "cores",
    "load average",
    "cpu governor",
    "clock source",
    "steal time",
    "virtual machine",
    "interface",
    "memory",
    "/dev/shm",
    "swap",
    "threads",
]


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(GOOD_MACHINE, **changes)


def load(**changes: Any) -> Load:
    return dataclasses.replace(GOOD_LOAD, **changes)


def environment(**changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the good environment with values of its groups changed; one that is ``...`` is left out."""
    merged = {group: {**values, **changes.get(group, {})} for group, values in GOOD_ENVIRONMENT.items()}
    return {group: {k: v for k, v in values.items() if v is not ...} for group, values in merged.items()}


def finding(
    topic: str,
    *,
    on: Machine = GOOD_MACHINE,
    within: Mapping[str, Any] = GOOD_ENVIRONMENT,
    under: Load = GOOD_LOAD,
) -> Finding:
    (found,) = [found for found in examine(on, within, load=under) if found.topic == topic]
    assert found.found
    assert found.remedy or not found.disturbs, "what disturbs can be mended"
    return found


# --- the whole ---


def test_a_good_machine_is_not_disturbed() -> None:
    findings = examine(GOOD_MACHINE, GOOD_ENVIRONMENT, load=GOOD_LOAD)
    assert [found.topic for found in findings] == TOPICS
    assert [(found.topic, found.remedy) for found in findings if found.disturbs or found.remedy] == []
    assert UNKNOWN not in [found.found for found in findings]


def test_what_is_unknown_prints_a_dash_and_does_not_disturb() -> None:
    unknown = Machine(cores=4, torch_has_cuda=False)
    findings = {found.topic: found for found in examine(unknown, {}, load=Load())}
    assert not any(found.disturbs or found.remedy for found in findings.values())
    known = [topic for topic, found in findings.items() if found.found != UNKNOWN]
    assert known == ["device", "ranks", "cores", "threads"]


def test_everything_that_disturbs_at_once_has_its_own_remedy() -> None:
    bad = machine(cores=1, memory_bytes=0, gpus=(GPU,), torch_version="2.10.0", torch_has_cuda=True)
    host = {"address": None, "governor": "powersave", "clock_source": "hpet", "virtualised": True}
    strain = Load(one_minute=9.0, steal_percent=9.0, swap_used_bytes=GIB, shm_bytes=0)
    findings = {found.topic: found for found in examine(bad, environment(host=host), load=strain)}
    words = {
        "torch": "pip install --upgrade 'torch>=2.11'",
        "ranks": "a machine with a core for each rank",
        "cores": "CPU quota",
        "load average": "--launches",
        "cpu governor": "cpupower frequency-set -g performance",
        "clock source": "boot with tsc or arch_sys_counter",
        "steal time": "dedicated cores",
        "virtual machine": "compare within a run",
        "interface": "GLOO_SOCKET_IFNAME",
        "memory": "free some",
        "/dev/shm": "--shm-size",
        "swap": "swapoff",
        "threads": "set OMP_NUM_THREADS=1",
    }
    assert [topic for topic in findings if findings[topic].disturbs] == list(words)
    assert [topic for topic, word in words.items() if word not in findings[topic].remedy] == []


def test_this_machine_can_be_examined() -> None:
    here = look(os.environ)
    findings = examine(here, capture(os.environ), load=sample_load(0.05))
    assert [found.topic for found in findings] == TOPICS
    by_topic = {found.topic: found for found in findings}
    assert by_topic["torch"].found == here.torch_version
    assert by_topic["cores"].found.startswith(f"{here.cores} available")
    chosen = choose_setting(here, nproc=None, backend=None, device=None, allow_single=False)
    assert by_topic["ranks"].found.startswith(f"{chosen.setting.nproc} on ")


def test_a_sampled_load_is_what_this_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swap:
        total, used, free = 30, 10, 20

    monkeypatch.setattr(psutil, "swap_memory", Swap)
    sampled = sample_load(0.05)
    assert sampled.shm_bytes == shutil.disk_usage("/dev/shm").total
    assert sampled.swap_used_bytes == 10
    assert sampled.steal_percent is not None
    assert 0 <= sampled.steal_percent <= 100
    assert sampled.one_minute is not None


def test_a_system_without_shared_memory_or_steal_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    intervals = []

    def without_steal(interval: float) -> object:
        intervals.append(interval)
        return object()

    monkeypatch.setattr(shutil, "disk_usage", missing)
    monkeypatch.setattr(psutil, "cpu_times_percent", without_steal)
    sampled = sample_load()
    assert (sampled.shm_bytes, sampled.steal_percent) == (None, None)
    assert intervals == [0.3]


# --- torch, device, ranks ---


@pytest.mark.parametrize(
    ("version", "disturbs"),
    [("2.13.0+cpu", False), ("2.11.0", False), ("2.10.1", True), ("2.9", True), ("1.13.1", True), ("3.0.0a1", False)],
)
def test_an_old_torch_is_to_be_upgraded(version: str, disturbs: bool) -> None:
    found = finding("torch", on=machine(torch_version=version))
    assert (found.found, found.disturbs) == (version, disturbs)
    assert ("torch>=2.11" in found.remedy) == disturbs


def test_an_absent_torch_is_to_be_installed() -> None:
    absent = machine(torch_version=None, torch_has_cuda=None)
    assert finding("torch", on=absent) == Finding(
        topic="torch", found="not installed", disturbs=True, remedy="pip install 'torch>=2.11'"
    )
    assert finding("device", on=absent).found == UNKNOWN
    assert finding("ranks", on=absent).found == UNKNOWN


def test_a_version_that_is_no_number_is_shown_and_not_judged() -> None:
    assert finding("torch", on=machine(torch_version="main")) == Finding(topic="torch", found="main", disturbs=False)


def test_the_device_is_the_one_a_run_would_choose() -> None:
    assert finding("device").found == "cpu with gloo; no GPU"
    two = machine(gpus=(GPU, GPU), torch_has_cuda=True)
    assert finding("device", on=two) == Finding(topic="device", found="cuda with nccl; 2 x NVIDIA H100", disturbs=False)


def test_a_gpu_left_unused_is_explained_and_disturbs_nothing() -> None:
    one = finding("device", on=machine(gpus=(GPU,), torch_has_cuda=True))
    assert (one.found, one.disturbs) == ("cpu with gloo; 1 x NVIDIA H100", False)
    assert "--nproc 1 --allow-single --device cuda" in one.remedy


def test_the_device_does_not_repeat_what_is_said_of_ranks() -> None:
    assert finding("device", on=machine(cores=1)).remedy == ""


@pytest.mark.parametrize(
    ("cores", "physical", "found", "disturbs"),
    [
        (4, 4, "4 on 4 cores", False),
        (4, None, "4 on 4 cores", False),
        (4, 64, "4 on 4 cores", False),
        (4, 2, "4 on 4 cores (2 physical)", True),
        (1, 1, "2 on 1 core", True),
        (16, 8, "8 on 16 cores (8 physical)", False),
    ],
)
def test_ranks_need_a_core_each(cores: int, physical: int | None, found: str, disturbs: bool) -> None:
    ranks = finding("ranks", on=machine(cores=cores, physical_cores=physical))
    assert (ranks.found, ranks.disturbs) == (found, disturbs)


def test_fewer_ranks_are_proposed_where_two_can_run() -> None:
    assert finding("ranks", on=machine(cores=4, physical_cores=2)).remedy.startswith("use --nproc 2:")
    assert "--nproc" not in finding("ranks", on=machine(cores=1)).remedy


# --- cores and load ---


def test_a_quota_below_the_affinity_disturbs() -> None:
    found = finding("cores", on=machine(cores=3))
    assert found.found == "3 available, by a CPU quota on 4, 4 physical in the machine"
    assert found.disturbs


def test_an_affinity_alone_does_not_disturb() -> None:
    found = finding("cores", on=machine(cores=4, physical_cores=None), within=environment(process={"affinity": "8-11"}))
    assert found == Finding(topic="cores", found="4 available", disturbs=False)


@pytest.mark.parametrize(("running", "disturbs"), [(0.0, False), (1.0, False), (1.01, True), (9.0, True)])
def test_other_work_above_a_quarter_of_the_cores_disturbs(running: float, disturbs: bool) -> None:
    found = finding("load average", under=load(one_minute=running))
    assert (found.found, found.disturbs) == (f"{running:.2f} on 4 cores", disturbs)


@pytest.mark.parametrize(("percent", "disturbs"), [(0.0, False), (2.0, False), (2.1, True)])
def test_stolen_time_above_two_percent_disturbs(percent: float, disturbs: bool) -> None:
    found = finding("steal time", under=load(steal_percent=percent))
    assert (found.found, found.disturbs) == (f"{percent:.1f} %", disturbs)


# --- clocks ---


@pytest.mark.parametrize(
    ("governor", "disturbs"), [("performance", False), ("powersave", True), ("performance,powersave", True)]
)
def test_any_governor_but_performance_disturbs(governor: str, disturbs: bool) -> None:
    found = finding("cpu governor", within=environment(host={"governor": governor}))
    assert (found.found, found.disturbs) == (governor, disturbs)


@pytest.mark.parametrize(
    ("source", "disturbs"), [("tsc", False), ("arch_sys_counter", False), ("hpet", True), ("kvm-clock", True)]
)
def test_a_slow_clock_source_disturbs(source: str, disturbs: bool) -> None:
    found = finding("clock source", within=environment(host={"clock_source": source}))
    assert (found.found, found.disturbs) == (source, disturbs)


@pytest.mark.parametrize(("virtual", "found"), [(True, "yes"), (False, "no"), (None, UNKNOWN)])
def test_a_virtual_machine_has_neighbours(virtual: bool | None, found: str) -> None:
    answer = finding("virtual machine", within=environment(host={"virtualised": virtual}))
    assert (answer.found, answer.disturbs) == (found, virtual is True)


# --- interface ---


@pytest.mark.parametrize(
    ("address", "interface", "found", "disturbs"),
    [
        ("10.0.0.1", "eth0", "eth0 (n1 resolves to 10.0.0.1)", False),
        ("10.0.0.1", None, "- (n1 resolves to 10.0.0.1)", False),
        ("fe80::1%eth0", "eth0", "eth0 (n1 resolves to fe80::1%eth0)", False),
        ("127.0.1.1", "lo", "lo (n1 resolves to 127.0.1.1)", True),
        ("127.0.0.1", "lo", "lo (n1 resolves to 127.0.0.1)", True),
        ("::1", "lo", "lo (n1 resolves to ::1)", True),
        (None, None, "- (n1 resolves to nothing)", True),
    ],
)
def test_a_host_name_that_other_nodes_cannot_reach_disturbs(
    address: str | None, interface: str | None, found: str, disturbs: bool
) -> None:
    within = environment(host={"address": address}, process={"interface": interface})
    answer = finding("interface", within=within)
    assert (answer.found, answer.disturbs) == (found, disturbs)
    assert ("GLOO_SOCKET_IFNAME" in answer.remedy) == disturbs


def test_an_interface_that_was_set_is_taken() -> None:
    within = environment(host={"address": "127.0.1.1"}, variables={"GLOO_SOCKET_IFNAME": "ib0"})
    answer = finding("interface", within=within)
    assert answer == Finding(topic="interface", found="ib0 (GLOO_SOCKET_IFNAME)", disturbs=False)


def test_an_address_that_was_not_looked_up_is_unknown() -> None:
    assert finding("interface", within=environment(host={"address": ...})).found == UNKNOWN


# --- memory ---


@pytest.mark.parametrize(("free", "disturbs"), [(GIB, False), (GIB - 1, True), (0, True)])
def test_little_memory_disturbs(free: int, disturbs: bool) -> None:
    assert finding("memory", on=machine(memory_bytes=free)).disturbs is disturbs


def test_memory_is_printed_in_gibibytes() -> None:
    assert finding("memory").found == "16.00 GiB available"
    assert finding("/dev/shm").found == "8.00 GiB in all"
    assert finding("swap").found == "0.00 GiB in use"


@pytest.mark.parametrize(
    ("size", "gpus", "disturbs"),
    [(64 << 20, (GPU,), True), (64 << 20, (), False), (10**9, (GPU,), False), (10**9 - 1, (GPU, GPU), True)],
)
def test_small_shared_memory_disturbs_where_there_are_gpus(size: int, gpus: tuple[Gpu, ...], disturbs: bool) -> None:
    answer = finding("/dev/shm", on=machine(gpus=gpus, torch_has_cuda=True), under=load(shm_bytes=size))
    assert answer.disturbs is disturbs


def test_swap_in_use_disturbs() -> None:
    assert finding("swap", under=load(swap_used_bytes=GIB // 2)).found == "0.50 GiB in use"
    assert finding("swap", under=load(swap_used_bytes=1)).disturbs
    assert not finding("swap").disturbs


# --- threads ---


@pytest.mark.parametrize(
    ("text", "disturbs"), [("1", False), ("2", True), ("1,4", False), ("4,1", True), ("", False), ("many", False)]
)
def test_more_threads_than_cores_disturb(text: str, disturbs: bool) -> None:
    answer = finding("threads", within=environment(variables={"OMP_NUM_THREADS": text}))
    assert (answer.found, answer.disturbs) == (f"OMP_NUM_THREADS={text}", disturbs)


def test_the_number_of_threads_that_fits_is_proposed() -> None:
    two_ranks = machine(cores=5, gpus=(GPU, GPU), torch_has_cuda=True)
    answer = finding("threads", on=two_ranks, within=environment(variables={"OMP_NUM_THREADS": "3"}))
    assert answer.remedy == "6 threads on 5 cores: set OMP_NUM_THREADS=2"
    one_core = finding("threads", on=machine(cores=1))
    assert one_core.remedy == "2 threads on 1 core: set OMP_NUM_THREADS=1"


def test_threads_that_were_not_set_are_said_so() -> None:
    answer = finding("threads", within=environment(variables={"OMP_NUM_THREADS": ...}))
    assert answer == Finding(topic="threads", found="OMP_NUM_THREADS is not set", disturbs=False)


def test_threads_without_torch_are_shown_and_not_judged() -> None:
    answer = finding("threads", on=machine(torch_version=None, torch_has_cuda=None))
    assert answer == Finding(topic="threads", found="OMP_NUM_THREADS=1", disturbs=False)


# --- what is printed ---

FINDINGS = (
    Finding(topic="torch", found="2.13.0", disturbs=False),
    Finding(topic="cpu governor", found="powersave", disturbs=True, remedy="set it to performance"),
    Finding(topic="swap", found=UNKNOWN, disturbs=False),
    Finding(topic="device", found="cpu", disturbs=False, remedy="one GPU found"),
)


def test_the_table_is_aligned_with_what_to_do_under_its_finding() -> None:
    lines = render(FINDINGS).splitlines()
    assert lines == [
        "torch         ok        2.13.0",
        "cpu governor  disturbs  powersave",
        "                        set it to performance",
        "swap          -         -",
        "device        ok        cpu",
        "                        one GPU found",
    ]


def test_the_table_of_nothing_is_empty() -> None:
    assert render(()) == ""


def test_json_holds_what_was_found() -> None:
    encoded = as_json(FINDINGS)
    assert encoded.endswith(b"]\n")
    assert msgspec.json.decode(encoded, type=tuple[Finding, ...]) == FINDINGS
    assert list(msgspec.json.decode(encoded)[0]) == ["topic", "found", "disturbs", "remedy"]
