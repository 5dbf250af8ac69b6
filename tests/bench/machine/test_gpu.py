"""Facts about GPUs and their links are read from NVML, in a child process."""

from pathlib import Path

import msgspec
import pytest

from parbench.bench.machine import gpu as gpu_module
from parbench.bench.machine.gpu import (
    Gpu,
    GpuReport,
    has_library,
    inspect_gpus,
    read_report,
    select_visible,
)
from tests.support.nvidia import (
    H100,
    HANG,
    LOST,
    NO_DRIVER,
    NO_PERMISSION,
    describe_links,
    format_uuid,
    gpus,
    install,
)


def test_facts_of_h100_are_read(tmp_path: Path) -> None:
    changes = {
        "memory_used": str(4 << 20),
        "rows": "1 0 0",
        "pci": "0:19:0",
        "fabric": "7 2 3 0",
        "field.90": "26562",
        **describe_links([True, False]),
    }
    [gpu] = read_report(install(tmp_path, gpus(H100, 1, gpu0=changes))).gpus
    assert gpu == Gpu(
        name="NVIDIA H100 80GB HBM3",
        index=0,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        pci_address="0000:19:00.0",
        driver="580.95.05",
        memory_bytes=81559 << 20,
        persistence=True,
        mig=False,
        ecc=True,
        power_limit_watts=700.0,
        power_default_watts=700.0,
        sm_clock_max=1980,
        pcie_generation_max=5,
        pcie_width_max=16,
        nvlinks=2,
        active_nvlinks=1,
        nvlink_bytes_per_second=26_562_000_000,
        fabric="completed",
        sm_clock=345,
        slowed_by=("idle",),
        memory_used_bytes=4 << 20,
        pcie_width=16,
        errors_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
    )


def test_unknown_facts_are_none(tmp_path: Path) -> None:
    [gpu] = read_report(install(tmp_path, [{"name": "H100"}])).gpus
    assert gpu == Gpu(name="H100", index=0, driver="580.95.05")


def test_state_of_a_slowed_gpu_is_read(tmp_path: Path) -> None:
    changes = {"clock_reasons": "0x6A", "rows": "0 1 0"}
    [gpu] = read_report(install(tmp_path, gpus(H100, 1, gpu0=changes))).gpus
    assert gpu.remap_pending is True
    assert gpu.slowed_by == (
        "applications clocks setting",
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
    )


def test_absent_library_fails_only_next_to_a_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_module, "has_library", lambda environ: False)
    monkeypatch.setattr(gpu_module, "DEVICE_FILE", tmp_path / "nvidiactl")
    assert read_report({}) == GpuReport()
    (tmp_path / "nvidiactl").touch()
    assert read_report({}) == GpuReport(failure="libnvidia-ml.so.1 is missing")


def test_library_is_found_without_a_call(tmp_path: Path) -> None:
    assert has_library(install(tmp_path, [], init=HANG))


def test_failing_driver_is_quoted(tmp_path: Path) -> None:
    report = read_report(install(tmp_path, gpus(H100, 1), init=NO_DRIVER))
    assert report.gpus == ()
    assert "Driver Not Loaded" in report.failure


def test_hung_driver_is_left_behind(tmp_path: Path) -> None:
    report = read_report(install(tmp_path, gpus(H100, 1), init=HANG), timeout_seconds=0.05)
    assert report.failure == "NVML did not answer within 0.05 s"


@pytest.mark.parametrize("lost", [LOST, {"clock_reasons": "error 15"}])
def test_lost_gpu_does_not_hide_the_others(tmp_path: Path, lost: dict[str, str]) -> None:
    report = read_report(install(tmp_path, gpus(H100, 3, gpu1=lost)))
    assert [gpu.index for gpu in report.gpus] == [0, 2]
    assert report.failure == "NVML reported 'GPU is lost (GPU 1)'"


def test_gpus_of_other_jobs_are_left_out(tmp_path: Path) -> None:
    report = read_report(install(tmp_path, gpus(H100, 2, gpu0=NO_PERMISSION)))
    assert [gpu.index for gpu in report.gpus] == [1]
    assert not report.failure


def test_gpus_are_inspected_once(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 2))
    assert len(inspect_gpus(environ).gpus) == 2
    install(tmp_path, [])
    assert len(inspect_gpus(environ).gpus) == 2
    assert read_report(environ).gpus == ()


THREE_GPUS = tuple(Gpu(name="H100", index=index, uuid=format_uuid(index)) for index in range(3))


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        ("", []),
        ("GPU-f", []),
        (" 1 , 0 ", [1, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        (f"{format_uuid(2)},{format_uuid(0)}", [2, 0]),
    ],
)
def test_visible_devices_select_gpus(variable: str, indices: list[int]) -> None:
    visible = select_visible(THREE_GPUS, {"CUDA_VISIBLE_DEVICES": variable})
    assert [gpu.index for gpu in visible] == indices


def test_all_gpus_are_visible_without_variable() -> None:
    assert select_visible(THREE_GPUS, {}) == THREE_GPUS


def test_mig_device_is_visible() -> None:
    [gpu] = select_visible(THREE_GPUS, {"CUDA_VISIBLE_DEVICES": "MIG-cc"})
    assert gpu == Gpu(name="MIG-cc", mig=True)


def test_links_are_read_from_topology(tmp_path: Path) -> None:
    """NVLink counts first, then the nearest common ancestor of two GPUs."""
    levels = {1: "10", 2: "30", 3: "40", 4: "50"}
    first_gpu = {f"topology.{index}": level for index, level in levels.items()}
    first_gpu |= {"nvlink_status.1": "5", "nvlink_status.5": "0", "topology.5": "50"}
    report = read_report(install(tmp_path, gpus(H100, 7, gpu0=first_gpu)))
    links = report.get_links_by_pair()
    assert [links.get(frozenset((format_uuid(0), format_uuid(i)))) for i in range(1, 7)] == [
        "same PCIe switch",
        "same host bridge",
        "same NUMA node",
        "other NUMA node",
        "NVLink",
        None,
    ]
    assert msgspec.json.decode(msgspec.json.encode(report), type=GpuReport) == report
