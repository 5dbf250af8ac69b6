"""GPUs that do not answer, found in files of the kernel without a call of their driver."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.machine.gpu import (
    GpuReport,
    is_entry_for,
    split_visible_devices,
)

_NVIDIA_VENDOR = "0x10de"
_COMPUTE_CLASS = "0x0302"  # a 3D controller, which drives no display
_GPU_CLASSES = ("0x0300", _COMPUTE_CLASS)


@dataclass(frozen=True, kw_only=True)
class KernelGpu:
    """A GPU of the kernel's driver, from /proc/driver/nvidia/gpus."""

    address: str
    """The PCI address."""
    minor: str
    """The number of its device node, /dev/nvidia<minor>."""
    uuid: str | None = None
    is_excluded: bool = False
    """True if the administrator excludes the GPU with the parameter NVreg_ExcludedGpus."""


def find_silent_gpus(
    environ: Mapping[str, str], report: GpuReport, root: Path = Path("/")
) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs that this process may use and that NVML does not report.

    A container or a job sees the addresses of all GPUs of its host, but may open only the device
    nodes of its own GPUs. So a GPU without a node belongs to others. GPUs that
    ``CUDA_VISIBLE_DEVICES`` or the administrator excludes are not returned.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None and not re.match(r"\s*(\d|GPU-|MIG-)", variable):
        return ()  # It hides all GPUs.
    driver_folder = root / "proc/driver/nvidia"
    kernel_gpus = _read_kernel_gpus(driver_folder)
    minors = _list_openable_minors(root)
    candidates = [gpu for gpu in kernel_gpus if gpu.minor in minors and not gpu.is_excluded]
    if not candidates and report.lost:
        return tuple(str(index) for index in report.lost if _is_visible(environ, index, None))
    if not candidates:
        return _find_without_nodes(report, kernel_gpus, driver_folder, root)
    answering = {str(gpu.minor) for gpu in report.gpus if gpu.minor is not None}
    if len(answering) < len(report.gpus):
        return ()  # The nodes of the GPUs that answer are unknown.
    visible = [gpu for index, gpu in enumerate(candidates) if _is_visible(environ, index, gpu.uuid)]
    silent = tuple(gpu.address for gpu in visible if gpu.minor not in answering)
    if silent or variable is not None:
        return silent
    return _list_unclaimed(report, root)


def _find_without_nodes(
    report: GpuReport, kernel_gpus: Sequence[KernelGpu], driver_folder: Path, root: Path
) -> tuple[str, ...]:
    """Return the PCI addresses of all GPUs of a host whose driver hangs or is not loaded.

    Only these failures count, because a container without GPUs has no device nodes either.
    """
    if report.gpus:
        return ()
    has_no_driver = report.failure.kind == "error" and not driver_folder.exists()
    if report.failure.kind == "hang" or has_no_driver:
        addresses = tuple(gpu.address for gpu in kernel_gpus if not gpu.is_excluded)
        devices = _list_pci_devices(root, _GPU_CLASSES)
        return addresses or tuple(folder.name for folder in devices)
    return ()


def _read_kernel_gpus(driver_folder: Path) -> list[KernelGpu]:
    """Read the GPUs of the loaded driver in the order of their addresses."""
    gpus = []
    for folder in sorted(driver_folder.glob("gpus/*"), key=lambda folder: folder.name.lower()):
        information = _read(folder / "information")
        facts = dict(re.findall(r"^(.+?):[ \t]*(.+?)[ \t]*$", information, re.MULTILINE))
        gpu = KernelGpu(
            address=folder.name.lower(),
            minor=facts.get("Device Minor", ""),
            uuid=facts.get("GPU UUID"),
            is_excluded=facts.get("GPU Excluded") == "Yes",
        )
        gpus.append(gpu)
    return gpus


def _is_visible(environ: Mapping[str, str], index: int, uuid: str | None) -> bool:
    variable = environ.get("CUDA_VISIBLE_DEVICES", str(index))
    return any(is_entry_for(entry, index, uuid) for entry in split_visible_devices(variable))


def _list_openable_minors(root: Path) -> list[str]:
    """Return the minor numbers of the GPU device nodes that this process may open.

    Its cgroup denies the nodes of other jobs.
    """
    minors = []
    for node in sorted((root / "dev").glob("nvidia*")):
        number = node.name.removeprefix("nvidia")
        if number.isdecimal() and os.access(node, os.R_OK | os.W_OK):
            minors.append(number)
    return minors


def _list_pci_devices(root: Path, classes: Iterable[str]) -> list[Path]:
    """Return the folders of NVIDIA's PCI devices of these classes.

    Devices that a virtual machine uses are left out.
    """
    folders = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = (
            _read(folder / "vendor") == _NVIDIA_VENDOR and _read(folder / "class")[:6] in classes
        )
        if is_gpu and (folder / "driver").resolve().name != "vfio-pci":
            folders.append(folder)
    return folders


def _list_unclaimed(report: GpuReport, root: Path) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs without a driver, if other GPUs answer."""
    folders = _list_pci_devices(root, (_COMPUTE_CLASS,)) if report.gpus else []
    return tuple(folder.name for folder in folders if not (folder / "driver").exists())


def _read(path: Path) -> str:
    """Return the text of a file, which is empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
