"""Each preset is a mesh and a few settings, or is refused with the equation that it breaks."""

from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.presets import PRESETS, add_experts

DEFINITION_BY_NAME = {definition.short_name: definition for definition in DEFINITIONS}
EIGHT_RANKS = WorldSpec(nproc=8, backend="gloo", device="cpu")


def build(name: str, ranks: int, **params: Any) -> StepSpec:
    return PRESETS[name](DEFINITION_BY_NAME[name].complete(params), ranks)


def refuse(name: str, ranks: int, **params: Any) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    world = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
    return definition.refuse(definition.complete(params), world)


@pytest.mark.parametrize(
    ("name", "params", "mesh"),
    [
        ("ddp", {}, "dp=8"),
        ("fsdp", {}, "fsdp=8"),
        ("hsdp", {}, "dp=2,fsdp=4"),
        ("hsdp", {"mesh": "dp=4,fsdp=2"}, "dp=4,fsdp=2"),
        ("tp_fsdp", {}, "fsdp=4,tp=2"),
        ("pp", {"layers": 8}, "pp=8"),
        ("cp", {"sequence": 128}, "cp=8"),
        ("ep_step", {}, "dp=8,ep=8"),
        ("ep_step", {"tp": 4, "ep": 2, "etp": 1, "fsdp": True}, "fsdp=2,tp=4,ep=2"),
        ("hybrid", {"mesh": "pp=2,dp=2,tp=2"}, "pp=2,dp=2,tp=2"),
        ("hybrid", {"mesh": "dp=4,tp=2,ep=4", "experts": 8}, "dp=4,tp=2,ep=4,etp=2"),
        ("hybrid", {"mesh": "dp=4,tp=2,ep=8,etp=1", "experts": 8}, "dp=4,tp=2,ep=8"),
    ],
)
def test_preset_has_mesh(name: str, params: dict[str, Any], mesh: str) -> None:
    assert build(name, 8, **params).dims.label == mesh


@pytest.mark.parametrize(("name", "microbatches"), [("ddp", 1), ("pp", 8), ("hybrid", 4)])
def test_preset_has_default_microbatches(name: str, microbatches: int) -> None:
    assert build(name, 2).microbatches == microbatches


def test_defaults_are_what_people_train_with() -> None:
    """Float32 reduction in the last microbatch, torch's buckets, sequence parallelism."""
    spec = build("hybrid", 8, precision="bfloat16", mesh="dp=2,cp=2,tp=2")
    assert spec.reduce_bytes == 4
    assert spec.no_sync
    assert spec.bucket_bytes == 0
    assert spec.sequence_parallel
    assert not build("tp", 2).sequence_parallel
    assert build("zero1", 2).zero1 == "distributed"


@pytest.mark.parametrize(
    ("name", "ranks", "params", "message"),
    [
        ("tp", 3, {}, "heads(4) % tp(3) != 0"),
        ("tp_sp", 4, {"kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        ("tp", 2, {"ffn": 513}, "ffn(513) % tp(2) != 0"),
        ("tp_sp", 4, {"sequence": 66}, "sequence(66) % tp(4) != 0"),
        ("tp_fsdp", 3, {"tp": 2}, "tp(2) != world size(3)"),
        ("hsdp", 4, {"mesh": "dp=2,fsdp=3"}, "dp(2) * fsdp(3) != world size(4)"),
        ("hsdp", 4, {"mesh": "dp=2,tp=2"}, "axes of hybrid"),
        ("cp", 8, {"sequence": 68}, "sequence(68) % cp(8) != 0"),
        ("ddp", 2, {"checkpointing": "all"}, "checkpointing 'all' is not none"),
        ("ddp", 2, {"checkpointing": "full:0"}, "checkpointing 'full:0'"),
        ("ddp", 2, {"compute": "timed:1ms"}, "simulated:20ms"),
        ("ep_step", 4, {"etp": 2, "tp": 1}, "tp(1) % etp(2) != 0"),
    ],
)
def test_impossible_preset_is_refused(
    name: str, ranks: int, params: dict[str, Any], message: str
) -> None:
    assert message in str(refuse(name, ranks, **params))


@pytest.mark.parametrize(
    ("mesh", "params", "message"),
    [
        ("tp=8", {}, "heads(4) % tp(8) != 0"),
        ("pp=8", {}, "layers(4) < pp(8) * chunks(1)"),
        ("cp=4,tp=2", {"cp_method": "ulysses"}, "heads(4) / tp(2) % cp(4) != 0"),
        (
            "dp=4,tp=2,ep=2",
            {"experts": 8, "sequence_parallel": False},
            "sequence_parallel = true",
        ),
        ("pp=2,fsdp=4", {"schedule": "zb_h1"}, "fsdp(4)"),
        ("pp=2,dp=4", {"schedule": "zb_h1", "checkpointing": "full"}, "schedule = zb_h1"),
    ],
)
def test_impossible_mesh_is_refused(mesh: str, params: dict[str, Any], message: str) -> None:
    assert message in str(refuse("hybrid", 8, mesh=mesh, **params))


def test_mesh_with_ep_has_experts_by_default() -> None:
    [expanded] = add_experts({"mesh": "dp=4,ep=2"}, EIGHT_RANKS)
    assert expanded["experts"] == 8
    [dense] = add_experts({"mesh": "dp=4,ep=1"}, EIGHT_RANKS)
    assert "experts" not in dense
