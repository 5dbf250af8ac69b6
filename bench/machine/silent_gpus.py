"""GPUs that are in this machine and do not answer, from files of the kernel: no call of a driver that may hang."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from parbench.bench.machine.gpu import Gpu, SmiReply, format_pci_address, select_visible
from parbench.bench.text import listed

NO_ADDRESS = "at an unknown PCI address"
_NVIDIA = "0x10de"
_COMPUTE_CLASS = "0x0302"  # a 3D controller, which drives no display
_GPU_CLASSES = ("0x0300", _COMPUTE_CLASS)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


def find_silent_gpus(
    environ: Mapping[str, str], gpus: Sequence[Gpu], reply: SmiReply, root: Path = Path("/")
) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs that this process may use and that ``nvidia-smi`` does not list.

    ``gpus`` are those that it lists, ``reply`` is what else it printed. A container or a job sees the addresses of all
    GPUs of its host, but may open only the device nodes of its own: without a node, a GPU belongs to someone else.
    """
    if _are_chosen(environ, gpus):
        return ()
    driver_folder = root / "proc/driver/nvidia"
    known = sorted(folder.name.lower() for folder in (driver_folder / "gpus").glob("*"))
    nodes = _openable_nodes(root)
    answering = {gpu.pci_address for gpu in gpus if gpu.pci_address is not None}
    unlisted = [address for address in known if address not in answering]
    if len(nodes) > len(gpus):
        return _name_missing(len(nodes) - len(gpus), nodes, unlisted, _addresses_in(reply.text) - answering)
    if gpus and not unlisted:
        return tuple(_unclaimed_devices(root)) if known else ()
    if not gpus and (reply.end == "hung" or (reply.end == "exited" and not driver_folder.exists())):
        return tuple(known or _pci_devices(root))
    return ()


def _name_missing(
    count: int, nodes: Sequence[str], unlisted: Sequence[str], reported: Collection[str]
) -> tuple[str, ...]:
    """Return a name for each of so many GPUs, from the addresses that are not listed or that the tool reports."""
    if reported and count == len(nodes):  # a GPU that fails may keep the tool from listing the others
        return tuple(sorted(reported))
    if len(unlisted) == count:
        return tuple(unlisted)
    if reported or count == len(nodes):
        return tuple(sorted(reported) or nodes)
    return (NO_ADDRESS,) * count


def describe_silent_gpus(addresses: Sequence[str], reply: SmiReply) -> str:
    """Return a sentence that names these GPUs, and says what ``nvidia-smi`` reported."""
    noun, verb = ("GPU", "does") if len(addresses) == 1 else ("GPUs", "do")
    if reply.end == "absent":
        return f"{noun} {listed(addresses, 'and')} cannot be examined: {reply.describe()}"
    return f"{noun} {listed(addresses, 'and')} {verb} not answer: {reply.describe()}"


def suggest_fix(reply: SmiReply) -> str:
    """Return what makes these GPUs answer."""
    if reply.end == "absent":
        return "add nvidia-smi to the PATH (containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    return "see dmesg (Xid, NVRM), then reset the GPU or reboot the host"


def _are_chosen(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides all GPUs, or names only GPUs that answer."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return False
    names_gpu = re.match(r"\s*(\d|GPU-|MIG-)", visible)
    return names_gpu is None or len(select_visible(gpus, environ)) == len(visible.split(","))


def _addresses_in(text: str) -> set[str]:
    return {format_pci_address(address) for address in _ADDRESS.findall(text)}


def _openable_nodes(root: Path) -> list[str]:
    """Return the device nodes of GPUs that this process may open; the cgroup of a job or container denies others."""
    nodes = sorted(node for node in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    return [f"/dev/{node.name}" for node in nodes if os.access(node, os.R_OK | os.W_OK)]


def _pci_devices(root: Path, classes: Iterable[str] = _GPU_CLASSES) -> dict[str, Path]:
    """Return NVIDIA's display controllers by address, but for those that are given to virtual machines."""
    devices = {}
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = _read(folder / "vendor") == _NVIDIA and _read(folder / "class")[:6] in classes
        is_passed_through = (folder / "driver").resolve().name == "vfio-pci"
        if is_gpu and not is_passed_through:
            devices[folder.name.lower()] = folder
    return devices


def _unclaimed_devices(root: Path) -> list[str]:
    """Return the addresses of GPUs on the bus that no driver has taken."""
    devices = _pci_devices(root, (_COMPUTE_CLASS,))
    return [address for address, folder in devices.items() if not (folder / "driver").exists()]


def _read(path: Path) -> str:
    """Return what a file holds, nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
