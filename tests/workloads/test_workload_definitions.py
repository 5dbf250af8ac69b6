"""Each definition is a mesh and a few settings, or is refused with the rule that it breaks."""

import inspect
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, load_target
from parbench.bench.plan.catalogue import DEFINITIONS as OPERATIONS
from parbench.bench.plan.params import Value
from parbench.bench.text import UserError
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import MODEL, SHAPES, Shape, build_shape
from parbench.workloads.presets import PRESETS
from tests.support.workloads.training_steps import DEFINITION_BY_NAME, Params

every_definition = pytest.mark.parametrize("name", DEFINITION_BY_NAME)


def refuse(name: str, ranks: int, device: str = "cpu", **params: Any) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    world = WorldSpec(nproc=ranks, backend="gloo", device=device)
    return definition.refuse(definition.complete(params), world)


def test_names_are_unique() -> None:
    names = [definition.name.partition(".")[2] for definition in (*OPERATIONS, *DEFINITIONS)]
    assert len(set(names)) == len(names)


@every_definition
def test_definition_matches_its_function(name: str) -> None:
    definition = DEFINITION_BY_NAME[name]
    world, params = inspect.signature(load_target(definition.target)).parameters.values()
    assert world.name == "world"
    assert params.kind == inspect.Parameter.VAR_KEYWORD
    assert definition.help
    assert all(param.help for param in definition.params)


@every_definition
def test_impossible_models_are_refused(name: str) -> None:
    assert "hidden(130) % heads(4) != 0" in str(refuse(name, 2, hidden=130))
    assert "heads(4) % kv_heads(3) != 0" in str(refuse(name, 2, kv_heads=3))
    assert "vocabulary(1) < 2" in str(refuse(name, 2, vocabulary=1))
    message = refuse(name, 2, recipe="llama", hidden=12, heads=4)
    assert "hidden(12) / heads(4) % 2 != 0" in str(message)
    if any(param.name == "compute" for param in DEFINITION_BY_NAME[name].params):
        assert "compute = 'fast'" in str(refuse(name, 2, compute="fast"))


@every_definition
def test_gloo_limits_on_gpus(name: str) -> None:
    """Gloo has only all-reduce and broadcast of CUDA tensors."""
    message = refuse(name, 2, device="cuda", shape="tiny")
    is_allowed = name in ("ddp", "zero1", "ep_dispatch")
    assert (message is None) == is_allowed
    assert is_allowed or "gloo" in str(message)


def make_shape(**params: Value) -> Shape:
    definition = BenchmarkDefinition(
        name="workload.x", target="x:x", help="", params=tuple(MODEL)
    )
    return build_shape(definition.complete(params))


def test_shape_is_named_or_changed() -> None:
    sizes: dict[str, Any] = {"layers": 3, "hidden": 60, "heads": 6, "kv_heads": 3, "ffn": 7}
    assert make_shape() == SHAPES["tiny"]
    assert make_shape(shape="small") == SHAPES["small"]
    assert make_shape(**sizes) == replace(SHAPES["tiny"], **sizes)
    with pytest.raises(UserError, match="llama3-8b"):
        make_shape(shape="llama-8b")


@pytest.mark.parametrize(
    ("params", "ffn", "kv_heads"),
    [
        ({"hidden": 32}, 128, 4),
        ({"heads": 8}, 512, 8),
        ({"shape": "tiny-llama", "heads": 8}, 352, 4),
        ({"shape": "tiny-llama", "hidden": 256}, 704, 2),
        ({"hidden": 32, "ffn": 5}, 5, 4),
    ],
)
def test_shape_keeps_proportions(params: Params, ffn: int, kv_heads: int) -> None:
    shape = make_shape(**params)
    assert shape.ffn == ffn
    assert shape.kv_heads == kv_heads


def build(name: str, ranks: int, **params: Any) -> StepSpec:
    return PRESETS[name](DEFINITION_BY_NAME[name].complete(params), ranks)


@pytest.mark.parametrize(
    ("name", "params", "mesh"),
    [
        ("ddp", {}, "dp=8"),
        ("hsdp", {}, "dp=2,fsdp=4"),
        ("tp_fsdp", {}, "fsdp=4,tp=2"),
        ("pp", {"layers": 8}, "pp=8"),
        ("cp", {"sequence": 128}, "cp=8"),
        ("ep_step", {}, "dp=8,ep=8"),
        ("hybrid", {"mesh": "fsdp=2,tp=4,ep=2,etp=1", "experts": 8}, "fsdp=2,tp=4,ep=2"),
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
        ("hybrid", 4, {"mesh": "dp=2,fsdp=3"}, "dp(2) * fsdp(3) != world size(4)"),
        ("cp", 8, {"sequence": 68}, "sequence(68) % cp(8) != 0"),
        (
            "ddp",
            2,
            {"checkpointing": "all"},
            "checkpointing = 'all' is not allowed: choose none",
        ),
        ("ddp", 2, {"checkpointing": "full:9", "layers": 8}, "full:9 > layers(8)"),
        ("ddp", 2, {"checkpointing": "full:0"}, "checkpointing = 'full:0'"),
        ("ddp", 2, {"compute": "timed:1ms"}, "simulated:20ms"),
        ("cp", 2, {"compute": "simulated:1ms"}, "compute = simulated"),
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
        ("pp=8", {}, "layers(4) < pp(8) * virtual_stages(1)"),
        ("cp=4,tp=2", {"cp_method": "ulysses"}, "heads(4) / tp(2) % cp(4) != 0"),
        (
            "dp=4,tp=2,ep=2",
            {"experts": 8, "sequence_parallel": False},
            "sequence_parallel = true",
        ),
        ("pp=2,fsdp=4", {"schedule": "zb_h1"}, "not allowed with fsdp > 1"),
        ("pp=2,dp=4", {"schedule": "zb_h1", "checkpointing": "full"}, "checkpointing = full"),
    ],
)
def test_impossible_mesh_is_refused(mesh: str, params: dict[str, Any], message: str) -> None:
    assert message in str(refuse("hybrid", 8, mesh=mesh, **params))
