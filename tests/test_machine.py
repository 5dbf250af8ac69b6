"""The machine: cores, memory and GPUs as a process may use them, read from fakes and from here."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from bench import machine
from bench.machine import (
    Gpu,
    affinity,
    available_cores,
    available_memory_bytes,
    contents,
    look,
    package_version,
    visible_gpus,
)

GIB = 1 << 30
HOME = Path(machine.__file__).parents[1]
CGROUP_V2 = "0::/jobs/one\n"
CGROUP_V1 = "5:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n1:name=systemd:/\n0::/\n"


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def fake_smi(folder: Path, body: str) -> dict[str, str]:
    """Put an ``nvidia-smi`` of this body on a PATH that holds no other, and return the environment that has it."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    return {"PATH": str(folder)}


def listing(*lines: str) -> str:
    return "\n".join(f"echo '{line}'" for line in lines)


def pretend_affinity(monkeypatch: pytest.MonkeyPatch, num_cpus: int) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: frozenset(range(num_cpus)))


def pretend_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    class Memory:
        available = num_bytes

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


# --- cores ---


def test_the_affinity_is_what_the_scheduler_says() -> None:
    assert affinity() == os.sched_getaffinity(0)


def test_a_system_without_affinity_has_all_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert affinity() == {0, 1, 2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert affinity() == {0}


def test_physical_cores_are_not_the_logical_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    assert look({"PATH": ""}).physical_cores == 8


def test_cores_without_cgroups_are_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_affinity(monkeypatch, 6)
    assert available_cores(tmp_path) == 6


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("350000 100000", 3), ("50000 100000", 1), ("max 100000", 8), ("6400000 100000", 8), ("800000 200000", 4)],
)
def test_a_quota_of_cgroup_v2_limits_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_affinity(monkeypatch, 8)
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, "sys/fs/cgroup/jobs/one/cpu.max": quota})
    assert available_cores(tmp_path) == cores


def test_the_tightest_cgroup_above_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_affinity(monkeypatch, 8)
    quotas = {"jobs/one": "700000 100000", "jobs": "500000 100000", ".": "max 100000"}
    files = {f"sys/fs/cgroup/{folder}/cpu.max": quota for folder, quota in quotas.items()}
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, **files})
    assert available_cores(tmp_path) == 5


@pytest.mark.parametrize("path", ["/docker/0123", "/", "/../..", "/pod:0123:one"])
def test_inside_a_container_the_limit_lies_at_the_mount(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_affinity(monkeypatch, 8)
    write_tree(tmp_path, {"proc/self/cgroup": f"0::{path}\n", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert available_cores(tmp_path) == 2


def test_a_path_may_hold_colons_and_the_mount_be_beside_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_affinity(monkeypatch, 8)
    files = {"sys/fs/cgroup/unified/pod:0123:one/cpu.max": "300000 100000"}
    write_tree(tmp_path, {"proc/self/cgroup": "0::/pod:0123:one\n", **files})
    assert available_cores(tmp_path) == 3


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("-1", 8)])
def test_a_quota_of_cgroup_v1_limits_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_affinity(monkeypatch, 8)
    folder = "sys/fs/cgroup/cpu,cpuacct/jobs/one"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V1, **files})
    assert available_cores(tmp_path) == cores


def test_a_quota_of_another_job_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_affinity(monkeypatch, 8)
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, "sys/fs/cgroup/jobs/two/cpu.max": "100000 100000"})
    assert available_cores(tmp_path) == 8


# --- memory ---


def test_memory_without_cgroups_is_what_the_system_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    assert available_memory_bytes(tmp_path) == 16 * GIB


def test_a_cgroup_v2_leaves_its_limit_less_what_is_used_and_not_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    folder = "sys/fs/cgroup/jobs/one"
    files = {
        f"{folder}/memory.max": str(8 * GIB),
        f"{folder}/memory.current": str(3 * GIB),
        f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
    }
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, **files})
    assert available_memory_bytes(tmp_path) == 6 * GIB


def test_a_cgroup_v1_limits_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    folder = "sys/fs/cgroup/memory/jobs/one"
    files = {
        f"{folder}/memory.limit_in_bytes": str(4 * GIB),
        f"{folder}/memory.usage_in_bytes": str(3 * GIB),
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V1, **files})
    assert available_memory_bytes(tmp_path) == 2 * GIB


def test_a_cgroup_without_a_limit_does_not_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    folder = "sys/fs/cgroup/jobs/one"
    files = {f"{folder}/memory.max": "max", f"{folder}/memory.current": str(3 * GIB)}
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, **files})
    assert available_memory_bytes(tmp_path) == 16 * GIB


def test_a_cgroup_that_does_not_tell_its_cache_is_taken_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    folder = "sys/fs/cgroup/jobs/one"
    files = {f"{folder}/memory.max": str(3 * GIB), f"{folder}/memory.current": str(GIB)}
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, **files})
    assert available_memory_bytes(tmp_path) == 2 * GIB


def test_memory_is_never_below_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, 16 * GIB)
    folder = "sys/fs/cgroup/jobs/one"
    files = {f"{folder}/memory.max": str(GIB), f"{folder}/memory.current": str(2 * GIB)}
    write_tree(tmp_path, {"proc/self/cgroup": CGROUP_V2, **files})
    assert available_memory_bytes(tmp_path) == 0


# --- GPUs ---

A100 = Gpu(name="NVIDIA A100", memory_bytes=40960 << 20)
H100 = Gpu(name="NVIDIA H100", memory_bytes=81559 << 20)
BOTH = listing("NVIDIA A100, 40960", "NVIDIA H100, 81559")


