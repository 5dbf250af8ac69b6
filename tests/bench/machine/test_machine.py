"""The machine: cores, memory and GPUs as a process may use them, read from fakes and from here."""

import importlib.util
import os
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from parbench.bench.machine import machine
from parbench.bench.machine.machine import (
    affinity,
    available_cores,
    available_memory_bytes,
    inspect_machine,
    package_version,
)
from tests.support.nvidia import H100, gpus, install
from tests.support.trees import write_tree

GIB = 1 << 30
CGROUP_V2 = "0::/jobs/one\n"
CGROUP_V1 = "5:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n1:name=systemd:/\n0::/\n"


def trees(root: Path, cgroup: str, *limits: Mapping[str, str]) -> list[Path]:
    """Write a ``/proc`` and ``/sys`` for each of these files under ``/sys/fs/cgroup``."""
    folders = []
    for number, files in enumerate(limits):
        below = {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
        folders.append(write_tree(root / str(number), {"proc/self/cgroup": cgroup, **below}))
    return folders


# --- cores ---


def test_the_affinity_is_what_the_scheduler_says_or_all_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert affinity() == os.sched_getaffinity(0)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert affinity() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert affinity() == {0}


CORES: list[tuple[str, dict[str, str], int]] = [
    (CGROUP_V2, {}, 8),
    (CGROUP_V2, {"jobs/one/cpu.max": "350000 100000"}, 3),
    (CGROUP_V2, {"jobs/one/cpu.max": "50000 100000"}, 1),
    (CGROUP_V2, {"jobs/one/cpu.max": "max 100000"}, 8),
    (CGROUP_V2, {"jobs/one/cpu.max": "6400000 100000"}, 8),
    (CGROUP_V2, {"jobs/one/cpu.max": "800000 200000"}, 4),
    # the tightest above the process counts, another job's does not
    (
        CGROUP_V2,
        {
            "jobs/one/cpu.max": "700000 100000",
            "jobs/cpu.max": "500000 100000",
            "cpu.max": "max 100000",
        },
        5,
    ),
    (CGROUP_V2, {"jobs/two/cpu.max": "100000 100000"}, 8),
    # inside a container the limit lies at the mount
    *(
        (f"0::{path}\n", {"cpu.max": "200000 100000"}, 2)
        for path in ("/docker/0123", "/", "/../..", "/pod:0123:one")
    ),
    # a path may hold colons, and the mount be beside v1
    ("0::/pod:0123:one\n", {"unified/pod:0123:one/cpu.max": "300000 100000"}, 3),
    *(
        (
            CGROUP_V1,
            {f"cpu,cpuacct/jobs/one/cpu.cfs_{name}_us": us for name, us in given.items()},
            cores,
        )
        for given, cores in (
            ({"quota": "250000", "period": "100000"}, 2),
            ({"quota": "-1", "period": "100000"}, 8),
        )
    ),
]


def test_cores_are_the_affinity_limited_by_the_quotas_of_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda pid=0: frozenset(range(8)))
    assert available_cores(tmp_path) == 8
    for number, (cgroup, files, cores) in enumerate(CORES):
        (root,) = trees(tmp_path / str(number), cgroup, files)
        assert available_cores(root) == cores, (cgroup, files)


# --- memory ---


def test_memory_is_what_is_free_limited_by_cgroups_less_what_is_used_and_not_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 16 * GIB

    def files(limit: object, used: int, **more: str) -> dict[str, str]:
        given = {"max": str(limit), "current": str(used * GIB), **more}
        return {f"jobs/one/memory.{name}": text for name, text in given.items()}

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert available_memory_bytes(tmp_path) == 16 * GIB
    cached = {"stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n"}
    wanted = [
        (files(8 * GIB, 3, **cached), 6),
        (files("max", 3), 16),
        (files(3 * GIB, 1), 2),
        (files(GIB, 2), 0),
    ]
    for root, (given, gibibytes) in zip(
        trees(tmp_path, CGROUP_V2, *(one for one, _ in wanted)), wanted, strict=True
    ):
        assert available_memory_bytes(root) == gibibytes * GIB, given
    told = {
        "limit_in_bytes": str(4 * GIB),
        "usage_in_bytes": str(3 * GIB),
        "stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    (v1,) = trees(
        tmp_path / "v1",
        CGROUP_V1,
        {f"memory/jobs/one/memory.{name}": text for name, text in told.items()},
    )
    assert available_memory_bytes(v1) == 2 * GIB


# --- torch ---

VERSION_FILES: dict[str | None, bool | None] = {
    "from typing import Optional\ncuda: Optional[str] = '12.8'\n": True,
    "cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n": False,
    "debug = False\ncuda = '11.8'\n": True,
    "cuda = None\n": False,
    "__version__ = '2.13.0'\n": None,
    "cuda = find_cuda()\n": None,
    "cuda: Optional[str]\n": None,
    "cuda = = 'half a file": None,
    None: None,
}


def test_whether_torch_has_cuda_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)
    version = tmp_path / "version.py"
    for text, has_cuda in VERSION_FILES.items():
        version.unlink(missing_ok=True)
        if text is not None:
            version.write_text(text, encoding="utf-8")
        assert inspect_machine({"PATH": ""}).torch_has_cuda is has_cuda, text
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert inspect_machine({"PATH": ""}).torch_has_cuda is None


# --- all of it, here ---


def test_this_machine_is_seen_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 7)
    found = inspect_machine(install(tmp_path, gpus(H100, 2)))
    assert found.cores == available_cores() <= len(os.sched_getaffinity(0))
    assert found.physical_cores == 7
    assert 0 < (found.memory_bytes or 0) <= psutil.virtual_memory().total
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found.torch_version == package_version("torch")
    assert isinstance(found.torch_has_cuda, bool)
