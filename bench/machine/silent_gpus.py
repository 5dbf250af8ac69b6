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
    """A GPU as NVIDIA's kernel driver lists it in /proc/driver/nvidia/gpus."""

    address: str
    """The PCI address in lower case, such as ``0000:1b:00.0``."""
    minor: str
    """The number in its device node /dev/nvidia<minor>, empty if it is unknown."""
    uuid: str | None = None
    """The UUID, None if the driver does not list one."""
    is_excluded: bool = False
    """True if the administrator excludes the GPU with the parameter NVreg_ExcludedGpus."""


def find_silent_gpus(
    environ: Mapping[str, str], report: GpuReport, root: Path = Path("/")
) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs that this process may use and that NVML does not report.

    ``report`` is NVML's report of this host. GPUs that ``CUDA_VISIBLE_DEVICES`` in ``environ`` or
    the administrator excludes are not returned. If the addresses are unknown, the indices of the
    GPUs that NVML cannot read are returned as text. ``root`` is the folder with the ``dev``,
    ``proc`` and ``sys`` to read.

    A container or a job sees the addresses of all GPUs of its host, but may open only the device
    nodes of its own GPUs. So a GPU whose node cannot be opened belongs to others.
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
    """Return the PCI addresses of all GPUs of this host if its driver hangs or is not loaded.

    In other cases the result is empty. The function is called if this process may open no GPU's
    device node, which is also the case in a container without GPUs. ``report`` is NVML's report.
    ``kernel_gpus`` are the GPUs listed in ``driver_folder``, which is /proc/driver/nvidia. ``root``
    is the folder with the ``sys`` to read.
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
    """Read the GPUs that NVIDIA's kernel driver lists, in the order of their PCI addresses.

    ``driver_folder`` is /proc/driver/nvidia. Empty if the driver is not loaded.
    """
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
    """Return True if ``CUDA_VISIBLE_DEVICES`` selects the GPU with this index or UUID, or is unset.

    ``uuid`` is None if it is unknown.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES", str(index))
    return any(is_entry_for(entry, index, uuid) for entry in split_visible_devices(variable))


def _list_openable_minors(root: Path) -> list[str]:
    """Return each number N for which this process may read and write the GPU node /dev/nvidiaN.

    The cgroup of a job denies access to the nodes of other jobs. ``root`` is the folder with the
    ``dev`` to read.
    """
    minors = []
    for node in sorted((root / "dev").glob("nvidia*")):
        number = node.name.removeprefix("nvidia")
        if number.isdecimal() and os.access(node, os.R_OK | os.W_OK):
            minors.append(number)
    return minors


def _list_pci_devices(root: Path, classes: Iterable[str]) -> list[Path]:
    """Return the folders in ``sys`` of NVIDIA's PCI devices of these classes, sorted by address.

    ``classes`` holds the first digits of PCI class codes, such as ``0x0302`` for 3D controllers.
    Devices that are passed to a virtual machine (vfio-pci) are left out. ``root`` is the folder
    with the ``sys`` to read.
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
    """Return the PCI addresses of compute GPUs to which no kernel driver is bound.

    Empty if NVML's ``report`` has no GPUs, because then the driver may be missing on purpose.
    ``root`` is the folder with the ``sys`` to read.
    """
    folders = _list_pci_devices(root, (_COMPUTE_CLASS,)) if report.gpus else []
    return tuple(folder.name for folder in folders if not (folder / "driver").exists())


def _read(path: Path) -> str:
    """Return the text of a file without leading and trailing blanks, empty if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