def test_gpus_are_those_the_driver_lists(tmp_path: Path) -> None:
    assert visible_gpus(fake_smi(tmp_path, BOTH)) == (A100, H100)


def test_the_driver_is_asked_for_what_is_parsed(tmp_path: Path) -> None:
    wanted = "--query-gpu=name,memory.total --format=csv,noheader,nounits"
    environ = fake_smi(tmp_path, f'[ "$*" = "{wanted}" ] || exit 6\n{BOTH}')
    assert visible_gpus(environ) == (A100, H100)


def test_a_gpu_that_does_not_tell_its_memory_is_unknown_not_empty(tmp_path: Path) -> None:
    environ = fake_smi(tmp_path, listing("NVIDIA GB10, [N/A]"))
    assert visible_gpus(environ) == (Gpu(name="NVIDIA GB10", memory_bytes=None),)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("1", (H100,)),
        ("1,0", (H100, A100)),
        (" 0 , 1 ", (A100, H100)),
        ("0,-1,1", (A100,)),
        ("0,7,1", (A100,)),
        ("none", ()),
    ],
)
def test_the_visible_devices_restrict_and_order_gpus(visible: str, gpus: tuple[Gpu, ...], tmp_path: Path) -> None:
    assert visible_gpus({**fake_smi(tmp_path, BOTH), "CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_identifiers_are_counted_and_described_as_far_as_known(tmp_path: Path) -> None:
    alike = fake_smi(tmp_path, listing("NVIDIA A100, 40960", "NVIDIA A100, 40960"))
    assert visible_gpus({**alike, "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}) == (A100, A100)
    assert visible_gpus({**alike, "CUDA_VISIBLE_DEVICES": "MIG-cc"}) == (Gpu(name="MIG-cc", memory_bytes=None),)
    mixed = fake_smi(tmp_path, BOTH)
    assert visible_gpus({**mixed, "CUDA_VISIBLE_DEVICES": "GPU-aa"}) == (Gpu(name="GPU-aa", memory_bytes=None),)


def test_visible_devices_name_nothing_where_the_driver_lists_nothing(tmp_path: Path) -> None:
    environ = fake_smi(tmp_path, "echo No devices were found")
    assert visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "GPU-aa"}) == ()


@pytest.mark.parametrize(
    "body", [f"{BOTH}\nexit 9", "echo 'NVIDIA-SMI has failed because it could not talk to the driver, sorry' ; exit 9"]
)
def test_a_driver_that_fails_has_no_gpus(body: str, tmp_path: Path) -> None:
    assert visible_gpus(fake_smi(tmp_path, body)) == ()


def test_a_driver_that_does_not_answer_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUERY_TIMEOUT_SECONDS", 0.2)
    assert visible_gpus(fake_smi(tmp_path, f"{BOTH}\nexec /bin/sleep 20")) == ()


def test_a_name_that_is_no_text_is_still_a_gpu(tmp_path: Path) -> None:
    environ = fake_smi(tmp_path, "printf 'NVIDIA \\377, 40960\\n'")
    assert visible_gpus(environ) == (Gpu(name="NVIDIA \ufffd", memory_bytes=40960 << 20),)


def test_a_driver_that_cannot_be_run_has_no_gpus(tmp_path: Path) -> None:
    environ = fake_smi(tmp_path, "")
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF, but no program")
    assert visible_gpus(environ) == ()


def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}) == ()


# --- torch ---


def pretend_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, version_py: str | None) -> None:
    if version_py is not None:
        (folder / "version.py").write_text(version_py, encoding="utf-8")
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)


@pytest.mark.parametrize(
    ("version_py", "has_cuda"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '12.8'\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
        ("debug = False\ncuda = '11.8'\n", True),
        ("cuda = None\n", False),
        ("__version__ = '2.13.0'\n", None),
        ("cuda = find_cuda()\n", None),
        ("cuda: Optional[str]\n", None),
        ("cuda = = 'half a file", None),
        (None, None),
    ],
)
def test_whether_torch_has_cuda_is_read_from_its_version_file(
    version_py: str | None, has_cuda: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_torch(monkeypatch, tmp_path, version_py)
    assert look({"PATH": ""}).torch_has_cuda is has_cuda


def test_an_absent_torch_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert look({"PATH": ""}).torch_has_cuda is None


def test_the_version_of_what_is_absent_is_none() -> None:
    assert package_version("parbench-has-no-such-part") is None
    assert package_version("psutil") == psutil.__version__


# --- all of it, here ---


def test_this_machine_is_seen_as_it_is(tmp_path: Path) -> None:
    found = look(fake_smi(tmp_path, BOTH))
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert found.physical_cores == psutil.cpu_count(logical=False)
    assert found.memory_bytes is not None
    assert 0 < found.memory_bytes <= psutil.virtual_memory().total
    assert found.gpus == (A100, H100)
    assert found.torch_version == package_version("torch")
    assert isinstance(found.torch_has_cuda, bool)


def test_the_look_imports_no_torch() -> None:
    program = (
        "import os, sys; from bench.machine import look; print(look(os.environ).torch_version is not None); "
        "print(sorted({'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=HOME, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["True", "[]", ""]


def test_contents_of_a_file_that_is_none_are_none(tmp_path: Path) -> None:
    (tmp_path / "word").write_text(" performance\n", encoding="utf-8")
    assert contents(tmp_path / "word") == "performance"
    assert contents(tmp_path / "absent") is None
    assert contents(tmp_path) is None
