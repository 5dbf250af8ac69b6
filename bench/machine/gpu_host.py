"""Settings of a host that slow or break its GPUs and NICs, from files of its kernel."""

import errno
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from parbench.bench.machine.environment import group_cores, parse_cpus
from parbench.bench.machine.gpu import SAME_BRIDGE, SAME_NUMA_NODE, SAME_SWITCH, Gpu
from parbench.bench.machine.machine import get_affinity, parse_count, read_text

BIND_VARIABLE = "PARBENCH_BIND"
"""1: a rank binds itself to CPUs near its GPU, because its launcher does not bind it."""
_PCI_DEVICES = "sys/bus/pci/devices"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_BRIDGE_CLASS = "0x0604"
_ACS = 0x0D
"""The number of the capability Access Control Services (PCI Express, section 7.7.11)."""
_ACS_REDIRECTS = 0b1_1101
"""Bits of its control register that send traffic between GPUs and NICs through the CPU."""
_KMSG_BYTES = 8192
_UNLIMITED = sys.maxsize


class GpuHost(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and NICs of a host, as its kernel shows them. None means unknown."""

    numa_balancing: bool | None = None
    """True if the kernel moves pages between NUMA nodes."""
    iommu_translates: bool | None = None
    """True if an IOMMU translates the addresses of a GPU."""
    acs_bridges: tuple[str, ...] | None = None
    """The PCI addresses of bridges that redirect traffic between devices to the CPU."""
    nics: tuple[str, ...] = ()
    """The names of the RDMA devices."""
    has_peer_memory: bool | None = None
    """True if NICs can access the memory of GPUs."""
    locked_bytes: int | None = None
    """The limit of the memory in bytes that a process may lock. NICs need locked memory."""
    open_files: int | None = None
    """The hard limit of the number of files that a process may open."""
    xids: tuple[str, ...] | None = None
    """The errors of GPUs in the kernel's log, as ``ADDRESS: NUMBER`` with the PCI address."""
    nics_by_gpu: tuple[str, ...] = ()
    """A text for each GPU with its nearest NICs and their distance, empty without NICs."""


def inspect_gpu_host(gpus: Sequence[Gpu], root: Path = Path("/")) -> GpuHost:
    """Return the facts that the kernel shows about the host of these GPUs.

    ``root`` holds the ``dev``, ``proc`` and ``sys`` to read.
    """
    balancing = read_text(root / "proc/sys/kernel/numa_balancing")
    nics = _find_nics(root)
    return GpuHost(
        numa_balancing=None if balancing is None else balancing != "0",
        iommu_translates=_read_iommu(gpus, root),
        acs_bridges=_find_acs_bridges(root),
        nics=tuple(nics),
        has_peer_memory=_has_peer_memory(root),
        locked_bytes=_read_limit(resource.RLIMIT_MEMLOCK, is_hard=False),
        open_files=_read_limit(resource.RLIMIT_NOFILE, is_hard=True),
        xids=_read_xids(root / "dev/kmsg"),
        nics_by_gpu=tuple(_describe_nearest_nics(gpu, nics, root) for gpu in gpus if nics),
    )


def bind_to_gpu(local_rank: int, addresses: Sequence[str], root: Path = Path("/")) -> None:
    """Bind all threads of this process to CPUs that are near its GPU, if those are known.

    ``addresses`` are the PCI addresses of the GPUs of this host's ranks, by local rank.
    """
    cpus_by_rank = choose_gpu_cpus(addresses, root)
    if cpus_by_rank:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus_by_rank[local_rank])


