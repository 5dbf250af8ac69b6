"""Copies of the experts are blocks of neighbours; replicas stand at the same place of each."""

from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from bench.world import World
from workloads.experts.expert_axis import make_axis


def axes_of(world: World, ep: int, etp: int = 1) -> dict[str, Any]:
    axis = make_axis(world, ep, etp)
    found = {
        "sources": axis.sources,
        "groups": {name: dist.get_process_group_ranks(group) for name, group in axis.groups.items()},
        "mesh": None if axis.mesh is None else axis.mesh.mesh.tolist(),
        "own": all(group is not world.group for group in axis.groups.values()),
        "place": axis.place,
        "names": None if axis.mesh is None else axis.mesh.mesh_dim_names,
        "held": axis.held.group is axis.group and axis.held.mesh is axis.mesh,
    }
    world.barrier()  # a group that one rank gives back while another still connects fails there
    axis.close()
    return found


@pytest.mark.parametrize(
    ("ep", "groups", "sources"),
    [
        (4, [{"ep": [0, 1, 2, 3]}] * 4, [(0, 1, 2, 3)] * 4),
        (
            2,
            [
                {"ep": [0, 1], "edp": [0, 2]},
                {"ep": [0, 1], "edp": [1, 3]},
                {"ep": [2, 3], "edp": [0, 2]},
                {"ep": [2, 3], "edp": [1, 3]},
            ],
            [(0, 1), (0, 1), (2, 3), (2, 3)],
        ),
        (1, [{"edp": [0, 1, 2, 3]}] * 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_four_ranks_are_copies_of_one_two_or_four(
    four_ranks: Ranks, ep: int, groups: list[dict[str, list[int]]], sources: list[tuple[int, ...]]
) -> None:
    found = four_ranks.call("test_expert_axis:axes_of", ep=ep)
    assert [one["groups"] for one in found] == groups
    assert [one["sources"] for one in found] == sources
    assert [one["mesh"] for one in found] == [of.get("ep") for of in groups]
    assert [one["place"] for one in found] == [of.index(rank) for rank, of in enumerate(sources)]
    assert all(one["own"] and one["held"] for one in found)


@pytest.mark.parametrize(
    ("ep", "etp", "groups", "mesh"),
    [
        (2, 2, [{"ep": [0, 2], "etp": [0, 1]}, {"ep": [1, 3], "etp": [0, 1]}], [[0, 1], [2, 3]]),
        (1, 2, [{"etp": [0, 1], "edp": [0, 2]}, {"etp": [0, 1], "edp": [1, 3]}], [0, 1]),
        (1, 4, [{"etp": [0, 1, 2, 3]}] * 2, [0, 1, 2, 3]),
    ],
)
def test_neighbours_split_experts(
    four_ranks: Ranks, ep: int, etp: int, groups: list[dict[str, list[int]]], mesh: list[Any]
) -> None:
    found = four_ranks.call("test_expert_axis:axes_of", ep=ep, etp=etp)
    assert [one["groups"] for one in found[:2]] == groups
    assert found[0]["mesh"] == found[1]["mesh"] == mesh
    assert found[0]["names"] == tuple(name for name in ("ep", "etp") if name in groups[0])
    assert [one["place"] for one in found] == [rank // etp % ep for rank in range(4)]
    assert all(one["own"] and one["held"] for one in found)
