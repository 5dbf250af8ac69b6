"""Models to plan: their parameters add up to what their names say."""

import pytest

from bench.errors import UserError
from workloads.planner.catalog import MODELS, model_of, num_model_parameters
from workloads.shapes import SHAPES, num_parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("gpt-7.5b", 7.7),
        ("gpt-175b", 175.8),
        ("gpt-530b", 531.0),
        ("mixtral-8x7b", 46.7),
    ],
)
def test_a_model_has_as_many_parameters_as_it_is_named_for(name: str, billions: float) -> None:
    assert num_model_parameters(model_of(name)) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_what_can_be_measured_can_be_planned(name: str) -> None:
    model = model_of(name)
    assert model.shape == SHAPES[name]
    assert num_model_parameters(model) == num_parameters(SHAPES[name])


def test_a_mixture_holds_its_experts_beside_what_every_rank_holds() -> None:
    model = model_of("mixtral-8x7b")
    assert model.expert_parameters == 3 * 4096 * 14336
    dense = num_parameters(model.shape) - 32 * model.expert_parameters
    routers = 32 * 4096 * 8
    assert num_model_parameters(model) == dense + routers + 32 * 8 * model.expert_parameters


def test_a_dense_layer_is_all_of_the_layer() -> None:
    model = model_of("gpt-175b")
    assert model.dense_layer_parameters * 96 < num_model_parameters(model)
    assert model.dense_layer_parameters == pytest.approx(12 * 12288**2, rel=1e-3)


def test_a_sequence_can_be_asked_for() -> None:
    assert model_of("llama3-8b", 131072).shape.sequence == 131072
    assert model_of("llama3-8b").shape.sequence == 8192


def test_a_longer_sequence_adds_parameters_to_gpt_alone() -> None:
    longer = num_model_parameters(model_of("gpt-7.5b", 4096)) - num_model_parameters(model_of("gpt-7.5b"))
    assert longer == 2048 * 4096
    assert num_model_parameters(model_of("llama3-8b", 4096)) == num_model_parameters(model_of("llama3-8b"))


@pytest.mark.parametrize(("name", "meant"), [("llama3-70", "llama3-70b"), ("gpt175b", "gpt-175b"), ("smal", "small")])
def test_an_unknown_model_is_refused_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"model '{name}' is not tiny, .*did you mean '{meant}'\?"):
        model_of(name)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"sequence\(-1\) < 1"):
        model_of("tiny", -1)


def test_names_are_the_models_own() -> None:
    assert all(name == model.name for name, model in MODELS.items())
