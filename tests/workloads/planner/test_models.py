"""Named models have their published sizes, and their particular layers are counted."""

from dataclasses import replace

import pytest

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.flops import (
    count_flops_per_token,
    count_model_matmul_weights,
    count_rank_flops,
)
from parbench.workloads.costs.memory import format_layer_bytes
from parbench.workloads.costs.parameter_table import (
    count_active_parameters,
    count_elements,
    count_parameters,
)
from parbench.workloads.planner.models import MODELS, load_model
from tests.support.workloads.planner_asks import make_spec


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("llama3-8b", 8.03, 8.03),  # Index of its checkpoint, also the next one.
        ("llama3-70b", 70.55, 70.55),
        ("llama3-405b", 405.85, 405.85),  # arXiv 2407.21783, section 3.2: 405 B
        ("gpt-7.5b", 7.7, 7.7),  # arXiv 2104.04473, table 1 without positions
        ("gpt-175b", 175.8, 175.8),
        ("gpt-530b", 531.0, 531.0),
        ("mixtral-8x7b", 46.7, 12.9),  # arXiv 2401.04088, section 2: 47 B, 13 B
        ("qwen3-32b", 32.8, 32.8),  # Model card
        ("qwen3-235b-a22b", 235, 22.2),  # Model card: 235 B, 22 B activated
        ("deepseek-v3", 671, 37.55),  # README_WEIGHTS.md of its checkpoint
        ("gpt-1t", 1008, 1008),  # arXiv 2104.04473, table 1
        ("olmo-7b", 6.9, 6.9),  # arXiv 2402.00838, table 1
        ("yi-34b", 34.4, 34.4),
        ("deepseek-67b", 67.4, 67.4),
        ("gemma2-27b", 27.23, 27.23),  # arXiv 2408.00118, table 2
    ],
)
def test_model_has_published_parameters(
    name: str, billions: float, active_billions: float
) -> None:
    model = MODELS[name]
    active = count_active_parameters(model.shape, model.moe)
    assert model.name == name
    assert count_parameters(model.shape, model.moe) / 1e9 == pytest.approx(billions, rel=0.005)
    assert active / 1e9 == pytest.approx(active_billions, rel=0.005)


def test_deepseek_flops_match_hand_count() -> None:
    model = load_model("deepseek-v3")
    queries = 7168 * 1536 + 1536 * 128 * 192
    keys_and_values = 7168 * 576 + 512 * 128 * 256
    output = 128 * 128 * 7168
    dense = 3 * 7168 * 18432
    experts = 9 * 3 * 7168 * 2048 + 7168 * 256
    layers = 61 * (queries + keys_and_values + output) + 3 * dense + 58 * experts
    weights = layers + 7168 * 129280
    scores = 61 * 128 * (192 + 128) * 4096
    assert count_model_matmul_weights(model.shape, model.moe) == weights
    assert count_flops_per_token(model.shape, model.moe) == 6 * (weights + scores)


def test_deepseek_stages_cover_the_model() -> None:
    """The first three layers have no experts. Stages of 2 and 19 layers divide them."""
    spec = make_spec(
        "pp=4,ep=8,dp=8", "deepseek-v3", layers_per_stage="2+19+20+20", microbatches=4
    )
    stages = [spec.make_stage_view(rank) for rank in range(4)]
    model = make_spec("dp=8,ep=8", "deepseek-v3").make_rank_view(0)
    assert [stage.dense_layers for stage in stages] == [2, 1, 0, 0]
    assert sum(count_elements(stage) for stage in stages) == count_elements(model)
    flops = sum(count_rank_flops(stage) for stage in stages)
    assert flops == pytest.approx(count_rank_flops(model))


def test_latent_attention_activations_match_hand_count() -> None:
    """Bytes of one token in a dense layer on one of four ranks that split heads and tokens."""
    spec = replace(make_spec("tp=4", "deepseek-v3"), moe=None)
    heads = 128 * (2 * 192 + 2 * 128) * 2 / 4
    log_sum_exps = 4 * 128 / 4
    norms = 2 * (7168 * 2 + 4) / 4
    feed_forward = 7168 * 2 / 4 + 4 * 18432 * 2 / 4
    latents = 7168 * 2 / 4 + 2 * (1536 + 512) * 2 / 4
    expected = norms + latents + heads + log_sum_exps + feed_forward
    equation = Equation(
        text=format_layer_bytes(spec, "none"), symbols=spec.make_rank_view(0).symbols
    )
    assert equation.value / 4096 == expected
