"""A mesh gives each rank a coordinate and groups, and refuses sizes that do not divide."""

import pytest

from parbench.bench.plan.groups import form_groups
from parbench.bench.text import UserError
from parbench.workloads.mesh.dims import ParallelDims

DIMS = ParallelDims(dp=2, pp=3, cp=2, tp=2, ep=2)


def test_mesh_keeps_order_of_axes() -> None:
    dims = ParallelDims.parse("pp=2,dp=2,tp=2")
    assert dims.order == ("pp", "dp", "tp", "fsdp", "cp")
    assert dims.label == "pp=2,dp=2,tp=2"
    assert ParallelDims.parse("", 8) == ParallelDims(dp=8)
    with pytest.raises(UserError, match="dp, fsdp"):
        ParallelDims.parse("fdsp=8")


def test_innermost_axis_varies_fastest() -> None:
    origin = {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert DIMS.coordinate(0) == origin
    assert DIMS.coordinate(1) == {**origin, "tp": 1}
    assert DIMS.coordinate(2) == {**origin, "cp": 1}


@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_groups_are_those_of_collectives(axis: str) -> None:
    expected = form_groups(f"dp=2 pp=3 cp=2 tp=2:{axis}", 24)
    assert sorted(DIMS.groups(axis)) == sorted(map(list, expected))


def test_groups_along_two_axes() -> None:
    ranks = DIMS.groups("dp", "cp")[0]
    assert ranks == [0, 2, 12, 14]
    assert [DIMS.index(rank, "dp", "cp") for rank in ranks] == [0, 1, 2, 3]
    assert DIMS.groups("cp", "dp")[0] == [0, 12, 2, 14]


def test_fsdp_shards_over_cp() -> None:
    dims = ParallelDims(dp=2, fsdp=2, cp=2)
    assert dims.groups(*dims.shard_axes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dims.shard_size == 4
    assert dims.replica_axes == ("dp",)
    assert ParallelDims(dp=2, cp=2).replica_axes == ("dp", "cp")


@pytest.mark.parametrize(
    ("mesh", "axis", "groups"),
    [
        ("dp=2,pp=2,cp=2,ep=2", "ep", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("dp=2,pp=2,cp=2,ep=2", "edp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("dp=2,pp=2,cp=2,ep=4", "ep", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("dp=2,tp=4,ep=8", "edp", [[rank] for rank in range(8)]),
        ("dp=2,tp=4,ep=2", "edp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("dp=2,tp=4,ep=2,etp=2", "ep", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("dp=2,tp=4,etp=2", "etp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("tp=2,dp=2,etp=2", "etp", [[0, 2], [1, 3]]),
        ("dp=2,fsdp=4,ep=2", "efsdp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("dp=2,fsdp=4,ep=2", "edp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_expert_groups(mesh: str, axis: str, groups: list[list[int]]) -> None:
    """Experts span dp, cp and tp. Neighbors of tp split them, and shards stay in a replica."""
    assert sorted(ParallelDims.parse(mesh).expert_groups(axis)) == groups


@pytest.mark.parametrize(
    ("mesh", "experts", "rule"),
    [
        ("dp=2,tp=2", 0, "dp(2) * tp(2) != world size(8)"),
        ("dp=8,ep=2", 0, "ep(2) > 1 without experts"),
        ("dp=4,tp=2,etp=4", 8, "tp(2) % etp(4) != 0"),
        ("dp=8,ep=8", 12, "experts(12) % ep(8) != 0"),
        ("dp=4,fsdp=2,ep=4", 8, "(fsdp(2) * cp(1) * tp(1)) % (ep(4)) != 0"),
    ],
)
def test_dims_name_the_broken_rule(mesh: str, experts: int, rule: str) -> None:
    assert rule in str(ParallelDims.parse(mesh).find_broken_rule(8, experts))
    assert ParallelDims.parse("dp=2,tp=4,ep=8").find_broken_rule(8, 8) is None
