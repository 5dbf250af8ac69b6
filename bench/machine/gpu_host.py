"""Settings of a host that slow or break its GPUs and NICs, from files of its kernel."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def has_numa_balancing(root: Path) -> bool | None:
    """Return True if the kernel moves pages between NUMA nodes, None if it is unknown."""
    balancing = read_text(root / "proc/sys/kernel/numa_balancing")
    return None if balancing is None else balancing != "0"


def has_iommu_translation(gpus: Sequence[Gpu], root: Path) -> bool | None:
    """Return True if an IOMMU translates the addresses of a GPU, None if it is unknown."""
    types = []
    for gpu in gpus:
        if gpu.pci_address:
            folder = root / _PCI_DEVICES / gpu.pci_address
            if folder.exists():
                types.append(read_text(folder / "iommu_group/type") or "none")
    return any(kind.startswith("DMA") for kind in types) if types else None


def find_acs_bridges(root: Path) -> tuple[str, ...] | None:
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


def has_peer_memory(root: Path) -> bool | None:
    """Return True if NICs can reach the memory of GPUs, by a module or by DMA-BUF.

    None without NVIDIA's driver. NVIDIA's open kernel modules export memory as DMA-BUF (NCCL
    documentation, NCCL_DMABUF_ENABLE).
    """
    version = read_text(root / "proc/driver/nvidia/version")
    if version is None:
        return None
    modules = (root / "sys/module/nvidia_peermem", root / "sys/module/nv_peer_mem")
    return "Open Kernel Module" in version or any(module.exists() for module in modules)


def read_xids(root: Path) -> tuple[str, ...] | None:
    """Return the GPU errors (Xid) in the kernel's log, None if it may not be read.

    An error is a text ``ADDRESS: NUMBER`` with the PCI address.
    """
    try:
        text = "".join(_read_kmsg(root / "dev/kmsg"))
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


def find_nics(root: Path) -> dict[str, tuple[str, ...]]:
    """Return the PCI path of each RDMA device, by the name of the device."""
    nics = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        nics[folder.name] = (folder / "device").resolve().parts
    return nics


def describe_nearest_nics(gpu: Gpu, nics: dict[str, tuple[str, ...]], root: Path) -> str:
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
