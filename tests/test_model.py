"""The model is a causal decoder, and what it starts from is a function of the seed alone."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model import Attention, Layer, Shape, Transformer, build, draw_tokens, loss_of

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, hidden=32, heads=4, sequence=16, vocabulary=64)
SHAPES = [
    SHAPE,
    Shape(layers=1, hidden=8, heads=1, sequence=3, vocabulary=2),
    Shape(layers=3, hidden=24, heads=8, sequence=5, vocabulary=17),
]


@pytest.fixture
def rng_state() -> Iterator[Tensor]:
    """torch's own random state, given back at the end."""
    state = torch.get_rng_state()
    yield state
    torch.set_rng_state(state)


def weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in build(shape, seed, CPU).named_parameters()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def test_weights_depend_on_the_seed_alone(rng_state: Tensor) -> None:
    torch.manual_seed(1)
    first = weights(SHAPE, seed=7)
    torch.manual_seed(2)
    torch.randn(13)
    assert alike(weights(SHAPE, seed=7), first)
    assert not alike(weights(SHAPE, seed=8), first)


def test_building_and_drawing_leave_torchs_own_random_state_alone(rng_state: Tensor) -> None:
    build(SHAPE, 7, CPU)
    draw_tokens(SHAPE, 4, 7, 1)
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_matrices_are_normal_norms_one_and_biases_zero() -> None:
    for name, weight in weights(replace(SHAPE, hidden=128), seed=7).items():
        if weight.dim() > 1:
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), name
            assert abs(float(weight.mean())) < 0.02 * 5 / math.sqrt(weight.numel()), name
        else:
            assert weight.unique().tolist() == [1.0 if "norm.weight" in name else 0.0], name  # type: ignore[no-untyped-call]


def test_no_two_matrices_are_alike() -> None:
    first_values = [weight.flatten()[:8].tolist() for weight in weights(SHAPE, seed=7).values() if weight.dim() > 1]
    assert len({*map(tuple, first_values)}) == len(first_values)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_as_many_as_the_closed_form_says(shape: Shape) -> None:
    """Per layer 4 h^2 + 4 h of attention, 8 h^2 + 5 h of ffn, 4 h of norms; embeddings, the last norm, the head."""
    h = shape.hidden
    per_layer = 12 * h * h + 13 * h
    expected = shape.layers * per_layer + (shape.vocabulary + shape.sequence) * h + 2 * h + h * shape.vocabulary
    assert sum(weight.numel() for weight in weights(shape, seed=0).values()) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_one_per_token_and_word(shape: Shape) -> None:
    tokens = draw_tokens(shape, 3, seed=0, step=0)[:, :-1]
    assert build(shape, 0, CPU)(tokens).shape == (3, shape.sequence, shape.vocabulary)


@pytest.mark.parametrize("position", [0, 1, 9, 15])
def test_a_token_changes_no_earlier_logits_and_its_own_and_all_later_ones(position: int) -> None:
    model = build(SHAPE, 7, CPU)
    tokens = draw_tokens(SHAPE, 2, seed=7, step=0)[:, :-1]
    other = tokens.clone()
    other[:, position] = (other[:, position] + 1) % SHAPE.vocabulary
    changed = (model(tokens) != model(other)).any(dim=2)
    assert changed.tolist() == [[at >= position for at in range(SHAPE.sequence)]] * 2


def test_positions_count() -> None:
    """Among equal tokens attention cannot tell positions apart: only their embedding can."""
    logits = build(SHAPE, 7, CPU)(torch.full((1, SHAPE.sequence), 5))[0]
    assert not torch.allclose(logits[1:], logits[:-1])


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one() -> None:
    model = build(SHAPE, 7, CPU)
    tokens = draw_tokens(SHAPE, 2, seed=7, step=0)[:, :-1]
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_is_the_papers(heads: int) -> None:
    """softmax(q k^T / sqrt(d)) v over what is not later, head by head (Vaswani et al., 2017)."""
    torch.manual_seed(heads)
    attention, x = Attention(16, heads).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    q, k, v = attention.qkv(x).split(16, dim=-1)
    d = 16 // heads
    later = torch.ones(6, 6).triu(1).bool()
    parts = []
    for head in range(heads):
        of_head = slice(head * d, (head + 1) * d)
        scores = q[..., of_head] @ k[..., of_head].transpose(1, 2) / math.sqrt(d)
        parts.append(scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v[..., of_head])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(parts, dim=-1)))


