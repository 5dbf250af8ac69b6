"""What drivers tell of eight GPUs and of InfiniBand's ports: whom it makes bad, whom it only has watched."""

from dataclasses import replace
from pathlib import Path

import pytest

from parbench.bench.check.gpus import Watch, at_work, complaints, facts_of, nvlink_errors
from parbench.bench.check.infiniband import Port, judged, ports
from parbench.bench.machine import environment
from parbench.bench.machine.environment import core_groups
from parbench.bench.machine.gpu import Gpu, gpus_of
from tests.support.nvidia import H100, gpus, install

ERRORS = (
    "GPU {0}: NVIDIA H100 (UUID: {1})\n\t Link 0: Replay Errors: {2}\n\t Link 1: Replay Errors: 1\n"
    "\t Link 1: Recovery Errors: 0\n"
)


def eight(folder: Path, **of_one: dict[str, str]) -> tuple[Gpu, ...]:
    listed = gpus(H100, 8, **of_one)
    environ = install(
        folder,
        listed,
        links=lambda index: ["26.562 GB/s", "<inactive>" if index == 6 else "26.562 GB/s"],
    )
    with Watch(environ, gpus_of(environ)) as watch:
        pass
    return watch.gpus


def test_what_is_wrong_with_one_of_eight_gpus_is_its_own(tmp_path: Path) -> None:
    seen = eight(
        tmp_path,
        gpu1={"ecc.errors.uncorrected.volatile.total": "2"},
        gpu2={"remapped_rows.pending": "Yes"},
        gpu3={"pcie.link.width.current": "8"},
        gpu4={"persistence_mode": "Disabled"},
        gpu5={"memory.used": "4000"},
    )
    told = {gpu.index: complaints(gpu, seen, {}) for gpu in seen}
    bad = {index: [one.is_bad for one in found] for index, found in told.items()}
    assert bad == {0: [], 1: [True], 2: [True], 3: [True], 4: [False], 5: [False], 6: [True], 7: []}
    assert told[3][0].text == "pcie: 8 of 16 lanes, generation 5 of 5"
    assert told[6][0].text == "nvlink: 1 of 2 active"
    assert all(one.remedy for found in told.values() for one in found)
    assert facts_of(seen[0], seen)["clocks"] == "SM 345 of 1980 MHz, memory 2619 of 2619 MHz, idle"
    assert facts_of(Gpu(), [Gpu()])["memory"] == "-", "unknown"
    assert complaints(Gpu(), [Gpu()], {}) == ()


def test_clocks_are_those_of_a_busy_gpu_and_a_power_cap_is_no_fault() -> None:
    idle = Gpu(
        uuid="a",
        sm_clock=345,
        sm_clock_max=1980,
        slowed_by=("idle",),
        utilization_percent=0,
        pcie_width=4,
    )
    busy = replace(
        idle,
        sm_clock=1500,
        utilization_percent=99,
        slowed_by=("software power cap",),
        pcie_width=16,
    )
    hot = replace(
        busy, sm_clock=1200, slowed_by=("hardware thermal slowdown",), temperature_celsius=91
    )
    found = at_work(idle, [idle, busy, replace(hot, uuid="b")])
    assert (found.sm_clock, found.pcie_width, found.slowed_by) == (
        1500,
        16,
        ("software power cap",),
    )
    assert complaints(found, [found], {}) == ()
    found = at_work(idle, [idle, busy, hot])
    assert found.slowed_by == ("software power cap", "hardware thermal slowdown")
    assert (found.sm_clock, found.temperature_celsius) == (1500, 91)
    [reason] = complaints(found, [found], {})
    assert reason.is_bad
    assert reason.text.endswith(
        "slowed by software power cap and hardware thermal slowdown at 91 degrees C"
    )
    assert at_work(idle, [idle]) == idle
    software = replace(idle, slowed_by=("software thermal slowdown",))
    assert [one.is_bad for one in complaints(software, [software], {})] == [False]


