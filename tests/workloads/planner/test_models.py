"""Named models are as large as published, and what is particular to them is counted, sent, kept and computed."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.flops import flops_per_token, product_weights, stage_flops
from parbench.workloads.costs.memory import layer_equation, layers_equation
from parbench.workloads.costs.parameter_table import (
    elements_of,
    num_active_parameters,
    num_parameters,
    parts_of,
)
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.models import MODELS, model_of
from tests.support.planner_asks import H100, make_spec

# billions as published, to so many digits; of all parameters, and of those that a token meets
PUBLISHED = {
    "llama3-8b": (8.03, 8.03),  # the safetensors index of its checkpoint, as the next
    "llama3-70b": (70.55, 70.55),
    "llama3-405b": (405.85, 405.85),  # arXiv 2407.21783, section 3.2: 405 B
    "llama3.1-405b": (405.85, 405.85),
    "gpt-7.5b": (7.7, 7.7),  # arXiv 2104.04473, table 1 without positions
    "gpt-175b": (175.8, 175.8),
    "gpt-530b": (531.0, 531.0),
    "mixtral-8x7b": (46.7, 12.9),  # arXiv 2401.04088, section 2: 47 B, 13 B
    "qwen3-32b": (32.8, 32.8),  # its model card: 32.8 B
    "qwen3-235b-a22b": (235, 22.2),  # its model card: 235 B, 22 B activated
    "deepseek-v3": (
        671,
        37.55,
    ),  # README_WEIGHTS.md of its checkpoint: 671 B; activated beside its embedding 36.6 B
    "gpt-oss-120b": (
        116.83,
        5.71,
    ),  # arXiv 2508.10925, table 1: 116.83 B; activated beside its embedding 5.13 B
}
EXACT = {  # counted by hand from the sizes of config.json
    "llama3-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
}


def test_a_model_has_as_many_parameters_as_it_is_published_with() -> None:
    assert MODELS.keys() - PUBLISHED.keys() == {
        "tiny",
        "tiny-llama",
        "small",
        "small-llama",
        "gpt2",
    }
    assert all(name == model.name for name, model in MODELS.items())
    for name, billions in PUBLISHED.items():
        shape, moe = MODELS[name].shape, MODELS[name].moe
        found = num_parameters(shape, moe) / 1e9, num_active_parameters(shape, moe) / 1e9
        assert found == pytest.approx(billions, rel=0.005), name
        assert num_parameters(shape, moe) == EXACT.get(name, num_parameters(shape, moe)), name
    for name, beside in (
        ("gpt-oss-120b", 5.13),
        ("deepseek-v3", 36.6),
    ):  # without what is looked up
        shape = MODELS[name].shape
        met = num_active_parameters(shape, MODELS[name].moe) - shape.vocabulary * shape.hidden
        assert met / 1e9 == pytest.approx(beside, rel=0.002), name
    assert model_of("gpt-175b", 4096).shape.sequence == 4096


def test_what_deepseek_compresses_is_counted_and_its_first_layers_have_no_experts() -> None:
    spec = model_of("deepseek-v3")
    parts = {part.name: part for part in parts_of(spec.on({"tp": 4}).at(0))}
    assert parts["layers.0.attention.q_a.weight"].size == (1536, 7168)
    assert parts["layers.0.attention.q_b.weight"].size == (128 * 192 // 4, 1536)
    assert parts["layers.0.attention.kv_a.weight"].size == (576, 7168)
    assert parts["layers.60.attention.kv_b.weight"].size == (128 * 256 // 4, 512)
    assert parts["layers.60.attention.out.weight"].size == (7168, 128 * 128 // 4)
    assert [f"layers.{i}.ffn.up.weight" in parts for i in (0, 2, 3, 60)] == [
        True,
        True,
        False,
        False,
    ]
    assert parts["layers.3.ffn.shared.up.weight"].size == (2048, 7168)
    # N by hand: 61 of attention, 3 of 3 h f, 58 of nine experts' 3 h r and the router, and the head
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 9 * 3 * 7168 * 2048 + 7168 * 256
    by_hand = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * experts + 7168 * 129280
    assert product_weights(spec.shape, spec.moe) == by_hand
    assert flops_per_token(spec.shape, spec.moe) == 6 * by_hand + 6 * 61 * 128 * (192 + 128) * 4096
    flops = stage_flops(spec.on({}).at(0))
    assert flops.total + 3 * flops.attention == pytest.approx(
        4096 * flops_per_token(spec.shape, spec.moe)
    )


def test_stages_have_the_layers_without_experts_that_are_theirs() -> None:
    spec = replace(make_spec("pp=4,ep=8,dp=8", "deepseek-v3", microbatches=8), split="2+19+20+20")
    assert [spec.at_stage(rank).dense_layers for rank in range(4)] == [2, 1, 0, 0]
    assert [at.pp_rank for at in spec.positions] == [0, 1, 2, 3]
    whole = make_spec("dp=8,ep=8", "deepseek-v3")
    held = sum(elements_of(spec.at_stage(rank)) for rank in range(4))
    assert held == elements_of(whole.at(0))
    assert held == sum(part.numel for part in parts_of(whole.at(0)))
    both = [
        layer_equation(at, "none").value for at in (whole.at(0), replace(whole, moe=None).at(0))
    ]
    assert layers_equation(whole.at(0), "none").value == pytest.approx(58 * both[0] + 3 * both[1])
    done = [stage_flops(spec.at_stage(rank)).total for rank in range(4)]
    assert sum(done) == pytest.approx(stage_flops(whole.at(0)).total)
    assert dry_run(spec, H100).seconds > 0


def test_latent_attention_keeps_what_it_compresses_and_every_heads_keys() -> None:
    """Bytes of one token in a dense layer of DeepSeek-V3, on one of four ranks that split heads and tokens."""
    spec = replace(make_spec("tp=4", "deepseek-v3"), moe=None)
    heads = 128 * (2 * 192 + 2 * 128) * 2 / 4 + 4 * 128 / 4  # q, k; v and the result; log-sum-exps
    norms, ffn = 2 * (7168 * 2 + 4) / 4, 7168 * 2 + 4 * 18432 * 2 / 4
    kept = norms + 7168 * 2 + 2 * (1536 + 512) * 2 + heads + ffn
    assert layer_equation(spec.at(0), "none").value / 4096 == kept
    products = 7168 * 2 / 4 + (1536 + 512) * 2 + heads + 2 * 18432 * 2 / 4 + 2 * 7168 * 2
    assert layer_equation(spec.at(0), "selective").value / 4096 == products


def test_a_tied_head_is_counted_once_and_copied_to_the_last_stage() -> None:
    spec = make_spec("pp=2", "llama3-8b", microbatches=4)
    tied = replace(spec, shape=replace(spec.shape, tied=True))
    table = spec.shape.vocabulary * spec.shape.hidden
    assert num_parameters(spec.shape) - num_parameters(tied.shape) == table
    assert [
        elements_of(tied.at_stage(rank)) - elements_of(spec.at_stage(rank)) for rank in (0, 1)
    ] == [0, 0]
    alone = tied.on({}).at(0)
    assert elements_of(alone) == num_parameters(tied.shape)
    assert stage_flops(alone).total == stage_flops(spec.on({}).at(0)).total
