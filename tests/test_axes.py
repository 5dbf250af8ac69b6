"""A rank stands where the mesh says, the innermost axis varying fastest, and groups are what coordinates say."""

import pytest

from bench.errors import UserError
from bench.groups import groups_of
from workloads.hybrid.axes import (
    DATA,
    along,
    coordinate_of,
    expert_copies,
    expert_groups,
    expert_parts,
    groups_along,
    mesh_of,
    multiplied,
    size_of,
)

MESH = {"dp": 2, "pp": 3, "cp": 2, "tp": 2, "ep": 2}


def test_a_mesh_keeps_the_order_in_which_it_is_written() -> None:
    assert list(mesh_of("dp=2,pp=2,tp=2").items()) == [("dp", 2), ("pp", 2), ("tp", 2)]
    assert list(mesh_of("pp=2 dp=4")) == ["pp", "dp"]


def test_what_is_no_mesh_is_one_sentence() -> None:
    with pytest.raises(UserError, match="not understood at 'dp'"):
        mesh_of("dp,tp=2")


def test_experts_are_not_multiplied() -> None:
    assert multiplied(MESH) == {"dp": 2, "pp": 3, "cp": 2, "tp": 2}
    assert size_of(MESH, *multiplied(MESH)) == 24


def test_axes_that_are_not_there_have_one_rank() -> None:
    assert size_of(MESH, *DATA) == 4
    assert size_of({}, *DATA) == 1


def test_the_innermost_axis_varies_fastest() -> None:
    assert coordinate_of(MESH, 0) == {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert coordinate_of(MESH, 1)["tp"] == 1
    assert coordinate_of(MESH, 2) == {"dp": 0, "fsdp": 0, "pp": 0, "cp": 1, "tp": 0}
    assert coordinate_of(MESH, 23) == {"dp": 1, "fsdp": 0, "pp": 2, "cp": 1, "tp": 1}
    assert coordinate_of({"tp": 2, "dp": 3}, 1)["dp"] == 1


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
def test_groups_of_an_axis_are_those_of_collectives(axis: str) -> None:
    text = " ".join(f"{name}={size}" for name, size in multiplied(MESH).items())
    assert sorted(groups_along(MESH, axis)) == sorted(list(ranks) for ranks in groups_of(f"{text}:{axis}", 24))


def test_groups_of_several_axes_count_the_last_fastest() -> None:
    [first, *_] = groups_along(MESH, "dp", "cp")
    assert first == [0, 2, 12, 14]
    assert [along(coordinate_of(MESH, rank), MESH, "dp", "cp") for rank in first] == [0, 1, 2, 3]
    [turned, *_] = groups_along(MESH, "cp", "dp")
    assert turned == [0, 12, 2, 14]


@pytest.mark.parametrize("axes", [("dp",), ("dp", "cp"), ("pp", "tp"), ()])
def test_every_rank_is_in_one_group(axes: tuple[str, ...]) -> None:
    groups = groups_along(MESH, *axes)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(24))
    assert {len(ranks) for ranks in groups} == {size_of(MESH, *axes)}


def test_experts_are_dealt_out_to_neighbours_in_the_data_axes() -> None:
    mesh = {"dp": 2, "pp": 2, "cp": 2, "ep": 2}
    assert sorted(expert_groups(mesh)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(expert_groups({**mesh, "ep": 4})) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_copies_of_experts_hold_the_same_layers() -> None:
    mesh = {"dp": 2, "pp": 2, "cp": 2, "ep": 2}
    assert sorted(expert_copies(mesh)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sorted(expert_copies({"dp": 4, "tp": 2, "ep": 2})) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_experts_are_split_among_neighbours_in_tp() -> None:
    assert expert_parts({"dp": 2, "tp": 4, "etp": 2}) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert expert_parts({"tp": 2, "dp": 2, "etp": 2}) == [[0, 2], [1, 3]]
    assert expert_parts({"dp": 2, "tp": 2}) == [[0], [1], [2], [3]]


def test_copies_of_split_experts_hold_the_same_part() -> None:
    assert sorted(expert_copies({"dp": 2, "tp": 2, "ep": 2, "etp": 2})) == [[0], [1], [2], [3]]
    assert sorted(expert_copies({"dp": 2, "tp": 2, "etp": 2})) == [[0, 2], [1, 3]]
    assert sorted(expert_copies({"dp": 2, "tp": 4, "ep": 2, "etp": 2})) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_rank_is_in_one_group_and_one_copy_of_experts(ep: int) -> None:
    for groups in (expert_groups({**MESH, "ep": ep}), expert_copies({**MESH, "ep": ep}), expert_parts(MESH)):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(24))
