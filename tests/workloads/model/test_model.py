"""The model is a causal decoder, and what it starts from is a function of the seed alone."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.model.shapes import SHAPES as NAMED
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.transformer import (
    Attention,
    Ffn,
    Transformer,
    build,
    draw_tokens,
    loss_of,
    rotate,
)

CPU = torch.device("cpu")
SHAPE = Shape(
    recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, sequence=16, vocabulary=64
)
LLAMA = replace(SHAPE, recipe="llama", kv_heads=2, ffn=80)
RECIPES = [SHAPE, LLAMA]
SHAPES = [
    *RECIPES,
    replace(SHAPE, layers=1, hidden=8, heads=1, kv_heads=1, ffn=7, sequence=3, vocabulary=2),
    replace(SHAPE, layers=3, hidden=24, heads=8, kv_heads=4, ffn=50, sequence=5, vocabulary=17),
    replace(LLAMA, layers=1, hidden=24, heads=6, kv_heads=1, ffn=10, sequence=1, vocabulary=5),
]


@pytest.fixture
def rng_state() -> Iterator[Tensor]:
    state = torch.get_rng_state()
    yield state
    torch.set_rng_state(state)


def weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    return {
        name: parameter.detach() for name, parameter in build(shape, seed, CPU).named_parameters()
    }


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some
    )


def test_weights_and_tokens_depend_on_the_seed_alone_and_leave_torchs_own_random_state(
    rng_state: Tensor,
) -> None:
    first, tokens = weights(SHAPE, seed=7), draw_tokens(SHAPE, 4, 2, 3)
    assert torch.equal(torch.get_rng_state(), rng_state)
    torch.manual_seed(99)
    assert alike(weights(SHAPE, seed=7), first)
    assert not alike(weights(SHAPE, seed=8), first)
    assert torch.equal(draw_tokens(SHAPE, 4, 2, 3), tokens)
    drawn = {
        tuple(draw_tokens(SHAPE, 4, seed, step).flatten().tolist())
        for seed in range(4)
        for step in range(4)
    }
    assert len(drawn) == 16


def test_matrices_are_normal_and_none_like_another_norms_one_and_biases_zero() -> None:
    starts = []
    for name, weight in weights(replace(SHAPE, hidden=128), seed=7).items():
        if weight.dim() > 1:
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), name
            assert abs(float(weight.mean())) < 0.02 * 5 / math.sqrt(weight.numel()), name
            starts.append(tuple(weight.flatten()[:8].tolist()))
        else:
            assert weight.unique().tolist() == [1.0 if "norm.weight" in name else 0.0], name  # type: ignore[no-untyped-call]
    assert len({*starts}) == len(starts)


def test_parameters_are_as_many_as_the_closed_form_says_and_logits_one_per_token_and_word() -> None:
    for shape in [*SHAPES, *NAMED.values()]:
        with torch.device("meta"):
            model = Transformer(shape)
        assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(
            shape
        ), shape
    for shape in SHAPES:
        tokens = draw_tokens(shape, 3, seed=0, step=0)[:, :-1]
        assert build(shape, 0, CPU)(tokens).shape == (3, shape.sequence, shape.vocabulary), shape


def of_16(recipe: str, heads: int, kv_heads: int) -> Shape:
    return replace(
        SHAPE if recipe == "gpt" else LLAMA, hidden=16, heads=heads, kv_heads=kv_heads, ffn=40
    )


@pytest.mark.parametrize("shape", RECIPES, ids=lambda shape: shape.recipe)
def test_a_token_changes_its_own_and_all_later_logits_and_no_earlier_ones(shape: Shape) -> None:
    model, tokens = build(shape, 7, CPU), draw_tokens(SHAPE, 2, seed=7, step=0)[:, :-1]
    for position in (0, 1, 9, 15):
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % SHAPE.vocabulary
        changed = (model(tokens) != model(other)).any(dim=2)
        assert changed.tolist() == [[at >= position for at in range(SHAPE.sequence)]] * 2, position
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_attention_is_the_papers() -> None:
    """softmax(q k^T / sqrt(d)) v over what is not later, head by head (Vaswani et al., 2017), grouped (2305.13245)."""
    for recipe, heads, kv_heads in [
        (recipe, *of) for recipe in ("gpt", "llama") for of in ((1, 1), (2, 2), (8, 2), (4, 1))
    ]:
        attention, x = (
            Attention(of_16(recipe, heads, kv_heads)).double(),
            torch.randn(2, 6, 16, dtype=torch.float64),
        )
        attention.rotate = None
        q, k, v = attention.q(x), attention.k(x), attention.v(x)
        d = 16 // heads
        later = torch.ones(6, 6).triu(1).bool()
        parts = []
        for head in range(heads):
            of_head, of_group = (
                slice(at * d, (at + 1) * d) for at in (head, head * kv_heads // heads)
            )
            scores = q[..., of_head] @ k[..., of_group].transpose(1, 2) / math.sqrt(d)
            parts.append(scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v[..., of_group])
        torch.testing.assert_close(attention(x), attention.out(torch.cat(parts, dim=-1)))


def test_rotation_multiplies_complex_numbers_of_length_one_by_their_places() -> None:
    """The pair (i, i + d/2) as a complex number, times e^(i position base^(-2i/d)) (arXiv 2104.09864)."""
    x = torch.randn(2, 3, 7, 8)
    angles = torch.arange(7)[:, None] * torch.tensor([500_000.0 ** (-2 * i / 8) for i in range(4)])
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(7, 4), angles)
    torch.testing.assert_close(rotate(x), torch.cat((turned.real, turned.imag), dim=-1))
    picked = torch.tensor([0, 1, 4, 5])
    assert torch.equal(rotate(x[:, :, picked], picked), rotate(x)[:, :, picked])
    narrow = torch.randn(1, 1, 300, 8).bfloat16()
    assert torch.equal(rotate(narrow), rotate(narrow.float()).bfloat16()), "it computes in float32"


def test_ffns_are_gelu_between_two_matrices_and_gated_silu() -> None:
    """W2 (silu(W1 x) * W3 x) is llama's (arXiv 2002.05202)."""
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    gpt, llama = (Ffn(of_16(recipe, 2, 2)).double() for recipe in ("gpt", "llama"))
    wide = F.linear(x, gpt.up.weight, gpt.up.bias)
    gelu = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
    torch.testing.assert_close(gpt(x), F.linear(gelu, gpt.down.weight, gpt.down.bias))
    assert llama.gate is not None
    gate = x @ llama.gate.weight.T
    torch.testing.assert_close(
        llama(x), (gate * gate.sigmoid() * (x @ llama.up.weight.T)) @ llama.down.weight.T
    )


