"""Candidates of a search are practical meshes."""

from dataclasses import replace

import pytest

from parbench.workloads.model.shapes import CHECKPOINTINGS
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.candidates import (
    CP_METHODS,
    MIN_TOKENS,
    SearchRequest,
    balance_layers,
    estimate_bubble,
    list_batches,
    list_layouts,
    list_pipelines,
)
from parbench.workloads.planner.models import load_model
from tests.support.workloads.planner_asks import make_request


def list_meshes(request: SearchRequest) -> set[str]:
    return {layout.dims.label for layout in list_layouts(request, 8)}


def test_layouts_split_the_model_in_practical_ways() -> None:
    layouts = list(list_layouts(make_request("llama3-70b", 64, 64), 8))
    assert {layout.dims.tp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.dims.cp for layout in layouts} == {1}
    assert {layout.dims.pp for layout in layouts} == {1, 2, 4, 8, 16, 32, 64}
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.ranks for layout in layouts} == {64}
    assert "dp=8,fsdp=8" in {layout.dims.label for layout in layouts}


def test_layouts_split_long_sequences() -> None:
    layouts = list(list_layouts(make_request(load_model("llama3-8b", 65536), 16), 8))
    assert {layout.dims.cp for layout in layouts} == {1, 2, 4, 8}
    methods = {layout.cp_method for layout in layouts if layout.dims.cp > 1}
    assert methods == set(CP_METHODS)


def test_layouts_spread_experts_over_nodes() -> None:
    layouts = list_layouts(make_request("deepseek-v3", 256), 8)
    assert {layout.dims.ep for layout in layouts} == {1, 8, 16, 32, 64}


def test_layouts_follow_the_request() -> None:
    request = make_request("llama3-8b", 8, zero=3)
    assert {layout.zero_stage for layout in list_layouts(request, 8)} == {3}
    assert list_meshes(replace(request, zero=2)) == {
        mesh for mesh in list_meshes(request) if "pp" not in mesh
    }


@pytest.mark.parametrize(
    ("sequence", "microbatches"),
    [(8192, [1, 2]), (1024, [1, 2, 4, 8, 16]), (131072, [1])],
)
def test_batches_have_enough_tokens(sequence: int, microbatches: list[int]) -> None:
    request = make_request(load_model("llama3-8b", sequence), 1, 16)
    layout = next(list_layouts(request, 8))
    batches = list(list_batches(request, layout))
    assert [step.microbatch for step in batches] == microbatches
    assert all(step.global_batch == 16 for step in batches)
    if sequence > MIN_TOKENS:
        assert all(step.microbatch * sequence >= MIN_TOKENS for step in batches)


def test_pipelines_have_every_schedule() -> None:
    request = make_request("llama3-8b", 4, 16)
    layout = next(layout for layout in list_layouts(request, 8) if layout.dims.label == "pp=4")
    step = next(list_batches(request, layout))
    options = [pipeline.pipeline_options for pipeline in list_pipelines(request, step)]
    assert {option.schedule for option in options} == set(SCHEDULES)
    assert {option.stages_per_rank for option in options} == {1, 2, 4}
    assert options[0].schedule == "1f1b"
    assert request.checkpointings == CHECKPOINTINGS


def test_balance_layers_counts_the_head() -> None:
    """The head of this model costs as much as two layers."""
    assert balance_layers(load_model("llama3-8b").shape, None, 2, 1, "1f1b") == "17+15"
    assert balance_layers(load_model("llama3-8b").shape, None, 1, 1, "1f1b") == ""


def test_bubble_without_formula_is_simulated() -> None:
    # Ranks take turns if there is one microbatch, so each waits for all others.
    assert estimate_bubble("looped_bfs", 4, 1, 2) == pytest.approx(3.0)
