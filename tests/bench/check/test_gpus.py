"""The driver's answers make a GPU bad, or one to watch."""

from dataclasses import replace
from pathlib import Path

from parbench.bench.check.gpus import Watch, at_work, complaints, facts_of, nvlink_errors
from parbench.bench.machine.gpu import Gpu, gpus_of
from tests.support.nvidia import H100, gpus, install

ERROR_COUNTERS = """\
GPU 0: NVIDIA H100 (UUID: x)
\t Link 0: Replay Errors: 3
\t Link 1: Replay Errors: 1
\t Link 1: Recovery Errors: 0
GPU 1: NVIDIA H100 (UUID: y)
\t Link 0: Replay Errors: 2
"""
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


def list_link_rates(index: int) -> list[str]:
    return ["26.562 GB/s", "<inactive>" if index == 6 else "26.562 GB/s"]


def test_complaints_are_about_the_faulty_gpu(tmp_path: Path) -> None:
    listed = gpus(
        H100,
        8,
        gpu1={"ecc.errors.uncorrected.volatile.total": "2"},
        gpu2={"remapped_rows.pending": "Yes"},
        gpu3={"pcie.link.width.current": "8"},
        gpu4={"persistence_mode": "Disabled"},
        gpu5={"memory.used": "4000"},
    )
    environ = install(tmp_path, listed, links=list_link_rates)
    with Watch(environ, gpus_of(environ)) as watch:
        pass
    reasons = [complaints(gpu, watch.gpus, {}) for gpu in watch.gpus]
    assert reasons[0] == reasons[7] == ()
    for index, topic in {1: "memory", 2: "memory", 3: "pcie", 6: "nvlink"}.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert reason.is_bad
    for index, topic in {4: "persistence", 5: "processes"}.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert not reason.is_bad
    assert "SM 345 of 1980 MHz" in facts_of(watch.gpus[0], watch.gpus)["clocks"]


def test_unknown_gpu_has_no_complaints() -> None:
    assert facts_of(Gpu(), [Gpu()])["memory"] == "-"
    assert complaints(Gpu(), [Gpu()], {}) == ()


def test_busy_samples_count_and_power_cap_is_fine() -> None:
    gpu = at_work(IDLE, [IDLE, BUSY, replace(HOT, uuid="b")])
    assert gpu.sm_clock == 1500
    assert gpu.pcie_width == 16
    assert gpu.slowed_by == ("software power cap",)
    assert complaints(gpu, [gpu], {}) == ()


def test_hardware_slowdown_is_bad() -> None:
    gpu = at_work(IDLE, [IDLE, BUSY, HOT])
    assert gpu.temperature_celsius == 91
    [reason] = complaints(gpu, [gpu], {})
    assert reason.is_bad
    assert "hardware thermal slowdown" in reason.text


def test_nvlink_errors_are_summed_over_links() -> None:
    assert nvlink_errors(ERROR_COUNTERS) == {
        "x": {"replay errors": 4, "recovery errors": 0},
        "y": {"replay errors": 2},
    }
    assert nvlink_errors("") == {}


def test_only_growth_of_nvlink_errors_counts() -> None:
    watch = Watch({}, ())
    watch._before = {"x": {"replay errors": 4, "crc": 1}}
    watch._after = {"x": {"replay errors": 9, "crc": 1}}
    growth = watch.grown(Gpu(uuid="x"))
    assert growth == {"replay errors": 5}
    assert watch.grown(Gpu(uuid="z")) == {}
    [replays] = complaints(Gpu(), [Gpu()], growth)
    assert not replays.is_bad
    [recoveries] = complaints(Gpu(), [Gpu()], {"recovery errors": 1})
    assert recoveries.is_bad