def test_the_loss_is_the_mean_over_tokens_of_what_comes_next_and_at_first_that_of_guessing() -> (
    None
):
    """A model that knows: all its weight is on the successor, so that only a shifted target is right."""

    class Successor(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return 100.0 * F.one_hot((tokens + 1) % 10, 10)

    assert float(loss_of(Successor(), torch.arange(9).repeat(3, 1))) == pytest.approx(0, abs=1e-6)
    assert float(loss_of(Successor(), torch.tensor([[0, 1, 2, 2]]))) == pytest.approx(100 / 3)
    model, tokens = build(SHAPE, 7, CPU), draw_tokens(SHAPE, 32, seed=7, step=0)
    parts = torch.stack([loss_of(model, part) for part in tokens.chunk(4)])
    torch.testing.assert_close(parts.mean(), loss_of(model, tokens))
    assert parts.mean().item() == pytest.approx(math.log(SHAPE.vocabulary), rel=0.01)


@pytest.mark.parametrize("shape", RECIPES, ids=lambda shape: shape.recipe)
def test_every_weight_has_a_gradient_and_training_on_one_batch_learns_it(shape: Shape) -> None:
    model, tokens = build(shape, 7, CPU), draw_tokens(shape, 8, seed=7, step=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(31):
        tokens_now = tokens if number == 0 else tokens[:2]
        optimizer.zero_grad()
        loss = loss_of(model, tokens_now)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for name, parameter in model.named_parameters() if number == 0 else ():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) > 1e-6, name
        optimizer.step()
    assert losses[-1] < losses[0] / 4
