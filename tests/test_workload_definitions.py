"""What is declared of a training step is what its function takes, and what cannot be built is refused by equation."""

import inspect
from collections.abc import Callable

import pytest
from ranks import Ranks

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS as OPERATIONS
from bench.errors import UserError
from bench.params import Param, Value
from bench.runner import load_target
from bench.world import World
from workloads.definitions import COMMON, DEFINITIONS, with_defaults
from workloads.shapes import SHAPES, shape_of
from workloads.training import Options, TrainingStep

OF_NAME = {definition.name.removeprefix("workload."): definition for definition in DEFINITIONS}
TINY = SHAPES["tiny"]
SPLIT = ["tp", "tp_sp", "tp_fsdp"]
OVERRIDES = ["layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "vocabulary"]

EXPERTS_ALONE = ["ep_dispatch", "ep_layer"]
"""No whole steps: they share fewer parameters."""
STEPS = [name for name in OF_NAME if name not in EXPERTS_ALONE]

each_definition = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)


def refusal(name: str, nproc: int, **given: Value) -> str | None:
    definition = OF_NAME[name]
    return definition.refuse(definition.case(given).params, Setting(nproc=nproc, backend="gloo", device="cpu"))


def prepared_by_defaults(world: World, name: str) -> tuple[list[int], list[str], str]:
    """Take two steps of a definition as ``list`` shows it; return what is wrong, its axes and its notes."""
    definition = OF_NAME[name]
    step = load_target(definition.target)(world, **definition.case({}).params)
    assert isinstance(step, TrainingStep) == (name not in EXPERTS_ALONE)
    wrong = []
    for _ in range(2):
        step.reset()
        step.step()
        wrong.append(step.check())
    axes, headline = list(step.describe().details["axes"]), step.describe().headline
    step.close()
    return wrong, axes, headline


def error_of(world: World, name: str, params: dict[str, Value]) -> str:
    """Return in which words a target itself refuses parameters."""
    definition = OF_NAME[name]
    try:
        load_target(definition.target)(world, **{**definition.case({}).params, **params})
    except UserError as error:
        return str(error)
    return ""


def test_every_parallelism_is_there_once() -> None:
    of_layers = ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp_sp", "tp_fsdp"]
    assert list(OF_NAME) == [*of_layers, "ep_dispatch", "ep_layer", "ep_step", "pp", "cp", "hybrid"]
    assert len({definition.target for definition in DEFINITIONS}) == len(DEFINITIONS)


@each_definition
def test_every_target_exists_and_takes_a_world_and_any_parameters(definition: Definition) -> None:
    world, params = inspect.signature(load_target(definition.target)).parameters.values()
    assert world.name == "world"
    assert params.kind is inspect.Parameter.VAR_KEYWORD


@each_definition
def test_every_definition_and_parameter_explains_itself(definition: Definition) -> None:
    assert definition.kind == "workload"
    assert definition.help
    assert all(param.help for param in definition.params)
    assert len({param.name for param in definition.params}) == len(definition.params)


@pytest.mark.parametrize("name", STEPS)
def test_what_all_steps_share_is_declared_of_each(name: str) -> None:
    """A pipeline has microbatches anyway, and so have meshes: they accumulate no others."""
    common = [param for param in COMMON if name not in ("pp", "hybrid") or param.name != "accumulation"]
    assert list(OF_NAME[name].params[: len(common)]) == common


@pytest.mark.parametrize("name", EXPERTS_ALONE)
def test_experts_without_a_step_take_no_parameters_that_would_mean_nothing(name: str) -> None:
    declared = {param.name for param in OF_NAME[name].params}
    assert not declared & {"accumulation", "checkpointing", "aux", "fsdp"}
    assert ("compute" in declared) == (name == "ep_layer")


def test_no_step_bears_the_name_of_an_operation() -> None:
    names = [definition.name.partition(".")[2] for definition in (*OPERATIONS, *DEFINITIONS)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("ddp", ["dp"]),
        ("zero1", ["dp"]),
        ("zero2", ["dp"]),
        ("zero3", ["dp"]),
        ("hsdp", ["replicate", "shard"]),
        ("tp", ["tp"]),
        ("tp_sp", ["tp"]),
        ("tp_fsdp", ["dp", "tp"]),
        ("ep_step", ["dp", "ep"]),
        ("pp", ["pp"]),
        ("cp", ["cp", "dp"]),
    ],
)
def test_the_defaults_of_every_step_run_and_are_right_on_two_ranks(
    two_ranks: Ranks, name: str, axes: list[str]
) -> None:
    assert (
        two_ranks.call("test_workload_definitions:prepared_by_defaults", name=name) == [([0, 0], axes, "step_time")] * 2
    )


# ---- defaults


