"""The kernel's files show what slows GPUs and NICs, and the CPUs next to a GPU."""

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from parbench.bench.machine import gpu_host
from parbench.bench.machine.disturbance import Disturbance
from parbench.bench.machine.doctor import examine_gpu_host
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.gpu_host import bind_to_gpu, choose_gpu_cpus, read_numa_node
from tests.support.trees import write_tree

DEVICES = "sys/bus/pci/devices"
GPU_ADDRESSES = ("0000:19:00.0", "0000:9a:00.0")
GPUS = tuple(Gpu(pci_address=address) for address in GPU_ADDRESSES)


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """A host with a GPU on each NUMA node, a NIC, and bad settings."""
    first, second = GPU_ADDRESSES
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    kernel_files = {
        f"{DEVICES}/{first}/local_cpulist": "0-1\n",
        f"{DEVICES}/{second}/local_cpulist": "2-3\n",
        f"{DEVICES}/{second}/numa_node": "1\n",
        f"{DEVICES}/{first}/iommu_group/type": "DMA-FQ\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n",
    }
    return write_tree(tmp_path, kernel_files)


def examine(root: Path) -> dict[str, Disturbance]:
    return {finding.topic: finding for finding in examine_gpu_host(GPUS, root)}


def test_bad_settings_of_a_gpu_host_disturb(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 29))
    findings = examine(two_gpus)
    assert {topic: finding.facts for topic, finding in findings.items()} == {
        "/dev/shm": "0.50 GiB",
        "iommu": "on",
        "peer memory": "off",
    }
    for finding in findings.values():
        assert finding.disturbs
        assert finding.fix


def test_good_settings_of_a_gpu_host_do_not_disturb(two_gpus: Path) -> None:
    files = {
        f"{DEVICES}/{GPU_ADDRESSES[0]}/iommu_group/type": "identity\n",
        "sys/module/nvidia_peermem/version": "1",
        "dev/shm/any": "",
    }
    findings = examine(write_tree(two_gpus, files))
    assert not any(finding.disturbs for finding in findings.values())
    assert findings["peer memory"].facts == "on"


def test_nothing_is_known_without_files(tmp_path: Path) -> None:
    assert {finding.facts for finding in examine(tmp_path).values()} == {"-"}


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
