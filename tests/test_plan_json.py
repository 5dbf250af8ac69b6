"""JSON of the planner: the same numbers as the text, on one line, with nothing that JSON cannot hold."""

import json

import pytest
from planner_asks import H100, ask

from workloads.planner.catalog import model_of
from workloads.planner.dry_run import dry_run
from workloads.planner.plan_json import as_line, claims_json, dry_run_json, search_json
from workloads.planner.published import claims
from workloads.planner.search import Wanted, search

RUN = dry_run(ask("dp=2,fsdp=2,pp=2,tp=2", "llama3-8b", microbatches=4), H100)


def test_a_dry_run_is_one_line_that_reads_back() -> None:
    line = as_line(dry_run_json(RUN, ["a note"]))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["kind"], found["predicted"], found["model"], found["gpus"]) == ("dry-run", True, "llama3-8b", 16)
    assert found["mesh"] == {"dp": 2, "fsdp": 2, "pp": 2, "tp": 2}
    assert found["notes"] == ["a note"]


def test_its_numbers_are_the_dry_runs() -> None:
    found = dry_run_json(RUN)
    assert found["step_seconds"] == RUN.time.seconds
    assert found["mfu"] == RUN.mfu
    assert found["fits"] is RUN.fits
    assert [held["total"] for held in found["memory_bytes"]] == [held.memory.total for held in RUN.ranks]
    assert found["axes"]["tp"]["sent_bytes"] == RUN.time.axes[0].sent_bytes
    assert found["hardware"]["efficiency"]["gemm"] == 0.55


def test_the_parts_of_the_step_are_all_there() -> None:
    found = dry_run_json(RUN)
    parts = found["compute_seconds"] + found["update_seconds"] + found["bubble_seconds"]
    exposed = sum(axis["exposed_seconds"] for axis in found["axes"].values())
    assert parts + exposed == pytest.approx(found["step_seconds"])


def test_formulas_are_in_it() -> None:
    assert {"state", "activations", "compute", "mfu"} <= {formula["name"] for formula in dry_run_json(RUN)["formulas"]}


def test_a_search_is_its_best_with_what_binds_them() -> None:
    result = search(Wanted(model=model_of("llama3-8b"), gpus=8, global_batch=64), H100, top=2)
    found = json.loads(as_line(search_json(result)))
    assert found["kind"] == "search"
    assert [run["bound_by"] for run in found["best"]] == list(result.bindings)
    assert [run["step_seconds"] for run in found["best"]] == [run.time.seconds for run in result.best]
    assert found["why"][0].startswith("fit: ")
    assert found["tried"] == result.tried


def test_claims_are_all_there() -> None:
    found = json.loads(as_line(claims_json(claims())))
    assert len(found["claims"]) == len(claims())
    assert {"quoted", "predicted", "source", "unit"} <= set(found["claims"][0])


def test_what_does_not_fit_says_so() -> None:
    found = dry_run_json(dry_run(ask("tp=8", "llama3-70b"), H100))
    assert found["fits"] is False
    assert found["memory_bytes"][0]["total"] > found["usable_bytes"]


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "fsdp=2,tp=2", "pp=2"])
def test_every_mesh_encodes(mesh: str) -> None:
    run = dry_run(ask(mesh, microbatches=4), H100)
    found = json.loads(as_line(dry_run_json(run)))
    assert set(found["axes"]) == {axis.name for axis in run.time.axes}
    assert found["global_batch"] == run.ask.global_batch
    assert found["tokens_per_second"] == run.tokens_per_second


def test_what_a_reader_must_know_is_a_note() -> None:
    run = dry_run(ask("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective"), H100)
    assert dry_run_json(run, ["a note"])["notes"] == [*run.caveats, "a note"]
    assert run.caveats
