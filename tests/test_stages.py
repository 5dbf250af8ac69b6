"""Stages, one after the other, are the model; their parameters keep their names."""

from itertools import pairwise

import pytest
import torch

from workloads.model import build, draw_tokens
from workloads.pipeline.stages import Chunk, Held
from workloads.shapes import SHAPES

CPU = torch.device("cpu")
CUTS = ((0, 4), (0, 1, 4), (0, 2, 3, 4))


@pytest.mark.parametrize("shape_name", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_stages_after_one_another_give_the_models_logits(shape_name: str, cuts: tuple[int, ...]) -> None:
    shape = SHAPES[shape_name]
    model = build(shape, 0, CPU)
    x = tokens = draw_tokens(shape, 2, 0, 0)[:, :-1]
    for first, end in pairwise(cuts):
        x = Chunk(model, first, end - first)(x)
    assert torch.equal(x, model(tokens))


@pytest.mark.parametrize("shape_name", ["tiny", "tiny-llama"])
def test_every_parameter_is_held_once_under_its_own_name(shape_name: str) -> None:
    model = build(SHAPES[shape_name], 0, CPU)
    chunks = [Chunk(model, first, 1) for first in range(4)]
    ends, middle = Held([chunks[0], chunks[3]]), Held(chunks[1:3])
    whole = dict(model.named_parameters())
    mine, others = dict(ends.named_parameters()), dict(middle.named_parameters())
    assert mine.keys() | others.keys() == whole.keys()
    assert not mine.keys() & others.keys()
    assert all(parameter is whole[name] for name, parameter in {**mine, **others}.items())
    assert {name.split(".")[0] for name in mine} == {"tokens", "layers", "norm", "head"} | (
        {"positions"} if shape_name == "tiny" else set()
    )


def test_only_the_first_stage_remembers_what_its_embeddings_gave() -> None:
    shape = SHAPES["tiny"]
    model = build(shape, 0, CPU)
    first, second = Chunk(model, 0, 2), Chunk(model, 2, 2)
    tokens = draw_tokens(shape, 2, 0, 0)[:, :-1]
    second(first(tokens))
    assert first.embedded is not None
    assert torch.equal(first.embedded, model.tokens(tokens) + model.get_submodule("positions")(torch.arange(64)))
    assert second.embedded is None
