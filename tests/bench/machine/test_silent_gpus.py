"""GPUs that do not answer are found from the kernel's files."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.machine.gpu import Gpu, GpuFailure, GpuReport
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.silent_gpus import find_silent_gpus
from tests.support.nvidia import format_address, format_uuid, write_evidence
from tests.support.trees import write_tree

ALL_THREE = tuple(format_address(index) for index in range(3))
NO_DRIVER = GpuReport(failure=GpuFailure(kind="error", text="Driver Not Loaded"))
MISMATCH = GpuReport(failure=GpuFailure(kind="error", text="version mismatch"))
NO_LIBRARY = GpuReport(failure=GpuFailure(kind="no library"))
HANG = GpuReport(failure=GpuFailure(kind="hang", text="60 s"))


def report(*indices: int) -> GpuReport:
    """Return the report of a driver to which the GPUs of these indices answer."""
    gpus = []
    for index in indices:
        gpus.append(Gpu(index=index, uuid=format_uuid(index), minor=index))
    return GpuReport(gpus=tuple(gpus))


def find(report: GpuReport, root: Path, **environ: str) -> tuple[str, ...]:
    return find_silent_gpus(environ, report, root)


def describe(report: GpuReport) -> str:
    machine = Machine(cores=1, silent_gpus=ALL_THREE, gpu_failure=report.failure)
    return machine.describe_silent_gpus()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host with three GPUs."""
    return write_evidence(tmp_path / "root", 3)


@pytest.mark.parametrize("report", [GpuReport(), NO_DRIVER, MISMATCH, HANG])
def test_gpus_behind_a_failing_driver_are_silent(root: Path, report: GpuReport) -> None:
    assert find(report, root) == ALL_THREE


def test_gpu_that_is_not_reported_is_silent(root: Path) -> None:
    assert find(report(1, 2), root) == ALL_THREE[:1]


def test_answering_gpus_are_not_silent(root: Path) -> None:
    assert find(report(0, 1, 2), root) == ()
    assert find(GpuReport(gpus=(Gpu(),)), root) == ()


def test_host_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    other = {"vendor": "0x1a03\n", "class": "0x030000\n"}
    write_tree(tmp_path / "sys/bus/pci/devices/0000:02:00.0", other)
    assert find(NO_LIBRARY, tmp_path) == ()
    assert find(NO_DRIVER, tmp_path) == ()


@pytest.mark.parametrize(
    ("visible", "silent"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1", ()),
        ("0,1", ALL_THREE[:1]),
        ("1,2", ALL_THREE[2:]),
        (format_uuid(1), ()),
        (format_uuid(0), ALL_THREE[:1]),
    ],
)
def test_gpus_that_are_hidden_on_purpose_are_not_silent(
    root: Path, visible: str, silent: tuple[str, ...]
) -> None:
    """Only the GPU in the middle answers."""
    assert find(report(1), root, CUDA_VISIBLE_DEVICES=visible) == silent


def test_dead_driver_is_not_hidden_by_visible_devices(root: Path) -> None:
    assert find(MISMATCH, root, CUDA_VISIBLE_DEVICES="0,1") == ALL_THREE[:2]
    assert find(MISMATCH, root, CUDA_VISIBLE_DEVICES="") == ()


def test_gpu_that_the_administrator_excluded_is_not_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path, 3, excluded=[1])
    assert find(report(0, 2), root) == ()
    assert find(report(0), root) == ALL_THREE[2:]


def test_container_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    """It sees the host's devices and the folders of its driver, but no device node."""
    root = write_evidence(tmp_path, 3, nodes=0)
    assert find(NO_LIBRARY, root) == ()
    assert find(NO_DRIVER, root) == ()


def test_job_with_a_share_of_the_gpus_has_no_silent_gpus(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cgroup denies the nodes of the others."""
    real_access = os.access
    denied = {root / "dev/nvidia1", root / "dev/nvidia2"}
    monkeypatch.setattr(
        os, "access", lambda path, mode: path not in denied and real_access(path, mode)
    )
    assert find(report(0), root) == ()


def test_container_without_library_has_silent_gpus(tmp_path: Path) -> None:
    root = write_evidence(tmp_path, 3, nodes=2)
    assert find(NO_LIBRARY, root) == ALL_THREE[:2]
    text = describe(NO_LIBRARY)
    assert "cannot be examined" in text
    assert "is not installed" in text


def test_gpu_that_the_driver_lost_is_silent_without_nodes(tmp_path: Path) -> None:
    """Neither the kernel's files nor device nodes are known."""
    lost = replace(report(0, 2), lost=(1,))
    assert find(lost, tmp_path) == ("1",)
    assert find(lost, tmp_path, CUDA_VISIBLE_DEVICES="1") == ("1",)
    assert find(lost, tmp_path, CUDA_VISIBLE_DEVICES="0") == ()


def test_driver_that_is_not_loaded_leaves_gpus_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path, 3, nodes=0, has_driver=False)
    assert find(NO_DRIVER, root) == ALL_THREE
    # Without the library it is a host that does not use its GPUs for CUDA.
    assert find(NO_LIBRARY, root) == ()


def test_gpus_of_virtual_machines_are_not_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 2, nodes=0, has_driver=False)
    (root / "drivers/vfio-pci").mkdir(parents=True)
    device = root / "sys/bus/pci/devices" / format_address(0)
    (device / "driver").symlink_to(root / "drivers/vfio-pci")
    assert find(NO_DRIVER, root) == (format_address(1),)


def test_gpu_that_its_driver_has_not_taken_is_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path, 2)
    unclaimed = {"vendor": "0x10de\n", "class": "0x030200\n"}
    write_tree(root / "sys/bus/pci/devices" / format_address(2), unclaimed)
    assert find(report(0, 1), root) == (format_address(2),)


def test_hung_driver_is_described() -> None:
    text = describe(HANG)
    assert text.startswith("GPUs 0000:19:00.0, 0000:2a:00.0 and 0000:3b:00.0 do not answer")
    assert "did not answer within 60 s" in text
