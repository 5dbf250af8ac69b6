"""GPUs that do not answer, found in files of the kernel without a call of their driver."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from parbench.bench.machine.gpu import GpuReport, is_entry_for, split_visible_devices

_NVIDIA_VENDOR = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with and without a display


def find_silent_gpus(
    environ: Mapping[str, str], report: GpuReport, root: Path = Path("/")
) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs that this process may use and that NVML does not report.

    ``report`` is NVML's report of this host. GPUs that ``CUDA_VISIBLE_DEVICES`` in ``environ`` or
    the administrator excludes are not returned. If the addresses are unknown, the indices of the
    GPUs that NVML cannot read are returned as text. ``root`` is the folder that contains ``dev``,
    ``proc`` and ``sys``, ``/`` except in tests.

    A container or a job sees the addresses of all GPUs of its host, but may open only the device
    files (``/dev/nvidiaN``) of its own GPUs. So a GPU whose device file cannot be opened belongs to
    another job.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None and not re.match(r"\s*(\d|GPU-|MIG-)", variable):
        return ()  # It hides all GPUs.
    driver_folder = root / "proc/driver/nvidia"
    has_no_driver = bool(report.failure) and not driver_folder.exists()
    if has_no_driver and not report.gpus and not report.lost:
        return _list_pci_gpus(root)
    answering = {gpu.minor for gpu in report.gpus}
    if None in answering:
        return ()  # The device nodes of the GPUs that answer are unknown.
    usable = []
    for folder in sorted(driver_folder.glob("gpus/*"), key=lambda folder: folder.name.lower()):
        information = _read(folder / "information")
        facts = dict(re.findall(r"^(.+?):[ \t]*(.+?)[ \t]*$", information, re.MULTILINE))
        minor = facts.get("Device Minor", "")
        # The administrator excludes a GPU with the driver's parameter NVreg_ExcludedGpus.
        is_excluded = facts.get("GPU Excluded") == "Yes"
        # The cgroup of a job denies access to the nodes of other jobs.
        if not is_excluded and os.access(root / f"dev/nvidia{minor}", os.R_OK | os.W_OK):
            usable.append((folder.name.lower(), minor, facts.get("GPU UUID")))
    if not usable:
        return tuple(str(index) for index in report.lost if _is_visible(environ, index, None))
    return tuple(
        address
        for index, (address, minor, uuid) in enumerate(usable)
        if int(minor) not in answering and _is_visible(environ, index, uuid)
    )


def _is_visible(environ: Mapping[str, str], index: int, uuid: str | None) -> bool:
    """Return True if ``CUDA_VISIBLE_DEVICES`` selects the GPU with this index or UUID, or is unset.

    ``uuid`` is None if it is unknown.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES", str(index))
    return any(is_entry_for(entry, index, uuid) for entry in split_visible_devices(variable))


def _list_pci_gpus(root: Path) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA's GPUs on this host, in ascending order.

    GPUs that are passed to a virtual machine (vfio-pci) are left out. ``root`` is the folder that
    contains ``sys``, ``/`` except in tests.
    """
    addresses = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_nvidia = _read(folder / "vendor") == _NVIDIA_VENDOR
        is_passed_on = (folder / "driver").resolve().name == "vfio-pci"
        if is_nvidia and _read(folder / "class").startswith(_GPU_CLASSES) and not is_passed_on:
            addresses.append(folder.name)
    return tuple(addresses)


def _read(path: Path) -> str:
    """Return the text of a file without leading and trailing blanks, empty if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
