"""Arithmetic: what the model counts, what a rank executes of it, and what it moves again."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.flops import again_bytes, flops_per_token, stage_flops
from parbench.workloads.costs.parameter_table import layer_weights, num_active_parameters
from parbench.workloads.planner.models import model_of
from tests.support.planner_asks import make_spec

TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256  # of llama3-8b


def test_of_a_mixture_the_experts_that_a_token_meets_count() -> None:
    mixtral = model_of("mixtral-8x7b")
    dense = layer_weights(mixtral.shape)
    found = layer_weights(mixtral.shape, mixtral.moe)
    assert found - dense == 3 * 4096 * 14336 + 4096 * 8  # a second expert, and the router
    # 12.9 billion active parameters are quoted, embedding included
    assert num_active_parameters(mixtral.shape, mixtral.moe) == pytest.approx(12.9e9, rel=0.01)


def test_what_is_executed_is_the_models_count_less_the_masked_half_of_attention() -> None:
    for name in ("small", "llama3-8b"):
        spec = make_spec("dp=1", name, microbatch=2)
        flops = stage_flops(spec.at(0))
        assert (flops.again, flops.backward) == (0, 2 * flops.forward)
        assert flops.total + 3 * flops.attention == pytest.approx(
            flops_per_token(spec.shape) * spec.local_tokens
        ), name
    short, long = (
        stage_flops(make_spec("dp=1", model_of("llama3-8b", s)).at(0)).attention
        for s in (4096, 16384)
    )
    assert long == 16 * short


def test_stages_do_the_models_work_once_and_axes_inside_a_sequence_divide_it() -> None:
    for name in ("llama3-70b", "gpt-175b", "mixtral-8x7b"):
        whole = stage_flops(make_spec("dp=1", name).at(0)).total
        first, middle, last = (
            stage_flops(at).total for at in make_spec("pp=4", name, microbatches=8).positions
        )
        assert first + 2 * middle + last == pytest.approx(whole), name
        assert first == middle < last, name
    one = stage_flops(make_spec("dp=1", "llama3-8b").at(0)).total
    for mesh, microbatch, share in (
        ("tp=4", 1, 0.25),
        ("cp=4", 1, 0.25),
        ("dp=8", 1, 1),
        ("fsdp=8", 4, 4),
    ):
        assert stage_flops(
            make_spec(mesh, "llama3-8b", microbatch=microbatch).at(0)
        ).total == pytest.approx(share * one), mesh
    here, there = (
        stage_flops(make_spec(mesh, "mixtral-8x7b").at(0)) for mesh in ("fsdp=8", "fsdp=8,ep=4")
    )
    assert here == there


def test_full_checkpointing_runs_the_layers_again_and_selective_moves_what_it_dropped() -> None:
    none, selective, full = (
        replace(make_spec("dp=1", "llama3-8b"), checkpointing=how).at(0)
        for how in ("none", "selective", "full")
    )
    flops = stage_flops(full)
    assert flops.again == pytest.approx(
        flops.forward - 2 * HIDDEN * VOCABULARY * TOKENS
    )  # but not the head
    assert stage_flops(selective).again == 0
    # units of b s h e: two norms' inputs, outputs of each, gate's SiLU and its product, less the input that is kept
    assert again_bytes(selective) / (2 * 32 * TOKENS * HIDDEN * 2) == pytest.approx(
        1 + 2 + 2 * 3.5 - 2, abs=0.01
    )
    assert again_bytes(none) == again_bytes(full) == 0
