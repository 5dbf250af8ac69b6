"""Places of process groups are those counted from groups that are written out rank by rank."""

import math

import pytest

from parbench.workloads.mesh.axes import expert_groups, groups_along
from parbench.workloads.planner.placement import Place, place_of


def count_place(groups: list[list[int]], gpus_per_node: int) -> Place:
    """Return the place of the group that reaches the most nodes."""
    nodes_by_group = [{rank // gpus_per_node for rank in group} for group in groups]
    max_nodes = max(map(len, nodes_by_group))
    ranks = len(groups[0])
    return Place(ranks=ranks, on_node=math.ceil(ranks / max_nodes))


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


def test_place_of_expert_shards_and_replicas() -> None:
    """Experts take cp and half of fsdp. Shards are 8 ranks apart, replicas 16 and 1."""
    mesh = {"dp": 2, "fsdp": 4, "cp": 2, "tp": 2, "ep": 4}
    assert place_of(mesh, ("expert_shards",), 8) == Place(ranks=2, on_node=1)
    assert place_of(mesh, ("edp",), 8) == Place(ranks=4, on_node=2)
