"""The resources that this process may use: cores, memory and GPUs. Does not import torch."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from parbench.bench.machine.gpu import (
    Gpu,
    GpuReport,
    inspect_gpus,
    select_visible,
    split_visible_devices,
)
from parbench.bench.text import format_list

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_NVIDIA_VENDOR = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # PCI classes of GPUs with and without a display
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The cores, memory, GPUs and torch that a process can use on its host. None means unknown."""

    cores: int
    """The number of logical CPUs that the process may use."""
    memory_bytes: int | None = None
    """The bytes of host memory that the process can still allocate."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` selects, in the order of this variable."""
    silent_gpus: tuple[str, ...] = ()
    """The GPUs that the process may use but that do not answer to NVML.

    They are given as indices, or as PCI addresses if NVML as a whole does not answer.
    """
    gpu_failure: str = ""
    """The reason why GPUs do not answer, such as ``NVML did not answer within 60 s``.

    Empty if all GPUs answer.
    """
    torch_version: str | None = None
    """The version of torch, None if torch is not installed."""
    torch_has_cuda: bool = False
    """True if torch is installed and built with CUDA."""
    may_share_gpus: bool = False
    """True if ``NCCL_MULTI_RANK_GPU_ENABLE`` permits several ranks on a GPU."""

    def describe_silent_gpus(self) -> str:
        """Return a sentence that names the GPUs that do not answer, with the reason.

        Empty if all GPUs answer.
        """
        if not self.silent_gpus:
            return ""
        names = format_list(self.silent_gpus, "and")
        return f"no answer from GPU {names}: {self.gpu_failure}"


def inspect_machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Find the cores, memory, GPUs and torch that this process can use.

    ``environ`` holds the environment variables. ``root`` is the folder that contains ``dev``,
    ``proc`` and ``sys``, ``/`` except in tests.
    """
    report = inspect_gpus(environ)
    return Machine(
        cores=count_available_cores(),
        memory_bytes=count_available_memory_bytes(),
        gpus=select_visible(report.gpus, environ),
        silent_gpus=find_silent_gpus(environ, report, root),
        gpu_failure=report.failure,
        torch_version=find_package_version("torch"),
        torch_has_cuda=_has_torch_cuda(),
        may_share_gpus=environ.get(SHARING_VARIABLE, "0").strip() not in ("", "0"),
    )


def find_silent_gpus(environ: Mapping[str, str], report: GpuReport, root: Path) -> tuple[str, ...]:
    """Return the GPUs of this host that do not answer to NVML, except those that are hidden.

    ``report`` is NVML's report. The result has the indices of the GPUs that NVML counts but cannot
    read, as text. If NVML as a whole does not answer, it has the PCI addresses of all NVIDIA GPUs
    instead. GPUs that ``CUDA_VISIBLE_DEVICES`` in ``environ`` hides are left out. ``root`` is the
    folder that contains ``sys``, ``/`` except in tests.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if report.gpus or report.lost:
        entries = None if variable is None else split_visible_devices(variable)
        lost_indices = [str(index) for index in report.lost]
        return tuple(index for index in lost_indices if entries is None or index in entries)
    hides_all = variable is not None and not re.match(r"\s*(\d|GPU-|MIG-)", variable)
    if hides_all or not report.failure:
        return ()
    return list_gpu_addresses(root)


def list_gpu_addresses(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the PCI addresses of all NVIDIA GPUs that the kernel lists.

    ``root`` is the folder that contains ``sys``, ``/`` except in tests.
    """
    addresses = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        device_class = read_text(folder / "class") or ""
        is_nvidia = read_text(folder / "vendor") == _NVIDIA_VENDOR
        if is_nvidia and device_class.startswith(_GPU_CLASSES):
            addresses.append(folder.name)
    return tuple(addresses)


def _has_torch_cuda() -> bool:
    """Return True if torch is installed and built with CUDA, without an import of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    text = read_text(Path(torch.origin).with_name("version.py")) or ""
    return re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None


def try_call(function: Callable[[], _T]) -> _T | None:
    """Call a function and return its result, or None if it fails.

    A failure is an ``OSError``, ``ImportError`` or ``SubprocessError``, because the system or the
    Python environment lacks something. Other exceptions are raised.
    """
    try:
        return function()
    except (OSError, ImportError, subprocess.SubprocessError):
        return None


def find_package_version(name: str) -> str | None:
    """Return the version of an installed Python package, None if it is not installed."""
    return try_call(lambda: importlib.metadata.version(name))


def read_text(path: Path) -> str | None:
    """Return the text of a file without leading and trailing blanks, None if it cannot be read."""
    return try_call(lambda: path.read_text(encoding="utf-8", errors="replace").strip())


def parse_count(text: str | None) -> int | None:
    """Return the non-negative whole number that a text contains.

    None if the text is None or not such a number, for example ``max``, ``-1`` or ``[N/A]``.
    """
    digits = (text or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() else None


def get_affinity(pid: int = 0) -> frozenset[int]:
    """Return the numbers of the CPUs on which a process may run (its CPU affinity).

    A ``pid`` of 0 is this process.
    """
    return frozenset(os.sched_getaffinity(pid))


def count_available_cores(root: Path = Path("/"), pid: int = 0) -> int:
    """Return the number of logical CPUs that a process may use, at least 1.

    It is the number of CPUs in the affinity of the process ``pid`` (0 is this process). CPU quotas
    of this process's cgroups limit the number, which is rounded down. ``root`` is the folder that
    contains ``proc`` and ``sys``, ``/`` except in tests.
    """
    limits: list[float] = [len(get_affinity(pid))]
    for folder in _list_cgroups(root):
        quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        if quota.isdecimal():  # not "max"
            limits.append(int(quota) / int(period))
    return max(1, int(min(limits)))


def count_available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still allocate without swapping.

    It is the available memory of the host, or less if a cgroup of this process has less left. The
    inactive page cache of a cgroup counts as available. ``root`` is the folder that contains
    ``proc`` and ``sys``, ``/`` except in tests.
    """
    limits: list[int] = [psutil.virtual_memory().available]
    for folder in _list_cgroups(root):
        limit = parse_count(read_text(folder / "memory.max"))
        usage = parse_count(read_text(folder / "memory.current"))
        if limit is not None and usage is not None:
            statistics = read_text(folder / "memory.stat") or ""
            cache = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
            limits.append(limit - usage + (int(cache[1]) if cache else 0))
    return max(0, min(limits))


def _list_cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroup (version 2) and of its ancestors.

    The first folder is that of the cgroup itself, followed by its parents up to ``sys/fs/cgroup``.
    Some folders may not exist, because a container may show the cgroup's path on the host. The
    limits of the container are then in the last folder. ``root`` is the folder that contains
    ``proc`` and ``sys``.
    """
    mount = root / "sys/fs/cgroup"
    match = re.search(r"^0::/(.*)$", read_text(root / "proc/self/cgroup") or "", re.MULTILINE)
    cgroup = mount / (match[1] if match else "")
    return [folder for folder in (cgroup, *cgroup.parents) if folder.is_relative_to(mount)]
