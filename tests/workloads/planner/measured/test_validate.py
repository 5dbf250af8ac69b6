"""A run's fits tell how long calls take, and its steps how far the planner's predictions are right."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.files import encode_json
from parbench.bench.plan.cases import make_case
from parbench.bench.results.details import PLAN_FILE, Component, StepCheck, Validation
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError, write_whole
from parbench.workloads.catalogue import STRATEGIES
from parbench.workloads.costs.memory import activations_of
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.planner.link_time import (
    PlacedCall,
    beyond,
    by_curves,
    curve_for,
    curves_of,
    hardware_of_run,
)
from parbench.workloads.planner.measured.validate import format_duration, validate, validation_text
from parbench.workloads.planner.placement import Place
from tests.support.planner_asks import SIMPLE_HARDWARE
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    counted_metric,
    curve_records,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    rate_metric,
    seconds_metric,
)
from tests.support.reports_fixtures import step_case as a_step
from tests.support.training_steps import DEFINITION_BY_NAME

PSI = num_parameters(SHAPES["small"])
LATENCY, RATE = 20e-6, 3e9
SUMMED = LATENCY + 4 * PSI / RATE
"""Seconds of DDP's only bucket by the made run's fit."""
"""Seconds of a pipeline's message by the made run's fit."""
GPUS = WorldInfo(size=4, nodes=1, backend="nccl", device="cuda")


def row(
    name: str = "ddp",
    launch: int = 0,
    *,
    metrics: dict[str, MetricValue] | None = None,
    world: WorldInfo | None = None,
    **params: Any,
) -> Record:
    case = make_case(
        f"workload.{name}",
        f"workloads.{name}:prepare",
        {"shape": "small", "microbatch": 4, **params},
    )
    usual = {"step_time": seconds_metric(0.3), "compute": counted_metric(0.25, "s")}
    found = ok_record(case, launch, metrics={**usual, **(metrics or {})})
    return msgspec.structs.replace(found, world=world or found.world)


def sends() -> list[Record]:
    params: dict[str, Any] = {"dtype": "float32", "mode": "blocking", "source": 0, "target": 1}
    sizes = [1024 * 4**i for i in range(8)]
    cases = [
        make_case(
            "p2p.unidirectional",
            "parbench.bench.operations.p2p:unidirectional",
            {"size_bytes": n, **params},
        )
        for n in sizes
    ]
    return [
        ok_record(case, seconds=1e-4 + size / RATE) for case, size in zip(cases, sizes, strict=True)
    ]


def run_of(*records: Record, environment: dict[str, Any] | None = None) -> Run:
    cases = {record.case.id: record.case for record in records}
    return make_run(make_plan(cases.values()), records, environment)


def checked(*records: Record) -> Validation:
    return validate(run_of(*curve_records(), *records))


def component(found: StepCheck, name: str) -> Component:
    return next(each for each in found.components if each.name == name)


def predicted(record: Record, name: str) -> float:
    [found] = checked(*sends(), record).rows
    return component(found, name).predicted


def test_a_step_is_its_compute_and_the_calls_that_the_fit_tells_beside_what_was_measured() -> None:
    measured = {
        "comm_transfer.dp": counted_metric(0.01, "s"),
        "exposed_comm.dp": counted_metric(0.02, "s"),
    }
    [found] = checked(row(metrics=measured)).rows
    assert found.rule == "1 bucket summed in turn beside the backward pass"
    assert (found.ranks, found.compute) == (4, "measured")
    parts = (
        ("step_time", 0.25 + SUMMED, 0.3),
        ("comm.dp", SUMMED, 0.01),
        ("exposed.dp", SUMMED, 0.02),
    )
    for name, seconds, seen in parts:
        each = component(found, name)
        assert each.predicted == pytest.approx(seconds, rel=1e-3), name
        assert each.measured == seen, name
        assert each.error == pytest.approx(seconds / seen - 1, rel=2e-3), name
    assert found.notes == [f"dp: all_reduce of {4 * PSI:,} B is beyond 1024 to 16777216 B"]
    errors = [
        Component(name="a", predicted=3.0, measured=seen, unit="s").error for seen in (2.0, 0.0)
    ]
    assert errors == [0.5, None]


def test_timed_compute_is_known_beforehand_and_launches_that_did_not_fail_give_their_mean() -> None:
    rows = [
        row(launch=i, metrics={"compute": counted_metric(value, "s")})
        for i, value in enumerate((0.1, 0.2, 0.4))
    ]
    timed = [row(compute="timed:50ms")]
    for records, how, compute in (
        ([failed_record(row().case, launch=3), *rows], "measured", 0.2),
        (timed, "declared", 0.15),
    ):
        [found] = checked(*records).rows
        assert found.compute == how
        assert component(found, "step_time").predicted == pytest.approx(
            compute + SUMMED, rel=1e-3
        ), how
        assert component(found, "step_time").measured == 0.3


def test_bytes_and_memory_are_closed_forms_beside_what_was_counted() -> None:
    sent = 2 * PSI * 4 * 3 / 4
    kept = activations_of(
        STRATEGIES["ddp"](DEFINITION_BY_NAME["ddp"].whole(row().case.params), 4, "cpu").at(0)
    )
    measured = {
        "bytes_sent.dp": counted_metric(2 * sent, "B"),
        "memory.parameters": counted_metric(4 * PSI, "B"),
        "memory.optimizer": counted_metric(8 * PSI, "B"),
        "memory_counted.activations": counted_metric(4 * kept, "B"),
        "memory.activations": counted_metric(9.0, "B"),  # the peak of a pass
    }
    [found] = checked(row(metrics=measured)).rows
    errors = {
        "bytes.dp": -0.5,
        "memory.parameters": 0,
        "memory.optimizer": 0,
        "memory.activations": -0.75,
    }
    assert {name: component(found, name).error for name in errors} == pytest.approx(errors)
    gradients = component(found, "memory.gradients")
    assert (gradients.predicted, gradients.measured, gradients.error) == (4 * PSI, None, None)
    on_gpu, on_cpu = (
        predicted(row(shape="small-llama", world=on), "memory.activations") for on in (GPUS, None)
    )
    assert on_gpu < on_cpu  # whose norms are fused


def test_what_is_not_predicted_says_why_and_a_message_that_was_not_measured_stops_no_other_step() -> (
    None
):
    for record, reason in (
        (
            row("ep_step", routing="zipf"),
            "not predicted: ep_step: routing = zipf: who sends how much is known once",
        ),
        (failed_record(row().case, reason="it broke"), "it broke"),
        (
            ok_record(row().case, metrics={"step_time": seconds_metric(0.3)}),
            "its compute was not measured alone",
        ),
    ):
        found = checked(record)
        assert found.rows == []
        assert found.left_out[record.case.label].startswith(reason)
    with pytest.raises(UserError, match=r"p2p\.unidirectional"):
        checked(row("pp", schedule="1f1b", microbatches=8))
    found = checked(row("tp"), row("cp", method="ring"), row("ddp"), row("fsdp"))
    assert [each.label.split()[0] for each in found.rows] == [
        "workload.tp",
        "workload.ddp",
        "workload.fsdp",
    ]
    [lacking] = found.left_out.values()
    assert "p2p.unidirectional" in lacking


def test_a_run_without_steps_or_without_collectives_is_refused() -> None:
    with pytest.raises(
        UserError, match="holds no training step: a validation needs some of ddp, zero1"
    ):
        validate(run_of(*curve_records()))
    for run, fits in ((run_of(row()), None), (run_of(*curve_records(), row()), run_of(row()))):
        with pytest.raises(
            UserError, match="holds no collective with three sizes, mode=blocking, dtype=float32"
        ):
            validate(run, fits)


def test_duration_has_three_digits() -> None:
    shown = [format_duration(seconds) for seconds in (0, 12.345, 1, 0.0123, 4.2e-5)]
    assert shown == ["0", "12.3 s", "1 s", "12.3 ms", "42 us"]


def test_validation_round_trips_and_prints(tmp_path: Path) -> None:
    found = checked(row(metrics={"bytes_sent.dp": counted_metric(1e6, "B")}), row("ep_layer"))
    write_whole(tmp_path / PLAN_FILE, encode_json(found))
    assert [path.name for path in tmp_path.iterdir()] == [PLAN_FILE]
    content = (tmp_path / PLAN_FILE).read_bytes()
    assert msgspec.json.decode(content, type=Validation) == found
    told = json.loads(content)
    assert told["schema"] == 1
    assert told["rows"][0]["components"][0].keys() == {
        *("name", "predicted", "measured", "low", "high", "unit", "error", "method")
    }
    text = validation_text(found)
    components = [f" {each.name} " for each in found.rows[0].components]
    for part in (
        "1,000,000 B",
        "not here: workload.ep_layer",
        "is beyond 1024 to 1677",
        *components,
    ):
        assert part in text, part


MEBI = 1 << 20


def call(op: str = "all_reduce", num_bytes: float = MEBI, ranks: int = 4) -> PlacedCall:
    return PlacedCall(
        axis="dp", op=op, num_bytes=num_bytes, count=1, place=Place(ranks=ranks, on_node=ranks)
    )


REDUCED = curves_of(run_of(*curve_records()))
BOTH = curves_of(run_of(*curve_records(), *curve_records("all_gather", latency=50e-6)))


def test_a_curve_is_an_operation_on_as_many_ranks_and_a_call_takes_what_its_fit_says() -> None:
    assert [(curve.op, curve.ranks) for curve in BOTH] == [("all_reduce", 4), ("all_gather", 4)]
    assert (BOTH[0].smallest, BOTH[0].largest) == (1024, 16 * MEBI)
    assert by_curves(BOTH)(call()) == pytest.approx(20e-6 + MEBI / 3e9, rel=1e-3)
    assert by_curves(BOTH)(call("all_gather")) == pytest.approx(50e-6 + MEBI / 3e9, rel=1e-3)
    assert curve_for(call("all_gather", ranks=64), BOTH).op == "all_gather"
    assert by_curves([])(call(ranks=1)) == 0.0
    slow, odd = (
        curve_records(latency=20e-6),
        curve_records(latency=900e-6),
    )  # of three launches the median counts
    again = [
        msgspec.structs.replace(one, launch=i) for i, more in ((1, slow), (2, odd)) for one in more
    ]
    [found] = curves_of(run_of(*curve_records(), *again))
    assert found.fit.segments[0].latency_seconds == pytest.approx(20e-6, rel=0.01)


def test_other_ways_of_measuring_failures_too_few_sizes_and_one_rank_are_no_curves() -> None:
    alone = msgspec.structs.replace(curve_records()[0].world, size=1)
    on_one = [msgspec.structs.replace(record, world=alone) for record in curve_records()]
    others = {
        "mode": "pipelined",
        "dtype": "bfloat16",
        "group": "node",
        "redop": "max",
        "background": "gemm",
    }
    ways: list[dict[str, Any]] = [{name: way} for name, way in others.items()]
    for records in (
        *(curve_records(**way) for way in ways),
        [failed_record(record.case) for record in curve_records()],
        [ok_record(collective_case(size_bytes=1024 * 4**i), metrics={}) for i in range(8)],
        curve_records()[:2],
        on_one,
    ):
        assert curves_of(run_of(*records)) == [], records[0].case.label
    assert curves_of(run_of(*on_one, *curve_records())) == REDUCED


def test_more_ranks_send_more_over_each_link_and_hop_more_often_and_another_operation_stands_in() -> (
    None
):
    # an all_reduce sends 2 (n-1)/n over 2 (n-1) hops: of 4 ranks 1.5 over 6, of 16 ranks 1.875 over 30
    for op, ranks, sent, hops in (("all_reduce", 16, 1.875, 30), ("all_gather", 4, 0.75, 3)):
        found = by_curves(REDUCED)(call(op, ranks=ranks))
        assert found == pytest.approx(20e-6 * hops / 6 + MEBI * sent / 1.5 / 3e9, rel=1e-3), op
    notes = beyond(
        [call(), call(ranks=8), call("all_gather"), call(num_bytes=1e12), call(num_bytes=1e12)],
        REDUCED,
    )
    assert notes == (
        "dp: all_reduce on 8 ranks by the fit of all_reduce on 4",
        "dp: all_gather by the fit of all_reduce",
        "dp: all_reduce of 1,000,000,000,000 B is beyond 1024 to 16777216 B",
    )


def test_a_message_takes_what_one_took_whatever_the_ranks_and_a_collective_stands_in_only_roughly() -> (
    None
):
    seconds = by_curves(curves_of(run_of(*sends())))
    for ranks in (2, 16):
        assert seconds(call("send", ranks=ranks)) == pytest.approx(1e-4 + MEBI / RATE, rel=1e-3)
    with pytest.raises(
        UserError, match=r"no fit for send: it needs three sizes of p2p\.unidirectional"
    ):
        by_curves(REDUCED)(call("send"))
    # an all_reduce of 4 ranks sends 1.5 of its bytes over 6 hops
    assert by_curves(REDUCED, roughly=True)(call("send")) == pytest.approx(
        20e-6 / 6 + MEBI / 1.5 / 3e9, rel=1e-3
    )


def test_a_machine_is_the_runs_as_far_as_it_tells_and_the_bases_elsewhere() -> None:
    measured = ok_record(
        a_step(), details={"peak": {"flops_per_second": 7e10, "source": "matrix products"}}
    )
    params: dict[str, Any] = {"size_bytes": MEBI, "dtype": "float32", "mode": "blocking"}
    copied = ok_record(
        make_case("memory.copy", "parbench.bench.operations.local:copy", params),
        metrics={"algbw": rate_metric(9e9)},
    )
    environment = {**ENVIRONMENT, "host": {"memory_bytes": 64e9}}
    machine, notes = hardware_of_run(
        run_of(measured, copied, *curve_records(), environment=environment), SIMPLE_HARDWARE
    )
    assert (machine.flops_per_second, machine.memory_bytes_per_second, machine.float32_share) == (
        7e10,
        9e9,
        1.0,
    )
    assert (machine.gpus_per_node, machine.memory_bytes, machine.efficiency) == (
        4,
        16e9,
        SIMPLE_HARDWARE.efficiency,
    )
    assert notes == ()
    assert "every link is taken to be alike" in machine.links_from
    machine, notes = hardware_of_run(run_of(*curve_records(), environment={}), SIMPLE_HARDWARE)
    assert (machine.flops_per_second, machine.float32_share) == (
        SIMPLE_HARDWARE.flops_per_second,
        0.5,
    )
    assert notes == (
        "flops_per_second, memory_bytes, memory_bytes_per_second: plain's, for the run does not tell",
    )
    with pytest.raises(UserError, match="holds no records to fit"):
        hardware_of_run(run_of(), SIMPLE_HARDWARE)
