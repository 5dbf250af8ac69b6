"""The catalogue: what can be measured, what a world refuses, case ids, selection and presets."""

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case, Definition, load_catalogue, make_case, matches, select
from parbench.bench.plan.catalogue import DEFINITIONS, DTYPES
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param, Value
from parbench.bench.plan.plan import PRESETS, Plan
from parbench.cli import DEFINITIONS as MODULES
from tests.support.refusals import usage_error as error_of

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
SHARDED = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "all_reduce_two_step"}
PAIRS = {"pingpong", "unidirectional", "bidirectional", "matrix"}
SENDING = {*PAIRS, "sendrecv", "pairwise"}
SIZED = [name for name, definition in BY_NAME.items() if "size_bytes" in definition.case({}).params]
GB = 1_000_000_000


def gloo(nproc: int = 4, rank_bytes: int | None = None) -> WorldSpec:
    return WorldSpec(nproc=nproc, backend="gloo", device="cpu", rank_bytes=rank_bytes)


def nccl(nproc: int = 4) -> WorldSpec:
    return WorldSpec(nproc=nproc, backend="nccl", device="cuda")


def refusal(name: str, spec: WorldSpec, **params: object) -> str | None:
    definition = BY_NAME[name]
    return definition.refuse(definition.whole(params), spec)


def expand(name: str, spec: WorldSpec, *keys: str, **params: Any) -> list[tuple[Any, ...]]:
    """Return the values of ``keys`` in each case that the given parameters expand to."""
    return [tuple(case.get(key) for key in keys) for case in BY_NAME[name].expand(params, spec)]


def test_definitions_have_help_and_valid_defaults() -> None:
    assert len(BY_NAME) == len(DEFINITIONS)
    for name, definition in BY_NAME.items():
        assert definition.help
        for param in definition.params:
            assert param.help, (name, param.name)
            assert param.parse(param.default) == param.default, (name, param.name)
            assert param.parse(str(param.default)) == param.default, (name, param.name)


@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_defaults_run_on_powers_of_two(nproc: int) -> None:
    for name in BY_NAME:
        is_refused = name in PAIRS and nproc == 1
        assert bool(refusal(name, gloo(nproc))) is is_refused, name
        assert bool(refusal(name, nccl(nproc))) is is_refused, name


def test_reduction_refuses_inexact_types() -> None:
    for name in ("all_reduce", "reduce_scatter", "reduce", "all_reduce_two_step"):
        assert "sum of bool" in str(refusal(name, gloo(), dtype="bool"))
        assert "average of int32" in str(refusal(name, gloo(), dtype="int32", redop="avg"))
        assert refusal(name, gloo(), dtype="bool", redop="max", size_bytes=64) is None
        assert refusal(name, gloo(), dtype="bfloat16", redop="avg", size_bytes=64) is None


def test_average_refuses_rank_counts_that_round() -> None:
    def refused(dtype: str, rank_counts: list[int]) -> list[int]:
        params = {"dtype": dtype, "redop": "avg"}
        return [n for n in rank_counts if refusal("all_reduce", nccl(n), **params)]

    assert refused("bfloat16", [96, 128, 189, 190, 199, 256, 300]) == [190, 199, 300]
    assert refused("float16", [96, 1000, 1024]) == []
    assert refused("float8_e4m3fn", [2, 3, 8]) == [3]
    assert "from that of 191 in" in str(
        refusal("all_reduce", nccl(190), dtype="bfloat16", redop="avg")
    )


def test_average_of_one_rank_is_refused_on_nccl() -> None:
    assert "2.29.7" in str(refusal("all_reduce", nccl(1), redop="avg"))
    assert refusal("all_reduce", nccl(1)) is None
    assert refusal("all_reduce", nccl(2), redop="avg") is None
    assert refusal("all_reduce", gloo(1), redop="avg") is None


def test_float8_is_refused_on_gloo_only() -> None:
    for dtype in DTYPES:
        assert bool(refusal("all_gather", gloo(), dtype=dtype)) is dtype.startswith("float8")
        assert refusal("all_gather", nccl(), dtype=dtype) is None


