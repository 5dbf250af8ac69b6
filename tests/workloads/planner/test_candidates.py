"""Candidates of a search: every mesh that the sizes of the model allow, and no other."""

import math
from dataclasses import replace
from itertools import product

from parbench.workloads.parallel.dims import ParallelDims
from parbench.workloads.planner.candidates import CP_METHODS, SCHEDULES, candidates, splits
from parbench.workloads.planner.models import model_of
from tests.support.planner_asks import make_request


def test_candidates_are_all_allowed_meshes() -> None:
    request = make_request(
        "small-llama", 12, 1536, microbatch=1, schedule="1f1b", checkpointing="none"
    )
    expected = set()
    for sizes in product((1, 2, 3, 4, 6, 12), repeat=5):
        if math.prod(sizes) != 12:
            continue
        names = ("dp", "pp", "fsdp", "cp", "tp")
        dims = ParallelDims.from_sizes(dict(zip(names, sizes, strict=True)))
        for split in ("", *splits(request.step.shape, None, dims.pp, 1, "1f1b")):
            step = replace(request.step, dims=dims, microbatches=64).with_pipeline(split=split)
            if step.find_broken_rule() is None:
                expected.add(step.dims.label)

    steps = candidates(request)

    assert {step.dims.label for step in steps if step.find_broken_rule() is None} == expected


def test_candidates_vary_every_open_choice() -> None:
    steps = list(candidates(make_request("small-llama", 4, 48)))
    assert {step.global_batch for step in steps} == {48}
    assert {step.microbatch for step in steps} == {1, 2, 4, 8}
    assert {step.zero_stage for step in steps} == {0, 1, 2, 3}
    assert {step.cp_method for step in steps} == set(CP_METHODS)
    assert {step.pipeline_options.schedule for step in steps} == {name for name, _ in SCHEDULES}


def test_candidates_divide_experts() -> None:
    request = make_request("mixtral-8x7b", 16, microbatch=1, checkpointing="none")
    steps = list(candidates(request))
    assert {step.dims.size("ep") for step in steps} == {1, 2, 4, 8}
    assert {step.dims.size("etp") for step in steps if step.dims.size("tp") == 8} == {1, 8}


def test_splits_balance_the_head() -> None:
    """The head of this model costs as much as two layers."""
    assert splits(model_of("llama3-8b").shape, None, 2, 1, "1f1b") == ("", "17+15")
