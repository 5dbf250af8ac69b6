"""Where ranks sit: the closed form against groups that are written out rank by rank."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.hybrid.axes import groups_along
from workloads.planner.placement import Place, place_of, place_of_digits

AXES = ("dp", "pp", "fsdp", "cp", "tp")


def counted(groups: list[list[int]], gpus_per_node: int) -> Place:
    """Return a group's ranks over the nodes of the group that reaches most, ranks and nodes written out."""
    nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
    return Place(ranks=len(groups[0]), on_node=-(-len(groups[0]) // nodes))


@st.composite
def written_meshes(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> dict[str, int]:
    """Return a mesh in any order of its axes, of 512 ranks at most."""
    mesh = {name: draw(st.sampled_from(sizes)) for name in draw(st.permutations(AXES))}
    while math.prod(mesh.values()) > 512:
        mesh[max(mesh, key=lambda name: mesh[name])] = 1
    return mesh


@given(written_meshes(), st.sampled_from([1, 2, 4, 6, 8, 9, 72]), st.sampled_from([*AXES, "dp+cp", "dp+fsdp+tp"]))
@settings(deadline=None, max_examples=300)
def test_a_group_sits_as_its_ranks_do(mesh: dict[str, int], gpus_per_node: int, axes: str) -> None:
    names = tuple(axes.split("+"))
    assert place_of(mesh, names, gpus_per_node) == counted(groups_along(mesh, *names), gpus_per_node)


@pytest.mark.parametrize("mesh", [{"dp": 6}, {"dp": 2, "tp": 3}, {"pp": 7}])
def test_a_job_that_fits_into_a_node_stays_inside_it(mesh: dict[str, int]) -> None:
    assert all(place_of(mesh, (name,), 8) == Place(ranks=size, on_node=size) for name, size in mesh.items())


def test_the_innermost_axis_sits_inside_a_node_as_long_as_it_fits() -> None:
    assert place_of({"dp": 4, "tp": 8}, ("tp",), 8) == Place(ranks=8, on_node=8)
    assert place_of({"dp": 4, "tp": 16}, ("tp",), 8) == Place(ranks=16, on_node=8)
    assert place_of({"dp": 4, "tp": 8}, ("dp",), 8) == Place(ranks=4, on_node=1)


def test_the_order_of_the_mesh_decides() -> None:
    assert place_of({"tp": 8, "dp": 4}, ("dp",), 8).inside
    assert not place_of({"tp": 8, "dp": 4}, ("tp",), 8).inside


def test_an_axis_that_is_not_there_is_one_rank() -> None:
    assert place_of({"dp": 4}, ("tp",), 8) == Place(ranks=1, on_node=1)


def test_groups_that_straddle_nodes_count_their_mean() -> None:
    place = place_of({"dp": 8, "tp": 6}, ("tp",), 8)  # ranks 6..11 lie on two nodes
    assert (place.ranks, place.on_node, place.inside) == (6, 3, False)


@pytest.mark.parametrize(("ranks", "on_node", "nodes"), [(8, 8, 1), (16, 8, 2), (12, 8, 2), (4, 1, 4)])
def test_nodes_are_counted_up(ranks: int, on_node: int, nodes: int) -> None:
    assert Place(ranks=ranks, on_node=on_node).nodes == nodes


def test_where_is_said_in_words() -> None:
    assert Place(ranks=8, on_node=8).words == "inside a node"
    assert Place(ranks=16, on_node=8).words == "across 2 nodes, 8 a node"


@pytest.mark.parametrize(("size", "on_node"), [(8, 8), (16, 8), (32, 8), (128, 8), (1024, 8)])
def test_no_more_ranks_share_a_node_than_it_has(size: int, on_node: int) -> None:
    assert place_of({"tp": size}, ("tp",), 8).on_node == on_node


@pytest.mark.parametrize(("stride", "on_node"), [(1, 8), (2, 4), (4, 2), (8, 1), (64, 1)])
def test_ranks_further_apart_share_a_node_less(stride: int, on_node: int) -> None:
    assert place_of({"fsdp": 32, "tp": stride}, ("fsdp",), 8).on_node == on_node


def test_two_axes_together_sit_where_both_do() -> None:
    mesh = {"dp": 4, "pp": 2, "cp": 2, "tp": 2}
    assert place_of(mesh, ("dp", "cp"), 8) == Place(ranks=8, on_node=2)
    assert place_of({"dp": 4, "cp": 2}, ("dp", "cp"), 8) == Place(ranks=8, on_node=8)


def test_experts_are_no_axis_of_the_ranks() -> None:
    assert place_of({"dp": 4, "tp": 8, "ep": 4}, ("dp",), 8) == place_of({"dp": 4, "tp": 8}, ("dp",), 8)


def test_digits_that_are_no_axes_have_a_place_too() -> None:
    every_second_of_each_four = [(1, 2, False), (2, 2, True), (4, 8, False)]
    assert place_of_digits(every_second_of_each_four, 2) == Place(ranks=2, on_node=1)
    assert place_of_digits(every_second_of_each_four, 4).inside


def test_a_larger_node_holds_more_of_a_group() -> None:
    mesh = {"dp": 4, "tp": 32}
    assert [place_of(mesh, ("tp",), node).on_node for node in (4, 8, 16, 32, 72)] == [4, 8, 16, 32, 16]