def test_errors_of_links_are_those_that_came_meanwhile(tmp_path: Path) -> None:
    assert nvlink_errors(ERRORS.format(0, "x", 3) + ERRORS.format(1, "y", 0)) == {
        "x": {"replay errors": 4, "recovery errors": 0},
        "y": {"replay errors": 1, "recovery errors": 0},
    }
    assert nvlink_errors("") == {}
    watch = Watch({}, ())
    watch._before, watch._after = (
        {"x": {"replay errors": 4, "crc": 1}},
        {"x": {"replay errors": 9, "crc": 1}},
    )
    grown = watch.grown(Gpu(uuid="x"))
    assert grown == {"replay errors": 5}
    assert watch.grown(Gpu(uuid="z")) == {}
    [reason] = complaints(Gpu(), [Gpu()], grown)
    assert (reason.is_bad, reason.text) == (False, "NVLink: 5 more replay errors meanwhile")
    assert complaints(Gpu(), [Gpu()], {"recovery errors": 1})[0].is_bad


def hca(
    root: Path, name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **more: str
) -> None:
    folder = root / "sys/class/infiniband" / name / "ports/1"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder.parents[1] / "board_id").write_text("MT_0000000838\n")
    told = {"state": state, "rate": rate, "phys_state": "5: LinkUp", "link_layer": "InfiniBand"}
    for key, value in {**told, **more}.items():
        (folder / (f"counters/{key}" if value.isdecimal() else key)).write_text(f"{value}\n")


def test_a_port_is_bad_that_is_down_or_slow_beside_others_of_its_board(tmp_path: Path) -> None:
    assert ports(tmp_path) == ()
    for number in range(8):
        hca(tmp_path, f"mlx5_{number}", symbol_error="7")
    hca(tmp_path, "mlx5_3", "1: DOWN", phys_state="2: Polling")
    hca(tmp_path, "mlx5_4", rate="100 Gb/sec (1X NDR)")
    hca(tmp_path, "mlx5_6", "1: DOWN", phys_state="3: Disabled")
    before = ports(tmp_path)
    hca(tmp_path, "mlx5_5", symbol_error="9")
    hca(tmp_path, "mlx5_7", link_downed="0")
    mid = ports(tmp_path)
    hca(tmp_path, "mlx5_7", link_downed="1")
    found = {port.name: port for port in judged(before, mid)}
    assert {name: port.complaint for name, port in found.items() if port.complaint} == {
        "mlx5_3/1": "DOWN (Polling), 6 of the same board are ACTIVE",
        "mlx5_4/1": "100 Gb/sec (1X NDR), others of the same board 400 Gb/s",
        "mlx5_5/1": "2 more symbol_error meanwhile",
    }
    assert [port.name for port in found.values() if port.is_bad] == ["mlx5_3/1", "mlx5_4/1"]
    assert {port.name for port in judged(mid, ports(tmp_path)) if port.is_bad} == {
        "mlx5_3/1",
        "mlx5_4/1",
        "mlx5_7/1",
    }
    alone: Port = before[3]
    assert judged([alone], [alone])[0].complaint == "", "no port of its board is used"


def test_cores_are_grouped_by_numa_node_and_physical_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "sys/devices/system"
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(cpus)
    for cpu in range(16):
        folder = system / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(str(cpu % 8))
        (folder / "physical_package_id").write_text(str(cpu % 8 // 4))
    monkeypatch.setattr(environment, "affinity", lambda: frozenset(range(16)))
    assert core_groups(2, tmp_path) == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert core_groups(8, tmp_path)[:2] == ((0, 8), (1, 9))
    monkeypatch.setattr(environment, "affinity", lambda: frozenset({1, 2, 5}))
    assert core_groups(2, tmp_path) == ((1,), (2, 5))
    assert core_groups(8, tmp_path) == ((1,), (2,), (5,))