def test_gloo_between_gpus_refuses_sends() -> None:
    spec = WorldSpec(nproc=2, backend="gloo", device="cuda")
    for name in BY_NAME:
        message = refusal(name, spec)
        assert bool(message) is (name in SENDING), name
        assert not message or "--backend nccl" in message
    assert "mode graph" in str(refusal("all_reduce", spec, mode="graph"))
    assert refusal("reduce_scatter", spec, mode="coalesced") is None
    for name in ("all_reduce", "all_gather"):
        assert "mode coalesced" in str(refusal(name, spec, mode="coalesced"))


def test_mode_graph_refuses_what_cannot_be_captured() -> None:
    for name, spec, background, is_refused in (
        ("all_reduce", nccl(), "nothing", False),
        ("all_reduce", gloo(), "nothing", True),
        ("barrier", nccl(), "nothing", True),
        ("all_reduce", nccl(), "gemm", True),
    ):
        message = refusal(name, spec, mode="graph", background=background)
        assert str(message).startswith("mode graph") is is_refused, (name, spec, background)
    assert refusal("all_reduce", nccl(), mode="pipelined", background="gemm") is None


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MODES: list[tuple[str, dict[str, str], bool, bool]] = [
    *((name, {}, True, True) for name in (*COLLECTIVES, "reduce", "gather", "scatter")),
    ("all_to_all_v", {}, True, True),
    *((name, {}, True, False) for name in sorted(SENDING - {"pingpong"})),
    ("pingpong", {}, False, False),
    ("all_reduce_two_step", {}, False, False),
    ("barrier", {}, False, False),
    ("all_reduce", {"placement": "out_of_place"}, False, False),
    ("pairwise", {"direction": "in_turn"}, False, False),
]


@pytest.mark.parametrize(("name", "params", "has_async", "coalesces"), MODES)
def test_async_and_coalesced_modes(
    name: str, params: dict[str, str], has_async: bool, coalesces: bool
) -> None:
    asynchronous = refusal(name, nccl(), mode="async", **params)
    assert asynchronous is None if has_async else str(asynchronous).startswith("mode async")
    on_nccl = refusal(name, nccl(), mode="coalesced", **params)
    assert on_nccl is None if coalesces else str(on_nccl).startswith("mode coalesced")
    on_gloo = refusal(name, gloo(), mode="coalesced", **params)
    gloo_coalesces = coalesces and name in ("all_reduce", "all_gather", "reduce_scatter")
    assert on_gloo is None if gloo_coalesces else str(on_gloo).startswith("mode coalesced")


def test_impossible_groups_are_refused() -> None:
    equation = error_of(refusal, "all_reduce", gloo(), group="dp=2 tp=4:tp")
    assert equation == "dp(2) * tp(4) != world size(4)"
    message = error_of(refusal, "all_reduce", gloo(), group="pairs", group_index=2)
    assert "group_index 2" in message
    assert "one rank" in str(refusal("all_reduce", gloo(), group="dp=4 tp=1:tp"))


def test_groups_pairs_and_rounds_expand_to_cases() -> None:
    keys = ("group_index", "concurrent")
    cases = expand("all_reduce", gloo(), *keys, group="pairs")
    assert cases == [(0, False), (1, False), (0, True), (1, True)]
    assert expand("all_reduce", gloo(), *keys, group="contiguous:4") == [(0, False)]
    chosen = {"group": "pairs", "group_index": 1, "concurrent": True}
    assert expand("all_reduce", gloo(), *keys, **chosen) == [(1, True)]
    assert list(BY_NAME["all_reduce"].expand({}, gloo())) == [{}]
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert expand("matrix", gloo(3), "source", "target") == pairs
    assert expand("matrix", gloo(3), "source", "target", source=1) == pairs[2:4]
    assert expand("pairwise", gloo(4), "round") == [(0,), (1,), (2,)]
    assert expand("pairwise", gloo(5), "round") == [(0,), (1,), (2,), (3,), (4,)]
    for params in ({"round": 2}, {"pairs": "0-2"}):
        assert list(BY_NAME["pairwise"].expand(params, gloo())) == [params]


@pytest.mark.parametrize(
    ("name", "params", "fact"),
    [
        ("broadcast", {"root": 4}, "root 4"),
        ("pingpong", {"source": 1, "target": 1}, "source 1 and target 1"),
        ("pingpong", {"source": 4}, "source 4"),
        ("pairwise", {"round": 3}, "round 3"),
        ("pairwise", {"pairs": "0-4"}, "rank 4"),
        ("all_to_all_v", {"traffic": "1 2;3 4"}, "2 rows"),
    ],
)
def test_absent_ranks_are_refused(name: str, params: dict[str, object], fact: str) -> None:
    assert fact in str(refusal(name, gloo(4), **params))


