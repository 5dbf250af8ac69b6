"""FLOPs: those that the model counts, those that a rank executes, and bytes that it moves again."""

import pytest

from parbench.workloads.costs.flops import (
    count_attention_flops,
    count_flops_per_token,
    count_rank_flops,
)
from parbench.workloads.costs.parameter_table import count_layer_matmul_weights
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from tests.support.workloads.planner_asks import make_spec

TOKENS = 8192
HIDDEN = 4096
VOCABULARY = 128256


def test_flops_per_token_match_hand_count() -> None:
    """6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B) with 12 h^2 weights per layer."""
    gpt2 = SHAPES["gpt2"]
    weights = 12 * 12 * 768**2 + 768 * 50257
    assert count_layer_matmul_weights(gpt2) == 12 * 768**2
    assert count_flops_per_token(gpt2) == 6 * weights + 12 * 12 * 768 * 1024


def count_attention(spec: StepSpec) -> float:
    """Return the forward FLOPs of attention in a microbatch on a single rank."""
    return count_attention_flops(spec.shape) * spec.local_tokens * spec.shape.layers


def test_stage_flops_skip_masked_pairs() -> None:
    """A causal kernel executes half of the attention that the model counts.

    Its backward pass is five GEMMs, of which one repeats the scores (Dao 2023).
    """
    spec = make_spec("dp=1", "llama3-8b", microbatch=2)
    counted = count_flops_per_token(spec.shape) * spec.local_tokens
    executed = counted - 6 * count_attention(spec) + 3.5 * count_attention(spec)
    assert count_rank_flops(spec.make_rank_view(0)) == pytest.approx(executed)


@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b"])
def test_stages_share_flops_of_the_model(model: str) -> None:
    total = count_rank_flops(make_spec("dp=1", model).make_rank_view(0))
    spec = make_spec("pp=4", model, microbatches=8)
    first, middle, last = (count_rank_flops(view) for view in spec.distinct_views)
    assert first + 2 * middle + last == pytest.approx(total)
    assert first == middle < last


@pytest.mark.parametrize(("mesh", "share"), [("tp=4", 0.25), ("cp=4", 0.25), ("fsdp=8", 1)])
def test_axes_divide_flops(mesh: str, share: float) -> None:
    single = count_rank_flops(make_spec("dp=1", "llama3-8b").make_rank_view(0))
    flops = count_rank_flops(make_spec(mesh, "llama3-8b").make_rank_view(0))
    assert flops == pytest.approx(share * single)


def test_full_checkpointing_repeats_layers_but_not_the_head() -> None:
    spec = make_spec("dp=1", "llama3-8b")
    view = make_spec("dp=1", "llama3-8b", checkpointing="full").make_rank_view(0)
    total = count_rank_flops(spec.make_rank_view(0))
    head = 2 * HIDDEN * VOCABULARY * TOKENS
    attention = count_attention(spec)
    gemms = (total - 3.5 * attention) / 3 - head
    assert count_rank_flops(view) - total == pytest.approx(gemms + attention)


def test_selective_checkpointing_repeats_every_second_gemm() -> None:
    """It repeats the keys', the output's and the up projection, 2 FLOPs per weight and token."""
    view = make_spec("dp=1", "llama3-8b", checkpointing="selective").make_rank_view(0)
    total = count_rank_flops(make_spec("dp=1", "llama3-8b").make_rank_view(0))
    weights = HIDDEN * (HIDDEN / 4 + HIDDEN + 3.5 * HIDDEN)
    assert count_rank_flops(view) - total == pytest.approx(32 * 2 * weights * TOKENS)
