"""Where ranks sit: the closed form against groups that are written out rank by rank."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.hybrid.axes import groups_along
from workloads.planner.placement import Place, place_of, place_of_experts

AXES = ("dp", "pp", "fsdp", "cp", "tp")


def counted(mesh: dict[str, int], axes: tuple[str, ...], gpus_per_node: int) -> tuple[int, int]:
    """Return a group's ranks, and the most of any group that share a node, with ranks and nodes written out."""
    groups = groups_along(mesh, *axes)
    return len(groups[0]), max(max(Counter(rank // gpus_per_node for rank in group).values()) for group in groups)


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=5, max_size=5), st.sampled_from([1, 2, 4, 8]), st.data())
@settings(deadline=None, max_examples=30)
def test_powers_of_two_sit_as_their_ranks_do(sizes: list[int], gpus_per_node: int, data: st.DataObject) -> None:
    mesh = dict(zip(AXES, sizes, strict=True))
    while math.prod(mesh.values()) > 256:
        mesh[max(mesh, key=lambda name: mesh[name])] //= 2
    [axes] = data.draw(st.lists(st.sampled_from([(name,) for name in AXES] + [("dp", "cp")]), min_size=1, max_size=1))
    place = place_of(mesh, axes, gpus_per_node)
    assert (place.ranks, place.on_node) == counted(mesh, axes, gpus_per_node)


def test_the_innermost_axis_sits_inside_a_node_as_long_as_it_fits() -> None:
    assert place_of({"dp": 4, "tp": 8}, ("tp",), 8) == Place(ranks=8, on_node=8)
    assert place_of({"dp": 4, "tp": 16}, ("tp",), 8) == Place(ranks=16, on_node=8)
    assert place_of({"dp": 4, "tp": 8}, ("dp",), 8) == Place(ranks=4, on_node=1)


def test_the_order_of_the_mesh_decides() -> None:
    assert place_of({"tp": 8, "dp": 4}, ("dp",), 8).inside
    assert not place_of({"tp": 8, "dp": 4}, ("tp",), 8).inside


def test_an_axis_that_is_not_there_is_one_rank() -> None:
    assert place_of({"dp": 4}, ("tp",), 8) == Place(ranks=1, on_node=1)


def test_groups_that_straddle_nodes_count_half() -> None:
    place = place_of({"dp": 8, "tp": 6}, ("tp",), 8)  # ranks 6..11 lie on two nodes
    assert (place.ranks, place.on_node, place.inside) == (6, 3, False)


@pytest.mark.parametrize(("ranks", "on_node", "nodes"), [(8, 8, 1), (16, 8, 2), (12, 8, 2), (4, 1, 4)])
def test_nodes_are_counted_up(ranks: int, on_node: int, nodes: int) -> None:
    assert Place(ranks=ranks, on_node=on_node).nodes == nodes


def test_where_is_said_in_words() -> None:
    assert Place(ranks=8, on_node=8).words == "inside a node"
    assert Place(ranks=16, on_node=8).words == "across 2 nodes, 8 a node"


def test_experts_take_the_innermost_data_ranks_and_skip_the_others() -> None:
    mesh = {"dp": 4, "fsdp": 8, "tp": 2, "ep": 8}
    assert place_of_experts(mesh, 8) == Place(ranks=8, on_node=4)  # every second rank of 16
    assert place_of_experts({"dp": 4, "fsdp": 8, "ep": 8}, 8) == Place(ranks=8, on_node=8)
    assert place_of_experts({"dp": 4, "fsdp": 4, "ep": 8}, 8) == Place(ranks=8, on_node=8)


def test_experts_over_a_pipeline_leave_the_node() -> None:
    assert place_of_experts({"dp": 4, "pp": 8, "fsdp": 2, "ep": 8}, 8) == Place(ranks=8, on_node=2)


def test_without_experts_nobody_shares() -> None:
    assert place_of_experts({"dp": 4, "fsdp": 8}, 8).ranks == 1


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


def test_a_larger_node_holds_more_of_a_group() -> None:
    mesh = {"dp": 4, "tp": 32}
    assert [place_of(mesh, ("tp",), node).on_node for node in (4, 8, 16, 32, 72)] == [4, 8, 16, 32, 16]
