"""The model is a causal decoder whose initial weights depend only on the seed."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import (
    Attention,
    Ffn,
    compute_loss,
    draw_tokens,
    rotate,
)
from tests.support.workloads.cp_ranks import compute_attention
from tests.support.workloads.training_steps import build_model

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, sequence=16, vocabulary=64
)
LLAMA = replace(GPT, recipe="llama", kv_heads=2, ffn=80)
both_recipes = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])


def test_weights_and_tokens_depend_only_on_seed() -> None:
    state = torch.get_rng_state()
    models = [build_model(GPT, seed, CPU) for seed in (7, 7, 8)]
    first, same, other = (model.get_parameter("head.weight") for model in models)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    tokens = draw_tokens(GPT, 4, seed=2, step=3)
    assert torch.equal(draw_tokens(GPT, 4, seed=2, step=3), tokens)
    assert not torch.equal(draw_tokens(GPT, 4, seed=2, step=4), tokens)


def test_initial_weights() -> None:
    first_values = []
    model = build_model(replace(GPT, hidden=128), 7, CPU)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if weight.dim() > 1:
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), name
            first_values.append(float(weight.flatten()[0]))
        else:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            assert bool((weight == expected).all()), name
    assert len(set(first_values)) == len(first_values)


@both_recipes
def test_token_changes_only_later_logits(shape: Shape) -> None:
    model = build_model(shape, 7, CPU)
    tokens = draw_tokens(shape, 2, seed=7, step=0)[:, :-1]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % shape.vocabulary
    differs = (model(tokens) != model(changed)).any(dim=2)
    expected = torch.arange(16) >= 9
    assert torch.equal(differs, expected.expand(2, -1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (8, 2)])
@both_recipes
def test_attention_matches_formula(shape: Shape, heads: int, kv_heads: int) -> None:
    """Attention (Vaswani et al., 2017) with grouped key heads (arXiv 2305.13245)."""
    attention = Attention(replace(shape, hidden=16, heads=heads, kv_heads=kv_heads)).double()
    attention.rotate = None
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    q = attention.q(x).unflatten(2, (heads, -1)).transpose(1, 2)
    k = attention.k(x).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    v = attention.v(x).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = compute_attention(q, k, v, causal, torch.zeros_like(q)).output
    expected = attention.out(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


def test_rotation_multiplies_complex_numbers() -> None:
    """The pair (i, i + d/2) times e^(i position base^(-2i/d)) (arXiv 2104.09864)."""
    x = torch.randn(2, 3, 7, 8)
    frequencies = torch.tensor([500_000.0 ** (-2 * i / 8) for i in range(4)])
    angles = torch.arange(7)[:, None] * frequencies
    real, imaginary = x.chunk(2, dim=-1)
    rotated = torch.complex(real, imaginary) * torch.polar(torch.ones(7, 4), angles)
    torch.testing.assert_close(rotate(x), torch.cat((rotated.real, rotated.imag), dim=-1))
    positions = torch.tensor([0, 1, 4, 5])
    assert torch.equal(rotate(x[:, :, positions], positions), rotate(x)[:, :, positions])


@both_recipes
def test_ffn_matches_formula(shape: Shape) -> None:
    """GELU, or W2 (silu(W1 x) * W3 x) (arXiv 2002.05202)."""
    ffn = Ffn(shape).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    hidden = ffn.up(x)
    if ffn.gate is None:
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    else:
        hidden = ffn.gate(x) * ffn.gate(x).sigmoid() * hidden
    torch.testing.assert_close(ffn(x), ffn.down(hidden))


class Successor(nn.Module):
    """A model that predicts the next number."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 100.0 * F.one_hot((tokens + 1) % 10, 10)


def test_loss_is_mean_over_next_tokens() -> None:
    right = torch.arange(9).repeat(3, 1)
    last_wrong = torch.tensor([[0, 1, 2, 2]])
    assert float(compute_loss(Successor(), right)) == pytest.approx(0, abs=1e-6)
    assert float(compute_loss(Successor(), last_wrong)) == pytest.approx(100 / 3)
