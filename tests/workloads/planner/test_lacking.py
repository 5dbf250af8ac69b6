"""A refused search names the missing memory or the broken rule, and the smallest number of GPUs."""

from dataclasses import replace
from typing import Any

import msgspec

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.planner.candidates import Wanted, candidates
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.lacking import lack_of, require_found, smallest_feasible
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.search import search
from tests.support import refusals
from tests.support.planner_asks import H100, SIMPLE_HARDWARE, make_request, make_spec


def message_of_search(request: Wanted, hardware: Hardware = H100) -> str:
    return refusals.usage_error(require_found, request, hardware, search(request, hardware))


def test_lacking_memory_is_stated_with_smallest_gpus() -> None:
    request = make_request("llama3-70b", 8, 4, schedule="1f1b", microbatch=1)
    message = message_of_search(request)
    assert "1,129 GB of state over 8 x 80 GB (73.6 GB usable)" in message
    assert "143.4 GB a GPU even as tp=8 with microbatch 1, checkpointing full" in message
    assert "16 GPUs as pp=2,tp=8 with microbatch 1, checkpointing full" in message


def test_lacking_memory_of_a_mesh_is_stated_by_part() -> None:
    message = lack_of(dry_run(make_spec("tp=8", "llama3-70b", microbatches=4), H100))
    assert "tp=8 needs 168.9 GB on pp rank 0" in message
    assert "141.1 GB of state, 27.8 GB of activations" in message
    assert "16 GPUs as pp=2,tp=8" in message


def test_lacking_batch_is_stated() -> None:
    message = message_of_search(make_request("tiny", 11, 3))
    assert "global batch(3) % (dp(11) * fsdp(1) * microbatch(1))" in message
    assert "1 GPUs as dp=1" in message


def test_lacking_rule_is_stated() -> None:
    """One head and an odd sequence leave only a pipeline, whose schedule needs microbatches."""
    shape = replace(model_of("tiny").shape, heads=1, kv_heads=1, sequence=63)
    step = StepSpec(name="narrow", shape=shape)
    message = message_of_search(
        make_request(step, 2, 1, schedule="dualpipe_v"), SIMPLE_HARDWARE
    )
    assert "pp=2" in message
    assert "microbatches(1)" in message


def make_tiny_mixture() -> StepSpec:
    step = model_of("tiny-llama")
    params: dict[str, Any] = {
        "experts": 4,
        "shared": 0,
        "expert_ffn": 352,
        "routing": "balanced",
    }
    return replace(step, moe=make_moe(params, step.shape, 1))


def test_smallest_gpus_match_exhaustive_search() -> None:
    hardware = msgspec.structs.replace(SIMPLE_HARDWARE, memory_bytes=12e6)
    request = make_request(make_tiny_mixture(), 1, 4)
    run = smallest_feasible(request, hardware)
    assert run is not None
    assert run.spec.ranks > 1
    assert run.spec.global_batch == 4
    for gpus in range(1, run.spec.ranks):
        for step in candidates(replace(request, gpus=gpus)):
            is_possible = (
                step.find_broken_rule() is None and dry_run(step, hardware, exact=False).fits
            )
            assert not is_possible, step
