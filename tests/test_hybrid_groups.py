"""Groups are those that a mesh's coordinates say, on one device mesh; no two axes share one."""

from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from bench.world import World
from workloads.hybrid.hybrid_case import hybrid_of
from workloads.hybrid.hybrid_groups import make_groups
from workloads.shapes import SHAPES


def made(world: World, params: dict[str, Any]) -> tuple[dict[str, list[int]], list[int], bool, int]:
    """Return this rank's groups by axis, its twins, whether names differ, and how many groups were made."""
    groups = make_groups(world, hybrid_of(params, SHAPES["tiny"], world.size))
    world.barrier()
    by_axis = {axis: dist.get_process_group_ranks(group) for axis, group in groups.axes.items()}
    names = {group.group_name for group in groups.axes.values()}
    twins = dist.get_process_group_ranks(groups.twins)
    for group in groups.made:
        dist.destroy_process_group(group)
    return by_axis, twins, len(names) == len(by_axis), len(groups.made)


def test_one_axis_of_all_ranks_is_the_world(two_ranks: Ranks) -> None:
    for by_axis, twins, _, num_made in two_ranks.call("test_hybrid_groups:made", params={"mesh": "dp=2"}):
        assert (by_axis, twins, num_made) == ({"dp": [0, 1]}, [0, 1], 0)


def test_gradients_over_cp_have_a_group_of_their_own(two_ranks: Ranks) -> None:
    for by_axis, _, apart, _ in two_ranks.call("test_hybrid_groups:made", params={"mesh": "cp=2"}):
        assert by_axis == {"cp": [0, 1], "dp": [0, 1]}
        assert apart


def test_experts_of_all_ranks_have_no_copies(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,ep=2", "experts": 4}
    for by_axis, _, apart, _ in two_ranks.call("test_hybrid_groups:made", params=params):
        assert by_axis == {"dp": [0, 1], "ep": [0, 1]}
        assert apart


def test_whole_experts_are_copies_of_one_another(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2", "experts": 4}
    for by_axis, *_ in two_ranks.call("test_hybrid_groups:made", params=params):
        assert by_axis == {"dp": [0, 1], "edp": [0, 1]}


@pytest.mark.parametrize(
    ("mesh", "third", "twins"),
    [
        ("dp=2,pp=2", {"dp": [0, 2], "pp": [0, 1]}, [0, 2]),
        ("pp=2,dp=2", {"pp": [0, 2], "dp": [0, 1]}, [0, 1]),
        ("pp=2,tp=2", {"pp": [0, 2], "tp": [0, 1]}, [0, 1]),
        ("fsdp=2,tp=2", {"fsdp": [0, 2], "tp": [0, 1]}, [0, 1, 2, 3]),
        ("dp=2,cp=2", {"dp": [0, 1, 2, 3], "cp": [0, 1]}, [0, 1, 2, 3]),
    ],
)
def test_four_ranks_stand_where_the_mesh_says(
    four_ranks: Ranks, mesh: str, third: dict[str, list[int]], twins: list[int]
) -> None:
    by_axis, mine, apart, _ = four_ranks.call("test_hybrid_groups:made", params={"mesh": mesh})[0]
    assert (by_axis, mine, apart) == (third, twins, True)


def test_experts_are_split_inside_tp(four_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,tp=2,ep=2,etp=2", "experts": 4}
    found = [by_axis for by_axis, *_ in four_ranks.call("test_hybrid_groups:made", params=params)]
    assert [of["ep"] for of in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [of["etp"] for of in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all("edp" not in of for of in found)


def test_experts_lie_inside_the_data_ranks_of_one_place_in_tp(four_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,tp=2,ep=2", "experts": 4}
    found = [by_axis for by_axis, *_ in four_ranks.call("test_hybrid_groups:made", params=params)]
    assert [of["ep"] for of in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [of["edp"] for of in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
