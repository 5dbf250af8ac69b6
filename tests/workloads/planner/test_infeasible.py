"""A refused search names the missing memory or the broken rule, and the fewest GPUs that fit."""

from dataclasses import replace

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import SearchRequest
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.infeasible import (
    explain_too_large,
    find_fewest_gpus,
    require_candidates,
)
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.search import search
from tests.support import refusals
from tests.support.planner_asks import H100, SIMPLE_HARDWARE, make_request, make_spec


def explain_search(request: SearchRequest, hardware: Hardware = H100) -> str:
    result = search(request, hardware)
    return refusals.usage_error(require_candidates, request, hardware, result)


def test_missing_memory_is_explained_with_fewest_gpus() -> None:
    message = explain_search(make_request("llama3-70b", 8, 4, schedule="1f1b", microbatch=1))
    assert "1,129 GB of state on 8 GPUs of 80 GB" in message
    assert "GB per GPU even as tp=8 with microbatch 1, checkpointing full" in message
    assert "The fewest GPUs that fit, in powers of two, are 32" in message


def test_missing_memory_of_a_mesh_is_explained() -> None:
    message = explain_too_large(dry_run(make_spec("tp=8", "llama3-70b", microbatches=4), H100))
    assert "tp=8 needs" in message
    assert "141.1 GB of state" in message
    assert "are 32" in message


def test_too_large_step_may_fit_with_recomputation() -> None:
    spec = make_spec("tp=8", "llama3-8b", microbatch=16)
    run = dry_run(spec, H100)
    assert not run.fits
    assert explain_too_large(run).endswith("It fits with --checkpointing full")


def test_too_large_step_may_fit_on_another_mesh() -> None:
    spec = make_spec("pp=8", "llama3-8b", schedule="zb_h2", microbatches=32)
    assert "As many GPUs can run fsdp=8" in explain_too_large(dry_run(spec, H100))


def test_indivisible_batch_is_explained() -> None:
    message = explain_search(make_request("tiny", 11, 3))
    assert "no mesh of 11 GPUs divides global batch 3" in message
    assert "--global-batch 11" in message


def test_broken_rule_is_explained() -> None:
    """A schedule that splits the backward pass forbids recomputation."""
    shape = replace(model_of("tiny").shape, heads=1, kv_heads=1, sequence=63)
    request = make_request(
        StepSpec(name="narrow", shape=shape),
        2,
        4,
        schedule="zb_h1",
        checkpointing="full",
        zero=1,
    )
    request = replace(request, microbatch=4)
    message = explain_search(request, SIMPLE_HARDWARE)
    assert "global batch 4" in message


def test_fewest_gpus_hold_the_state() -> None:
    run = find_fewest_gpus(make_request("llama3-70b", 1, 64), H100)
    assert run is not None
    assert run.spec.ranks == 32
    assert run.spec.global_batch == 64
    assert search(make_request("llama3-70b", 16, 64), H100).runs == []
