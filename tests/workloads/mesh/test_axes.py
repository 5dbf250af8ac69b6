"""A rank stands where the mesh says, the innermost axis varying fastest, and groups are what coordinates say."""

import pytest
import torch.distributed as dist
from mesh_steps import Params
from ranks import Ranks

from bench.plan.groups import groups_of
from bench.world.world import World
from workloads.mesh.axes import (
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
from workloads.mesh.mesh_case import hybrid_of
from workloads.mesh.mesh_stages import make_groups
from workloads.model.shapes import SHAPES

MESH = {"dp": 2, "pp": 3, "cp": 2, "tp": 2, "ep": 2}


def test_a_mesh_keeps_the_order_in_which_it_is_written_and_experts_are_not_multiplied() -> None:
    assert list(mesh_of("dp=2,pp=2,tp=2", 8).items()) == [("dp", 2), ("pp", 2), ("tp", 2)]
    assert mesh_of("", 8) == {"dp": 8}
    assert multiplied(MESH) == {"dp": 2, "pp": 3, "cp": 2, "tp": 2}
    assert (size_of(MESH, *multiplied(MESH)), size_of(MESH, *DATA), size_of({}, *DATA)) == (24, 4, 1)


def test_the_innermost_axis_varies_fastest() -> None:
    assert coordinate_of(MESH, 0) == {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert coordinate_of(MESH, 1)["tp"] == 1
    assert coordinate_of(MESH, 2) == {"dp": 0, "fsdp": 0, "pp": 0, "cp": 1, "tp": 0}
    assert coordinate_of(MESH, 23) == {"dp": 1, "fsdp": 0, "pp": 2, "cp": 1, "tp": 1}
    assert coordinate_of({"tp": 2, "dp": 3}, 1)["dp"] == 1


def test_groups_of_axes_are_those_of_collectives_and_count_the_last_fastest() -> None:
    text = " ".join(f"{name}={size}" for name, size in multiplied(MESH).items())
    for axis in ("dp", "pp", "cp", "tp"):
        assert sorted(groups_along(MESH, axis)) == sorted(list(ranks) for ranks in groups_of(f"{text}:{axis}", 24))
    [first, *_] = groups_along(MESH, "dp", "cp")
    assert first == [0, 2, 12, 14]
    assert [along(coordinate_of(MESH, rank), MESH, "dp", "cp") for rank in first] == [0, 1, 2, 3]
    assert groups_along(MESH, "cp", "dp")[0] == [0, 12, 2, 14]


def test_every_rank_is_in_one_group_and_one_copy_of_experts() -> None:
    groups = [groups_along(MESH, *axes) for axes in (("dp",), ("dp", "cp"), ("pp", "tp"), ())]
    for ep in (1, 2, 4):
        groups += [make({**MESH, "ep": ep}) for make in (expert_groups, expert_copies, expert_parts)]
    for partition in groups:
        assert sorted(rank for ranks in partition for rank in ranks) == list(range(24)), partition
        assert len({len(ranks) for ranks in partition}) == 1, partition


def test_experts_are_dealt_out_in_the_data_axes_and_split_in_tp_and_copies_hold_the_same() -> None:
    mesh = {"dp": 2, "pp": 2, "cp": 2, "ep": 2}
    assert sorted(expert_groups(mesh)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(expert_groups({**mesh, "ep": 4})) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert expert_parts({"dp": 2, "tp": 4, "etp": 2}) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert expert_parts({"tp": 2, "dp": 2, "etp": 2}) == [[0, 2], [1, 3]]
    assert expert_parts({"dp": 2, "tp": 2}) == [[0], [1], [2], [3]]
    assert sorted(expert_copies(mesh)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sorted(expert_copies({"dp": 4, "tp": 2, "ep": 2})) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert sorted(expert_copies({"dp": 2, "tp": 2, "ep": 2, "etp": 2})) == [[0], [1], [2], [3]]
    assert sorted(expert_copies({"dp": 2, "tp": 2, "etp": 2})) == [[0, 2], [1, 3]]
    assert sorted(expert_copies({"dp": 2, "tp": 4, "ep": 2, "etp": 2})) == [[0, 2], [1, 3], [4, 6], [5, 7]]


Made = tuple[dict[str, list[int]], list[int]]


def made(world: World, meshes: list[Params]) -> list[Made]:
    """Return this rank's groups by axis, no two of which are one, and its twins."""
    found = []
    for params in meshes:
        groups = make_groups(world, hybrid_of(params, SHAPES["tiny"], world.size))
        world.barrier()
        by_axis = {axis: dist.get_process_group_ranks(group) for axis, group in groups.axes.items()}
        assert len({group.group_name for group in groups.axes.values()}) == len(by_axis), params
        found.append((by_axis, dist.get_process_group_ranks(groups.replica_group)))
        for group in groups.made:
            dist.destroy_process_group(group)
    return found


def test_groups_are_made_as_the_mesh_says(two_ranks: Ranks) -> None:
    """One of all ranks is the world; gradients over cp have one of their own, experts of all ranks no copies."""
    expected: dict[str, tuple[str, int]] = {
        "dp=2": ("dp", 0),
        "cp=2": ("cp dp", 0),
        "dp=2,ep=2": ("dp ep", 4),
        "fsdp=2": ("fsdp edp", 4),
    }
    meshes = [{"mesh": mesh, "experts": experts} for mesh, (_, experts) in expected.items()]
    for found in two_ranks.call("test_axes:made", meshes=meshes):
        assert found == [({axis: [0, 1] for axis in axes.split()}, [0, 1]) for axes, _ in expected.values()]


@pytest.mark.full
def test_four_ranks_stand_where_the_mesh_says(four_ranks: Ranks) -> None:
    whole = [0, 1, 2, 3]
    expected: dict[str, Made] = {
        "dp=2,pp=2": ({"dp": [0, 2], "pp": [0, 1]}, [0, 2]),
        "pp=2,dp=2": ({"pp": [0, 2], "dp": [0, 1]}, [0, 1]),
        "pp=2,tp=2": ({"pp": [0, 2], "tp": [0, 1]}, [0, 1]),
        "fsdp=2,tp=2": ({"fsdp": [0, 2], "tp": [0, 1]}, whole),
        "dp=2,cp=2": ({"dp": whole, "cp": [0, 1]}, whole),
        # experts lie inside the data ranks of one place in tp, and are split inside tp
        "dp=2,tp=2,ep=2": ({"dp": [0, 2], "tp": [0, 1], "ep": [0, 2], "edp": [0, 1]}, whole),
        "dp=2,tp=2,ep=2,etp=2": ({"dp": [0, 2], "tp": [0, 1], "ep": [0, 2], "etp": [0, 1]}, whole),
    }
    for mesh, of_first in expected.items():
        found = four_ranks.call("test_axes:made", meshes=[{"mesh": mesh, "experts": 4 if "ep" in mesh else 0}])
        assert found[0] == [of_first], mesh
