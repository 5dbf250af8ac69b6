"""A mesh gives each rank a coordinate and groups, and refuses a step that does not fit."""

from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.groups import form_groups
from parbench.workloads.mesh.axes import (
    along,
    coordinate_of,
    expert_copies,
    expert_groups,
    expert_parts,
    groups_along,
    mesh_of,
    with_experts,
)
from tests.support.mesh_steps import HYBRID

MESH = {"dp": 2, "pp": 3, "cp": 2, "tp": 2, "ep": 2}
WORLD_SPEC = WorldSpec(nproc=8, backend="gloo", device="cpu")
ZB_H1 = {"schedule": "zb_h1"}


def refuse(mesh: str, **params: Any) -> str | None:
    return HYBRID.refuse(HYBRID.complete({"mesh": mesh, **params}), WORLD_SPEC)


def test_mesh_keeps_order_of_axes() -> None:
    assert list(mesh_of("pp=2,dp=2,tp=2", 8)) == ["pp", "dp", "tp"]
    assert mesh_of("", 8) == {"dp": 8}


def test_innermost_axis_varies_fastest() -> None:
    origin = {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert coordinate_of(MESH, 0) == origin
    assert coordinate_of(MESH, 1) == {**origin, "tp": 1}
    assert coordinate_of(MESH, 2) == {**origin, "cp": 1}


@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_groups_are_those_of_collectives(axis: str) -> None:
    expected = form_groups(f"dp=2 pp=3 cp=2 tp=2:{axis}", 24)
    assert sorted(groups_along(MESH, axis)) == sorted(map(list, expected))


def test_groups_along_two_axes() -> None:
    ranks = groups_along(MESH, "dp", "cp")[0]
    assert ranks == [0, 2, 12, 14]
    indices = [along(coordinate_of(MESH, rank), MESH, "dp", "cp") for rank in ranks]
    assert indices == [0, 1, 2, 3]
    assert groups_along(MESH, "cp", "dp")[0] == [0, 12, 2, 14]


def test_experts_are_distributed_over_data_axes() -> None:
    axes = {"dp": 2, "pp": 2, "cp": 2}
    assert sorted(expert_groups({**axes, "ep": 2})) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(expert_groups({**axes, "ep": 4})) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_experts_are_split_over_tp() -> None:
    inner_tp = {"dp": 2, "tp": 4, "etp": 2}
    outer_tp = {"tp": 2, "dp": 2, "etp": 2}
    assert sorted(expert_parts(inner_tp)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(expert_parts(outer_tp)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ("dp=2,pp=2,cp=2,ep=2", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("dp=4,tp=2,ep=2", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("dp=2,tp=4,etp=2,ep=2", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_expert_replicas_hold_same_part(mesh: str, groups: list[list[int]]) -> None:
    assert sorted(expert_copies(mesh_of(mesh, 8))) == groups


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fdsp=8", "did you mean 'fsdp'"),
        ("dp=2,tp=2", "dp(2) * tp(2) != world size(8)"),
        ("tp=8", "heads(4) % tp(8) != 0"),
        ("pp=8", "layers(4) < pp(8) * chunks(1)"),
    ],
)
def test_impossible_mesh_is_refused(mesh: str, message: str) -> None:
    assert message in str(refuse(mesh))


@pytest.mark.parametrize(
    ("mesh", "params", "equation"),
    [
        ("cp=8", {"sequence": 68}, "sequence(68) % cp(8) != 0"),
        ("cp=4,tp=2", {"cp_method": "ulysses"}, "heads(4) / tp(2) % cp(4) != 0"),
        ("dp=4,tp=2,etp=4", {"experts": 8}, "tp(2) % etp(4) != 0"),
        ("dp=2,tp=4,ep=4", {"experts": 8}, "(dp(2) * fsdp(1) * cp(1)) % ep(4) != 0"),
        ("pp=2,fsdp=4", ZB_H1, "fsdp(4)"),
        ("pp=2,dp=4", {**ZB_H1, "checkpointing": "full"}, "schedule = zb_h1"),
    ],
)
def test_impossible_option_is_refused(mesh: str, params: dict[str, Any], equation: str) -> None:
    assert equation in str(refuse(mesh, **params))


def test_mesh_with_ep_has_experts_by_default() -> None:
    [expanded] = with_experts({"mesh": "dp=4,ep=2"}, WORLD_SPEC)
    assert expanded["experts"] == 8
    [dense] = with_experts({"mesh": "dp=4,ep=1"}, WORLD_SPEC)
    assert "experts" not in dense
