"""Efficiencies of a run's steps take the place of assumed ones, and what no run told is said."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.workloads.costs.flops import stage_flops
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.link_time import PlacedCall, curve_for, curves_of
from parbench.workloads.planner.measured.calibration import calibrated
from parbench.workloads.planner.measured.validate import spec_of_record
from parbench.workloads.planner.placement import Place
from parbench.workloads.planner.plan_command import Given, answer, machine_of
from tests.support.planner_asks import SIMPLE_HARDWARE
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    WORLD,
    counted_metric,
    curve_records,
    make_plan,
    make_run,
    ok_record,
    seconds_metric,
    write_run,
)

PEAK = {"flops_per_second": 1e12, "source": "measured"}


def step(
    name: str, busy: float, exposed: float, took: float, details: Any, **params: Any
) -> Record:
    case = make_case(
        f"workload.{name}",
        f"parbench.workloads.data_parallel.{name}:prepare",
        {"shape": "tiny", **params},
    )
    metrics = {"step_time": seconds_metric(0.02), "compute": counted_metric(busy, "s")}
    metrics |= {
        "exposed_comm.dp": counted_metric(exposed, "s"),
        "comm_transfer.dp": counted_metric(took, "s"),
    }
    return ok_record(case, metrics=metrics, details=details)


def run_of(*records: Record) -> Run:
    return make_run(make_plan([record.case for record in records]), list(records), ENVIRONMENT)


def test_a_share_is_what_was_executed_over_compute_and_peak_and_what_was_hidden_of_what_was_sent() -> (
    None
):
    record = step("ddp", 0.01, 0.002, 0.008, {"peak": PEAK})
    spec = spec_of_record(record)
    assert not isinstance(spec, str)
    executed = stage_flops(spec.at(0)).total * spec.microbatches
    found, notes = calibrated([run_of(record)], SIMPLE_HARDWARE)
    assert found.efficiency.gemm == pytest.approx(executed / 0.01 / 1e12)
    assert found.efficiency.overlap == {"dp": pytest.approx(0.75)}
    assert "measured: of dp's communication hides 75% (1 step)" in notes
    assert notes[-1] == "still assumed: memory_rate, memory, links_inside, links_across"
    slower = step("ddp", 0.02, 0.02, 0.008, {"peak": PEAK})
    twice = [run_of(record), run_of(slower)]
    both, told = calibrated(twice, PRESETS["h100"])
    assert both.efficiency.gemm == pytest.approx(executed * 0.75 / 0.01 / 1e12)
    assert both.efficiency.overlap == {
        "dp": pytest.approx(0.375),
        "edp": 0.9,
        "fsdp": 0.9,
        "cp": 0.9,
    }
    assert "(2 steps, 0% to 75%)" in told[1]
    assert "overlap of edp, overlap of fsdp, overlap of cp" in told[-1]


def test_fsdps_overlap_is_fsdps_though_it_is_shown_as_dp_and_waits_are_no_products() -> None:
    record = step("fsdp", 0.01, 0.004, 0.008, {"peak": PEAK}, compute="timed:10ms")
    found, _ = calibrated([run_of(record)], SIMPLE_HARDWARE)
    assert found.efficiency.gemm == SIMPLE_HARDWARE.efficiency.gemm
    assert found.efficiency.overlap == {"fsdp": pytest.approx(0.5)}
    unreadable, _ = calibrated(
        [run_of(step("ddp", 0.01, 0.004, 0.008, {"peak": {"flops_per_second": "fast"}}))],
        SIMPLE_HARDWARE,
    )
    assert unreadable.efficiency.gemm == SIMPLE_HARDWARE.efficiency.gemm
    with pytest.raises(UserError, match="no step has real compute and a known peak"):
        calibrated([run_of(*curve_records())], SIMPLE_HARDWARE)


def test_each_kind_of_group_has_its_fit() -> None:
    slow = [*curve_records(latency=1e-3, group="across")]
    records = [*curve_records(), *curve_records(latency=5e-6, group="node"), *slow]
    across = [msg for msg in records if msg.case.params.get("group") == "across"]
    assert len(across) == 8
    curves = curves_of(run_of(*records), grouped=True)
    assert {curve.inside for curve in curves} <= {True, False}
    call = PlacedCall(
        axis="dp", op="all_reduce", num_bytes=1e6, count=1, place=Place(ranks=8, on_node=8)
    )
    assert curve_for(call, curves).inside is True


def test_a_run_that_tells_no_nodes_has_the_fits_of_its_world() -> None:
    unknown = msgspec.structs.replace(WORLD, nodes=0)
    records = [msgspec.structs.replace(record, world=unknown) for record in curve_records()]
    for grouped in (False, True):
        [curve] = curves_of(run_of(*records), grouped=grouped)
        assert (curve.op, curve.ranks) == ("all_reduce", WORLD.size)


def test_a_run_calibrates_a_plan_and_with_hardware_only_the_shares_are_its(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "run", run_of(*curve_records(), step("ddp", 0.01, 0.002, 0.008, {"peak": PEAK}))
    )
    hardware, seconds, notes = machine_of(Given(calibrate=(path,)))
    assert (hardware.name, seconds is None) == (path.name, False)
    assert any(note.startswith("still assumed: ") and "links" not in note for note in notes)
    assert any(note.startswith("a hop of a collective stands in for messages: ") for note in notes)
    named, links, _ = machine_of(Given(calibrate=(path,), hardware="h100"))
    assert (named.name, links) == ("h100", None)
    assert named.efficiency.overlap["dp"] == pytest.approx(0.75)
    line = answer(
        Given(model="llama3-8b", mesh="fsdp=8", hardware="h100", calibrate=(path,), as_json=True)
    ).text
    assert re.search(r"measured: matrix products at \d+% \(1 step\)", line)
