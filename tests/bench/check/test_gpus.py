"""The driver's facts make a GPU bad, or cause a warning."""

from pathlib import Path

from parbench.bench.check.gpus import find_faults, list_gpus
from parbench.bench.machine.gpu import Gpu, read_report
from tests.support.nvidia import H100, LOST, describe_links, gpus, install

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


def test_gpu_that_is_lost_during_work_is_bad(tmp_path: Path) -> None:
    before = read_report(install(tmp_path, gpus(H100, 2))).gpus
    used_by_ranks = {"memory_used": str(4000 << 20)}
    after = gpus(H100, 2, gpu0=used_by_ranks, gpu1=LOST)
    report = read_report(install(tmp_path, after))
    first, second = list_gpus("n1", before, report)
    assert (second.name, second.rank) == ("GPU 1", 1)
    assert first.reasons == ()
    [reason] = second.reasons
    assert "GPU is lost" in reason.text


def test_unknown_gpu_has_no_faults() -> None:
    assert find_faults(Gpu(), [Gpu()]) == ()


def test_power_cap_is_fine_and_hardware_slowdown_is_bad() -> None:
    capped = Gpu(slowed_by=("software power cap",))
    assert find_faults(capped, [capped]) == ()
    hot = Gpu(slowed_by=("hardware thermal slowdown",))
    [reason] = find_faults(hot, [hot])
    assert reason.is_bad
    assert "hardware thermal slowdown" in reason.text


def test_heat_during_the_check_is_a_fault(tmp_path: Path) -> None:
    earlier = {**H100, "heat_ns": "4000000000"}
    before = read_report(install(tmp_path, gpus(earlier, 2))).gpus
    after = gpus(earlier, 2, gpu1={"heat_ns": "5500000000"})
    first, second = list_gpus("n1", before, read_report(install(tmp_path, after)))
    assert first.reasons == ()
    [reason] = second.reasons
    assert reason.text == "clocks: heat lowered them for 1.5 s of the check"
