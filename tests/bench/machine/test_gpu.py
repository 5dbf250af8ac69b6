"""Facts about GPUs and their links are read from the answers of ``nvidia-smi``."""

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from parbench.bench.machine import gpu as gpu_module
from parbench.bench.machine.gpu import (
    Gpu,
    ask_nvidia_smi,
    driver_cuda_version,
    gpu_links,
    gpus_of,
    in_detail,
    list_gpus,
    visible_gpus,
)
from tests.support.nvidia import (
    A100,
    H100,
    LOST_GPU,
    NO_DRIVER,
    VERSION_MISMATCH,
    gpus,
    install,
    topology,
)
from tests.support.trees import write_tool


def read_gpus(environ: dict[str, str]) -> tuple[Gpu, ...]:
    return in_detail(environ, gpus_of(environ))


def test_facts_of_h100_are_read(tmp_path: Path) -> None:
    listed = gpus({**H100, "memory.used": "4", "remapped_rows.uncorrectable": "1"}, 1)
    environ = install(
        tmp_path,
        listed,
        processes=[
            (0, 17, "/usr/bin/python3.12"),
            (0, os.getpid(), "this process"),
            (0, 18, "[Not Found]"),
            (0, 19, "odd, name"),
        ],
        links=lambda index: ["26.562 GB/s", "<inactive>"],
    )
    [gpu] = read_gpus(environ)
    assert gpu == Gpu(
        name="NVIDIA H100 80GB HBM3",
        index=0,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        pci_address="0000:19:00.0",
        driver="580.95.05",
        compute_capability="9.0",
        memory_bytes=81559 << 20,
        persistence=True,
        mig=False,
        ecc=True,
        power_limit_watts=700.0,
        power_default_watts=700.0,
        sm_clock_max=1980,
        memory_clock_max=2619,
        sm_clock_applications=1980,
        memory_clock_applications=2619,
        pcie_generation_max=5,
        pcie_width_max=16,
        nvlinks=(26.562, 0.0),
        sm_clock=345,
        memory_clock=2619,
        slowed_by=("idle",),
        utilization_percent=0,
        temperature_celsius=28,
        memory_used_bytes=4 << 20,
        pcie_generation=5,
        pcie_width=16,
        errors_corrected=0,
        errors_uncorrected=0,
        rows_remapped=1,
        remap_pending=False,
        remap_failed=False,
        processes=("python3.12 (pid 17)", "? (pid 18)", "odd, name (pid 19)"),
    )
    assert msgspec.json.decode(msgspec.json.encode(gpu), type=Gpu) == gpu
    # Runs on different GPUs of a host do not differ in it.
    assert "pci_address" not in gpu.facts(varying=False)


@pytest.mark.parametrize("answer", ["[N/A]", "[Unknown Error]", ""])
def test_unknown_facts_are_none(tmp_path: Path, answer: str) -> None:
    [known] = gpus(H100, 1)
    unknown = {**dict.fromkeys(known, answer), "name": known["name"], "uuid": known["uuid"]}
    [gpu] = read_gpus(install(tmp_path, [unknown]))
    facts = {**gpu.facts(varying=False), **gpu.facts(varying=True)}
    del facts["uuid"], facts["processes"]
    assert set(facts.values()) == {None}


def test_older_driver_is_read(tmp_path: Path) -> None:
    """It has no compute capability, and remaps are numbers."""
    answers = {
        "clocks_throttle_reasons.active": "0x000000000000006A",
        "remapped_rows.pending": "1",
    }
    listed = gpus(A100, 2, gpu1=answers)
    environ = install(tmp_path, listed, links=lambda index: ["25 GB/s", "25 GB/s"][:index])
    first, second = read_gpus(environ)
    assert first.driver == "470.256.02"
    assert first.compute_capability is None
    assert first.slowed_by == ()
    assert first.nvlinks == ()
    assert second.remap_pending is True
    assert second.nvlinks == (25.0,)
    assert second.slowed_by == (
        "applications clocks setting",
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
    )


def test_absent_tool_finds_no_gpus(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "MIG-cc"}
    assert visible_gpus(environ) == ()
    assert gpu_links(environ) == {}
    [gpu] = in_detail(environ, [Gpu(name="H100")])
    assert gpu.processes is None


@pytest.mark.parametrize(
    ("command", "seconds"), [("exit 9", 30.0), ("exec /bin/sleep 20", 0.2)]
)
def test_failing_tool_finds_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, seconds: float
) -> None:
    environ = install(tmp_path, gpus(H100, 1))
    assert len(visible_gpus(environ)) == 1
    write_tool(tmp_path, "nvidia-smi", command)
    monkeypatch.setattr(gpu_module, "_FIRST_QUERY_SECONDS", seconds)
    assert visible_gpus(environ) == ()


def test_first_query_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = install(tmp_path, gpus(H100, 1))
    script = tmp_path / "answer.py"
    script.write_text(f"import time\ntime.sleep(0.2)\n{script.read_text()}")
    monkeypatch.setattr(gpu_module, "_QUERY_SECONDS", 0.05)
    assert gpus_of(environ) == ()
    assert len(visible_gpus(environ)) == 1


