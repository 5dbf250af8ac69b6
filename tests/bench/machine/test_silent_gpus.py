"""GPUs that do not answer are found from the kernel's files."""

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.machine.gpu import Gpu, GpuReport
from parbench.bench.machine.silent_gpus import find_silent_gpus
from tests.support.nvidia import format_address, format_uuid, write_evidence
from tests.support.trees import write_tree

ALL_THREE = tuple(format_address(index) for index in range(3))
NO_DRIVER = GpuReport(failure="NVML reported 'Driver Not Loaded'")
NO_LIBRARY = GpuReport()
HANG = GpuReport(failure="NVML did not answer within 60 s")


def make_report(*indices: int) -> GpuReport:
    """Return the report of a driver to which the GPUs of these indices answer."""
    gpus = []
    for index in indices:
        gpus.append(Gpu(index=index, uuid=format_uuid(index), minor=index))
    return GpuReport(gpus=tuple(gpus))


def find(report: GpuReport, root: Path, **environ: str) -> tuple[str, ...]:
    return find_silent_gpus(environ, report, root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host with three GPUs."""
    return write_evidence(tmp_path / "root", 3)


@pytest.mark.parametrize(
    ("report", "visible", "silent"),
    [
        (NO_DRIVER, None, ALL_THREE),
        (NO_LIBRARY, None, ALL_THREE),
        (HANG, None, ALL_THREE),
        (make_report(1, 2), None, ALL_THREE[:1]),
        (make_report(0, 1, 2), None, ()),
        (GpuReport(gpus=(Gpu(),)), None, ()),  # The device nodes of GPUs are unknown.
        # A dead driver is not hidden by visible devices, but all GPUs may be.
        (NO_DRIVER, "0,1", ALL_THREE[:2]),
        (NO_DRIVER, "", ()),
        (make_report(1), "-1", ()),
        (make_report(1), "NoDevFiles", ()),
        (make_report(1), "1", ()),
        (make_report(1), "1,2", ALL_THREE[2:]),
        (make_report(1), format_uuid(1), ()),
        (make_report(1), format_uuid(0), ALL_THREE[:1]),
    ],
)
def test_visible_gpus_that_are_not_reported_are_silent(
    root: Path, report: GpuReport, visible: str | None, silent: tuple[str, ...]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find(report, root, **environ) == silent


@pytest.mark.parametrize(
    ("files", "report", "silent"),
    [
        # The administrator excludes a GPU.
        ({"excluded": [1]}, make_report(0, 2), ()),
        ({"excluded": [1]}, make_report(0), ALL_THREE[2:]),
        # A container sees the host's devices and its driver's folders, but no device node.
        ({"nodes": 0}, NO_LIBRARY, ()),
        ({"nodes": 0}, NO_DRIVER, ()),
        # A container with two GPUs lacks the library.
        ({"nodes": 2}, NO_LIBRARY, ALL_THREE[:2]),
        # The driver is not loaded. Without the library the host does not use GPUs for CUDA.
        ({"nodes": 0, "has_driver": False}, NO_DRIVER, ALL_THREE),
        ({"nodes": 0, "has_driver": False}, NO_LIBRARY, ()),
    ],
)
def test_gpus_that_this_process_may_use_are_silent(
    tmp_path: Path, files: dict[str, Any], report: GpuReport, silent: tuple[str, ...]
) -> None:
    assert find(report, write_evidence(tmp_path, 3, **files)) == silent


def test_host_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    other = {"vendor": "0x1a03\n", "class": "0x030000\n"}
    write_tree(tmp_path / "sys/bus/pci/devices/0000:02:00.0", other)
    assert find(NO_DRIVER, tmp_path) == ()


def test_job_with_a_share_of_the_gpus_has_no_silent_gpus(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cgroup denies the nodes of the others."""
    real_access = os.access
    denied = {root / "dev/nvidia1", root / "dev/nvidia2"}
    monkeypatch.setattr(
        os, "access", lambda path, mode: path not in denied and real_access(path, mode)
    )
    assert find(make_report(0), root) == ()


def test_gpu_that_the_driver_lost_is_silent_without_nodes(tmp_path: Path) -> None:
    """Neither the kernel's files nor device nodes are known."""
    lost = replace(make_report(0, 2), lost=(1,), failure="NVML reported 'GPU is lost'")
    assert find(lost, tmp_path) == ("1",)
    assert find(lost, tmp_path, CUDA_VISIBLE_DEVICES="1") == ("1",)
    assert find(lost, tmp_path, CUDA_VISIBLE_DEVICES="0") == ()


def test_gpus_of_virtual_machines_are_not_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 2, nodes=0, has_driver=False)
    (root / "drivers/vfio-pci").mkdir(parents=True)
    device = root / "sys/bus/pci/devices" / format_address(0)
    (device / "driver").symlink_to(root / "drivers/vfio-pci")
    assert find(NO_DRIVER, root) == (format_address(1),)
