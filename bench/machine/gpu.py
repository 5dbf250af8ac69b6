"""GPUs of this host and their links, as NVIDIA's driver reports them through NVML.

NVML can block inside a broken driver. So a child process (``nvml.py``) calls it, within a time
limit.
"""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from parbench.bench.text import UserError, get_last_line

LIBRARY = "libnvidia-ml.so.1"
IDLE = "idle"
FABRIC_READY = "completed"
POWER_CAP = "software power cap"
# The relation of two devices, from near to far.
SAME_SWITCH = "same PCIe switch"
SAME_BRIDGE = "same host bridge"
SAME_NUMA_NODE = "same NUMA node"  # with other host bridges
OTHER_NUMA_NODE = "other NUMA node"
# Without persistence mode the driver first initializes each GPU, which takes up to 3 s for each.
_TIMEOUT_SECONDS = 60.0
_KILL_SECONDS = 1.0
_NOT_RECORDED = ("name", "index", "minor", "pci_address", "nvlink_errors")
_VARYING = (
    "sm_clock",
    "memory_clock",
    "slowed_by",
    "utilization_percent",
    "temperature_celsius",
    "memory_used_bytes",
    "pcie_generation",
    "pcie_width",
    "errors_corrected",
    "errors_uncorrected",
    "rows_remapped",
    "remap_pending",
    "remap_failed",
    "processes",
)

Links = Mapping[frozenset[str], str]
"""The connection of two GPUs, such as ``NVLink``, by the pair of their UUIDs."""
NvmlAction = Literal["report", "sample", "watch"]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its driver reports it. None means unknown.

    Clocks are in MHz, and PCIe widths are numbers of lanes.
    """

    name: str | None = None
    index: int | None = None  # among all GPUs of the host, in the order of PCI addresses
    uuid: str | None = None
    minor: int | None = None  # the number of its device node, /dev/nvidia<minor>
    pci_address: str | None = None  # as the kernel writes it
    driver: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    sm_clock_max: int | None = None
    memory_clock_max: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None  # the number of links of the GPU, active or not
    nvlink_bytes_per_second: int | None = None  # of one link in one direction
    fabric: str | None = None  # the state of its registration with the fabric manager
    nvlink_domain: str | None = None  # GPUs in one domain have NVLink, also between hosts
    active_nvlinks: int | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    slowed_by: tuple[str, ...] | None = None  # reasons why clocks are low
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    memory_used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    errors_corrected: int | None = None  # errors of memory since the driver was loaded
    errors_uncorrected: int | None = None  # likewise
    rows_remapped: int | None = None  # over the life of the GPU
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    processes: tuple[str, ...] | None = None  # other processes that use the GPU
    nvlink_errors: dict[str, int] = {}  # counters by name, summed over the links

    def facts(self, *, varying: bool) -> dict[str, Any]:
        """Return recorded fields by name: fields that vary during a run, or constant fields."""
        return {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in _NOT_RECORDED and (name in _VARYING) == varying
        }


class GpuFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why NVML does not report all GPUs of this host."""

    kind: Literal["no error", "no library", "error", "hang"] = "no error"
    text: str = ""  # the error's message

    def describe(self) -> str:
        """Return a clause that says why GPUs are missing in NVML's report."""
        if self.kind == "no library":
            return f"NVML ({LIBRARY}) is not installed"
        if self.kind == "hang":
            return f"NVML did not answer within {self.text}"
        if self.kind == "error":
            return f"NVML reported {self.text!r}"
        return "NVML reports no error"

    @property
    def fix(self) -> str:
        """Advice about the missing GPUs."""
        if self.kind == "no library":
            return "install NVIDIA's driver libraries (containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return "see dmesg (Xid, NVRM), then reset the GPU or reboot the host"


