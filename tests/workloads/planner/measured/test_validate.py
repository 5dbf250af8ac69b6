"""A validation compares the predictions of a run's steps with their measurements."""

from typing import Any

import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.details import ComponentCheck, StepCheck, Validation
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.text import UserError
from parbench.workloads.costs.memory import make_activations_equation
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.pipeline_parallel.order import PipelineSize
from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.measured.validate import validate
from parbench.workloads.presets import PRESETS
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    counted_metric,
    curve_records,
    failed_record,
    ok_record,
    seconds_metric,
)

PSI = count_parameters(SHAPES["small"])
REDUCE_SECONDS = 20e-6 + 4 * PSI / 3e9
"""PredictSeconds of DDP's only bucket by the fit of ``curve_records``."""


def make_record(
    name: str = "ddp",
    metrics: dict[str, MetricValue] | None = None,
    repetition: int = 0,
    **params: Any,
) -> Record:
    params = {"shape": "small", "microbatch": 4, **params}
    if name == "ddp":
        params |= {"bucket_mb": 25.0}  # holds all gradients
    case = make_case(f"workload.{name}", f"workloads.{name}:prepare", params)
    defaults = {"step_time": seconds_metric(0.3), "compute": counted_metric(0.25, "s")}
    return ok_record(case, repetition, metrics={**defaults, **(metrics or {})})


def validate_records(*records: Record) -> Validation:
    return validate(run_from_records(*curve_records(), *records))


def component_of(row: StepCheck, name: str) -> ComponentCheck:
    return next(component for component in row.components if component.name == name)


@pytest.mark.parametrize(
    ("name", "predicted", "measured"),
    [
        ("step_time", 0.25 + 0.1 * REDUCE_SECONDS, 0.3),
        ("comm.dp", REDUCE_SECONDS, 0.01),
        ("exposed.dp", 0.1 * REDUCE_SECONDS, 0.02),
    ],
)
def test_validation_predicts_times(name: str, predicted: float, measured: float) -> None:
    metrics = {
        "comm_transfer.dp": counted_metric(0.01, "s"),
        "exposed_comm.dp": counted_metric(0.02, "s"),
    }
    [row] = validate_records(make_record(metrics=metrics)).rows
    component = component_of(row, name)
    assert component.predicted == pytest.approx(predicted, rel=1e-3)
    assert component.measured.value == measured
    assert component.error == pytest.approx(predicted / measured - 1, rel=2e-3)


def test_validation_compares_bytes_and_memory() -> None:
    spec = PRESETS["ddp"](make_record().case.params, 4)
    activations = make_activations_equation(spec.make_rank_view(0)).value
    sent_bytes = 2 * 4 * PSI * 3 / 4
    metrics = {
        "bytes_sent.dp": counted_metric(2 * sent_bytes, "B"),
        "memory.parameters": counted_metric(4 * PSI, "B"),
        "memory_counted.activations": counted_metric(4 * activations, "B"),
    }
    [row] = validate_records(make_record(metrics=metrics)).rows
    assert component_of(row, "bytes.dp").error == pytest.approx(-0.5)
    assert component_of(row, "memory.parameters").error == 0
    assert component_of(row, "memory_counted.activations").error == pytest.approx(-0.75)
    assert component_of(row, "memory.gradients").predicted == 4 * PSI
    assert component_of(row, "memory.gradients").error is None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (make_record("ep_step", routing="zipf"), "routing = zipf"),
        (failed_record(make_record().case, reason="it broke"), "it broke"),
        (
            make_record(metrics={"compute": counted_metric(None, "s")}),
            "compute time was not measured",
        ),
    ],
)
def test_validation_states_why_steps_are_left_out(record: Record, reason: str) -> None:
    validation = validate_records(record, make_record("tp"))
    [row] = validation.rows
    assert row.label.startswith("workload.tp")
    assert reason in validation.left_out[record.case.label]


def test_validation_needs_steps() -> None:
    with pytest.raises(UserError, match="no training step"):
        validate(run_from_records(*curve_records()))


def predict_seconds(metrics: dict[str, MetricValue] | None = None, **params: Any) -> float:
    """Return the predicted step time of a measured step, whose preset is ``params["name"]``."""
    [row] = validate_records(make_record(metrics=metrics, **params)).rows
    return component_of(row, "step_time").predicted


@pytest.mark.parametrize(
    ("checkpointing", "seconds"),
    [("none", 6.0), ("full", 8.0), ("full:2", 7.0), ("selective", 8.0)],
)
def test_validation_takes_declared_compute(checkpointing: str, seconds: float) -> None:
    """A microbatch takes 3 T and its recomputation, and its backward pass hides the reduction."""
    simulated = predict_seconds(
        compute="simulated:1s", microbatches=2, layers=4, checkpointing=checkpointing
    )
    assert simulated == pytest.approx(seconds + 0.1 * REDUCE_SECONDS, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)]
)
def test_validation_simulates_pipelines(schedule: str, virtual_stages: int) -> None:
    sizes: dict[str, Any] = {"shape": "tiny", "layers": 8, "microbatches": 8}
    seconds = predict_seconds(name="pp", schedule=schedule, compute="simulated:10s", **sizes)
    bubble = SCHEDULES[schedule].compute_bubble(
        PipelineSize(4, 8, virtual_stages), PassSeconds(10.0, 10.0, 10.0)
    )
    assert bubble is not None
    assert seconds == pytest.approx(8 * 30.0 + bubble.seconds, rel=0.05)


def test_validation_exposes_fsdp_on_gloo() -> None:
    """Without prefetch, gloo hides no call of FSDP."""
    [hidden, exposed] = [
        predict_seconds(name="fsdp", compute="simulated:10s", prefetch=prefetch)
        for prefetch in ("explicit", "default")
    ]
    assert exposed - 30 == pytest.approx(4 * (hidden - 30), rel=1e-3)
