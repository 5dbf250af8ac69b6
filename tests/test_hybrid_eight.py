"""Three, four and five axes at once, on eight ranks: parity with one process, and bytes of each axis."""

from collections.abc import Iterator

import pytest
from ranks import Ranks
from test_hybrid import EXPERTS, Params, assert_right
from test_hybrid_memory import assert_activations_agree

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    """Eight gloo ranks that live as long as this file."""
    with Ranks(8) as ranks:
        yield ranks


THREE = [
    ("dp=2,pp=2,tp=2", {"dp", "pp", "tp"}, {}),
    ("fsdp=2,pp=2,tp=2", {"fsdp", "pp", "tp"}, {}),
    ("fsdp=2,cp=2,tp=2", {"fsdp", "cp", "dp", "tp"}, {}),
    ("dp=2,fsdp=2,tp=2", {"dp", "fsdp", "tp"}, {"vocabulary": 65}),
]
FOUR = [
    # the ranks of cp are the fourth axis: gradients are summed over them
    ("pp=2,cp=2,tp=2", {"dp", "pp", "cp", "tp"}, {}),
    ("dp=2,pp=2,tp=2,ep=2", {"dp", "pp", "tp", "ep", "edp"}, EXPERTS),
]
FIVE = [
    ("pp=2,cp=2,tp=2,ep=2", {"dp", "pp", "cp", "tp", "ep", "edp"}, EXPERTS),
    ("fsdp=2,pp=2,cp=2,ep=4", {"fsdp", "dp", "pp", "cp", "ep"}, EXPERTS),
    ("dp=2,fsdp=2,pp=2,ep=2", {"fsdp", "dp", "pp", "ep", "edp"}, EXPERTS),
]
MESHES = [*THREE, *FOUR, *FIVE]


@pytest.mark.parametrize(("mesh", "axes", "more"), MESHES, ids=[mesh for mesh, *_ in MESHES])
def test_many_axes_at_once(eight_ranks: Ranks, mesh: str, axes: set[str], more: Params) -> None:
    assert_right(eight_ranks, axes, {"mesh": mesh, **more})


def test_activations_of_three_and_four_axes_are_the_closed_form_s(eight_ranks: Ranks) -> None:
    assert_activations_agree(eight_ranks, [{"mesh": mesh} for mesh in ("dp=2,pp=2,tp=2", "pp=2,cp=2,tp=2")])
