"""Places of process groups are those counted from groups that are written out rank by rank."""

import math
from itertools import product

import pytest

from parbench.workloads.mesh.axes import expert_groups, groups_along
from parbench.workloads.planner.placement import Place, place_of


def count_place(groups: list[list[int]], gpus_per_node: int) -> Place:
    """Return the place of the group that reaches the most nodes."""
    nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
    ranks = len(groups[0])
    return Place(ranks=ranks, on_node=math.ceil(ranks / nodes))


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2, "pp": 3, "fsdp": 4, "cp": 2, "tp": 2},
        {"tp": 4, "cp": 3, "dp": 2, "fsdp": 1, "pp": 6},
    ],
)
@pytest.mark.parametrize("gpus_per_node", [1, 4, 6, 9])
def test_place_of_axes_matches_counted_nodes(mesh: dict[str, int], gpus_per_node: int) -> None:
    for axes in (("dp",), ("pp",), ("fsdp",), ("tp",), ("dp", "cp"), ("dp", "fsdp", "tp")):
        expected = count_place(groups_along(mesh, *axes), gpus_per_node)
        assert place_of(mesh, axes, gpus_per_node) == expected, axes


@pytest.mark.parametrize("gpus_per_node", [1, 4, 6])
def test_place_of_experts_matches_counted_nodes(gpus_per_node: int) -> None:
    mesh = {"fsdp": 4, "pp": 2, "cp": 2, "dp": 2, "tp": 2, "ep": 4}
    expected = count_place(expert_groups(mesh), gpus_per_node)
    assert place_of(mesh, ("ep",), gpus_per_node) == expected


@pytest.mark.parametrize("gpus_per_node", [1, 2, 8])
def test_place_of_expert_shards_and_replicas(gpus_per_node: int) -> None:
    """Of dp=2, fsdp=4, cp=2 and tp=2, ep=4 takes cp and a half of fsdp, and leaves two shards."""
    mesh = {"dp": 2, "fsdp": 4, "cp": 2, "tp": 2, "ep": 4}
    shards = [
        [replica * 16 + shard * 8 + expert * 2 + tensor for shard in range(2)]
        for replica, expert, tensor in product(range(2), range(4), range(2))
    ]
    replicas = [
        [
            replica * 16 + shard * 8 + expert * 2 + tensor
            for replica, tensor in product(range(2), range(2))
        ]
        for shard, expert in product(range(2), range(4))
    ]
    assert place_of(mesh, ("expert_shards",), gpus_per_node) == count_place(shards, gpus_per_node)
    assert place_of(mesh, ("edp",), gpus_per_node) == count_place(replicas, gpus_per_node)


def test_place_of_split_experts_is_next_to_tp() -> None:
    mesh = {"dp": 4, "tp": 8, "ep": 2, "etp": 4}
    assert place_of(mesh, ("etp",), 8) == Place(ranks=4, on_node=4)
    assert place_of(mesh, ("edp",), 8) == Place(ranks=4, on_node=2)
    assert place_of(mesh, ("tp",), 8) == Place(ranks=8, on_node=8)


def test_place_counts_pods() -> None:
    place = place_of({"fsdp": 64}, ("fsdp",), gpus_per_node=8, nodes_per_pod=4)
    assert place.nodes == 8
    assert place.in_pod == 32
    assert place.pods == 2
