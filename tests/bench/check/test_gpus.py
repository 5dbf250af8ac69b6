"""The driver's facts make a GPU bad, or one to watch."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.check.gpus import Watch, find_faults, format_facts, summarize_load
from parbench.bench.machine.gpu import Gpu, GpuReport, read_report
from tests.support.nvidia import H100, LOST, describe_links, gpus, install

IDLE = Gpu(
    uuid="a",
    sm_clock=345,
    sm_clock_max=1980,
    slowed_by=("idle",),
    utilization_percent=0,
    pcie_width=4,
)
BUSY = replace(
    IDLE,
    sm_clock=1500,
    utilization_percent=99,
    slowed_by=("software power cap",),
    pcie_width=16,
)
HOT = replace(
    BUSY,
    sm_clock=1200,
    slowed_by=("hardware thermal slowdown",),
    temperature_celsius=91,
)


ONE_INACTIVE = describe_links([True, False])
ALL_ACTIVE = {**H100, **describe_links([True, True])}


def test_complaints_are_about_the_faulty_gpu(tmp_path: Path) -> None:
    listed = gpus(
        ALL_ACTIVE,
        8,
        gpu1={"errors_uncorrected": "2"},
        gpu2={"rows": "0 1 0"},
        gpu3={"pcie_width": "8"},
        gpu4={"persistence": "0"},
        gpu5={"memory_used": str(4000 << 20)},
        gpu6=ONE_INACTIVE,
    )
    watched = read_report(install(tmp_path, listed)).gpus
    reasons = [find_faults(gpu, watched, {}) for gpu in watched]
    assert reasons[0] == reasons[7] == ()
    for index, topic in {1: "memory", 2: "memory", 3: "pcie", 6: "nvlink"}.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert reason.is_bad
    for index, topic in {4: "persistence", 5: "processes"}.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert not reason.is_bad
    assert "SM 345 of 1980 MHz" in format_facts(watched[0], watched)["clocks"]


def test_gpus_are_sampled_during_work(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 1, gpu0={"utilization": "99", "clock.1": "1500"}))
    with Watch(environ, read_report(environ).gpus) as watch:
        assert watch._output is not None
        while not os.fstat(watch._output.fileno()).st_size:
            time.sleep(0.05)
        install(tmp_path, gpus(H100, 1))
    assert watch.gpus[0].sm_clock == 1500


def test_gpu_that_is_lost_during_work_is_bad(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 2))
    with Watch(environ, read_report(environ).gpus) as watch:
        install(tmp_path, gpus(H100, 2, gpu1=LOST))
    first, second = watch.gpus
    assert watch.find_loss(first) is None
    reason = watch.find_loss(second)
    assert reason is not None
    assert "GPU is lost" in reason.text


def test_unknown_gpu_has_no_complaints() -> None:
    assert format_facts(Gpu(), [Gpu()])["memory"] == "-"
    assert find_faults(Gpu(), [Gpu()], {}) == ()


def test_busy_samples_count_and_power_cap_is_fine() -> None:
    gpu = summarize_load(IDLE, [IDLE, BUSY, replace(HOT, uuid="b")])
    assert gpu.sm_clock == 1500
    assert gpu.pcie_width == 16
    assert gpu.slowed_by == ("software power cap",)
    assert find_faults(gpu, [gpu], {}) == ()


def test_hardware_slowdown_is_bad() -> None:
    gpu = summarize_load(IDLE, [IDLE, BUSY, HOT])
    assert gpu.temperature_celsius == 91
    [reason] = find_faults(gpu, [gpu], {})
    assert reason.is_bad
    assert "hardware thermal slowdown" in reason.text


def list_growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of a GPU's counters that a watch finds."""
    gpu = Gpu(uuid="x", nvlink_errors=dict(before))
    watch = Watch({}, [gpu])
    watch._after = GpuReport(gpus=(replace(gpu, nvlink_errors=dict(after)),))
    return watch.count_link_errors(gpu)


def test_only_growth_of_nvlink_errors_counts() -> None:
    growth = list_growth(
        {"replay errors": 4, "crc errors": 1}, {"replay errors": 9, "crc errors": 1}
    )
    assert growth == {"replay errors": 5}
    assert Watch({}, ()).count_link_errors(Gpu(uuid="z")) == {}
    [replays] = find_faults(Gpu(), [Gpu()], growth)
    assert "5 more replay errors" in replays.text


@pytest.mark.parametrize(
    ("name", "is_bad"),
    [
        ("replay errors", True),
        ("recovery errors", True),
        ("crc errors", False),
        ("link recovery failed events", True),
        ("effective errors", True),
        ("symbol errors", False),
        ("malformed packet errors", False),
        ("buffer overrun errors", False),
        ("rx remote errors", False),
        ("fec errors - 8", False),
        ("fec errors - 15", False),
    ],
)
def test_counters_of_nvlinks_are_judged(name: str, is_bad: bool) -> None:
    [reason] = find_faults(Gpu(), [Gpu()], {name: 2})
    assert reason.text == f"NVLink: 2 more {name} meanwhile"
    assert reason.is_bad is is_bad


def test_counters_of_good_links_are_kept_and_not_judged() -> None:
    """They grow on links without faults: codewords without errors above all."""
    growth = {
        "fec errors - 0": 125_361,
        "fec errors - 1": 2,
        "fec errors - 7": 1,
        "raw errors lane 1": 4,
        "link recovery successful events": 1,
        "total link recovery events": 1,
    }
    gpu = Gpu()
    assert find_faults(gpu, [gpu], growth) == ()
    assert "fec errors - 0 +125361" in format_facts(gpu, [gpu], growth)["nvlink counters"]
