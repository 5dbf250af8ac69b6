"""The driver's answers make a GPU bad, or one to watch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parbench.bench.check.gpus import Watch, at_work, complaints, facts_of, nvlink_errors
from parbench.bench.check.health import Reason
from parbench.bench.machine.gpu import Gpu, gpus_of
from tests.support.nvidia import (
    BLACKWELL_COUNTERS,
    H100,
    HOPPER_COUNTERS,
    format_counters,
    gpus,
    install,
)

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
    assert "5 more replay errors" in replays.text


def list_complaints(names: Sequence[str], counts: Mapping[str, int]) -> tuple[Reason, ...]:
    """Return the complaints about a GPU whose counters have grown from 0 to these values."""
    listed = gpus(H100, 1)
    watch = Watch({}, ())
    watch._before = nvlink_errors(format_counters(listed, names, {}))
    watch._after = nvlink_errors(format_counters(listed, names, counts))
    gpu = Gpu(uuid=listed[0]["uuid"])
    return complaints(gpu, [gpu], watch.grown(gpu))


@pytest.mark.parametrize(
    ("name", "is_bad"),
    [("Replay Errors", True), ("Recovery Errors", True), ("CRC Errors", False)],
)
def test_counters_of_hopper_are_judged(name: str, is_bad: bool) -> None:
    [reason] = list_complaints(HOPPER_COUNTERS, {name: 1})
    assert reason.text == f"NVLink: 2 more {name.lower()} meanwhile"
    assert reason.is_bad is is_bad


@pytest.mark.parametrize(
    ("name", "is_bad"),
    [
        ("Link recovery failed events", True),
        ("Effective Errors", True),
        ("Symbol Errors", False),
        ("Malformed packet Errors", False),
        ("Buffer overrun Errors", False),
        ("Rx remote Errors", False),
        ("FEC Errors - 8", False),
        ("FEC Errors - 15", False),
    ],
)
def test_counters_of_blackwell_are_judged(name: str, is_bad: bool) -> None:
    [reason] = list_complaints(BLACKWELL_COUNTERS, {name: 1})
    assert reason.text == f"NVLink: 2 more {name.lower()} meanwhile"
    assert reason.is_bad is is_bad


def test_counters_of_well_links_are_kept_and_not_judged(tmp_path: Path) -> None:
    """They grow on links without faults: codewords without errors above all."""
    before = {"FEC Errors - 0": 36_140_749_276, "FEC Errors - 1": 7}
    after = {
        "FEC Errors - 0": 36_140_874_637,
        "FEC Errors - 1": 9,
        "FEC Errors - 7": 1,
        "Raw Errors Lane 1": 4,
        "Link recovery successful events": 1,
        "Total link recovery events": 1,
    }
    listed = gpus(H100, 1)
    counters = [
        format_counters(listed, BLACKWELL_COUNTERS, counts) for counts in (before, after)
    ]
    environ = install(tmp_path, listed, counters=counters)
    with Watch(environ, gpus_of(environ)) as watch:
        pass
    [gpu] = watch.gpus
    grown = watch.grown(gpu)
    assert complaints(gpu, [gpu], grown) == ()
    facts = facts_of(gpu, [gpu], grown)
    assert "fec errors - 0 +250722" in facts["nvlink counters"]
    assert "link recovery successful events +2" in facts["nvlink counters"]
    assert "ber" not in facts["nvlink counters"]