@pytest.mark.parametrize("failure", [LOST_GPU, NO_DRIVER, VERSION_MISMATCH])
def test_failing_tool_is_quoted(tmp_path: Path, failure: tuple[str, int]) -> None:
    listed, reply = list_gpus(install(tmp_path, [], failure=failure))
    assert listed == ()
    text, code = failure
    assert " ".join(text.split()) in reply.describe()
    assert f"(exit code {code})" in reply.describe()


@pytest.mark.parametrize("code", [0, 15])
def test_lost_gpu_does_not_hide_the_others(tmp_path: Path, code: int) -> None:
    """The tool reports the lost GPU, lists the others, and fails or not."""
    failure = (LOST_GPU[0], code)
    environ = install(tmp_path, gpus(H100, 3)[1:], failure=failure)
    listed, reply = list_gpus(environ)
    assert [gpu.index for gpu in listed] == [1, 2]
    assert reply.text == LOST_GPU[0]


def test_row_of_lost_gpu_is_left_out(tmp_path: Path) -> None:
    lost = {"memory.total": "[GPU is lost]", "ecc.mode.current": "[GPU is lost]"}
    environ = install(tmp_path, gpus(H100, 3, gpu1=lost))
    assert [gpu.index for gpu in gpus_of(environ)] == [0, 2]


def test_hung_tool_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits inside the driver, and does not end when it is killed."""
    write_tool(tmp_path, "nvidia-smi", "exec /bin/sleep 20")
    started: list[subprocess.Popen[bytes]] = []
    real_wait = subprocess.Popen.wait

    def wait(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        assert timeout is not None
        started.append(process)
        return real_wait(process, timeout=0.05)

    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    reply = ask_nvidia_smi({"PATH": str(tmp_path)}, seconds=0.05)
    assert "did not end within 0.05 s" in reply.describe()
    [process] = started
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    real_wait(process)


def test_absent_and_unusable_tools_are_described(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert "not in the PATH" in ask_nvidia_smi(environ).describe()
    write_tool(tmp_path, "nvidia-smi", "").write_bytes(b"\x7fELF")
    assert "cannot be started" in ask_nvidia_smi(environ).describe()


@pytest.mark.parametrize(
    ("driver", "cuda", "version"),
    [
        ("550.54.15", "12.4", "12.4"),
        ("610.57.04", "13.3", "13.3"),
        ("550.54.15", "N/A", None),
    ],
)
def test_cuda_version_is_read_from_header(
    tmp_path: Path, driver: str, cuda: str, version: str | None
) -> None:
    listed = gpus({**H100, "driver_version": driver}, 1)
    environ = install(tmp_path, listed, cuda=cuda)
    assert driver_cuda_version(environ) == version


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho No devices were found\n", b"\x7fELF"])
def test_unusable_tool_finds_no_gpus(tmp_path: Path, content: bytes) -> None:
    write_tool(tmp_path, "nvidia-smi", "").write_bytes(content)
    assert visible_gpus({"PATH": str(tmp_path)}) == ()


@pytest.fixture(scope="module")
def three_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("gpus"), gpus(H100, 3))


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        ("", []),
        ("none", []),
        ("GPU-f", []),
        (" 1 , 0 ", [1, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("GPU-00000002,GPU-00000000-0000", [2, 0]),
    ],
)
def test_visible_devices_select_gpus(
    three_gpus: dict[str, str], variable: str, indices: list[int]
) -> None:
    visible = visible_gpus({**three_gpus, "CUDA_VISIBLE_DEVICES": variable})
    assert [gpu.index for gpu in visible] == indices


def test_all_gpus_are_visible_without_variable(three_gpus: dict[str, str]) -> None:
    assert [gpu.index for gpu in visible_gpus(three_gpus)] == [0, 1, 2]


def test_mig_device_is_visible(three_gpus: dict[str, str]) -> None:
    [gpu] = visible_gpus({**three_gpus, "CUDA_VISIBLE_DEVICES": "MIG-cc"})
    assert gpu == Gpu(name="MIG-cc", mig=True)


Link = Callable[[int, int], str]


def link_dgx(first: int, second: int) -> str:
    return "NV18"


def link_pcie_box(first: int, second: int) -> str:
    if first // 4 != second // 4:
        return "SYS"
    return {1: "PIX", 2: "PXB"}.get(first ^ second, "PHB")


DGX = topology(link_dgx, ("0-55", "56-111"), nics=["NIC0", "NIC1"])
PCIE_BOX = topology(link_pcie_box, ("0-31", "32-63"), has_numa_id=False)
RELATIONS = {
    "NV18": "NVLink",
    "PIX": "PCIe",
    "PXB": "PCIe",
    "PHB": "PCIe",
    "SYS": "other NUMA node",
}


@pytest.mark.parametrize(("matrix", "link"), [(DGX, link_dgx), (PCIE_BOX, link_pcie_box)])
def test_links_are_read_from_topology_matrix(tmp_path: Path, matrix: str, link: Link) -> None:
    listed = gpus(H100, 8)
    links = gpu_links(install(tmp_path, listed, topology=matrix))
    assert len(links) == 8 * 7 / 2
    for first, second in combinations(range(8), 2):
        pair = frozenset((listed[first]["uuid"], listed[second]["uuid"]))
        assert links[pair] == RELATIONS[link(first, second)]
