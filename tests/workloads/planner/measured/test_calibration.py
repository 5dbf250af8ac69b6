"""Calibration takes efficiencies from measured steps, and keeps the assumed ones elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.bench.text import UserError
from parbench.workloads.costs.flops import count_rank_flops
from parbench.workloads.planner.measured.calibration import calibrate_hardware
from parbench.workloads.planner.measured.validate import build_spec_of_record
from parbench.workloads.planner.plan_command import (
    MachineOptions,
    load_machine,
)
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    counted_metric,
    curve_records,
    ok_record,
    seconds_metric,
    write_run,
)
from tests.support.workloads.planner_asks import H100, SIMPLE_HARDWARE


def make_step(
    name: str = "ddp", *, exposed: float, compute_seconds: float = 0.01, **params: Any
) -> Record:
    """Return a step of which 8 ms of communication were partly exposed."""
    target = f"parbench.workloads.data_parallel.{name}:prepare"
    axis = "fsdp" if name == "fsdp" else "dp"
    metrics = {
        "step_time": seconds_metric(0.02),
        "compute": counted_metric(compute_seconds, "s"),
        f"exposed_comm.{axis}": counted_metric(exposed, "s"),
        f"comm_transfer.{axis}": counted_metric(0.008, "s"),
    }
    details = {"peak": {"flops_per_second": 1e12, "source": "measured"}}
    case = make_case(f"workload.{name}", target, {"shape": "tiny", **params})
    return ok_record(case, metrics=metrics, details=details)


def count_flops(record: Record) -> float:
    spec = build_spec_of_record(record)
    return count_rank_flops(spec.make_rank_view(0)) * spec.microbatches


def test_calibration_averages_runs() -> None:
    fast = make_step(exposed=0.002)
    slow = make_step(exposed=0.02, compute_seconds=0.02)
    hardware, notes = calibrate_hardware([run_from_records(fast), run_from_records(slow)], H100)
    mean_rate = count_flops(fast) * (1 / 0.01 + 1 / 0.02) / 2
    assert hardware.efficiency.gemm == pytest.approx(mean_rate / 1e12)
    assert hardware.efficiency.overlap["dp"] == pytest.approx(0.75 / 2)
    assert hardware.efficiency.overlap["fsdp"] == H100.efficiency.overlap["fsdp"]
    assert "of the communication on dp (median of 2 steps)" in notes[1]


def test_calibration_assigns_overlap_of_fsdp() -> None:
    """Simulated compute does not change the efficiency of compute."""
    step = make_step("fsdp", exposed=0.004, compute="simulated:10ms")
    hardware, _ = calibrate_hardware([run_from_records(step)], SIMPLE_HARDWARE)
    assert hardware.efficiency.overlap == {"fsdp": pytest.approx(0.5)}
    assert hardware.efficiency.gemm == SIMPLE_HARDWARE.efficiency.gemm


def test_calibration_needs_steps() -> None:
    with pytest.raises(UserError, match="no step has real compute"):
        calibrate_hardware([run_from_records(*curve_records())], SIMPLE_HARDWARE)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Write a run of collectives and a step of which three quarters are hidden."""
    return write_run(
        tmp_path / "run",
        run_from_records(*curve_records(), make_step(exposed=0.002), environment=ENVIRONMENT),
    )


def test_plan_uses_links_and_efficiencies_of_runs(run_path: Path) -> None:
    machine = load_machine(MachineOptions(links=run_path, calibrate=(run_path,)))
    assert machine.hardware.name == run_path.name
    assert machine.seconds is not None


def test_plan_calibrates_a_preset(run_path: Path) -> None:
    options = MachineOptions(hardware="h100", calibrate=(run_path,))
    machine = load_machine(options)
    assert machine.hardware.name == "h100"
    assert machine.hardware.efficiency.overlap["dp"] == pytest.approx(0.75)
    assert machine.seconds is None
    assert "measured: compute reaches" in machine.notes[0]
