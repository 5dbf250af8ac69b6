"""Memory of a rank: ZeRO's table, the closed forms of activations, and what recomputation and sharding save."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import ask

from workloads.costs import LayerShape, gpt_activation_bytes, swiglu_activation_bytes
from workloads.planner.catalog import model_of, num_model_parameters
from workloads.planner.rank_memory import (
    RankMemory,
    activation_bytes,
    gathered_bytes,
    head_bytes,
    kept_bytes,
    layer_bytes,
    memory_of,
    total_state_bytes,
)
from workloads.planner.stage_parts import parts_of


def memory(mesh: str, model: str = "llama3-8b", **more: object) -> RankMemory:
    step = ask(mesh, model, **more)
    return memory_of(step, parts_of(step)[0])


def test_mixed_precision_holds_sixteen_bytes_a_parameter() -> None:
    psi = num_model_parameters(model_of("llama3-8b"))
    found = memory("dp=8")
    assert (found.parameters, found.gradients, found.optimizer) == (2 * psi, 2 * psi, 12 * psi)
    assert total_state_bytes(model_of("llama3-8b"), 2) == found.state == 16 * psi


def test_float32_holds_as_much_in_other_parts() -> None:
    psi = num_model_parameters(model_of("llama3-8b"))
    found = memory("dp=8", element_bytes=4)
    assert (found.parameters, found.gradients, found.optimizer) == (4 * psi, 4 * psi, 8 * psi)


@pytest.mark.parametrize("axis", ["fsdp", "pp", "tp"])
def test_state_is_divided_by_the_axes_that_divide_it(axis: str) -> None:
    one, many = memory("dp=1").state, memory(f"{axis}=4", microbatches=4).state
    assert many == pytest.approx(one / 4, rel=0.25 if axis == "pp" else 1e-3)


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_replicas_hold_all_of_it(axis: str) -> None:
    assert memory(f"{axis}=4").state == memory("dp=1").state


@pytest.mark.parametrize("model", ["llama3-8b", "gpt-7.5b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_is_the_closed_form_of_its_recipe(model: str, tp: int) -> None:
    step = ask(f"tp={tp}", model, microbatch=2)
    shape = step.model.shape
    layer = LayerShape(
        microbatch=2,
        sequence=shape.sequence,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
    )
    formula = swiglu_activation_bytes if shape.recipe == "llama" else gpt_activation_bytes
    assert layer_bytes(step) == formula(layer, 2, tp=tp, sequence_parallel=tp > 1)


def test_what_is_kept_falls_from_none_over_selective_to_full() -> None:
    none, selective, full = (
        kept_bytes(ask("tp=4", "llama3-8b", checkpointing=how)) for how in ("none", "selective", "full")
    )
    assert full < selective < none
    assert full == 8192 * 4096 * 2 / 4


def test_selective_keeps_every_matrix_product() -> None:
    # the layer's input; q, out, attention and down of hidden size; k, v of a quarter; gate and up of 3.5
    kept = 1 + 4 + 2 / 4 + 2 * 3.5
    assert kept_bytes(ask("dp=1", "llama3-8b", checkpointing="selective")) == 8192 * 4096 * 2 * kept


def test_recomputation_keeps_room_for_the_layer_that_is_computed_again() -> None:
    step = ask("tp=8", "llama3-8b", checkpointing="full")
    [part] = parts_of(step)
    kept = 32 * kept_bytes(step) + layer_bytes(step)
    assert activation_bytes(step, part) == pytest.approx(kept + head_bytes(step, part))


def test_a_pipelines_first_rank_holds_most_and_only_the_last_logits() -> None:
    step = ask("pp=4", "llama3-8b", microbatches=8)
    first, middle, last = parts_of(step)
    each = 8 * layer_bytes(step)
    assert activation_bytes(step, first) == 4 * each
    assert activation_bytes(step, middle) == 3 * each
    assert activation_bytes(step, last) == each + head_bytes(step, last)


def test_the_head_is_a_norm_and_logits_with_a_float32_softmax_beside_them() -> None:
    step = ask("dp=1", "llama3-8b")
    [part] = parts_of(step)
    tokens, hidden, vocabulary = 8192, 4096, 128256
    assert head_bytes(step, part) == tokens * hidden * 2 * 2 + tokens * vocabulary * (2 + 4)
    assert head_bytes(replace(step, float32_loss=False), part) == tokens * hidden * 2 * 2 + tokens * vocabulary * 2


@pytest.mark.parametrize(("sharded", "whole_share"), [(True, 1), (False, 1 / 8)])
def test_a_split_vocabulary_needs_all_tokens_before_it(sharded: bool, whole_share: float) -> None:
    step = ask("tp=8", "llama3-8b", sharded_vocabulary=sharded)
    norm = 8192 * 4096 * 2 * (1 / 8 + whole_share)
    assert head_bytes(step, parts_of(step)[0]) == norm + 8192 * 128256 / 8 * 6


def test_kernels_that_are_not_fused_keep_more_of_llama_alone() -> None:
    fused, composed = (ask("tp=4", "llama3-8b", fused_kernels=fused) for fused in (True, False))
    elements = 8192 * 4096 / 4
    norm = elements * (8 - 2)
    assert layer_bytes(composed) - layer_bytes(fused) == 2 * norm + elements * 2
    [part] = parts_of(fused)
    assert head_bytes(composed, part) - head_bytes(fused, part) == norm
    gpt = [layer_bytes(ask("tp=4", "gpt-7.5b", fused_kernels=fused)) for fused in (True, False)]
    assert gpt[0] == gpt[1]


def test_gpipe_holds_every_microbatch_and_all_logits() -> None:
    step = ask("pp=2", "llama3-8b", microbatches=8, schedule="gpipe")
    last = parts_of(step)[-1]
    assert activation_bytes(step, last) == 8 * 16 * layer_bytes(step) + head_bytes(step, last)
    assert head_bytes(step, last) == 8 * (8192 * 4096 * 4 + 8192 * 128256 * 6)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
@settings(deadline=None)
def test_activations_grow_with_the_microbatch_and_shrink_with_cp_and_tp(cp: int, tp: int, microbatch: int) -> None:
    step = ask(f"cp={cp},tp={tp}", "llama3-8b", microbatch=microbatch)
    more = ask(f"cp={cp},tp={tp}", "llama3-8b", microbatch=microbatch + 1)
    fewer = ask(f"cp={2 * cp},tp={tp}", "llama3-8b", microbatch=microbatch)
    [part] = parts_of(step)
    assert activation_bytes(fewer, part) < activation_bytes(step, part) < activation_bytes(more, part)
    assert activation_bytes(fewer, part) == pytest.approx(activation_bytes(step, part) / 2)


def test_a_mixture_holds_its_rows_k_times() -> None:
    dense, mixed = layer_bytes(ask("dp=1", "llama3-8b")), layer_bytes(ask("dp=1", "mixtral-8x7b"))
    tokens = 8192
    more = 4 * 14336 * tokens * 2 + 2 * 2 * tokens * 4096 * 2
    assert mixed - dense == pytest.approx(more)


def test_gathered_are_two_layers_and_a_gradient_or_a_whole_stage() -> None:
    flat, staged = ask("fsdp=8", "llama3-8b"), ask("fsdp=4,pp=2", "llama3-8b", microbatches=4)
    assert gathered_bytes(flat, parts_of(flat)[0], 32e6, 0.0) == 3 * 1e6 * 2
    assert gathered_bytes(staged, parts_of(staged)[0], 32e6, 0.0) == 2 * 32e6 * 2
    assert gathered_bytes(ask("dp=8"), parts_of(flat)[0], 32e6, 0.0) == 0


def test_experts_that_are_not_sharded_are_not_gathered() -> None:
    step = ask("fsdp=8,ep=8", "mixtral-8x7b")
    assert gathered_bytes(step, parts_of(step)[0], 32e6, 1e12) == 3 * 1e6 * 2


def test_the_total_is_the_sum() -> None:
    found = RankMemory(parameters=1, gradients=2, optimizer=3, activations=4, buffers=5)
    assert (found.state, found.total) == (6, 15)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_zero3_is_a_share_of_all_three(n: int) -> None:
    whole, shard = memory("dp=1"), memory(f"fsdp={n}")
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(shard, name) == pytest.approx(getattr(whole, name) / n)


def test_experts_take_most_of_a_mixture_and_their_axis_divides_them() -> None:
    whole, dealt = memory("dp=8", "mixtral-8x7b"), memory("dp=8,ep=8", "mixtral-8x7b")
    assert whole.state / dealt.state > 6


def test_experts_that_are_dealt_out_and_sharded_are_divided_twice() -> None:
    dealt, both = memory("dp=8,ep=8", "mixtral-8x7b"), memory("fsdp=64,ep=8", "mixtral-8x7b")
    assert dealt.state / both.state == pytest.approx(8, rel=0.25) or dealt.state / both.state > 8


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_microbatch_of_two_holds_twice_as_much(checkpointing: str) -> None:
    one, two = (memory("tp=2", microbatch=microbatch, checkpointing=checkpointing).activations for microbatch in (1, 2))
    assert two == pytest.approx(2 * one)


def test_half_the_precision_halves_activations_but_for_statistics_and_the_loss() -> None:
    wide, narrow = (memory("dp=1", element_bytes=e).activations for e in (4, 2))
    statistics = 32 * 4 * 32 * 8192
    loss = 4 * 8192 * 128256
    assert wide - statistics - loss == pytest.approx(2 * (narrow - statistics - loss))
