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
    build,
    draw_tokens,
    loss_of,
    rotate,
)

CPU = torch.device("cpu")
GPT = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, sequence=16, vocabulary=64
)
LLAMA = replace(GPT, recipe="llama", kv_heads=2, ffn=80)
both_recipes = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])


def draw_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    model = build(shape, seed, CPU)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_weights_and_tokens_depend_only_on_seed() -> None:
    state = torch.get_rng_state()
    weights = draw_weights(GPT, seed=7)
    tokens = draw_tokens(GPT, 4, seed=2, step=3)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        torch.testing.assert_close(draw_weights(GPT, seed=7), weights, rtol=0, atol=0)
        assert torch.equal(draw_tokens(GPT, 4, seed=2, step=3), tokens)
    assert not torch.equal(draw_weights(GPT, seed=8)["head.weight"], weights["head.weight"])
    assert not torch.equal(draw_tokens(GPT, 4, seed=2, step=4), tokens)
    assert not torch.equal(draw_tokens(GPT, 4, seed=3, step=3), tokens)


def test_initial_weights() -> None:
    first_values = set()
    weights = draw_weights(replace(GPT, hidden=128), seed=7)
    for name, weight in weights.items():
        if weight.dim() > 1:
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), name
            first_values.add(float(weight.flatten()[0]))
        else:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            assert bool((weight == expected).all()), name
    assert len(first_values) == sum(weight.dim() > 1 for weight in weights.values())


@both_recipes
def test_token_changes_only_later_logits(shape: Shape) -> None:
    model = build(shape, 7, CPU)
    tokens = draw_tokens(shape, 2, seed=7, step=0)[:, :-1]
    for position in (0, 9, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % shape.vocabulary
        differs = (model(tokens) != model(changed)).any(dim=2)
        expected = torch.arange(16) >= position
        assert torch.equal(differs, expected.expand(2, -1)), position


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (8, 2), (4, 1)])
@both_recipes
def test_attention_matches_formula(shape: Shape, heads: int, kv_heads: int) -> None:
    """softmax(q k^T / sqrt(d)) v of earlier tokens (Vaswani et al., 2017), grouped (2305.13245)."""
    d = 16 // heads
    attention = Attention(replace(shape, hidden=16, heads=heads, kv_heads=kv_heads)).double()
    attention.rotate = None
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    q, k, v = attention.q(x), attention.k(x), attention.v(x)
    later = torch.ones(6, 6).triu(1).bool()
    outputs = []
    for head in range(heads):
        group = head * kv_heads // heads
        key_columns = slice(group * d, (group + 1) * d)
        queries = q[..., head * d : (head + 1) * d]
        scores = queries @ k[..., key_columns].transpose(1, 2) / math.sqrt(d)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        outputs.append(weights @ v[..., key_columns])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(outputs, dim=-1)))


def test_rotation_multiplies_complex_numbers() -> None:
    """The pair (i, i + d/2) times e^(i position base^(-2i/d)) (arXiv 2104.09864)."""
    x = torch.randn(2, 3, 7, 8)
    frequencies = torch.tensor([500_000.0 ** (-2 * i / 8) for i in range(4)])
    angles = torch.arange(7)[:, None] * frequencies
    rotated = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(7, 4), angles)
    torch.testing.assert_close(rotate(x), torch.cat((rotated.real, rotated.imag), dim=-1))
    positions = torch.tensor([0, 1, 4, 5])
    assert torch.equal(rotate(x[:, :, positions], positions), rotate(x)[:, :, positions])


def test_gpt_ffn_is_gelu() -> None:
    ffn = Ffn(GPT).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    hidden = F.linear(x, ffn.up.weight, ffn.up.bias)
    activated = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(ffn(x), F.linear(activated, ffn.down.weight, ffn.down.bias))


def test_llama_ffn_is_gated_silu() -> None:
    """W2 (silu(W1 x) * W3 x) (arXiv 2002.05202)."""
    ffn = Ffn(LLAMA).double()
    assert ffn.gate is not None
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    gate = x @ ffn.gate.weight.T
    hidden = gate * gate.sigmoid() * (x @ ffn.up.weight.T)
    torch.testing.assert_close(ffn(x), hidden @ ffn.down.weight.T)


class Successor(nn.Module):
    """A model that predicts the next number."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 100.0 * F.one_hot((tokens + 1) % 10, 10)


def test_loss_is_mean_over_next_tokens() -> None:
    assert float(loss_of(Successor(), torch.arange(9).repeat(3, 1))) == pytest.approx(0, abs=1e-6)
    assert float(loss_of(Successor(), torch.tensor([[0, 1, 2, 2]]))) == pytest.approx(100 / 3)


def test_initial_loss_is_that_of_guessing() -> None:
    loss = loss_of(build(GPT, 7, CPU), draw_tokens(GPT, 32, seed=7, step=0))
    assert loss.item() == pytest.approx(math.log(GPT.vocabulary), rel=0.01)


@both_recipes
def test_training_learns_a_batch(shape: Shape) -> None:
    model = build(shape, 7, CPU)
    tokens = draw_tokens(shape, 2, seed=7, step=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