NO_FAILURE = GpuFailure()


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's report of a host's GPUs."""

    gpus: tuple[Gpu, ...] = ()  # without GPUs that belong to others or do not answer
    lost: tuple[int, ...] = ()  # the indices of GPUs that NVML counts and cannot read
    links: tuple[tuple[str, str, str], ...] = ()  # the UUIDs and the connection of each pair
    cuda_version: str | None = None  # the newest CUDA that the driver supports, with cuda-compat
    failure: GpuFailure = NO_FAILURE

    def get_links_by_pair(self) -> Links:
        """Return the connection of GPUs by their pair of UUIDs."""
        return {frozenset((first, second)): connection for first, second, connection in self.links}


def has_library(environ: Mapping[str, str]) -> bool:
    """Return True if NVML is installed. This does not call the driver, which might hang."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and Path(folder, LIBRARY).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def read_report(
    environ: Mapping[str, str],
    action: NvmlAction = "report",
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> GpuReport:
    """Read all facts about this host's GPUs from NVML, or a ``sample`` of clocks and memory.

    NVML runs in a child process, because it may hang.
    """
    if not has_library(environ):
        return GpuReport(failure=GpuFailure(kind="no library"))
    return finish_nvml(start_nvml(environ, action), timeout_seconds)


def inspect_gpus(environ: Mapping[str, str]) -> GpuReport:
    """Return the report of this host's GPUs. Only the first call in a process reads it."""
    return _read_once(environ.get("LD_LIBRARY_PATH", ""))


@functools.lru_cache(maxsize=1)
def _read_once(library_path: str) -> GpuReport:
    return read_report({**os.environ, "LD_LIBRARY_PATH": library_path})


def start_nvml(environ: Mapping[str, str], action: NvmlAction) -> "subprocess.Popen[bytes]":
    """Start the child process that calls NVML. With ``watch`` it samples until ``finish_nvml``."""
    return subprocess.Popen(
        [sys.executable, "-m", "parbench.bench.machine.nvml", action],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish_nvml(
    child: "subprocess.Popen[bytes]", timeout_seconds: float = _TIMEOUT_SECONDS
) -> GpuReport:
    """Close the child's standard input and return its report."""
    try:
        output, errors = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        abandon(child)
        return GpuReport(failure=GpuFailure(kind="hang", text=f"{timeout_seconds:g} s"))
    try:
        return msgspec.json.decode(output, type=GpuReport)
    except msgspec.DecodeError:
        text = get_last_line(errors.decode(errors="replace")) or f"exit code {child.returncode}"
        return GpuReport(failure=GpuFailure(kind="error", text=text))


def abandon(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child process.

    A child that waits inside a driver cannot be killed and is left alone.
    """
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_KILL_SECONDS)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def select_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects, in its order."""
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None or not gpus:
        return tuple(gpus)
    visible = []
    for entry in split_visible_devices(variable):
        if entry.startswith("MIG-"):
            visible.append(Gpu(name=entry, mig=True))  # a slice of unknown size
            continue
        matches = [gpu for gpu in gpus if is_entry_for(entry, gpu.index, gpu.uuid)]
        if not matches:
            break  # CUDA ignores an unknown entry and all entries after it
        visible.append(matches[0])
    return tuple(visible)


def split_visible_devices(variable: str) -> list[str]:
    """Return the entries of the variable ``CUDA_VISIBLE_DEVICES``."""
    return [entry.strip() for entry in variable.split(",")]


def is_entry_for(entry: str, index: int | None, uuid: str | None) -> bool:
    """Return True if an entry of ``CUDA_VISIBLE_DEVICES`` selects this GPU."""
    if entry.startswith("GPU-"):
        return uuid is not None and uuid.startswith(entry)
    return entry == str(index)


def choose_gpu_index(environ: Mapping[str, str], count: int) -> int:
    """Return the index of this rank's GPU, its local rank modulo ``count``.

    Raises ``UserError`` if ``count`` is 0.
    """
    if count == 0:
        raise UserError(
            "torch finds no GPU in this rank: see nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and parbench doctor on this host; --device cpu measures the cores"
        )
    return int(environ.get("LOCAL_RANK", "0")) % count
