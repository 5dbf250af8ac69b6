"""A mesh gives each rank a coordinate and groups, and refuses a step that does not fit."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.groups import groups_of
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.axes import (
    along,
    coordinate_of,
    expert_copies,
    expert_groups,
    expert_parts,
    groups_along,
    mesh_of,
    multiplied,
    with_experts,
)
from parbench.workloads.model.shapes import SHAPES
from tests.support.mesh_steps import HYBRID

MESH = {"dp": 2, "pp": 3, "cp": 2, "tp": 2, "ep": 2}
TINY = SHAPES["tiny"]


def test_mesh_keeps_order_of_axes() -> None:
    assert list(mesh_of("pp=2,dp=2,tp=2", 8).items()) == [("pp", 2), ("dp", 2), ("tp", 2)]
    assert mesh_of("", 8) == {"dp": 8}
    assert multiplied(MESH) == {"dp": 2, "pp": 3, "cp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("rank", "coordinate"),
    [
        (0, {}),
        (1, {"tp": 1}),
        (2, {"cp": 1}),
        (23, {"dp": 1, "pp": 2, "cp": 1, "tp": 1}),
    ],
)
def test_innermost_axis_varies_fastest(rank: int, coordinate: dict[str, int]) -> None:
    origin = {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert coordinate_of(MESH, rank) == {**origin, **coordinate}


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
def test_groups_are_those_of_collectives(axis: str) -> None:
    expected = groups_of(f"dp=2 pp=3 cp=2 tp=2:{axis}", 24)
    assert sorted(groups_along(MESH, axis)) == sorted(map(list, expected))


def test_groups_along_two_axes() -> None:
    first = groups_along(MESH, "dp", "cp")[0]
    assert first == [0, 2, 12, 14]
    assert [along(coordinate_of(MESH, rank), MESH, "dp", "cp") for rank in first] == [0, 1, 2, 3]
    assert groups_along(MESH, "cp", "dp")[0] == [0, 12, 2, 14]


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ({"dp": 2, "pp": 2, "cp": 2, "ep": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"dp": 2, "pp": 2, "cp": 2, "ep": 4}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_experts_are_distributed_over_data_axes(
    mesh: dict[str, int], groups: list[list[int]]
) -> None:
    assert sorted(expert_groups(mesh)) == groups


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ({"dp": 2, "tp": 4, "etp": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"tp": 2, "dp": 2, "etp": 2}, [[0, 2], [1, 3]]),
        ({"dp": 2, "tp": 2}, [[0], [1], [2], [3]]),
    ],
)
def test_experts_are_split_over_tp(mesh: dict[str, int], groups: list[list[int]]) -> None:
    assert sorted(expert_parts(mesh)) == groups


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ({"dp": 2, "pp": 2, "cp": 2, "ep": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"dp": 4, "tp": 2, "ep": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"dp": 2, "tp": 2, "etp": 2, "ep": 2}, [[0], [1], [2], [3]]),
        ({"dp": 2, "tp": 4, "etp": 2, "ep": 2}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_expert_replicas_hold_same_part(mesh: dict[str, int], groups: list[list[int]]) -> None:
    assert sorted(expert_copies(mesh)) == groups


@pytest.mark.parametrize(
    ("mesh", "overrides", "equation"),
    [
        ({"fdsp": 2}, {}, "did you mean 'fsdp'"),
        ({"tp": 2, "etp": 2}, {}, "etp(2) > 1 without experts"),
        ({"tp": 4}, {"shape": replace(TINY, heads=2, kv_heads=2)}, "heads(2) % tp(4) != 0"),
        ({"dp": 2, "tp": 2}, {"shape": replace(TINY, ffn=511)}, "ffn(511) % tp(2) != 0"),
        ({"cp": 3}, {}, "sequence(64) % cp(3) != 0"),
        (
            {"cp": 2},
            {"shape": replace(TINY, sequence=66), "cp_method": "zigzag"},
            "sequence(66) % (2 * cp(2)) != 0",
        ),
        (
            {"cp": 2, "tp": 2},
            {"shape": replace(TINY, sequence=66)},
            "sequence(66) % (cp(2) * tp(2)) != 0",
        ),
        ({"cp": 4, "tp": 2}, {"cp_method": "ulysses"}, "heads(4) / tp(2) % cp(4) != 0"),
        ({"cp": 2}, {"cp_method": "rings"}, "did you mean 'ring'"),
        ({"pp": 2}, {"microbatches": 0}, "microbatches(0) < 1"),
        ({"pp": 4}, {"schedule": "interleaved"}, "layers(4) < pp(4) * chunks(2)"),
        (
            {"pp": 2, "fsdp": 2},
            {"schedule": "interleaved", "chunks": 4, "shape": replace(TINY, layers=8)},
            "chunks(4) > 3 with fsdp(2)",
        ),
        ({"dp": 2, "ep": 2}, {}, "ep(2) > 1 without experts"),
    ],
)
def test_impossible_step_is_refused(
    mesh: dict[str, int], overrides: dict[str, Any], equation: str
) -> None:
    params: dict[str, Any] = {"shape": TINY, "microbatches": 4, "cp_method": "ring", **overrides}
    assert equation in str(StepSpec(mesh=mesh, **params).refusal())


@pytest.mark.parametrize(
    ("params", "equation"),
    [
        ({"mesh": "dp=2,tp=2"}, "dp(2) * tp(2) != world size(8)"),
        ({"mesh": "dp=4,tp=2,etp=4", "experts": 8}, "tp(2) % etp(4) != 0"),
        ({"mesh": "dp=2,tp=4,ep=4", "experts": 8}, "(dp(2) * fsdp(1) * cp(1)) % ep(4) != 0"),
        ({"mesh": "dp=8", "experts": 4, "top_k": 5}, "top_k(5) > experts(4)"),
        ({"mesh": "dp=8", "experts": 4, "checkpointing": "selective"}, "checkpointing(selective)"),
        ({"mesh": "pp=2,dp=4", "schedule": "zb_h1", "checkpointing": "full"}, "schedule = zb_h1"),
        ({"mesh": "pp=2,fsdp=4", "schedule": "zb_h1"}, "fsdp(4)"),
        ({"mesh": "pp=2,dp=4", "schedule": "zb_h1", "experts": 4}, "experts(4)"),
    ],
)
def test_impossible_case_is_refused(params: dict[str, Any], equation: str) -> None:
    world_spec = WorldSpec(nproc=8, backend="gloo", device="cpu")
    assert equation in str(HYBRID.refuse(HYBRID.whole(params), world_spec))


@pytest.mark.parametrize(
    "params",
    [
        {"mesh": "pp=2,dp=4", "checkpointing": "selective"},
        {"mesh": "dp=8", "schedule": "zb_h1", "checkpointing": "full"},  # without a pipeline
        {"mesh": "pp=2,fsdp=4"},
        {"mesh": "pp=2,dp=4", "experts": 4, "checkpointing": "full"},
    ],
)
def test_possible_case_is_accepted(params: dict[str, Any]) -> None:
    world_spec = WorldSpec(nproc=8, backend="gloo", device="cpu")
    assert HYBRID.refuse(HYBRID.whole(params), world_spec) is None


@pytest.mark.parametrize(
    ("params", "experts"),
    [
        ({"mesh": "dp=4,ep=2"}, 8),
        ({"mesh": "dp=4,ep=2", "experts": 4}, 4),
        ({"mesh": "tp=4,etp=2"}, 8),
        ({"mesh": "dp=4,ep=1"}, None),
    ],
)
def test_mesh_with_ep_has_experts_by_default(params: dict[str, Any], experts: int | None) -> None:
    [expanded] = with_experts(params, WorldSpec(nproc=4, backend="gloo", device="cpu"))
    assert expanded.get("experts") == experts


def test_mesh_strategy_has_pipeline_and_mixture() -> None:
    dense = strategies.mesh({"mesh": "dp=4,tp=2"}, 8)
    assert dense.pipeline is None
    assert dense.moe is None
    params: dict[str, Any] = {"mesh": "pp=2", "split": "3+1", "schedule": "gpipe"}
    pipeline = strategies.mesh({**params, "microbatches": 6}, 2).pipeline
    assert pipeline is not None
    assert pipeline.layers_by_stage == (3, 1)
    assert pipeline.schedule.name == "gpipe"
    assert pipeline.schedule.microbatches == 6
    moe = strategies.mesh({"mesh": "dp=4,tp=2,ep=4,etp=2", "experts": 8, "top_k": 3}, 8).moe
    assert moe is not None
    assert (moe.ep, moe.etp, moe.tp) == (4, 2, 1)
    assert moe.top_k == 3
    assert moe.experts_per_rank == 2
