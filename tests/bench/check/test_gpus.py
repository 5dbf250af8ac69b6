"""The driver's facts make a GPU bad, or one to watch."""

from pathlib import Path

from msgspec.structs import replace

from parbench.bench.check.gpus import find_faults, list_gpus, run_watched
from parbench.bench.machine.gpu import Gpu, read_report
from parbench.bench.machine.nvml import summarize_load
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
HOT = replace(BUSY, sm_clock=1200, slowed_by=("hardware thermal slowdown",))


ONE_INACTIVE = describe_links([True, False])
ALL_ACTIVE = {**H100, **describe_links([True, True])}


def test_faults_are_those_of_the_faulty_gpu(tmp_path: Path) -> None:
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
    reasons = [find_faults(gpu, watched) for gpu in watched]
    assert reasons[0] == reasons[7] == ()
    bad_topics = {1: "memory errors", 2: "memory errors", 3: "pcie", 6: "nvlink"}
    for index, topic in bad_topics.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert reason.is_bad
    for index, topic in {4: "persistence", 5: "memory in use"}.items():
        [reason] = reasons[index]
        assert reason.text.startswith(topic)
        assert not reason.is_bad


def test_gpus_are_sampled_during_work(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 1, gpu0={"utilization": "99"}))
    result, report = run_watched(environ, [Gpu()], lambda: tmp_path)
    assert result == tmp_path
    # A GPU that is busy in a sample is not idle.
    assert report.gpus[0].slowed_by == ()


def test_gpu_that_is_lost_during_work_is_bad(tmp_path: Path) -> None:
    before = read_report(install(tmp_path, gpus(H100, 2))).gpus
    environ = install(tmp_path, gpus(H100, 2, gpu1=LOST))
    _, report = run_watched(environ, before, lambda: None)
    first, second = list_gpus("n1", before, report)
    assert (second.name, second.rank) == ("GPU 1", 1)
    assert second.facts["pcie"] == "16 of 16 lanes"
    assert first.reasons == ()
    [reason] = second.reasons
    assert "GPU is lost" in reason.text


def test_unknown_gpu_has_no_faults() -> None:
    assert find_faults(Gpu(), [Gpu()]) == ()


def test_busy_samples_count_and_power_cap_is_fine() -> None:
    gpu = summarize_load(IDLE, [IDLE, BUSY, replace(HOT, uuid="b")])
    assert gpu.sm_clock == 1500
    assert gpu.pcie_width == 16
    assert gpu.slowed_by == ("software power cap",)
    assert find_faults(gpu, [gpu]) == ()


def test_hardware_slowdown_is_bad() -> None:
    gpu = summarize_load(IDLE, [IDLE, BUSY, HOT])
    [reason] = find_faults(gpu, [gpu])
    assert reason.is_bad
    assert "hardware thermal slowdown" in reason.text
