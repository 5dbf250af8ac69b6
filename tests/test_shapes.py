"""A shape is a name and what one changes of it; its closed forms are the papers'."""

import pytest

from bench.errors import UserError
from bench.params import Value, resolve
from workloads.shapes import MODEL, SHAPES, Shape, flops_per_token, num_layer_weights, num_parameters, shape_of


def asked(**given: Value) -> Shape:
    return shape_of(resolve(MODEL, given, "workload.x"))


@pytest.mark.parametrize("name", SHAPES)
def test_a_name_alone_is_that_shape(name: str) -> None:
    assert asked(shape=name) == SHAPES[name]


def test_the_default_is_tiny() -> None:
    assert asked() == SHAPES["tiny"]
    assert SHAPES["tiny"].head_size == 32


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4 + 38.6), ("llama3-8b", 8030.3), ("llama3-70b", 70553.7)],
)
def test_published_models_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    """GPT-2's 124.4 M are with a tied head, which is 50257 * 768 more here, and with 12 * 768 biases of keys."""
    assert num_parameters(SHAPES[name]) / 1e6 == pytest.approx(millions, abs=0.1)


def test_llamas_parameters_are_exact_to_the_last() -> None:
    """As the published checkpoints' indices sum to."""
    assert num_parameters(SHAPES["llama3-8b"]) == 8_030_261_248
    assert num_parameters(SHAPES["llama3-70b"]) == 70_553_706_496


@pytest.mark.parametrize("name", ["small", "small-llama"])
def test_small_shapes_are_a_few_million_parameters(name: str) -> None:
    assert 2e6 < num_parameters(SHAPES[name]) < 6e6


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_splits_over_two_tensor_parallel_ranks(name: str) -> None:
    shape = SHAPES[name]
    assert {size % 2 for size in (shape.heads, shape.kv_heads, shape.ffn, shape.sequence)} == {0}


def test_every_size_may_be_changed() -> None:
    given: dict[str, int] = {
        "layers": 3, "hidden": 60, "heads": 6, "kv_heads": 3, "ffn": 7, "sequence": 5, "vocabulary": 11
    }  # fmt: skip
    assert asked(recipe="llama", **given) == Shape(recipe="llama", **given)


def test_gpt_may_be_asked_of_a_llama_shape() -> None:
    assert asked(shape="tiny-llama", recipe="gpt").recipe == "gpt"
    assert asked(shape="tiny-llama", recipe="").recipe == "llama"


@pytest.mark.parametrize(
    ("given", "ffn", "kv_heads"),
    [
        ({"hidden": 32}, 128, 4),
        ({"heads": 8}, 512, 8),
        ({"shape": "tiny-llama", "heads": 8}, 352, 4),
        ({"shape": "tiny-llama", "heads": 1}, 352, 1),
        ({"shape": "tiny-llama", "hidden": 256}, 704, 2),
        ({"hidden": 32, "ffn": 5}, 5, 4),
    ],
)
def test_what_is_not_given_keeps_the_shapes_proportion(given: dict[str, Value], ffn: int, kv_heads: int) -> None:
    shape = asked(**given)
    assert (shape.ffn, shape.kv_heads) == (ffn, kv_heads)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"heads": 3}, "hidden(128) % heads(3) != 0"),
        ({"kv_heads": 3}, "heads(4) % kv_heads(3) != 0"),
        ({"kv_heads": 8}, "heads(4) % kv_heads(8) != 0"),
        ({"recipe": "llama", "hidden": 12, "heads": 4}, "hidden(12) / heads(4) % 2 != 0: llama's RoPE turns pairs"),
        ({"vocabulary": 1}, "vocabulary(1) < 2: one word leaves nothing to predict"),
    ],
)
def test_what_cannot_be_built_is_refused_by_the_equation(given: dict[str, Value], told: str) -> None:
    with pytest.raises(UserError) as refusal:
        asked(**given)
    assert str(refusal.value) == told


def test_an_odd_head_is_fine_where_nothing_turns() -> None:
    assert asked(hidden=12, heads=4).head_size == 3


def test_a_name_misspelt_is_corrected() -> None:
    with pytest.raises(UserError, match="did you mean 'llama3-8b'"):
        asked(shape="llama-8b")


@pytest.mark.parametrize("name", [param.name for param in MODEL if param.kind == "int"])
def test_no_size_is_below_nothing(name: str) -> None:
    with pytest.raises(UserError, match=name):
        asked(**{name: -1})


def test_overrides_that_change_nothing_leave_a_case_as_it_was() -> None:
    assert resolve(MODEL, {"layers": 0, "recipe": ""}, "x") == {"shape": "tiny"}


def test_a_layers_weights_are_twelve_squares_for_gpt() -> None:
    assert num_layer_weights(SHAPES["gpt2"]) == 12 * 768**2


def test_flops_per_token_are_palms() -> None:
    """6 N + 12 L H Q T by hand: GPT-2's layers are 12 * 12 h^2, its head h * V, its attention 12 * 12 * 768 * 1024."""
    expected = 6 * (12 * 12 * 768**2 + 768 * 50257) + 12 * 12 * 768 * 1024
    assert flops_per_token(SHAPES["gpt2"]) == expected


def test_flops_of_a_long_sequence_grow_by_attention_alone() -> None:
    short, long = asked(), asked(sequence=128)
    assert flops_per_token(long) - flops_per_token(short) == 12 * 4 * 128 * 64


def test_fewer_key_heads_save_weights_and_no_attention() -> None:
    saved = flops_per_token(asked(recipe="llama")) - flops_per_token(asked(recipe="llama", kv_heads=1))
    assert saved == 6 * 4 * 2 * 128 * (128 - 32)