def test_a_parameter_that_a_case_leaves_out_has_its_default() -> None:
    common = {
        "shape": "tiny",
        "microbatch": 4,
        "recipe": "",
        **dict.fromkeys(OVERRIDES, 0),
        "accumulation": 1,
        "precision": "float32",
        "checkpointing": "none",
        "compute": "real",
    }
    given: dict[str, Value] = {"shape": "tiny", "microbatch": 4}
    assert with_defaults(given) == common
    assert with_defaults(given, "ddp") == {**common, "static_graph": False, "no_sync": False}
    assert with_defaults(given, "hsdp") == {**common, "prefetch": "default", "shard": 0}


def test_names_that_two_steps_share_have_each_steps_own_default() -> None:
    assert with_defaults({}, "pp")["chunks"] == 0
    assert with_defaults({}, "ep_step")["chunks"] == 1


def test_what_is_given_stays_and_what_is_no_ones_default_is_passed_on() -> None:
    given: dict[str, Value] = {"precision": "bfloat16", "layers": 2, "bucket_mb": 1.0, "shard": 2}
    filled = with_defaults(given, "hsdp")
    assert {name: filled[name] for name in given} == given
    assert given == {"precision": "bfloat16", "layers": 2, "bucket_mb": 1.0, "shard": 2}


@each_definition
def test_a_case_of_defaults_and_its_options_are_the_same_as_with_every_default_written_out(
    definition: Definition,
) -> None:
    written_out = {param.name: param.default for param in definition.params}
    name = definition.name.removeprefix("workload.")
    short = with_defaults(definition.case({}).params, name)
    assert {name: short[name] for name in written_out} == written_out
    assert Options.of(short) == Options.of(with_defaults(written_out, name))


@each_definition
def test_an_optional_parameter_is_in_no_id_unless_it_is_set(definition: Definition) -> None:
    """What was measured before a parameter was added keeps its id."""
    plain = definition.case({})
    for param in (param for param in definition.params if param.optional):
        assert param.name not in plain.params
        assert definition.case({param.name: param.default}).id == plain.id
        assert definition.case({param.name: another(param)}).id != plain.id


def another(param: Param) -> Value:
    if param.kind == "bool":
        return not param.default
    if param.choices:
        return next(choice for choice in param.choices if choice != param.default)
    if param.name == "order":
        return "0F0,0B0;1F0,1B0"
    return "timed:5ms" if isinstance(param.default, str) else int(param.default) + 1


# ---- refusals


@pytest.mark.parametrize("nproc", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(OF_NAME.keys() - {"hsdp", "tp_fsdp", "pp"}))
def test_the_defaults_are_refused_on_no_small_power_of_two(name: str, nproc: int) -> None:
    assert refusal(name, nproc) is None


