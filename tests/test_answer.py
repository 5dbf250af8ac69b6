"""Questions and answers: what is asked becomes a step, a search or a check, and bad input one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports_fixtures import ENVIRONMENT, curve_records, make_plan, make_run, ok, plain, seconds_metric, write_run

from bench.cases import make_case
from bench.errors import UserError
from bench.records import Record
from workloads.planner.answer import Given, answer, ask_of, machine_of
from workloads.planner.hardware import PRESETS


def given(**more: Any) -> Given:
    return Given(**{"model": "llama3-8b", **more})


def run_folder(out: Path, *records: Record) -> Path:
    found = [*curve_records(), *records]
    return write_run(out, make_run(make_plan([record.case for record in found]), found, ENVIRONMENT))


def test_a_mesh_is_dry_run() -> None:
    found = answer(given(mesh="fsdp=8", gpus=8))
    assert found.text.startswith("Predicted, not measured: llama3-8b on 8 GPUs (h100)")
    assert found.problem == ""


def test_a_step_that_does_not_fit_is_shown_and_is_a_problem() -> None:
    found = answer(given(mesh="dp=8"))
    assert "memory, GB a rank" in found.text
    assert found.problem.startswith("llama3-8b with dp=8 needs ")


def test_gpus_default_to_the_product_of_the_mesh() -> None:
    assert ask_of(given(mesh="dp=2,tp=4")).world == 8
    with pytest.raises(UserError, match=r"dp\(2\) \* tp\(4\) = 8 != --gpus\(9\)"):
        ask_of(given(mesh="dp=2,tp=4", gpus=9))


def test_microbatches_come_from_the_batch_or_fill_the_pipeline() -> None:
    assert ask_of(given(mesh="dp=2")).microbatches == 1
    assert ask_of(given(mesh="pp=4")).microbatches == 16
    assert ask_of(given(mesh="pp=4", microbatches=5)).microbatches == 5
    assert ask_of(given(mesh="dp=2,pp=4", global_batch=64, microbatch=2)).microbatches == 16


def test_a_search_shows_as_many_as_asked() -> None:
    found = json.loads(answer(given(search=True, gpus=16, global_batch=64, top=3, as_json=True)).text)
    assert len(found["best"]) == 3
    assert {run["global_batch"] for run in found["best"]} == {64}


def test_a_search_without_a_batch_takes_a_sequence_for_each_gpu() -> None:
    assert "at global batch 16 of 8192 tokens" in answer(given(search=True, gpus=16)).text


def test_explanations_are_asked_for() -> None:
    for asked in (given(mesh="fsdp=8"), given(search=True, gpus=8)):
        plainly = answer(asked).text
        told = answer(Given(**{**vars(asked), "explain": True})).text
        assert told.startswith(plainly)
        assert "arXiv 1910.02054" in told.removeprefix(plainly)


def test_json_is_one_line() -> None:
    text = answer(given(mesh="fsdp=8", as_json=True)).text
    assert "\n" not in text
    assert json.loads(text)["sequence"] == 8192


def test_published_numbers_need_no_model() -> None:
    assert answer(Given(published=True)).text.startswith("published")
    assert json.loads(answer(Given(published=True, as_json=True)).text)["kind"] == "published"


def test_options_reach_the_step() -> None:
    ask = ask_of(
        given(
            mesh="pp=2,cp=2",
            sequence=16384,
            precision="float32",
            schedule="interleaved",
            chunks=4,
            checkpointing="full",
            cp_method="ulysses",
            microbatches=4,
        )
    )
    assert (ask.model.shape.sequence, ask.element_bytes, ask.schedule, ask.chunks) == (16384, 4, "interleaved", 4)
    assert (ask.checkpointing, ask.cp_method) == ("full", "ulysses")


def test_hardware_is_h100_unless_said() -> None:
    assert machine_of(given()).hardware == PRESETS["h100"]
    assert machine_of(given(hardware="b200")).hardware == PRESETS["b200"]


def test_a_runs_fits_tell_a_calls_time(tmp_path: Path) -> None:
    path = run_folder(tmp_path)
    machine = machine_of(given(fits=path))
    assert machine.seconds is not None
    assert machine.hardware.name == path.name
    text = answer(given(mesh="dp=2,tp=4", model="small-llama", fits=path)).text
    assert f"fits of {path}" in text


def step_record() -> Record:
    case = make_case("workload.ddp", "workloads.ddp:prepare", {"shape": "tiny", "microbatch": 4})
    return ok(case, metrics={"step_time": seconds_metric(0.02), "compute": plain(0.01, "s")})


def test_a_validation_is_shown_and_written(tmp_path: Path) -> None:
    path = run_folder(tmp_path, step_record())
    text = answer(Given(validate=path)).text
    assert "workload.ddp shape=tiny" in text
    assert json.loads((path / "plan.json").read_text())["rows"][0]["label"].startswith("workload.ddp")
    assert json.loads(answer(Given(validate=path, as_json=True)).text)["kind"] == "validation"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for asked in (Given(validate=tmp_path), given(mesh="dp=2", fits=tmp_path)):
        with pytest.raises(UserError, match="is no run"):
            answer(asked)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"model": None, "mesh": "dp=2"}, "--model is missing"),
        ({"model": "llama3-7b", "mesh": "dp=2"}, r"model 'llama3-7b' is not .*did you mean 'llama3-\d"),
        ({}, "--mesh is missing"),
        ({"mesh": "dp=2", "search": True, "gpus": 2}, "--mesh and --search do not go together"),
        ({"search": True}, "--gpus is missing"),
        ({"search": True, "gpus": 8, "microbatches": 4}, "--microbatches and --search do not go together"),
        ({"search": True, "gpus": 8, "checkpointing": "ful"}, r"--checkpointing 'ful' is not .*did you mean 'full'"),
        ({"search": True, "gpus": 8, "microbatch": 0}, r"--microbatch\(0\) < 1"),
        ({"search": True, "gpus": 8, "top": 0}, r"--top\(0\) < 1"),
        ({"mesh": "dp=2", "microbatches": 2, "global_batch": 4}, "say the same thing"),
        ({"mesh": "dp=2", "precision": "bf16"}, r"--precision 'bf16' is not float32 or bfloat16"),
        ({"mesh": "dp=2", "checkpointing": "ful"}, r"--checkpointing 'ful' is not .*did you mean 'full'"),
        ({"mesh": "dp=2", "schedule": "1f2b"}, r"schedule\(1f2b\) is not .*did you mean '1f1b'"),
        ({"mesh": "dp=2", "cp_method": "rings"}, r"--cp-method 'rings' is not .*did you mean 'ring'"),
        ({"mesh": "dp=2", "microbatch": 0, "global_batch": 4}, r"--microbatch\(0\) < 1"),
        ({"mesh": "dp=2", "global_batch": -4}, r"--global-batch\(-4\) < 0"),
        ({"mesh": "dp=2", "gpus": -2}, r"--gpus\(-2\) < 0"),
        ({"mesh": "dp=2", "sequence": -1}, r"sequence\(-1\) < 1"),
        ({"mesh": "dp=2", "hardware": "tpu"}, "hardware 'tpu' is not a100"),
        ({"mesh": "tp=16", "gpus": 16}, r"--mesh tp=16 cannot carry llama3-8b: kv_heads\(8\) % tp\(16\) != 0"),
        ({"search": True, "gpus": 8, "schedule": "nil"}, r"schedule\(nil\) is not"),
    ],
)
def test_bad_input_is_one_sentence(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        answer(given(**more))
    assert "\n" not in str(caught.value)


def test_a_search_takes_what_is_said_of_its_candidates() -> None:
    asked = given(search=True, gpus=8, global_batch=16, top=50, as_json=True)
    every, told = (
        json.loads(answer(one).text)["best"] for one in (asked, replace(asked, microbatch=2, checkpointing="full"))
    )
    assert {run["microbatch"] for run in told} == {2}
    assert {run["checkpointing"] for run in told} == {"full"}
    assert len({(run["microbatch"], run["checkpointing"]) for run in every}) > 1


def test_a_search_takes_the_chunks_that_are_asked_for() -> None:
    asked = given(search=True, gpus=16, global_batch=64, top=200, schedule="interleaved", chunks=4)
    meshes = [line.split()[0] for line in answer(asked).text.splitlines() if "pp=" in line.split(" ")[0]]
    assert meshes
    default = answer(replace(asked, chunks=0)).text
    assert answer(asked).text != default
    with pytest.raises(UserError, match=r"chunks\(3\)"):
        answer(given(search=True, model="tiny", gpus=2, global_batch=1, schedule="interleaved", chunks=3, sequence=63))


def test_a_step_too_large_names_the_fewest_gpus_with_its_own_chunks() -> None:
    asked = given(mesh="pp=2", model="gpt-175b", schedule="interleaved", microbatches=4)
    plain, own = (answer(replace(asked, chunks=chunks)).problem for chunks in (2, 48))
    assert "smallest feasible: 48 GPUs as pp=3,tp=16" in plain
    assert "smallest feasible: 64 GPUs as pp=2,tp=32" in own  # 96 layers are no 48 chunks on 3 ranks
