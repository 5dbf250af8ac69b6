"""GPUs of this host and their links, as NVIDIA's driver reports them through NVML.

NVML can block inside a broken driver. So a child process (``nvml.py``) calls it, within a time
limit.
"""

import ctypes
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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
Links = Mapping[frozenset[str], str]
"""The connection of two GPUs, keyed by the pair of their UUIDs.

A connection is ``NVLink`` or the nearest PCIe ancestor, such as ``same PCIe switch``.
"""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """The identity, settings and current state of one GPU, as NVIDIA's driver reports them.

    None means unknown. Clocks are in MHz, and PCIe widths are numbers of lanes. Fields that end
    with ``_max`` are the limits of the hardware, and the fields of the same name without ``_max``
    are the current values.
    """

    name: str | None = None
    """The model, such as ``NVIDIA H100 80GB HBM3``."""
    index: int | None = None
    """The index among all GPUs of the host, in the order of PCI addresses."""
    uuid: str | None = None
    """The UUID, such as ``GPU-...``."""
    pci_address: str | None = None
    """The PCI address as the kernel writes it, such as ``0000:1b:00.0``."""
    driver: str | None = None
    """The version of NVIDIA's driver."""
    memory_bytes: int | None = None
    """The total memory of the GPU in bytes."""
    persistence: bool | None = None
    """True if persistence mode is on."""
    mig: bool | None = None
    """True if MIG mode is on."""
    ecc: bool | None = None
    """True if ECC mode is on."""
    power_limit_watts: float | None = None
    """The power limit in force."""
    power_default_watts: float | None = None
    """The power limit that the manufacturer sets."""
    sm_clock_max: int | None = None
    """The highest clock of the SMs in MHz."""
    pcie_generation_max: int | None = None
    """The highest generation of PCIe that the GPU and its slot support."""
    pcie_width_max: int | None = None
    """The largest number of PCIe lanes that the GPU and its slot support."""
    nvlinks: int | None = None
    """The number of NVLinks of the GPU, active or not."""
    nvlink_bytes_per_second: int | None = None
    """The speed of one NVLink in one direction."""
    fabric: str | None = None
    """The state of the NVLink fabric: ``not started``, ``in progress``, ``completed`` or failed.

    The last is ``failed (REASON)``. None also if the GPU has no fabric.
    """
    active_nvlinks: int | None = None
    """The number of active NVLinks."""
    sm_clock: int | None = None
    """The current clock of the SMs in MHz."""
    slowed_by: tuple[str, ...] | None = None
    """NVML's reasons why the clocks are low, such as ``software power cap`` or ``idle``.

    Empty if no reason is active.
    """
    heat_seconds: float | None = None
    """The seconds since the driver was loaded in which heat lowered the clocks."""
    memory_used_bytes: int | None = None
    """The bytes of GPU memory that all processes use."""
    pcie_width: int | None = None
    """The current number of PCIe lanes."""
    errors_uncorrected: int | None = None
    """The number of uncorrected memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    """True if a memory row will be remapped when the GPU is reset."""
    remap_failed: bool | None = None
    """True if the remapping of a memory row failed."""


GPU_FIX = (
    "check dmesg (Xid, NVRM), then reset the GPU or reboot the host; "
    "containers need NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)
"""Advice to the user about a GPU that does not answer NVML."""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's report of the GPUs of one host."""

    gpus: tuple[Gpu, ...] = ()
    """The GPUs in the order of their indices.

    GPUs that belong to other jobs or do not answer are left out.
    """
    lost: tuple[int, ...] = ()
    """The indices of GPUs that NVML counts but cannot read."""
    links: tuple[tuple[str, str, str], ...] = ()
    """A tuple for each pair of GPUs: the UUID of one, the UUID of the other, their connection."""
    failure: str = ""
    """The reason why GPUs are missing, such as ``NVML did not answer within 60 s``.

    Empty if NVML had no error, or if neither NVML nor a GPU's device file exists.
    """

    def get_links_by_pair(self) -> Links:
        """Return the connection of each pair of GPUs, such as ``NVLink``, by the pair of UUIDs."""
        return {frozenset((first, second)): connection for first, second, connection in self.links}


