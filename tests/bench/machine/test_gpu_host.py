"""The kernel's files show what slows GPUs and NICs, and the CPUs and NICs next to a GPU."""

import os
import resource
import threading
from pathlib import Path

import pytest

from parbench.bench.machine import gpu_host
from parbench.bench.machine.doctor import Disturbance, examine_gpu_host
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.gpu_host import bind_to_gpu, choose_gpu_cpus, read_numa_node
from tests.support.trees import write_tree

DEVICES = "sys/bus/pci/devices"
GPU_ADDRESSES = ("0000:19:00.0", "0000:9a:00.0")
GPUS = tuple(Gpu(pci_address=address) for address in GPU_ADDRESSES)


def write_device(root: Path, path: str, files: dict[str, str]) -> None:
    """Write a device below its PCI root, with a link by its address as the kernel has it."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    write_tree(folder, files)
    link = root / DEVICES / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def add_nic(root: Path, name: str, path: str) -> None:
    write_device(root, path, {"numa_node": "1\n"})
    folder = root / "sys/class/infiniband" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(root / "sys/devices" / path)


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """A host with a GPU on each NUMA node, a NIC at the switch of the first one, and errors."""
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    first, second = GPU_ADDRESSES
    write_device(tmp_path, f"{switch}/0000:17:00.0/{first}", {"local_cpulist": "0-1\n"})
    other_root = "pci0000:97/0000:97:01.0"
    files = {"local_cpulist": "2-3\n", "numa_node": "1\n"}
    write_device(tmp_path, f"{other_root}/{second}", files)
    add_nic(tmp_path, "mlx5_0", f"{switch}/0000:17:01.0/0000:18:00.0")
    (tmp_path / DEVICES / first / "iommu_group").mkdir()
    kernel_files = {
        f"{DEVICES}/{first}/iommu_group/type": "DMA-FQ\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n",
        "dev/kmsg": "6,1,0,-;usb 1\n4,2,0,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1\n",
    }
    write_tree(tmp_path, kernel_files)
    header = (0x0D | 1 << 16).to_bytes(4, "little")
    config = bytes(0x100) + header + bytes(2) + (0x1D).to_bytes(2, "little") + bytes(64)
    bridge = tmp_path / DEVICES / "0000:15:01.0"
    write_tree(bridge, {"class": "0x060400\n"})
    (bridge / "config").write_bytes(config)
    return tmp_path


def examine(root: Path) -> dict[str, Disturbance]:
    return {finding.topic: finding for finding in examine_gpu_host(GPUS, root)}


def test_bad_settings_of_a_gpu_host_disturb(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 26, 1024))
    findings = examine(two_gpus)
    assert {topic: finding.facts for topic, finding in findings.items()} == {
        "open files": "1024",
        "numa balancing": "on",
        "iommu": "on",
        "acs": "0000:15:01.0",
        "gpu errors": "Xid 0000:19:00: 79",
        "memlock": "67108864 B",
        "peer memory": "off",
        "nearest nics": "mlx5_0 (same PCIe switch); mlx5_0 (same NUMA node)",
    }
    nics = findings.pop("nearest nics")
    assert not nics.disturbs
    for finding in findings.values():
        assert finding.disturbs
        assert finding.fix


def test_good_settings_of_a_gpu_host_do_not_disturb(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (-1, -1))
    files = {
        f"{DEVICES}/{GPU_ADDRESSES[0]}/iommu_group/type": "identity\n",
        f"{DEVICES}/0000:15:01.0/class": "0x020000\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "sys/module/nvidia_peermem/version": "1",
        "dev/kmsg": "6,1,0,-;usb 1\n",
    }
    findings = examine(write_tree(two_gpus, files))
    assert not any(finding.disturbs for finding in findings.values())
    assert findings["memlock"].facts == "unlimited"
    assert findings["peer memory"].facts == "on"


def test_nothing_is_known_without_files(tmp_path: Path) -> None:
    known = [topic for topic, finding in examine(tmp_path).items() if finding.facts != "-"]
    assert known == ["open files"]


@pytest.mark.parametrize(
    ("allowed", "ranks", "cpus"),
    [
        ({0, 2, 3}, (0, 1), ((0,), (2, 3))),
        ({0, 2, 3}, (0, 1, 0, 1), ((0,), (2,), (0,), (3,))),
        ({0}, (0, 1), ()),  # not to bind some ranks only
    ],
)
def test_ranks_use_the_cores_of_their_gpu(
    two_gpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: set[int],
    ranks: tuple[int, ...],
    cpus: tuple[tuple[int, ...], ...],
) -> None:
    monkeypatch.setattr(gpu_host, "get_affinity", lambda: frozenset(allowed))
    assert choose_gpu_cpus([GPU_ADDRESSES[rank] for rank in ranks], two_gpus) == cpus


def test_all_threads_of_a_rank_are_bound(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[int, tuple[int, ...]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", calls.__setitem__)
    monkeypatch.setattr(gpu_host, "get_affinity", lambda: frozenset(range(4)))
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    bind_to_gpu(1, GPU_ADDRESSES, two_gpus)
    may_end.set()
    assert {os.getpid(), thread.native_id} <= calls.keys()
    assert set(calls.values()) == {(2, 3)}


def test_numa_node_of_a_gpu_is_read(two_gpus: Path) -> None:
    assert [read_numa_node(address, two_gpus) for address in GPU_ADDRESSES] == [None, 1]