def test_present_ranks_are_accepted() -> None:
    assert refusal("broadcast", gloo(4), root=3) is None
    assert refusal("pairwise", gloo(4), pairs="0-3 1-2") is None
    assert refusal("all_to_all_v", gloo(2), traffic="1 2;3 4") is None


def test_pairwise_id_ignores_defaults() -> None:
    definition = BY_NAME["pairwise"]
    assert definition.case({"repeat": 0}).id == definition.case({}).id
    assert definition.case({"repeat": 1}).id != definition.case({}).id
    assert "pairs" not in definition.case({}).params


def test_indivisible_size_is_refused_with_the_nearest() -> None:
    for name, size, nearest in (
        ("all_reduce", 1001, "nearest are 1000 and 1004"),
        ("all_gather", 1002, "nearest are 992 and 1008"),
        ("all_reduce", 2, "the least is 4"),
        ("all_gather", 4, "the least is 16"),
    ):
        assert str(refusal(name, gloo(4), size_bytes=size)).endswith(nearest)
    assert len(SIZED) > len(SHARDED)
    for name in SIZED:
        unit = 3 * 2 if name in SHARDED else 2
        for size in (999, 1000, 1002):
            message = refusal(name, gloo(3), size_bytes=size, dtype="float16")
            assert (message is None) is (size % unit == 0), (name, size)


def test_size_beyond_memory_is_refused_with_both_amounts() -> None:
    for name in SIZED:
        message = refusal(name, gloo(4, rank_bytes=2 * GB), size_bytes="1G")
        assert "6.4 GB" in str(message), name
        assert "2.0 GB" in str(message), name
    needed = (1 << 20) * 6
    assert refusal("all_reduce", gloo(2, rank_bytes=needed), size_bytes="1M") is None
    assert refusal("all_reduce", gloo(2, rank_bytes=needed - 1), size_bytes="1M") is not None
    assert refusal("all_reduce", gloo(2, rank_bytes=None), size_bytes="1T") is None


EVERYTHING = load_catalogue(MODULES)
FULL_ONLY_STEPS = {"zero1", "hsdp", "tp", "ep_dispatch", "ep_layer", "hybrid"}
STEPS = {*FULL_ONLY_STEPS, "ddp", "fsdp", "tp_sp", "tp_fsdp", "pp", "cp", "ep_step"}
FULL_ONLY = {"all_gather_v", "matrix", "pairwise", "gemm", "to_device", "from_device"}
OMITTED = {
    "smoke": FULL_ONLY | FULL_ONLY_STEPS,
    "node": (FULL_ONLY | STEPS) - {"ddp"},
    "full": set[str](),
}
REFUSED_ON_3_RANKS = {
    "tp": "heads(4) % tp(3) != 0",
    "tp_sp": "heads(4) % tp(3) != 0",
    "ep_dispatch": "experts(8) % ep(3) != 0",
    "ep_layer": "experts(8) % ep(3) != 0",
    "ep_step": "experts(8) % ep(3) != 0",
    "hsdp": "replicate(1) * shard(2) != world size(3)",
    "tp_fsdp": "dp(1) * tp(2) != world size(3)",
    "pp": "layers(4) % stages(3) != 0",
    "cp": "sequence(64) % cp(3) != 0",
}


def plan(preset: str, backend: str = "gloo", nproc: int = 2) -> Plan:
    device = "cpu" if backend == "gloo" else "cuda"
    spec = WorldSpec(nproc=nproc, backend=backend, device=device)
    return make_plan(Options(preset=preset), EVERYTHING, spec)


def short_name(entry: Case | Definition) -> str:
    return entry.name.partition(".")[2]


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_measures_all_but_the_omitted(preset: str) -> None:
    preset_plan = plan(preset)
    expected = {short_name(definition) for definition in EVERYTHING} - OMITTED[preset]
    assert {short_name(case) for case in preset_plan.cases} == expected
    assert preset == "full" or preset_plan.skipped == ()
    for entry in PRESETS[preset].entries:
        for definition in select(EVERYTHING, [entry.name]):
            assert set(entry.set) <= {param.name for param in definition.params}, entry