@pytest.mark.parametrize("nproc", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_data_parallelism_takes_any_number_of_ranks(name: str, nproc: int) -> None:
    assert refusal(name, nproc) is None


@each_definition
def test_every_step_refuses_a_model_that_cannot_be_built(definition: Definition) -> None:
    name = definition.name.removeprefix("workload.")
    assert refusal(name, 2, hidden=130) == "hidden(130) % heads(4) != 0"
    assert refusal(name, 2, kv_heads=3) == "heads(4) % kv_heads(3) != 0"
    assert refusal(name, 2, vocabulary=1) == "vocabulary(1) < 2: one word leaves nothing to predict"
    assert refusal(name, 2, recipe="llama", hidden=12, heads=4) == (
        "hidden(12) / heads(4) % 2 != 0: llama's RoPE turns pairs"
    )


@pytest.mark.parametrize("name", [name for name in OF_NAME if name != "ep_dispatch"])
def test_every_step_that_computes_refuses_compute_in_other_words(name: str) -> None:
    told = refusal(name, 2, compute="fast")
    assert told == "compute = 'fast' is not allowed: compute is real or timed:DURATION, such as timed:20ms"
    assert refusal(name, 2, compute="timed:20 apples") is not None
    assert refusal(name, 2, compute="timed:20ms") is None


@pytest.mark.parametrize("name", ["tp", "tp_sp"])
@pytest.mark.parametrize(
    ("nproc", "given", "told"),
    [
        (3, {}, "heads(4) % tp(3) != 0"),
        (8, {}, "heads(4) % tp(8) != 0"),
        (4, {"kv_heads": 2}, "kv_heads(2) % tp(4) != 0"),
        (4, {"shape": "tiny-llama"}, "kv_heads(2) % tp(4) != 0"),
        (4, {"ffn": 514}, "ffn(514) % tp(4) != 0"),
        (2, {"ffn": 513}, "ffn(513) % tp(2) != 0"),
        (4, {}, None),
        (2, {"kv_heads": 2, "ffn": 514}, None),
        (1, {"heads": 1, "hidden": 7, "kv_heads": 1, "ffn": 3}, None),
    ],
)
def test_a_layer_that_does_not_divide_is_refused_with_its_numbers(
    name: str, nproc: int, given: dict[str, Value], told: str | None
) -> None:
    assert refusal(name, nproc, **given) == told


def test_the_hidden_size_divides_where_heads_do() -> None:
    """It is heads times their size; the equation is there for whoever lets it be otherwise."""
    for nproc in (1, 2, 4, 8):
        for heads in (4, 8):
            told = refusal("tp", nproc, hidden=heads * 3, heads=heads, kv_heads=heads, ffn=64)
            assert told == (f"heads({heads}) % tp({nproc}) != 0" if heads % nproc else None)


def test_a_sequence_that_does_not_divide_is_refused_only_where_it_is_split() -> None:
    assert refusal("tp_sp", 4, sequence=66) == "sequence(66) % tp(4) != 0"
    assert refusal("tp_sp", 2, sequence=66) is None
    assert refusal("tp", 4, sequence=66) is None
    assert refusal("tp_fsdp", 4, sequence=67) is None


def test_heads_are_refused_before_the_sequence() -> None:
    assert refusal("tp_sp", 3, sequence=64) == "heads(4) % tp(3) != 0"


@pytest.mark.parametrize(
    ("nproc", "tp", "told"),
    [
        (1, 2, "dp(0) * tp(2) != world size(1)"),
        (3, 2, "dp(1) * tp(2) != world size(3)"),
        (4, 3, "dp(1) * tp(3) != world size(4)"),
        (8, 8, "heads(4) % tp(8) != 0"),
        (6, 3, "heads(4) % tp(3) != 0"),
        (8, 2, None),
        (8, 4, None),
        (3, 1, None),
    ],
)
def test_a_mesh_of_tensor_and_data_ranks_is_the_world(nproc: int, tp: int, told: str | None) -> None:
    assert refusal("tp_fsdp", nproc, tp=tp) == told


@pytest.mark.parametrize(
    ("nproc", "shard", "told"),
    [
        (1, 0, "replicate(0) * shard(2) != world size(1)"),
        (3, 0, "replicate(1) * shard(2) != world size(3)"),
        (4, 3, "replicate(1) * shard(3) != world size(4)"),
        (2, 4, "replicate(0) * shard(4) != world size(2)"),
        (7, 0, "replicate(2) * shard(3) != world size(7)"),
        (6, 0, None),
        (8, 0, None),
        (4, 1, None),
        (4, 4, None),
    ],
)
def test_a_mesh_of_shards_and_replicas_is_the_world(nproc: int, shard: int, told: str | None) -> None:
    assert refusal("hsdp", nproc, shard=shard) == told


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("shape", "huge", "shape"),
        ("precision", "float8", "precision"),
        ("checkpointing", "some", "checkpointing"),
        ("recipe", "bert", "recipe"),
        *((name, -1, name) for name in OVERRIDES),
        ("microbatch", 0, "microbatch"),
        ("accumulation", 0, "accumulation"),
    ],
)
@each_definition
def test_a_value_that_is_none_of_a_parameters_is_refused_by_name(
    definition: Definition, name: str, value: Value, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        definition.case({name: value})


@pytest.mark.parametrize(
    ("step", "name", "value"), [("ddp", "bucket_mb", 0), ("tp_fsdp", "tp", 0), ("zero3", "prefetch", "some")]
)
def test_so_is_one_of_a_steps_own(step: str, name: str, value: Value) -> None:
    with pytest.raises(UserError, match=name):
        OF_NAME[step].case({name: value})


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_size_of_0_is_the_shapes(name: str) -> None:
    assert getattr(shape_of({"shape": "tiny", name: 0}), name) == getattr(TINY, name)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("ddp", {"hidden": 130}, "hidden(130) % heads(4) != 0"),
        ("zero3", {"compute": "fast"}, "compute = 'fast' is not allowed"),
        ("ddp", {"checkpointing": "some"}, "checkpointing = 'some' is not allowed"),
    ],
)
def test_what_is_not_refused_before_is_refused_by_the_target_in_the_same_words(
    two_ranks: Ranks, name: str, params: dict[str, Value], told: str
) -> None:
    for error in two_ranks.call("test_workload_definitions:error_of", name=name, params=params):
        assert error.startswith(told)


def test_refusing_needs_no_more_than_a_setting() -> None:
    refuse: Callable[..., str | None] = OF_NAME["tp"].refuse
    assert refuse({"shape": "tiny"}, Setting(nproc=3, backend="nccl", device="cuda")) == "heads(4) % tp(3) != 0"
