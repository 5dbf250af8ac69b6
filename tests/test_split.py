"""Layers are dealt out to stages, evenly or as one says, or it is said why not."""

import pytest

from bench.errors import UserError
from workloads.pipeline.split import layers_of_stages


@pytest.mark.parametrize(("layers", "stages", "counts"), [(4, 2, (2, 2)), (12, 4, (3, 3, 3, 3)), (3, 3, (1, 1, 1))])
def test_layers_are_as_many_on_each_stage(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert layers_of_stages(layers, stages) == counts


def test_a_split_is_taken_as_it_is_given() -> None:
    assert layers_of_stages(7, 4, "2+1+1+3") == (2, 1, 1, 3)


@pytest.mark.parametrize(
    ("layers", "stages", "split", "words"),
    [
        (4, 3, "", r"layers\(4\) % stages\(3\) != 0"),
        (2, 4, "", r"layers\(2\) % stages\(4\) != 0"),
        (4, 3, "2+2", "is for 2 stages, and there are 3"),
        (5, 2, "2+2", r"holds 4 layers, and the model has layers\(5\)"),
        (4, 2, "4+0", "is not understood"),
        (4, 2, "2,2", "is not understood"),
        (4, 2, "two+2", "is not understood"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(layers: int, stages: int, split: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        layers_of_stages(layers, stages, split)
