"""Places of process groups are those counted from groups that are written out rank by rank."""

import math

import pytest

from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.planner.placement import Place, place_group


def count_place(groups: list[list[int]], gpus_per_node: int) -> Place:
    """Return the place of the group that reaches the most nodes."""
    nodes_by_group = [{rank // gpus_per_node for rank in group} for group in groups]
    max_nodes = max(map(len, nodes_by_group))
    ranks = len(groups[0])
    return Place(ranks=ranks, on_node=math.ceil(ranks / max_nodes))


@pytest.mark.parametrize("mesh", ["dp=2,pp=3,fsdp=4,cp=2,tp=2", "tp=4,cp=3,dp=2,pp=6"])
@pytest.mark.parametrize("gpus_per_node", [1, 4, 6, 9])
def test_place_of_axes_matches_counted_nodes(mesh: str, gpus_per_node: int) -> None:
    dims = ParallelDims.parse(mesh)
    for axes in (("dp",), ("pp",), ("fsdp",), ("tp",), ("dp", "cp"), ("dp", "fsdp", "tp")):
        expected = count_place(dims.groups(*axes), gpus_per_node)
        assert place_group(dims, axes, gpus_per_node) == expected, axes


@pytest.mark.parametrize("mesh", ["fsdp=4,pp=2,cp=2,dp=2,tp=2,ep=4", "dp=4,tp=4,ep=4,etp=2"])
@pytest.mark.parametrize("gpus_per_node", [1, 4, 6])
def test_place_of_experts_matches_counted_nodes(mesh: str, gpus_per_node: int) -> None:
    dims = ParallelDims.parse(mesh)
    groups_by_axis = {
        "ep": dims.expert_groups("ep"),
        "etp": dims.expert_groups("etp"),
        "efsdp": dims.expert_groups("efsdp"),
    }
    if not dims.is_sharded:
        groups_by_axis["edp"] = dims.expert_groups("edp")
    for axis, groups in groups_by_axis.items():
        assert place_group(dims, (axis,), gpus_per_node) == count_place(groups, gpus_per_node)
