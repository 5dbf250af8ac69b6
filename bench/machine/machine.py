"""What this process may use: cores, memory and GPUs, found without importing torch."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from parbench.bench.machine.gpu import Gpu, GpuFailure, inspect_gpus, select_visible
from parbench.bench.machine.silent_gpus import find_silent_gpus

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process started here finds; ``cores`` and ``memory_bytes`` are what it may use of them."""

    cores: int
    host_cores: int | None = None  # logical CPUs of the host, which its load average counts
    physical_cores: int | None = None
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    silent_gpus: tuple[str, ...] = ()  # PCI addresses of GPUs that do not answer
    gpu_failure: GpuFailure | None = None  # NVML's error, where there are silent GPUs
    torch_version: str | None = None
    torch_has_cuda: bool | None = None
    torch_cuda_version: str | None = None  # that torch is built for
    driver_cuda_version: str | None = None  # up to which the driver supports it
    nccl_version: str | None = None  # of the package that torch depends on
    may_share_gpus: bool = False  # NCCL_MULTI_RANK_GPU_ENABLE is set: several NCCL ranks on a GPU


def inspect_machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Inspect this machine; ``root`` holds the ``dev``, ``proc`` and ``sys`` that show GPUs without their driver."""
    report = inspect_gpus(environ)
    visible = select_visible(report.gpus, environ)
    silent = find_silent_gpus(environ, report, root)
    torch = importlib.util.find_spec("torch")
    built = contents(Path(torch.origin).with_name("version.py")) if torch and torch.origin else None
    cuda = re.search(r"^cuda\b[^=\n]*= *(None|'.+'|\".+\")", built or "", re.MULTILINE)
    torch_cuda = None if cuda is None or cuda[1] == "None" else cuda[1].strip("'\"")
    return Machine(
        cores=available_cores(),
        host_cores=psutil.cpu_count(),
        physical_cores=psutil.cpu_count(logical=False),
        memory_bytes=available_memory_bytes(),
        gpus=visible,
        silent_gpus=silent,
        gpu_failure=report.failure if silent else None,
        torch_version=package_version("torch"),
        torch_has_cuda=None if cuda is None else cuda[1] != "None",
        torch_cuda_version=torch_cuda,
        driver_cuda_version=report.cuda_version if visible and torch_cuda else None,
        nccl_version=_nccl_version(environ),
        may_share_gpus=environ.get(SHARING_VARIABLE, "0").strip() not in ("", "0"),
    )


def _nccl_version(environ: Mapping[str, str]) -> str | None:
    """Return the version of the NCCL package; None where there is none, or another NCCL is loaded instead of it."""
    if "nccl" in environ.get("LD_PRELOAD", ""):
        return None
    return package_version("nvidia-nccl-cu13") or package_version("nvidia-nccl-cu12")


def or_none(ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except (OSError, ImportError, subprocess.SubprocessError):
        return None


def package_version(name: str) -> str | None:
    return or_none(lambda: importlib.metadata.version(name))


def contents(path: Path) -> str | None:
    return or_none(lambda: path.read_text(encoding="utf-8", errors="replace").strip())


def whole_number(text: str | None) -> int | None:
    """Return the whole number a word stands for, None for ``max``, ``-1``, ``[N/A]`` and the like."""
    word = (text or "").strip()
    return int(word) if word.isascii() and word.isdigit() else None


def affinity(pid: int = 0) -> frozenset[int]:
    """Return the logical CPUs this process, or another, may be scheduled on; all where the system has no affinity."""
    return frozenset(os.sched_getaffinity(pid) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def available_cores(root: Path = Path("/"), pid: int = 0) -> int:
    """Return the size of the affinity, limited by the CPU quotas of the cgroups under ``root``; at least 1."""
    limits: list[float] = [len(affinity(pid))]
    for folder in _cgroup_folders(root, "cpu"):
        v1 = [contents(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = (whole_number(word) for word in (contents(folder / "cpu.max") or "").split() or v1)
        if quota and period:
            limits.append(quota / period)
    return max(1, int(min(limits)))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes free without swapping, limited by the memory cgroups under ``root``, cache not counted."""
    limits: list[int] = [psutil.virtual_memory().available]
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # huge where unlimited
        ):
            limit, usage = (whole_number(contents(folder / name)) for name in (limit_name, usage_name))
            if limit is not None and usage is not None:
                cache = re.search(rf"^{cache_name} (\d+)$", contents(folder / "memory.stat") or "", re.MULTILINE)
                limits.append(limit - usage + (int(cache[1]) if cache else 0))
    return max(0, min(limits))


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup and those above it, any of which can limit it, in v1 and v2."""
    base = root / "sys/fs/cgroup"
    for line in (contents(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, unknown here: its limits then lie at the mount, the last folder.
        parts = [part for part in path.split("/") if part]
        for mount in (base / controllers, base / controller) if controllers else (base, base / "unified"):
            yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