def test_a_layer_is_two_blocks_each_beside_a_way_past_it() -> None:
    """x + attention(norm(x)), then x + W2 gelu(W1 norm(x)), written out."""
    torch.manual_seed(0)
    layer, x = Layer(16, 2).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    inner, _, outer = layer.ffn
    assert isinstance(inner, nn.Linear)
    assert isinstance(outer, nn.Linear)
    past = x + layer.attention(F.layer_norm(x, (16,)))
    wide = F.linear(F.layer_norm(past, (16,)), inner.weight, inner.bias)
    gelu = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
    torch.testing.assert_close(layer(x), past + F.linear(gelu, outer.weight, outer.bias))


def test_the_loss_at_first_is_that_of_guessing() -> None:
    shape = replace(SHAPE, vocabulary=512)
    loss = loss_of(build(shape, 7, CPU), draw_tokens(shape, 16, seed=7, step=0))
    assert loss.item() == pytest.approx(math.log(512), rel=0.01)


def test_the_loss_is_the_mean_over_tokens_of_what_comes_next() -> None:
    """A model that knows: all its weight is on the successor, so that only a shifted target is right."""

    class Successor(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return 100.0 * F.one_hot((tokens + 1) % 10, 10)

    assert float(loss_of(Successor(), torch.arange(9).repeat(3, 1))) == pytest.approx(0, abs=1e-6)
    assert float(loss_of(Successor(), torch.tensor([[0, 1, 2, 2]]))) == pytest.approx(100 / 3)


def test_the_loss_of_a_batch_is_the_mean_of_its_parts() -> None:
    """Data parallelism rests on it: equal parts' mean gradients average to the whole's."""
    model, tokens = build(SHAPE, 7, CPU), draw_tokens(SHAPE, 8, seed=7, step=0)
    parts = torch.stack([loss_of(model, part) for part in tokens.chunk(4)])
    torch.testing.assert_close(parts.mean(), loss_of(model, tokens))


def test_training_on_one_batch_learns_it() -> None:
    model, tokens = build(SHAPE, 7, CPU), draw_tokens(SHAPE, 2, seed=7, step=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss_of(model, tokens).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss_of(model, tokens).item() < first / 4


def test_every_weight_has_a_gradient() -> None:
    model = build(SHAPE, 7, CPU)
    loss_of(model, draw_tokens(SHAPE, 8, seed=7, step=0)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_tokens_are_words_of_the_vocabulary_and_use_all_of_it() -> None:
    tokens = draw_tokens(SHAPE, 200, seed=0, step=0)
    assert tokens.shape == (200, SHAPE.sequence + 1)
    assert {*tokens.flatten().tolist()} == {*range(SHAPE.vocabulary)}


def test_tokens_differ_by_step_and_seed_and_by_nothing_else(rng_state: Tensor) -> None:
    drawn = {(seed, step): draw_tokens(SHAPE, 4, seed, step) for seed in range(4) for step in range(4)}
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == 16
    torch.manual_seed(99)
    assert torch.equal(draw_tokens(SHAPE, 4, 2, 3), drawn[2, 3])


@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_a_larger_batch_begins_with_the_smaller_ones_so_any_layout_shares_it(sequences: int) -> None:
    assert torch.equal(draw_tokens(SHAPE, 16, 1, 2)[:sequences], draw_tokens(SHAPE, sequences, 1, 2))


def test_layers_are_apart_from_one_another() -> None:
    """Each of them counts: leaving any one out changes the result."""
    model = build(replace(SHAPE, layers=3), 7, CPU)
    tokens = draw_tokens(SHAPE, 1, seed=7, step=0)[:, :-1]
    whole = model(tokens)
    for left_out in range(3):
        shorter = Transformer(replace(SHAPE, layers=2))
        shorter.load_state_dict(model.state_dict(), strict=False)
        kept = [layer for number, layer in enumerate(model.layers) if number != left_out]
        shorter.layers = nn.ModuleList(kept)
        assert not torch.equal(shorter(tokens), whole)