@pytest.mark.parametrize(("nproc", "refused"), [(2, {}), (3, REFUSED_ON_3_RANKS), (4, {})])
def test_full_preset_skips_what_cannot_be_divided(nproc: int, refused: dict[str, str]) -> None:
    full = plan("full", "nccl", nproc)
    assert {short_name(case) for case in full.cases} >= STEPS - refused.keys()
    steps = [entry for entry in full.skipped if short_name(entry.case) in STEPS]
    reasons = {short_name(entry.case): entry.reason.partition(":")[0] for entry in steps}
    assert reasons == refused
    groups = {entry.case.params.get("group") for entry in full.skipped if entry not in steps}
    assert groups == ({"across", "pairs"} if nproc % 2 else {"across"})


def test_full_preset_skips_float8_on_gloo() -> None:
    skipped = [entry.case for entry in plan("full").skipped if "group" not in entry.case.params]
    assert len(skipped) == 6  # the main operations
    assert {case.params["dtype"] for case in skipped} == {"float8_e4m3fn"}


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(-1e30, 1e30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
PARAMS = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6)


@settings(deadline=None, max_examples=50)
@given(PARAMS, st.sampled_from("abcdef"), VALUES, st.randoms(use_true_random=False))
def test_case_id_depends_on_the_values_only(
    params: dict[str, Value], name: str, value: Value, random: Random
) -> None:
    case = make_case("n", "t:f", params)
    shuffled = list(params.items())
    random.shuffle(shuffled)
    assert make_case("n", "t:f", dict(shuffled)).id == case.id
    changed = {**params, name: value}
    is_same = json.dumps(changed, sort_keys=True) == json.dumps(params, sort_keys=True)
    assert (make_case("n", "t:f", changed).id == case.id) == is_same
    decoded = msgspec.json.decode(msgspec.json.encode(case), type=Case)
    assert decoded == case
    assert make_case(decoded.name, decoded.target, decoded.params).id == case.id


def test_case_id_differs_for_values_that_compare_equal() -> None:
    values: list[Value] = [1, True, 1.0, "1", 0, False, ""]
    cases = [
        *(make_case("n", "t:f", {"x": value}) for value in values),
        make_case("m", "t:f", {}),
        make_case("n", "t:g", {}),
        make_case("n", "t:f", {}),
    ]
    assert len({case.id for case in cases}) == len(cases)


def test_definition_parses_text_and_refuses_unknown_names() -> None:
    param = Param(name="batch", kind="int", default=2, help="samples", minimum=1)
    definition = Definition(name="step.mine", target="mine:f", help="a step", params=(param,))
    assert definition.case({"batch": "3"}) == definition.case({"batch": 3})
    assert definition.case({}) == make_case("step.mine", "mine:f", {"batch": 2})
    assert definition.refuse({"batch": 1}, gloo(1)) is None
    assert "no parameter 'bach'" in error_of(definition.case, {"bach": 3})


def test_patterns_match_with_or_without_prefix() -> None:
    matching = ["collective.all_reduce", "collective.*", "all_reduce", "all_*", "*"]
    for pattern in [*matching, "p2p.*", "collective", "reduce", "COLLECTIVE.*"]:
        assert matches("collective.all_reduce", pattern) is (pattern in matching), pattern
    assert select(DEFINITIONS, []) == DEFINITIONS
    patterns = ["p2p.s*", "all_reduce", "collective.all_re*"]
    names = [short_name(definition) for definition in select(DEFINITIONS, patterns)]
    assert names == ["all_reduce", "all_reduce_two_step", "sendrecv"]


def test_unknown_case_is_refused_with_the_nearest() -> None:
    message = error_of(select, DEFINITIONS, ["collective.*", "al_reduce"])
    assert "no case is named 'al_reduce'; did you mean 'all_reduce'?" in message
    assert "mean" not in error_of(select, DEFINITIONS, ["nothing_like_it"])


def test_ranks_are_placed_on_nodes() -> None:
    for nodes, placement, hosts in (
        (1, "block", "000000"),
        (2, "block", "000111"),
        (3, "cyclic", "012012"),
    ):
        spec = WorldSpec(nproc=6, backend="gloo", device="cpu", nodes=nodes, placement=placement)
        assert "".join(spec.hosts) == hosts, (nodes, placement)
