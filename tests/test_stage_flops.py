"""FLOPs: what PaLM counts, what is executed, and what checkpointing adds."""

import pytest
from planner_asks import NAMES, ask

from workloads.planner.catalog import model_of
from workloads.planner.stage_flops import active_layer_weights, again_bytes, model_flops_per_token, stage_flops
from workloads.planner.stage_parts import parts_of
from workloads.shapes import flops_per_token, num_layer_weights


@pytest.mark.parametrize("name", NAMES)
def test_the_models_count_is_that_of_the_measured_steps(name: str) -> None:
    assert model_flops_per_token(model_of(name)) == flops_per_token(model_of(name).shape)


def test_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    model = model_of("mixtral-8x7b")
    expected = num_layer_weights(model.shape) + model.expert_parameters + 4096 * 8
    assert active_layer_weights(model) == expected
    # 12.9 billion active parameters are quoted, embedding included
    assert 32 * expected + 2 * 32000 * 4096 == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_executed_is_the_models_count_less_the_masked_half_of_attention(name: str) -> None:
    step = ask("dp=1", name, microbatch=2)
    [part] = parts_of(step)
    flops = stage_flops(step, part)
    assert flops.again == 0
    assert flops.total + 3 * flops.attention == pytest.approx(model_flops_per_token(step.model) * step.local_tokens)


def test_backward_is_twice_forward() -> None:
    step = ask("dp=1")
    flops = stage_flops(step, parts_of(step)[0])
    assert flops.backward == 2 * flops.forward


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_axes_inside_a_sequence_divide_the_work(axis: str) -> None:
    one, four = ask("dp=1", "llama3-8b"), ask(f"{axis}=4", "llama3-8b")
    [part] = parts_of(one)
    assert stage_flops(four, part).total == pytest.approx(stage_flops(one, part).total / 4)


def test_stages_together_do_the_work_once() -> None:
    whole, staged = ask("dp=1", "llama3-8b"), ask("pp=4", "llama3-8b", microbatches=8)
    first, middle, last = (stage_flops(staged, part).total for part in parts_of(staged))
    assert first + 2 * middle + last == pytest.approx(stage_flops(whole, parts_of(whole)[0]).total)
    assert first == middle < last


def test_full_checkpointing_runs_the_layers_again_but_not_the_head() -> None:
    step = ask("dp=1", "llama3-8b", checkpointing="full")
    [part] = parts_of(step)
    flops = stage_flops(step, part)
    head = 2 * 4096 * 128256 * 8192
    assert flops.again == pytest.approx(flops.forward - head)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_only_selective_checkpointing_is_paid_in_memory_traffic(checkpointing: str) -> None:
    step = ask("dp=1", "llama3-8b", checkpointing=checkpointing)
    assert again_bytes(step, parts_of(step)[0]) == 0


def test_selective_checkpointing_repeats_no_product_and_moves_what_it_dropped() -> None:
    step = ask("dp=1", "llama3-8b", checkpointing="selective")
    [part] = parts_of(step)
    assert stage_flops(step, part).again == 0
    dropped = 2 + 2 + 2 + 0.5 + 4 * 3.5 - (5 + 0.5 + 2 * 3.5)
    tokens = 8192
    statistics = 4 * 32 * tokens
    assert again_bytes(step, part) == pytest.approx(2 * 32 * (tokens * 4096 * 2 * dropped + statistics))


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_work_goes_with_the_microbatch(microbatch: int) -> None:
    one, more = ask("dp=1", "llama3-8b"), ask("dp=1", "llama3-8b", microbatch=microbatch)
    [part] = parts_of(one)
    assert stage_flops(more, part).total == microbatch * stage_flops(one, part).total


def test_attention_goes_with_the_square_of_the_sequence() -> None:
    short, long = (ask("dp=1", model_of("llama3-8b", sequence)) for sequence in (4096, 16384))
    [part] = parts_of(short)
    assert stage_flops(long, part).attention == 16 * stage_flops(short, part).attention


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_data_axes_divide_nothing_of_a_microbatch(axis: str) -> None:
    one, many = ask("dp=1", "llama3-8b"), ask(f"{axis}=8", "llama3-8b")
    [part] = parts_of(one)
    assert stage_flops(many, part) == stage_flops(one, part)


def test_a_rank_of_a_mixture_computes_as_much_wherever_experts_are() -> None:
    here, there = ask("fsdp=8", "mixtral-8x7b"), ask("fsdp=8,ep=8", "mixtral-8x7b")
    [part] = parts_of(here)
    assert stage_flops(here, part) == stage_flops(there, part)
