"""Cores, memory, GPUs and torch are those that this process may use."""

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec
import psutil
import pytest

from parbench.bench.machine import machine
from parbench.bench.machine.gpu import Gpu, GpuReport
from parbench.bench.machine.machine import (
    Machine,
    count_available_cores,
    count_available_memory_bytes,
    find_package_version,
    find_silent_gpus,
    inspect_machine,
)
from tests.support.nvidia import H100, LOST, gpus, install
from tests.support.trees import write_tree

GIB = 1 << 30
CGROUP = "0::/jobs/one\n"


def write_cgroup(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    tree = {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
    return write_tree(root, {"proc/self/cgroup": cgroup, **tree})


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (CGROUP, {}, 8),
        (CGROUP, {"jobs/one/cpu.max": "50000 100000"}, 1),
        (CGROUP, {"jobs/one/cpu.max": "max 100000"}, 8),
        (CGROUP, {"jobs/one/cpu.max": "700000 100000", "jobs/cpu.max": "500000 100000"}, 5),
        # Inside a container the limit lies at the mount.
        ("0::/docker/0123\n", {"cpu.max": "200000 100000"}, 2),
        # A path may contain colons.
        ("0::/pod:0123\n", {"pod:0123/cpu.max": "300000 100000"}, 3),
    ],
)
def test_cores_are_limited_by_cgroups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr(machine, "get_affinity", lambda pid=0: frozenset(range(8)))
    assert count_available_cores(write_cgroup(tmp_path, cgroup, files)) == cores


def limit_memory(limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        "jobs/one/memory.max": limit,
        "jobs/one/memory.current": str(used),
        "jobs/one/memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 7\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "gibibytes"),
    [
        (CGROUP, {}, 16),
        (CGROUP, limit_memory(str(8 * GIB), 3 * GIB, cached=GIB), 6),
        (CGROUP, limit_memory("max", 3 * GIB), 16),
        (CGROUP, limit_memory(str(GIB), 2 * GIB), 0),
    ],
)
def test_memory_is_limited_by_cgroups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    gibibytes: int,
) -> None:
    class Memory:
        available = 16 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    root = write_cgroup(tmp_path, cgroup, files)
    assert count_available_memory_bytes(root) == gibibytes * GIB


@pytest.mark.parametrize(
    ("version_file", "has_cuda"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '12.8'\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
    ],
)
def test_cuda_of_torch_is_read_from_version_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version_file: str,
    has_cuda: bool,
) -> None:
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)
    (tmp_path / "version.py").write_text(version_file)
    assert inspect_machine({}).torch_has_cuda is has_cuda


@pytest.mark.parametrize(
    ("value", "may_share"),
    [
        ("1", True),
        ("0", False),
        ("", False),
    ],
)
def test_sharing_of_gpus_is_read_from_environment(value: str, may_share: bool) -> None:
    machine = inspect_machine({"NCCL_MULTI_RANK_GPU_ENABLE": value})
    assert machine.may_share_gpus is may_share


def test_silent_gpu_of_a_host_is_found(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 3, gpu0=LOST))
    this_machine = inspect_machine(environ)
    assert len(this_machine.gpus) == 2
    assert this_machine.silent_gpus == ("0",)
    assert "GPU is lost" in this_machine.gpu_failure
    # A node of an allocation sends it to the driver of a run.
    encoded = msgspec.json.encode(this_machine)
    assert msgspec.json.decode(encoded, type=Machine) == this_machine


def test_this_machine_is_inspected(tmp_path: Path) -> None:
    this_machine = inspect_machine(install(tmp_path, gpus(H100, 2)))
    assert this_machine.cores == count_available_cores() <= len(os.sched_getaffinity(0))
    assert 0 < (this_machine.memory_bytes or 0) <= psutil.virtual_memory().total
    assert [gpu.name for gpu in this_machine.gpus] == [H100["name"], H100["name"]]
    assert this_machine.torch_version == find_package_version("torch")


def make_report(*indices: int, lost: tuple[int, ...] = (), failure: str = "") -> GpuReport:
    """Return NVML's report of a host on which the GPUs of these indices answer."""
    answering = tuple(Gpu(index=index) for index in indices)
    return GpuReport(gpus=answering, lost=lost, failure=failure)


NO_ANSWER = make_report(failure="NVML did not answer within 60 s")
ADDRESSES = ("0000:19:00.0", "0000:2a:00.0")


@pytest.mark.parametrize(
    ("report", "visible", "silent"),
    [
        (make_report(0, 1), None, ()),
        (make_report(0, lost=(1,)), None, ("1",)),
        (make_report(lost=(0, 1)), None, ("0", "1")),
        (make_report(0, lost=(1,)), "0", ()),
        (make_report(0, lost=(1,)), "0, 1", ("1",)),
        (NO_ANSWER, None, ADDRESSES),
        (NO_ANSWER, "0,1", ADDRESSES),
        (NO_ANSWER, "", ()),
        (NO_ANSWER, "-1", ()),
        (NO_ANSWER, "NoDevFiles", ()),
        (GpuReport(), None, ()),  # NVML is not installed.
    ],
)
def test_visible_gpus_that_do_not_answer_are_silent(
    tmp_path: Path, report: GpuReport, visible: str | None, silent: tuple[str, ...]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    for address in ADDRESSES:
        files = {"vendor": "0x10de\n", "class": "0x030200\n"}
        write_tree(tmp_path / "sys/bus/pci/devices" / address, files)
    assert find_silent_gpus(environ, report, tmp_path) == silent


def test_host_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    other = {"vendor": "0x1a03\n", "class": "0x030000\n"}
    write_tree(tmp_path / "sys/bus/pci/devices/0000:02:00.0", other)
    assert find_silent_gpus({}, NO_ANSWER, tmp_path) == ()
