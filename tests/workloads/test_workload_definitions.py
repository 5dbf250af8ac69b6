"""What is declared of a training step is what its function takes, and what cannot be built is refused by equation."""

import inspect
from dataclasses import replace

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition
from parbench.bench.plan.catalogue import DEFINITIONS as OPERATIONS
from parbench.bench.plan.params import Value
from parbench.bench.rank.runner import load_target
from parbench.bench.text import UserError
from parbench.bench.world.world import World
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.costs.parameter_table import layer_weights, num_parameters
from parbench.workloads.model.shapes import COMPUTE, MODEL, SHAPES, Shape, parse_compute, shape_of
from tests.support.ranks import Ranks
from tests.support.training_steps import DEFINITION_BY_NAME, count_wrong_after_step

OVERRIDES = ["layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "vocabulary"]
EXPERTS_ALONE = ["ep_dispatch", "ep_layer"]
"""No whole steps: they share fewer parameters."""
AXES = {
    **{key: ["dp"] for key in ["ddp", "zero1", "fsdp"]},
    "hsdp": ["replicate", "shard"],
    **{key: ["tp"] for key in ["tp", "tp_sp"]},
    "tp_fsdp": ["dp", "tp"],
    "ep_step": ["dp", "ep"],
    "pp": ["pp"],
    "cp": ["cp", "dp"],
}


def refusal(name: str, nproc: int, **given: Value) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    return definition.refuse(
        definition.whole(given), WorldSpec(nproc=nproc, backend="gloo", device="cpu")
    )


OF_MODEL = Definition(name="workload.x", target="x:x", help="", params=tuple(MODEL))


def asked(**given: Value) -> Shape:
    return shape_of(OF_MODEL.whole(given))


def prepared_by_defaults(world: World) -> dict[str, tuple[list[int], list[str], str]]:
    """Take two steps of each definition as ``list`` shows it; return what is wrong, its axes and its headline."""
    found = {}
    for name in AXES:
        step = load_target(DEFINITION_BY_NAME[name].target)(
            world, **DEFINITION_BY_NAME[name].whole({})
        )
        wrong = [count_wrong_after_step(step) for _ in range(2)]
        found[name] = wrong, list(step.describe().details["axes"]), step.describe().headline
        step.close()
    return found


def test_every_parallelism_is_declared_once_and_takes_a_world_and_its_parameters() -> None:
    of_layers = ["ddp", "zero1", "fsdp", "hsdp", "tp", "tp_sp", "tp_fsdp"]
    assert list(DEFINITION_BY_NAME) == [*of_layers, *EXPERTS_ALONE, "ep_step", "pp", "cp", "hybrid"]
    assert len({definition.target for definition in DEFINITIONS}) == len(DEFINITIONS)
    names = [definition.name.partition(".")[2] for definition in (*OPERATIONS, *DEFINITIONS)]
    assert len({*names}) == len(names), "a step bears the name of an operation"
    for name, definition in DEFINITION_BY_NAME.items():
        world, params = inspect.signature(load_target(definition.target)).parameters.values()
        assert (world.name, params.kind) == ("world", inspect.Parameter.VAR_KEYWORD), name
        assert definition.help, name
        assert all(param.help for param in definition.params), name
        assert len({param.name for param in definition.params}) == len(definition.params), name


@pytest.mark.full
def test_the_defaults_of_every_step_run_and_are_right_on_two_ranks(two_ranks: Ranks) -> None:
    expected = {name: ([0, 0], axes, "step_time") for name, axes in AXES.items()}
    assert (
        two_ranks.call("tests.workloads.test_workload_definitions:prepared_by_defaults")
        == [expected] * 2
    )


def test_a_model_that_cannot_be_built_is_refused_by_every_step() -> None:
    refused: list[tuple[str, dict[str, Value]]] = [
        ("hidden(130) % heads(4) != 0", {"hidden": 130}),
        ("heads(4) % kv_heads(3) != 0", {"kv_heads": 3}),
        ("vocabulary(1) < 2: one word leaves nothing to predict", {"vocabulary": 1}),
        (
            "hidden(12) / heads(4) % 2 != 0: llama's RoPE turns pairs",
            {"recipe": "llama", "hidden": 12, "heads": 4},
        ),
    ]
    fast = "compute = 'fast' is not allowed: compute is real or timed:DURATION, such as timed:20ms"
    for name in DEFINITION_BY_NAME:
        for told, given in refused:
            assert refusal(name, 2, **given) == told, name
        if name != "ep_dispatch":
            assert refusal(name, 2, compute="fast") == fast, name
            assert refusal(name, 2, compute="timed:20 apples") is not None, name
            assert refusal(name, 2, compute="timed:20ms") is None, name


def test_what_does_not_divide_among_the_ranks_is_refused_with_its_numbers_and_nothing_else_is() -> (
    None
):
    for name, nproc in [
        (name, nproc) for name in ("ddp", "zero1", "fsdp") for nproc in (1, 2, 3, 7, 8)
    ]:
        assert refusal(name, nproc) is None, (name, nproc)
    for name, nproc in [
        (name, nproc)
        for name in DEFINITION_BY_NAME
        if name not in ("hsdp", "tp_fsdp", "pp")
        for nproc in (1, 4)
    ]:
        assert refusal(name, nproc) is None, (name, nproc)
    layers: list[tuple[int, dict[str, Value], str | None]] = [
        (3, {}, "heads(4) % tp(3) != 0"),
        (8, {}, "heads(4) % tp(8) != 0"),
        (4, {"kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        (4, {"shape": "tiny-llama"}, "kv_heads(2) % tp(4) != 0"),
        (2, {"ffn": 513}, "ffn(513) % tp(2) != 0"),
        (2, {"kv_heads": 2, "ffn": 514}, None),
        (1, {"heads": 1, "hidden": 7, "kv_heads": 1, "ffn": 3}, None),
    ]
    for name, (nproc, given, told) in [
        (name, layer) for name in ("tp", "tp_sp") for layer in layers
    ]:
        assert refusal(name, nproc, **given) == told, (name, nproc, given)
    assert refusal("tp_sp", 4, sequence=66) == "sequence(66) % tp(4) != 0"
    assert refusal("tp_sp", 2, sequence=66) is refusal("tp", 4, sequence=66) is None
    assert refusal("tp_fsdp", 4, sequence=67) is None
    refuse = DEFINITION_BY_NAME["tp"].refuse
    assert (
        refuse({"shape": "tiny"}, WorldSpec(nproc=3, backend="nccl", device="cuda"))
        == "heads(4) % tp(3) != 0"
    )


def test_steps_that_gloo_does_not_carry_on_gpus_are_refused() -> None:
    spec = WorldSpec(nproc=2, backend="gloo", device="cuda")
    refused = {
        name: one.refuse(one.whole({"shape": "tiny"}), spec)
        for name, one in DEFINITION_BY_NAME.items()
    }
    assert {name for name, told in refused.items() if told is None} == {
        "ddp",
        "zero1",
        "ep_dispatch",
    }
    for name, told in refused.items():
        assert told is None or told.startswith("gloo carries no CUDA tensors in what " + name), told
    cp = DEFINITION_BY_NAME["cp"]
    carried = {"ulysses": None, "allgather_kv": None, "ring": "gloo", "usp": "gloo"}
    for method, expected in carried.items():
        told = cp.refuse(cp.whole({"shape": "tiny", "method": method}), spec)
        assert (told and told[:4]) == expected, method


def test_a_mesh_of_two_axes_is_the_world() -> None:
    for nproc, tp, told in [
        (1, 2, "dp(0) * tp(2) != world size(1)"),
        (3, 2, "dp(1) * tp(2) != world size(3)"),
        (8, 8, "heads(4) % tp(8) != 0"),
        (8, 2, None),
        (3, 1, None),
    ]:
        assert refusal("tp_fsdp", nproc, tp=tp) == told, (nproc, tp)
    for nproc, shard, told in [
        (1, 0, "replicate(0) * shard(2) != world size(1)"),
        (3, 0, "replicate(1) * shard(2) != world size(3)"),
        (4, 3, "replicate(1) * shard(3) != world size(4)"),
        (7, 0, "replicate(2) * shard(3) != world size(7)"),
        (6, 0, None),
        (4, 1, None),
        (4, 4, None),
    ]:
        assert refusal("hsdp", nproc, shard=shard) == told, (nproc, shard)


def test_a_step_computes_or_waits_for_a_duration() -> None:
    for text, seconds in {
        "real": None,
        "timed:20ms": 0.02,
        "timed:1s": 1.0,
        "timed:0.5ms": 0.0005,
    }.items():
        assert parse_compute(text) == pytest.approx(seconds), text
    for text in ("", "fake", "timed", "20ms", "Real", "real:20ms"):
        with pytest.raises(
            UserError, match=r"compute = .* is not allowed: compute is real or timed:DURATION"
        ):
            parse_compute(text)
    for text in ("timed:", "timed:0ms", "timed:-1s", "timed:soon"):
        with pytest.raises(UserError, match="duration"):
            parse_compute(text)
    assert (COMPUTE.default, COMPUTE.optional) == ("real", True)


def test_a_shape_is_its_name_and_what_one_changes_of_it() -> None:
    assert {name: asked(shape=name) for name in SHAPES} == SHAPES
    assert asked() == SHAPES["tiny"]
    assert {name: getattr(shape_of({"shape": "tiny", name: 0}), name) for name in OVERRIDES} == {
        name: getattr(SHAPES["tiny"], name) for name in OVERRIDES
    }
    sizes = dict(zip(OVERRIDES, (3, 60, 6, 3, 7, 5, 11), strict=True))
    assert asked(recipe="llama", **sizes) == replace(SHAPES["tiny"], recipe="llama", **sizes)  # type: ignore[arg-type]
    assert [asked(shape="tiny-llama", recipe=recipe).recipe for recipe in ("gpt", "")] == [
        "gpt",
        "llama",
    ]
    assert asked(hidden=12, heads=4).head_size == 3, "an odd head is fine where nothing turns"
    assert OF_MODEL.whole({"layers": 0}) == {
        "shape": "tiny",
        "recipe": "",
        **dict.fromkeys(OVERRIDES, 0),
    }
    with pytest.raises(UserError, match="did you mean 'llama3-8b'"):
        asked(shape="llama-8b")


def test_what_is_not_given_keeps_the_shapes_proportion() -> None:
    cases: list[tuple[dict[str, Value], tuple[int, int]]] = [
        ({"hidden": 32}, (128, 4)),
        ({"heads": 8}, (512, 8)),
        ({"shape": "tiny-llama", "heads": 8}, (352, 4)),
        ({"shape": "tiny-llama", "heads": 1}, (352, 1)),
        ({"shape": "tiny-llama", "hidden": 256}, (704, 2)),
        ({"hidden": 32, "ffn": 5}, (5, 4)),
    ]
    for given, expected in cases:
        assert (asked(**given).ffn, asked(**given).kv_heads) == expected, given


def test_named_shapes_are_as_large_as_published_and_split_over_two_ranks() -> None:
    """GPT-2's 124.4 M are with a tied head, which is 50257 * 768 more here, and with 12 * 768 biases of keys."""
    assert num_parameters(SHAPES["gpt2"]) / 1e6 == pytest.approx(124.4 + 38.6, abs=0.1)
    assert (
        num_parameters(SHAPES["llama3-8b"]) == 8_030_261_248
    )  # as the published checkpoints' indices sum to
    assert num_parameters(SHAPES["llama3-70b"]) == 70_553_706_496
    assert all(2e6 < num_parameters(SHAPES[name]) < 6e6 for name in ("small", "small-llama"))
    for name, shape in SHAPES.items():
        assert {size % 2 for size in (shape.heads, shape.kv_heads, shape.ffn, shape.sequence)} == {
            0
        }, name


def test_flops_per_token_are_palms() -> None:
    """6 N + 12 L H Q T by hand: GPT-2's layers are 12 * 12 h^2, its head h * V, its attention 12 * 12 * 768 * 1024."""
    assert layer_weights(SHAPES["gpt2"]) == 12 * 768**2
    assert (
        flops_per_token(SHAPES["gpt2"])
        == 6 * (12 * 12 * 768**2 + 768 * 50257) + 12 * 12 * 768 * 1024
    )
    assert flops_per_token(asked(sequence=128)) - flops_per_token(asked()) == 12 * 4 * 128 * 64
    saved = flops_per_token(asked(recipe="llama")) - flops_per_token(
        asked(recipe="llama", kv_heads=1)
    )
    assert saved == 6 * 4 * 2 * 128 * (128 - 32), "fewer key heads save weights and no attention"
