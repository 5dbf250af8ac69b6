"""Predictions against a run: right where the run is what was predicted, and loud about what is not there."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reports_fixtures import bad, curve_records, make_plan, make_run, ok, plain, seconds_metric

from bench.cases import make_case
from bench.errors import UserError
from bench.records import Metric, Record, WorldInfo
from bench.runs import Run
from workloads.costs import ddp_sent_bytes
from workloads.definitions import with_defaults
from workloads.planner.published import claims
from workloads.planner.row_activations import activations_of
from workloads.planner.row_calls import Step
from workloads.planner.validate import (
    FILE,
    Component,
    RowCheck,
    Validation,
    validate,
    validation_text,
    write_validation,
)
from workloads.shapes import SHAPES, num_parameters

PSI = num_parameters(SHAPES["small"])
LATENCY, RATE = 20e-6, 3e9


def row(name: str = "ddp", launch: int = 0, *, metrics: dict[str, Metric] | None = None, **params: Any) -> Record:
    case = make_case(f"workload.{name}", f"workloads.{name}:prepare", {"shape": "small", "microbatch": 4, **params})
    usual = {"step_time": seconds_metric(0.3), "compute": plain(0.25, "s")}
    return ok(case, launch, metrics={**usual, **(metrics or {})})


def run_of(*records: Record) -> Run:
    cases = {record.case.id: record.case for record in records}
    return make_run(make_plan(cases.values()), records)


def checked(*records: Record) -> Validation:
    return validate(run_of(*curve_records(), *records))


def component(found: RowCheck, name: str) -> Component:
    return next(each for each in found.components if each.name == name)


def comm_seconds() -> float:
    return LATENCY + 4 * PSI / RATE


def test_communication_is_what_the_fit_says_of_the_calls() -> None:
    [found] = checked(row(metrics={"comm_transfer.dp": plain(0.01, "s")})).rows
    comm = component(found, "comm.dp")
    assert comm.predicted == pytest.approx(comm_seconds(), rel=1e-3)
    assert comm.error == pytest.approx(comm_seconds() / 0.01 - 1, rel=1e-3)


def test_a_step_is_its_compute_and_what_is_exposed() -> None:
    [found] = checked(row()).rows
    assert found.rule == "1 bucket summed in turn beside the backward pass"
    assert component(found, "step_time").predicted == pytest.approx(0.25 + comm_seconds(), rel=1e-3)
    assert component(found, "step_time").measured == 0.3


def test_what_is_exposed_stands_beside_what_was_measured() -> None:
    [found] = checked(row(metrics={"exposed_comm.dp": plain(0.02, "s")})).rows
    exposed = component(found, "exposed.dp")
    assert exposed.predicted == pytest.approx(comm_seconds(), rel=1e-3)
    assert exposed.measured == 0.02


def test_fsdp_on_gloo_hides_nothing_and_on_nccl_what_fits_beside_a_layer() -> None:
    world = WorldInfo(size=4, nodes=1, backend="nccl", device="cuda")
    gpu = msgspec.structs.replace(row("zero3"), world=world)
    on_gloo, on_nccl = (component(checked(each).rows[0], "exposed.dp").predicted for each in (row("zero3"), gpu))
    assert on_gloo == pytest.approx(component(checked(row("zero3")).rows[0], "comm.dp").predicted)
    assert on_nccl < on_gloo / 2


def test_timed_compute_is_known_beforehand_and_what_was_measured_of_it_does_not_count() -> None:
    [found] = checked(row(compute="timed:50ms")).rows
    assert found.compute == "declared"
    assert component(found, "step_time").predicted == pytest.approx(0.15 + comm_seconds(), rel=1e-3)


def test_another_runs_collectives_can_tell_how_long_calls_take() -> None:
    fits = run_of(*curve_records())
    found = validate(run_of(row()), fits)
    assert component(found.rows[0], "comm.dp").predicted == pytest.approx(comm_seconds(), rel=1e-3)
    assert (found.run, found.fits) == (fits.info.id, fits.info.id)  # made runs all have one id


def test_a_run_without_collectives_that_others_are_to_be_predicted_from_is_refused() -> None:
    with pytest.raises(UserError, match="holds no collective with three sizes"):
        validate(run_of(*curve_records(), row()), run_of(row()))


def test_the_text_says_whose_fits_and_which_compute() -> None:
    own = checked(row())
    assert "predicted from its own fits and each row's measured compute" in validation_text(own)
    other = msgspec.structs.replace(own, fits="another")
    assert "predicted from the fits of another and" in validation_text(other)


def test_bytes_and_memory_are_closed_forms_beside_what_was_counted() -> None:
    sent = ddp_sent_bytes(PSI, 4, 4)["dp"]
    measured = {
        "bytes_sent.dp": plain(sent, "B"),
        "memory.parameters": plain(4 * PSI, "B"),
        "memory.optimizer": plain(8 * PSI, "B"),
    }
    [found] = checked(row(metrics=measured)).rows
    for name in ("bytes.dp", "memory.parameters", "memory.optimizer"):
        assert component(found, name).error == pytest.approx(0)
    assert component(found, "memory.gradients").measured is None
    assert component(found, "memory.gradients").error is None


def test_activations_stand_beside_what_was_counted_not_beside_the_peak() -> None:
    kept = activations_of(Step(name="ddp", params=with_defaults(row().case.params, "ddp"), ranks=4, on_node=4))
    assert kept is not None
    metrics = {"memory_counted.activations": plain(2 * kept, "B"), "memory.activations": plain(9.0, "B")}
    [found] = checked(row(metrics=metrics)).rows
    assert component(found, "memory.activations").error == pytest.approx(-0.5)


def test_a_gpus_norms_are_fused() -> None:
    world = WorldInfo(size=4, nodes=1, backend="nccl", device="cuda")
    on_cpu = row(shape="small-llama")
    on_gpu = msgspec.structs.replace(on_cpu, world=world)
    kept = [component(checked(each).rows[0], "memory.activations").predicted for each in (on_gpu, on_cpu)]
    assert kept[0] < kept[1]


def test_activations_that_are_not_known_are_left_out() -> None:
    [found] = checked(row(checkpointing="selective")).rows
    assert "memory.activations" not in [each.name for each in found.components]


def test_a_wrong_count_shows() -> None:
    sent = ddp_sent_bytes(PSI, 4, 4)["dp"]
    [found] = checked(row(metrics={"bytes_sent.dp": plain(2 * sent, "B")})).rows
    assert component(found, "bytes.dp").error == pytest.approx(-0.5)


def test_launches_give_their_median() -> None:
    rows = [row(launch=i, metrics={"compute": plain(value, "s")}) for i, value in enumerate((0.1, 0.2, 9.0))]
    [found] = checked(*rows).rows
    assert component(found, "step_time").predicted == pytest.approx(0.2 + comm_seconds(), rel=1e-3)


def sends() -> list[Record]:
    params: dict[str, Any] = {"dtype": "float32", "mode": "blocking", "source": 0, "target": 1}
    sizes = [1024 * 4**i for i in range(8)]
    cases = [make_case("p2p.unidirectional", "bench.p2p:unidirectional", {"size_bytes": n, **params}) for n in sizes]
    return [ok(case, seconds=1e-4 + int(case.params["size_bytes"]) / RATE) for case in cases]


def test_a_pipeline_is_compute_its_bubble_its_messages_and_what_lies_outside() -> None:
    measured = {"outside_pipeline": plain(0.01, "s")}
    record = row("pp", schedule="1f1b", microbatches=8, metrics=measured)
    [found] = checked(*sends(), record).rows
    message = 1e-4 + 4 * 128 * 192 * 4 / RATE
    bubble = 3 * 0.25 / 8
    assert component(found, "step_time").predicted == pytest.approx(0.25 + bubble + 2 * 6 * message + 0.01, rel=5e-3)


def test_a_pipeline_without_a_measured_message_is_refused_with_what_is_needed() -> None:
    with pytest.raises(UserError, match=r"p2p\.unidirectional"):
        checked(row("pp", schedule="1f1b", microbatches=8))


def test_a_step_whose_message_was_not_measured_does_not_stop_the_others() -> None:
    found = checked(row(), row("cp", method="ring"))
    assert [each.label.split()[0] for each in found.rows] == ["workload.ddp"]
    [reason] = found.left_out.values()
    assert "p2p.unidirectional" in reason


def test_attention_over_ranks_is_predicted_by_axis() -> None:
    [found] = checked(row("cp", method="ulysses", metrics={"bytes_sent.cp": plain(1e6, "B")})).rows
    assert {"comm.cp", "comm.dp", "bytes.cp", "bytes.dp"} <= {each.name for each in found.components}
    assert component(found, "bytes.cp").measured == 1e6


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (row("ep_step", routing="zipf"), "not predicted: ep_step: routing = zipf: who sends how much is known once"),
        (bad(row().case, reason="it broke"), "it broke"),
        (ok(row().case, metrics={"step_time": seconds_metric(0.3)}), "its compute was not measured alone"),
    ],
)
def test_what_is_not_predicted_says_why(record: Record, reason: str) -> None:
    found = checked(record)
    assert found.rows == []
    assert reason in found.left_out[record.case.label]


def test_a_hybrid_mixture_says_why() -> None:
    found = checked(row("hybrid", mesh="fsdp=4,ep=2", experts=4))
    assert list(found.left_out.values()) == ["not predicted: hybrid with experts: its communication depends on routes"]


def test_a_run_without_steps_or_without_collectives_is_refused() -> None:
    with pytest.raises(UserError, match="holds no training step: a validation needs some of ddp, zero1"):
        validate(run_of(*curve_records()))
    with pytest.raises(UserError, match="holds no collective with three sizes, mode=blocking, dtype=float32"):
        validate(run_of(row()))


def test_calls_beyond_the_measured_sizes_are_told() -> None:
    [found] = checked(row()).rows
    assert found.notes == [f"dp: all_reduce of {4 * PSI:,} B is beyond 1024 to 16777216 B"]


def test_it_is_written_into_the_run_and_reads_back(tmp_path: Path) -> None:
    found = checked(row(), row("ep_layer"))
    write_validation(tmp_path, found)
    content = (tmp_path / FILE).read_bytes()
    told = json.loads(content)
    assert told["schema"] == 1
    assert told["rows"][0]["components"][0].keys() == {"name", "predicted", "measured", "unit", "error"}
    assert msgspec.json.decode(content, type=Validation) == found
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_published_numbers_go_with_it_into_file_and_text(tmp_path: Path) -> None:
    found = checked(row())
    write_validation(tmp_path, found)
    told = json.loads((tmp_path / FILE).read_bytes())["published"]
    assert len(told) == len(claims()) > 10
    assert told[0].keys() == {"name", "quoted", "predicted", "unit", "source"}
    text = validation_text(found)
    assert "Of declared hardware, not of this machine:" in text
    assert all(f"{claim.group}: {claim.what}" in text for claim in claims())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json cannot be written: No such file"):
        write_validation(tmp_path / "absent", checked(row()))


def test_the_text_has_a_row_for_every_component() -> None:
    found = checked(row(metrics={"bytes_sent.dp": plain(1e6, "B")}), row("ep_layer"))
    text = validation_text(found)
    for each in found.rows[0].components:
        assert f" {each.name} " in text
    assert "1,000,000 B" in text
    assert "-" in text
    assert "not here: workload.ep_layer" in text
    assert "is beyond 1024 to 16777216 B" in text


def test_an_error_is_predicted_over_measured_less_one() -> None:
    assert Component(name="a", predicted=3.0, measured=2.0, unit="s").error == 0.5
    assert Component(name="a", predicted=3.0, measured=0.0, unit="s").error is None


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp_sp"])
def test_every_kind_of_one_axis_or_two_has_all_components(name: str) -> None:
    [found] = checked(row(name)).rows
    names = [each.name for each in found.components]
    assert names[0] == "step_time"
    assert {"memory.parameters", "memory.gradients", "memory.optimizer"} <= set(names)
    axes = {name.partition(".")[2] for name in names if name.startswith("comm.")}
    assert axes == {name.partition(".")[2] for name in names if name.startswith("bytes.")}
    assert axes == ({"shard", "replicate"} if found.label.startswith("workload.hsdp") else axes)
    assert all(each.predicted > 0 for each in found.components)


def test_a_step_on_a_mesh_has_its_axes() -> None:
    [found] = checked(row("hybrid", mesh="fsdp=2,tp=2", microbatches=2)).rows
    assert {each.name for each in found.components if each.name.startswith("bytes.")} == {"bytes.fsdp", "bytes.tp"}


def test_a_mesh_with_a_pipeline_has_its_bubble() -> None:
    [flat] = checked(row("hybrid", mesh="dp=4", microbatches=4)).rows
    [staged] = checked(*sends(), row("hybrid", mesh="dp=2,pp=2", microbatches=4)).rows
    dp = component(staged, "comm.dp").predicted
    message = 1e-4 + 4 * 128 * 192 * 4 / RATE
    bubble = 1 * 0.25 / 4
    assert component(staged, "step_time").predicted == pytest.approx(0.25 + dp + bubble + 2 * 2 * message, rel=5e-3)
    assert component(flat, "step_time").predicted == pytest.approx(0.25 + component(flat, "comm.dp").predicted)


def test_rows_come_in_the_order_of_the_run() -> None:
    found = checked(row("tp"), row("ddp"), row("zero3"))
    assert [each.label.split()[0] for each in found.rows] == ["workload.tp", "workload.ddp", "workload.zero3"]


def test_steps_on_several_nodes_know_how_many_ranks_share_one() -> None:
    world = WorldInfo(size=4, nodes=2, backend="gloo", device="cpu")
    [found] = checked(msgspec.structs.replace(row(), world=world)).rows
    assert found.ranks == 4


def test_a_failed_launch_beside_a_good_one_does_not_count() -> None:
    [found] = checked(bad(row().case, launch=1), row()).rows
    assert component(found, "step_time").measured == 0.3