DEVICE_FILE = Path("/dev/nvidiactl")
"""The device file of NVIDIA's driver. Containers have it only if they may use GPUs."""
_REPORTS: dict[str, GpuReport] = {}
"""NVML's reports so far in this process, by the value of LD_LIBRARY_PATH."""


def has_library(environ: Mapping[str, str]) -> bool:
    """Return True if NVML, the library libnvidia-ml.so.1, is installed.

    The driver is not called, because it might hang. ``environ`` provides LD_LIBRARY_PATH.
    """
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and Path(folder, LIBRARY).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def read_report(
    environ: Mapping[str, str], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> GpuReport:
    """Read this host's GPUs from NVML in a child process, because NVML may hang.

    On a host without a driver of NVIDIA, the report is empty. If NVML fails, exceeds
    ``timeout_seconds`` or is not installed although the driver is loaded, the report has no GPUs
    and its ``failure`` is set.
    """
    if not has_library(environ):
        # A container may have GPUs, but not the driver's capability "utility".
        return GpuReport(failure=f"{LIBRARY} is missing" if DEVICE_FILE.exists() else "")
    child = subprocess.Popen(
        [sys.executable, "-m", "parbench.bench.machine.nvml"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        abandon(child)
        return GpuReport(failure=f"NVML did not answer within {timeout_seconds:g} s")
    try:
        return msgspec.json.decode(output, type=GpuReport)
    except msgspec.DecodeError:
        text = get_last_line(errors.decode(errors="replace")) or f"exit code {child.returncode}"
        return GpuReport(failure=f"NVML reported {text!r}")


def inspect_gpus(environ: Mapping[str, str]) -> GpuReport:
    """Return NVML's report of all facts about this host's GPUs, cached in this process.

    NVML is called once for each value of LD_LIBRARY_PATH in ``environ``.
    """
    library_path = environ.get("LD_LIBRARY_PATH", "")
    if library_path not in _REPORTS:
        _REPORTS[library_path] = read_report(environ)
    return _REPORTS[library_path]


def abandon(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child process, wait at most 1 s for its end, and close its pipes.

    A child that waits inside a driver cannot be killed and keeps running.
    """
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_KILL_SECONDS)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def select_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects, in the order of this variable.

    All GPUs are returned if the variable is not set. An unknown entry and all entries after it are
    ignored, as in CUDA. A MIG slice becomes a ``Gpu`` with only ``name`` and ``mig``.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None or not gpus:
        return tuple(gpus)
    visible_gpus = []
    for entry in split_visible_devices(variable):
        if entry.startswith("MIG-"):
            visible_gpus.append(Gpu(name=entry, mig=True))  # a slice of unknown size
            continue
        matches = [gpu for gpu in gpus if entry in (str(gpu.index), gpu.uuid)]
        if not matches:
            break  # CUDA ignores an unknown entry and all entries after it
        visible_gpus.append(matches[0])
    return tuple(visible_gpus)


def split_visible_devices(variable: str) -> list[str]:
    """Return the entries in ``variable``, the value of ``CUDA_VISIBLE_DEVICES``.

    An entry is the text of an index, of a UUID or of the id of a MIG slice.
    """
    return [entry.strip() for entry in variable.split(",")]


def choose_gpu_index(environ: Mapping[str, str], count: int) -> int:
    """Return the CUDA device index of this rank: LOCAL_RANK modulo ``count``.

    ``environ`` holds LOCAL_RANK. ``count`` is the number of GPUs that torch finds. Raises
    ``UserError`` if ``count`` is 0.
    """
    if count == 0:
        raise UserError(
            "torch finds no GPU in this rank: check CUDA_VISIBLE_DEVICES, and run nvidia-smi: "
            "the driver may be too old for torch's CUDA; --device cpu measures the cores"
        )
    return int(environ.get("LOCAL_RANK", "0")) % count
