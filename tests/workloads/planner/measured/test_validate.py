"""A validation compares the predictions of a run's steps with their measurements."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.bench.plan.cases import make_case
from parbench.bench.results.details import ComponentCheck, StepCheck, Validation
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import list_calls
from parbench.workloads.costs.memory import activations_equation
from parbench.workloads.costs.parameter_table import list_parts, num_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.pipeline_parallel.schedule import PassSeconds, PipelineSize
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.link_time import PlacedCall
from parbench.workloads.planner.measured.step_time import (
    StepTime,
    list_buckets,
    predict_step_time,
)
from parbench.workloads.planner.measured.validate import validate
from parbench.workloads.planner.placement import Place
from parbench.workloads.presets import PRESETS
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import (
    counted_metric,
    curve_records,
    failed_record,
    ok_record,
    seconds_metric,
)

PSI = num_parameters(SHAPES["small"])
REDUCE_SECONDS = 20e-6 + 4 * PSI / 3e9
"""Seconds of DDP's only bucket by the fit of ``curve_records``."""
MEBI = 2**20


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
        ("step_time", 0.25 + REDUCE_SECONDS, 0.3),
        ("comm.dp", REDUCE_SECONDS, 0.01),
        ("exposed.dp", REDUCE_SECONDS, 0.02),
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
    activations = activations_equation(spec.rank_view(0)).value
    sent_bytes = 2 * 4 * PSI * 3 / 4
    metrics = {
        "bytes_sent.dp": counted_metric(2 * sent_bytes, "B"),
        "memory.parameters": counted_metric(4 * PSI, "B"),
        "memory_counted.activations": counted_metric(4 * activations, "B"),
    }
    [row] = validate_records(make_record(metrics=metrics)).rows
    assert component_of(row, "bytes.dp").error == pytest.approx(-0.5)
    assert component_of(row, "memory.parameters").error == 0
    assert component_of(row, "memory.activations").error == pytest.approx(-0.75)
    assert component_of(row, "memory.gradients").predicted == 4 * PSI
    assert component_of(row, "memory.gradients").error is None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (make_record("ep_step", routing="zipf"), "routing = zipf"),
        (failed_record(make_record().case, reason="it broke"), "it broke"),
        (
            make_record(metrics={"compute": counted_metric(None, "s")}),
            "compute was not measured",
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


def make_step(name: str, ranks: int = 4, **params: Any) -> StepSpec:
    return PRESETS[name]({"shape": "tiny", "microbatch": 4, **params}, ranks)


def call_seconds(call: PlacedCall) -> float:
    return 1e-3 + call.sent / call.count / 25e6


def calls_of(step: StepSpec) -> list[PlacedCall]:
    """Return the calls of rank 0, whose place is one rank per node."""
    return [
        PlacedCall.of(call, Place(ranks=call.ranks, on_node=1))
        for call in list_calls(step.rank_view(0))
    ]


def sum_seconds(step: StepSpec, axis: str) -> float:
    on_axis = [call for call in calls_of(step) if call.axis == axis]
    return sum(call.count * call_seconds(call) for call in on_axis)


def predict(step: StepSpec, compute: float = 0.3) -> StepTime:
    return predict_step_time(step, calls_of(step), call_seconds, compute_seconds=compute)


@pytest.mark.parametrize(("name", "axis"), [("tp_sp", "tp"), ("fsdp", "fsdp")])
def test_row_time_adds_exposed_calls(name: str, axis: str) -> None:
    step = make_step(name)
    row = predict(step)
    assert row.seconds == pytest.approx(0.3 + sum_seconds(step, axis))
    assert row.exposed_seconds == {axis: pytest.approx(sum_seconds(step, axis))}


@pytest.mark.parametrize(("backend", "scattered"), [("gloo", [1, 4, 1]), ("nccl", [1, 1, 0])])
def test_row_time_hides_units_behind_the_unit_before(
    backend: str, scattered: list[int]
) -> None:
    """Embeddings and head hide nothing: neither the first gather nor that of a first layer."""
    step = make_step("fsdp", prefetch="explicit")
    row = predict_step_time(
        step, calls_of(step), call_seconds, compute_seconds=100.0, backend=backend
    )
    scatters = [call for call in calls_of(step) if call.op == "reduce_scatter"]
    embedding, head, layer = [call_seconds(call) for call in scatters]
    counts = zip(scattered, (embedding, layer, head), strict=True)
    scattering = sum(count * seconds for count, seconds in counts)
    assert row.exposed_seconds["fsdp"] == pytest.approx(embedding + 2 * layer + scattering)


def test_row_time_hides_ddp_buckets_during_backward() -> None:
    step = make_step("ddp", bucket_mb=1.0)
    buckets = list_buckets(
        list(list_parts(step.rank_view(0))), bucket_bytes=MEBI, bytes_per_element=4
    )
    [call] = calls_of(step)

    last = replace(call, num_bytes=buckets[-1].size_bytes, count=1)
    assert predict(step, compute=100.0).seconds == pytest.approx(100 + call_seconds(last))


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)]
)
def test_row_time_of_pipeline_contains_bubble(schedule: str, chunks: int) -> None:
    step = make_step("pp", schedule=schedule, microbatches=8, layers=8)
    row = predict_step_time(step, calls_of(step), lambda call: 0.0, compute_seconds=2.4)
    passes = PassSeconds(0.1, 0.1, 0.1)
    bubble = SCHEDULES[schedule].compute_bubble(PipelineSize(4, 8, chunks), passes)
    assert bubble is not None
    assert row.seconds == pytest.approx(2.4 + bubble.seconds)


@pytest.mark.parametrize(
    ("bucket_bytes", "caps"), [(50_000, [50_000]), (MEBI, [MEBI]), (0, [MEBI, 25 * MEBI])]
)
def test_buckets_match_torch(bucket_bytes: int, caps: list[int]) -> None:
    parts = list(list_parts(make_step("ddp").rank_view(0)))
    with torch.device("meta"):
        parameters = dict(Transformer(SHAPES["tiny"]).named_parameters())
    tensors = [torch.empty(parameters[part.name].shape) for part in reversed(parts)]
    assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
    [indices_by_bucket, _] = assign(tensors, caps)
    expected = []
    for indices in indices_by_bucket:
        expected.append(sum(tensors[index].numel() * 4 for index in indices))
    buckets = list_buckets(parts, bucket_bytes=bucket_bytes, bytes_per_element=4)
    assert [bucket.size_bytes for bucket in buckets] == expected
