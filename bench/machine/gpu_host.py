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
"""An environment variable of ranks. With ``1``, a rank binds itself to CPUs near its GPU.

It is set for ranks on GPUs, unless Slurm binds each rank to its own CPUs.
"""
_PCI_DEVICES = "sys/bus/pci/devices"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_BRIDGE_CLASS = "0x0604"
_ACS = 0x0D
"""The number of the capability Access Control Services (PCI Express, section 7.7.11)."""
_ACS_REDIRECTS = 0b1_1101
"""The bits of the ACS control register that send traffic between GPUs and NICs through the CPU."""
_KMSG_BYTES = 8192


def bind_to_gpu(local_rank: int, addresses: Sequence[str], root: Path = Path("/")) -> None:
    """Bind all threads of this process, a rank, to CPUs in the NUMA node of the rank's GPU.

    ``local_rank`` is the rank's number on this host. ``addresses`` holds the PCI address of the GPU
    of each rank on this host, in the order of local ranks. Nothing is bound if the CPUs near any of
    these GPUs are unknown. ``root`` is the folder with the ``sys`` to read.
    """
    cpus_by_rank = choose_gpu_cpus(addresses, root)
    if cpus_by_rank:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus_by_rank[local_rank])


def choose_gpu_cpus(
    addresses: Sequence[str], root: Path = Path("/")
) -> tuple[tuple[int, ...], ...]:
    """Choose for each rank on this host the CPUs in the NUMA node of the rank's GPU.

    ``addresses`` holds the PCI address of the GPU of each rank, in the order of local ranks. The
    result holds the numbers of the CPUs in the same order. CPUs outside the affinity of this
    process are left out. Ranks whose GPUs are in one NUMA node get different parts of its CPUs. The
    result is empty if the CPUs near any GPU are unknown or outside the affinity.
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
    """Return the number of the NUMA node of the PCI device at ``address``, None if it is unknown.

    ``root`` is the folder with the ``sys`` to read.
    """
    return parse_count(read_text(root / _PCI_DEVICES / address / "numa_node"))


def has_numa_balancing(root: Path) -> bool | None:
    """Return True if automatic NUMA balancing is on, which moves pages between NUMA nodes.

    None if it is unknown. ``root`` is the folder with the ``proc`` to read.
    """
    balancing = read_text(root / "proc/sys/kernel/numa_balancing")
    return None if balancing is None else balancing != "0"


def has_iommu_translation(gpus: Sequence[Gpu], root: Path) -> bool | None:
    """Return True if an IOMMU translates the DMA addresses of any of these GPUs.

    None if the kernel lists none of the GPUs. ``root`` is the folder with the ``sys`` to read.
    """
    types = []
    for gpu in gpus:
        if gpu.pci_address:
            folder = root / _PCI_DEVICES / gpu.pci_address
            if folder.exists():
                types.append(read_text(folder / "iommu_group/type") or "none")
    return any(kind.startswith("DMA") for kind in types) if types else None


def find_acs_bridges(root: Path) -> tuple[str, ...] | None:
    """Return the PCI addresses of bridges whose ACS sends peer-to-peer traffic through the CPU.

    ACS is PCI Express's Access Control Services. None if this is unknown, because only the user
    root may read the registers. ``root`` is the folder with the ``sys`` to read.
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
    """Return the 16-bit control register of ACS (Access Control Services) of a PCI device.

    ``config`` is the device's configuration space. The result is 0 if the device has no ACS.
    """
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
    """Return True if NICs can read and write GPU memory directly (GPUDirect RDMA).

    This needs the kernel module nvidia_peermem or nv_peer_mem, or NVIDIA's open kernel modules,
    which export memory as DMA-BUF (NCCL documentation, NCCL_DMABUF_ENABLE). None without NVIDIA's
    driver. ``root`` is the folder with the ``proc`` and ``sys`` to read.
    """
    version = read_text(root / "proc/driver/nvidia/version")
    if version is None:
        return None
    modules = (root / "sys/module/nvidia_peermem", root / "sys/module/nv_peer_mem")
    return "Open Kernel Module" in version or any(module.exists() for module in modules)


def read_xids(root: Path) -> tuple[str, ...] | None:
    """Return the GPU errors (Xid) in the kernel's log, each different error once.

    An error is a text ``ADDRESS: NUMBER`` with the PCI address of the GPU and the Xid. Empty if
    there are no errors, None if this process may not read the log. ``root`` is the folder with the
    ``dev`` to read.
    """
    try:
        text = "".join(_read_kmsg(root / "dev/kmsg"))
    except OSError:
        return None
    return tuple(dict.fromkeys(f"{address}: {number}" for address, number in _XID.findall(text)))


def _read_kmsg(log: Path) -> Iterator[str]:
    """Yield the messages in the kernel's log, the oldest first.

    ``log`` is the path of ``/dev/kmsg``, from which each read returns one message. Raises
    ``OSError`` if this process may not read it.
    """
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
    """Return the folder of each RDMA NIC under ``sys/devices``, by name such as ``mlx5_0``.

    The folder is split into the parts of its path, which contain the PCI bridges above the NIC.
    ``root`` is the folder with the ``sys`` to read.
    """
    nics = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        nics[folder.name] = (folder / "device").resolve().parts
    return nics


def describe_nearest_nics(gpu: Gpu, nics: dict[str, tuple[str, ...]], root: Path) -> str:
    """Return the NICs that are nearest to a GPU and their connection, as text.

    An example is ``mlx5_0, mlx5_1 (same PCIe switch)``. ``nics`` is the result of ``find_nics``.
    ``root`` is the folder with the ``sys`` to read. The connection may also be ``same host bridge``
    or ``same NUMA node``. Without any of these, the text is ``no NIC on its NUMA node``.
    """
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
    """Return True if a PCI device is on this NUMA node, False if ``node`` is None (unknown).

    ``device`` is the folder of the device in ``sys``. ``node`` is the number of the node as text.
    """
    return node is not None and read_text(device / "numa_node") == node
