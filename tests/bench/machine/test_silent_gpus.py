"""GPUs that do not answer are found from the kernel's files."""

import os
from pathlib import Path

import pytest

from parbench.bench.machine.gpu import list_gpus
from parbench.bench.machine.silent_gpus import (
    NO_ADDRESS,
    describe_silent_gpus,
    find_silent_gpus,
    suggest_fix,
)
from tests.support.nvidia import (
    H100,
    LOST_GPU,
    NO_DEVICES,
    NO_DRIVER,
    VERSION_MISMATCH,
    format_address,
    gpus,
    install,
    write_evidence,
)
from tests.support.trees import write_tool, write_tree

SILENT = ("", 0)
ALL_THREE = tuple(format_address(index) for index in range(3))


def find(environ: dict[str, str], root: Path) -> tuple[str, ...]:
    listed, reply = list_gpus(environ)
    return find_silent_gpus(environ, listed, reply, root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host with three GPUs."""
    return write_evidence(tmp_path / "root", 3)


@pytest.mark.parametrize("failure", [NO_DEVICES, NO_DRIVER, VERSION_MISMATCH])
def test_gpus_behind_a_failing_driver_are_silent(
    tmp_path: Path, root: Path, failure: tuple[str, int]
) -> None:
    assert find(install(tmp_path, [], failure=failure), root) == ALL_THREE


def test_gpu_that_fails_the_tool_is_named(tmp_path: Path, root: Path) -> None:
    environ = install(tmp_path, [], failure=LOST_GPU)
    assert find(environ, root) == ("0000:19:00.0",)


@pytest.mark.parametrize("failure", [SILENT, LOST_GPU])
def test_gpu_that_is_not_listed_is_silent(
    tmp_path: Path, root: Path, failure: tuple[str, int]
) -> None:
    environ = install(tmp_path, gpus(H100, 3)[1:], failure=failure)
    assert find(environ, root) == ("0000:19:00.0",)


@pytest.mark.parametrize(("num_nodes", "silent"), [(3, ALL_THREE[2:]), (2, (NO_ADDRESS,))])
def test_warning_does_not_make_an_answering_gpu_silent(
    tmp_path: Path, num_nodes: int, silent: tuple[str, ...]
) -> None:
    root = write_evidence(tmp_path / "root", 3, nodes=num_nodes)
    failure = ("WARNING: infoROM is corrupted at gpu 0000:19:00.0", 14)
    listed = gpus(H100, num_nodes - 1)
    assert find(install(tmp_path, listed, failure=failure), root) == silent


def test_answering_gpus_are_not_silent(tmp_path: Path, root: Path) -> None:
    assert find(install(tmp_path, gpus(H100, 3)), root) == ()


def test_host_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    other = {"vendor": "0x1a03\n", "class": "0x030000\n"}
    write_tree(tmp_path / "sys/bus/pci/devices/0000:02:00.0", other)
    assert find({"PATH": str(tmp_path)}, tmp_path) == ()
    assert find(install(tmp_path, [], failure=NO_DRIVER), tmp_path) == ()


@pytest.mark.parametrize(
    ("visible", "silent"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,2", ()),
        ("0,1", ALL_THREE[:1]),
        ("GPU-00000002", ()),
        ("GPU-00000000", ALL_THREE[:1]),
    ],
)
def test_gpus_that_are_hidden_on_purpose_are_not_silent(
    tmp_path: Path, root: Path, visible: str, silent: tuple[str, ...]
) -> None:
    environ = install(tmp_path, gpus(H100, 3)[1:])
    assert find({**environ, "CUDA_VISIBLE_DEVICES": visible}, root) == silent


def test_dead_driver_is_not_hidden_by_visible_devices(tmp_path: Path, root: Path) -> None:
    environ = install(tmp_path, [], failure=VERSION_MISMATCH)
    assert find({**environ, "CUDA_VISIBLE_DEVICES": "0,1"}, root) == ALL_THREE
    assert find({**environ, "CUDA_VISIBLE_DEVICES": ""}, root) == ()


def test_container_without_gpus_has_no_silent_gpus(tmp_path: Path) -> None:
    """It sees the host's devices and the folders of its driver, but no device node."""
    root = write_evidence(tmp_path / "root", 3, nodes=0)
    assert find({"PATH": str(tmp_path)}, root) == ()
    assert find(install(tmp_path, [], failure=NO_DEVICES), root) == ()


def test_job_with_a_share_of_the_gpus_has_no_silent_gpus(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cgroup denies the nodes of the others."""
    environ = install(tmp_path, gpus(H100, 1))
    real_access = os.access
    denied = {root / "dev/nvidia1", root / "dev/nvidia2"}
    monkeypatch.setattr(
        os, "access", lambda path, mode: path not in denied and real_access(path, mode)
    )
    assert find(environ, root) == ()


def test_container_without_tool_has_silent_gpus(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 3, nodes=2)
    environ = {"PATH": str(tmp_path)}
    listed, reply = list_gpus(environ)
    silent = find_silent_gpus(environ, listed, reply, root)
    assert silent == ("/dev/nvidia0", "/dev/nvidia1")
    assert "nvidia-smi is not in the PATH" in describe_silent_gpus(silent, reply)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in suggest_fix(reply)


def test_silent_gpu_of_a_container_may_have_no_address(tmp_path: Path) -> None:
    """Two of the host's three GPUs are its own, and one of them is missing."""
    root = write_evidence(tmp_path / "root", 3, nodes=2)
    assert find(install(tmp_path, gpus(H100, 1)), root) == (NO_ADDRESS,)


def test_driver_that_is_not_loaded_leaves_gpus_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 3, nodes=0, has_driver=False)
    assert find(install(tmp_path, [], failure=NO_DRIVER), root) == ALL_THREE
    # Without the tool it is a host that does not use its GPUs for CUDA.
    assert find({"PATH": str(tmp_path / "empty")}, root) == ()


def test_gpus_of_virtual_machines_are_not_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 2, nodes=0, has_driver=False)
    (root / "drivers/vfio-pci").mkdir(parents=True)
    device = root / "sys/bus/pci/devices" / format_address(0)
    (device / "driver").symlink_to(root / "drivers/vfio-pci")
    environ = install(tmp_path, [], failure=NO_DRIVER)
    assert find(environ, root) == (format_address(1),)


def test_gpu_that_its_driver_has_not_taken_is_silent(tmp_path: Path) -> None:
    root = write_evidence(tmp_path / "root", 2)
    unclaimed = {"vendor": "0x10de\n", "class": "0x030200\n"}
    write_tree(root / "sys/bus/pci/devices" / format_address(2), unclaimed)
    assert find(install(tmp_path, gpus(H100, 2)), root) == (format_address(2),)


def test_hung_driver_leaves_gpus_silent(tmp_path: Path, root: Path) -> None:
    write_tool(tmp_path, "nvidia-smi", "exec /bin/sleep 20")
    environ = {"PATH": str(tmp_path)}
    listed, reply = list_gpus(environ, seconds=0.1)
    silent = find_silent_gpus(environ, listed, reply, root)
    assert silent == ALL_THREE
    text = describe_silent_gpus(silent, reply)
    assert text.startswith("GPUs 0000:19:00.0, 0000:2a:00.0 and 0000:3b:00.0 do not answer")
    assert "did not end within 0.1 s" in text
