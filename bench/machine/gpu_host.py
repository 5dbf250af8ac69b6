"""Settings of a host that slow or break its GPUs and NICs, from files of its kernel."""

import os
from collections.abc import Sequence
from pathlib import Path

from parbench.bench.machine.environment import group_cores, parse_cpus
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import get_affinity, parse_count, read_text

BIND_VARIABLE = "PARBENCH_BIND"
"""An environment variable of ranks. With ``1``, a rank binds itself to CPUs near its GPU.

It is set for ranks on GPUs, unless Slurm binds each rank to its own CPUs.
"""
_PCI_DEVICES = "sys/bus/pci/devices"


def bind_to_gpu(local_rank: int, addresses: Sequence[str], root: Path = Path("/")) -> None:
    """Bind all threads of this process, a rank, to CPUs in the NUMA node of the rank's GPU.

    ``local_rank`` is the rank's number on this host. ``addresses`` holds the PCI address of the GPU
    of each rank on this host, in the order of local ranks. Nothing is bound if the CPUs near any of
    these GPUs are unknown. ``root`` is the folder that contains ``sys``, ``/`` except in tests.
    """
    cpus_by_rank = choose_gpu_cpus(addresses, root)
    if cpus_by_rank:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus_by_rank[local_rank])


def choose_gpu_cpus(
    addresses: Sequence[str], root: Path = Path("/")
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank on this host the CPUs in the NUMA node of the rank's GPU.

    ``addresses`` holds the PCI address of the GPU of each rank, in the order of local ranks. The
    result has a tuple of CPU numbers for each rank in the same order. CPUs outside the affinity of
    this process are left out. Ranks whose GPUs are in one NUMA node get different parts of its
    CPUs. The result is empty if the CPUs near any GPU are unknown or outside the affinity. ``root``
    is the folder that contains ``sys``, ``/`` except in tests.
    """
    files = [root / _PCI_DEVICES / address / "local_cpulist" for address in addresses]
    near_cpus = [parse_cpus(read_text(file) or "") & get_affinity() for file in files]
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

    ``root`` is the folder that contains ``sys``, ``/`` except in tests.
    """
    return parse_count(read_text(root / _PCI_DEVICES / address / "numa_node"))


def has_iommu_translation(gpus: Sequence[Gpu], root: Path) -> bool | None:
    """Return True if an IOMMU translates the DMA addresses of any of these GPUs, otherwise False.

    The result is None if the kernel lists none of the GPUs. ``root`` is the folder that contains
    ``sys``, ``/`` except in tests.
    """
    types = []
    for gpu in gpus:
        if gpu.pci_address:
            folder = root / _PCI_DEVICES / gpu.pci_address
            if folder.exists():
                types.append(read_text(folder / "iommu_group/type") or "none")
    return any(kind.startswith("DMA") for kind in types) if types else None


def has_peer_memory(root: Path) -> bool | None:
    """Return True if NICs can read and write GPU memory directly (GPUDirect RDMA).

    This needs the kernel module nvidia_peermem, or NVIDIA's open kernel modules, which export
    memory as DMA-BUF (NCCL documentation, NCCL_DMABUF_ENABLE). The result is None if
    NVIDIA's driver is not loaded. ``root`` is the folder that contains ``proc`` and ``sys``, ``/``
    except in tests.
    """
    version = read_text(root / "proc/driver/nvidia/version")
    if version is None:
        return None
    return "Open Kernel Module" in version or (root / "sys/module/nvidia_peermem").exists()