def choose_gpu_cpus(
    addresses: Sequence[str], root: Path = Path("/")
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank of this host the CPUs that are near its GPU and that it may use.

    The CPUs are in the NUMA node of the GPU. Ranks whose GPUs share a node divide its CPUs. The
    result is empty if the CPUs of any GPU are unknown.
    """
    near_cpus = []
    for address in addresses:
        local_cpus = read_text(root / _PCI_DEVICES / address / "local_cpulist")
        near_cpus.append(parse_cpus(local_cpus or "") & get_affinity())
    if not all(near_cpus):
        return ()
    cpus_by_rank = []
    for rank, cpus in enumerate(near_cpus):
        parts = group_cores(near_cpus.count(cpus), cpus, root)
        position = near_cpus[:rank].count(cpus)
        cpus_by_rank.append(parts[position % len(parts)])
    return tuple(cpus_by_rank)


def read_numa_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, None if it is unknown."""
    return parse_count(read_text(root / _PCI_DEVICES / address / "numa_node"))


def _read_limit(kind: int, *, is_hard: bool) -> int:
    """Return the soft or hard limit of a resource, ``_UNLIMITED`` if there is none."""
    limit = resource.getrlimit(kind)[is_hard]
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _read_iommu(gpus: Sequence[Gpu], root: Path) -> bool | None:
    """Return True if an IOMMU translates the addresses of a GPU, None if it is unknown."""
    types = []
    for gpu in gpus:
        if gpu.pci_address:
            folder = root / _PCI_DEVICES / gpu.pci_address
            if folder.exists():
                types.append(read_text(folder / "iommu_group/type") or "none")
    return any(kind.startswith("DMA") for kind in types) if types else None


def _find_acs_bridges(root: Path) -> tuple[str, ...] | None:
    """Return the PCI bridges whose ACS redirects peer-to-peer traffic.

    None if this is unknown, because only root may read it.
    """
    bridges = []
    is_known = False
    for folder in sorted((root / _PCI_DEVICES).glob("*")):
        if (read_text(folder / "class") or "").startswith(_BRIDGE_CLASS):
            try:
                config = (folder / "config").read_bytes()
            except OSError:
                continue
            is_known |= len(config) > 0x100
            if _read_acs_control(config) & _ACS_REDIRECTS:
                bridges.append(folder.name)
    return tuple(bridges) if is_known else None


def _read_acs_control(config: bytes) -> int:
    """Return the control register of ACS in a device's configuration space, 0 without ACS."""
    offset = 0x100
    visited_offsets: set[int] = set()
    while offset >= 0x100 and offset + 8 <= len(config) and offset not in visited_offsets:
        visited_offsets.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return 0


def _has_peer_memory(root: Path) -> bool | None:
    """Return True if NICs can reach the memory of GPUs, by a module or by DMA-BUF.

    None without NVIDIA's driver. NVIDIA's open kernel modules export memory as DMA-BUF (NCCL
    documentation, NCCL_DMABUF_ENABLE).
    """
    version = read_text(root / "proc/driver/nvidia/version")
    if version is None:
        return None
    modules = (root / "sys/module/nvidia_peermem", root / "sys/module/nv_peer_mem")
    return "Open Kernel Module" in version or any(module.exists() for module in modules)


def _read_xids(log: Path) -> tuple[str, ...] | None:
    """Return the GPU errors (Xid) in the kernel's log, None if it may not be read."""
    try:
        text = "".join(_read_kmsg(log))
    except OSError:
        return None
    return tuple(dict.fromkeys(f"{address}: {number}" for address, number in _XID.findall(text)))


def _read_kmsg(log: Path) -> Iterator[str]:
    """Yield the messages of the kernel's log, each of which is one read of the file."""
    file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                message = os.read(file, _KMSG_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # The message has been overwritten meanwhile.
                    continue
                raise
            if not message:
                return
            yield message.decode(errors="replace")
    finally:
        os.close(file)


def _find_nics(root: Path) -> dict[str, tuple[str, ...]]:
    """Return the PCI path of each RDMA device, by the name of the device."""
    nics = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        nics[folder.name] = (folder / "device").resolve().parts
    return nics


def _describe_nearest_nics(gpu: Gpu, nics: dict[str, tuple[str, ...]], root: Path) -> str:
    """Return the NICs with the longest common PCI path to a GPU, and their distance."""
    gpu_path = (root / _PCI_DEVICES / (gpu.pci_address or "-")).resolve()
    ancestors = {name: os.path.commonpath([gpu_path, Path(*path)]) for name, path in nics.items()}
    nearest = max(ancestors.values(), key=len)
    names = ", ".join(name for name, ancestor in ancestors.items() if ancestor == nearest)
    common_name = Path(nearest).name
    if re.fullmatch(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", common_name):
        return f"{names} ({SAME_SWITCH})"
    if common_name.startswith("pci"):
        return f"{names} ({SAME_BRIDGE})"
    gpu_node = read_text(gpu_path / "numa_node")
    near = [name for name, path in nics.items() if _is_on_node(Path(*path), gpu_node)]
    return f"{', '.join(near)} ({SAME_NUMA_NODE})" if near else "no NIC on its NUMA node"


def _is_on_node(device: Path, node: str | None) -> bool:
    return node is not None and read_text(device / "numa_node") == node
