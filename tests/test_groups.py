"""Groups as arithmetic: every rank in exactly one, meshes as DeviceMesh lays them, refusals with the equation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.groups import groups_of, mesh_group, parse_mesh

FOUR_ON_TWO = ["a", "a", "b", "b"]
SPLITS = {
    "world": ((0, 1, 2, 3),),
    "node": ((0, 1), (2, 3)),
    "across": ((0, 2), (1, 3)),
    "pairs": ((0, 1), (2, 3)),
    "contiguous:2": ((0, 1), (2, 3)),
    "contiguous:4": ((0, 1, 2, 3),),
    "strided:2": ((0, 2), (1, 3)),
    "dp=2 tp=2:tp": ((0, 1), (2, 3)),
    "dp=2 tp=2:dp": ((0, 2), (1, 3)),
}


def refusal(text: str, size: int, hosts: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        groups_of(text, size, hosts)
    return str(caught.value)


@pytest.mark.parametrize("text", SPLITS)
def test_four_ranks_on_two_nodes_split_as_written(text: str) -> None:
    assert groups_of(text, 4, FOUR_ON_TWO) == SPLITS[text]


def test_nodes_need_not_be_contiguous() -> None:
    assert groups_of("node", 4, ["a", "b", "a", "b"]) == ((0, 2), (1, 3))
    assert groups_of("across", 4, ["a", "b", "a", "b"]) == ((0, 1), (2, 3))


def test_a_middle_axis_strides_over_the_inner_one() -> None:
    assert groups_of("pp=2 dp=3 tp=2:dp", 12)[:3] == ((0, 2, 4), (1, 3, 5), (6, 8, 10))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_the_groups_of_an_axis_part_the_world_and_have_its_size(sizes: list[int], data: st.DataObject) -> None:
    axes = [f"a{i}" for i in range(len(sizes))]
    chosen = data.draw(st.sampled_from(axes))
    world = 1
    for size in sizes:
        world *= size
    mesh = " ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
    groups = groups_of(f"{mesh}:{chosen}", world)
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert {len(group) for group in groups} == {sizes[axes.index(chosen)]}


@given(st.sampled_from(["contiguous", "strided"]), st.integers(1, 6), st.integers(1, 6))
def test_splits_part_the_world(kind: str, each: int, count: int) -> None:
    groups = groups_of(f"{kind}:{each}", each * count)
    assert sorted(rank for group in groups for rank in group) == list(range(each * count))
    assert {len(group) for group in groups} == {each}


def test_a_mesh_is_laid_out_row_by_row_as_torchs_device_mesh_is() -> None:
    mesh = np.arange(24).reshape(2, 3, 4)
    for position, axis in enumerate(("pp", "dp", "tp")):
        rows = mesh.swapaxes(-1, position).reshape(-1, mesh.shape[position]).tolist()
        assert sorted(map(list, groups_of(f"pp=2 dp=3 tp=4:{axis}", 24))) == sorted(rows)


@pytest.mark.parametrize(
    ("text", "size", "told"),
    [
        ("dp=2 tp=4:tp", 6, "dp(2) * tp(4) != world size(6)"),
        ("dp=2 tp=2:pp", 4, "'pp' is no axis of the mesh; it has dp or tp"),
        ("contiguous:3", 4, "world size(4) % 3 != 0"),
        ("strided:3", 4, "world size(4) % 3 != 0"),
        ("pairs", 3, "world size(3) % 2 != 0"),
        ("contiguous:0", 4, "contiguous:K"),
        ("word", 4, "did you mean 'world'"),
        ("dp=two:dp", 4, "at 'dp=two'"),
        ("dp=2 dp=2:dp", 4, "each axis once"),
        ("across", 4, "at least 2 nodes"),
    ],
)
def test_what_cannot_be_formed_is_refused_in_words(text: str, size: int, told: str) -> None:
    assert told in refusal(text, size)


def test_across_uneven_nodes_is_refused_with_the_numbers() -> None:
    assert "nodes have 1, 2" in refusal("across", 3, ["a", "a", "b"])


def test_the_command_lines_mesh_and_group_become_one_text() -> None:
    assert mesh_group("dp=2,tp=4", "tp") == "dp=2 tp=4:tp"
    assert parse_mesh("dp=2,tp=4") == parse_mesh("dp=2 tp=4") == {"dp": 2, "tp": 4}
    with pytest.raises(UserError, match="no axis of the mesh: it has dp or tp"):
        mesh_group("dp=2,tp=4", "pp")
    with pytest.raises(UserError, match="needs an axis"):
        parse_mesh("")
