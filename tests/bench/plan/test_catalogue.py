"""What can be measured, its ids and names, the words in which a world refuses it, and presets, each larger."""

import itertools
import json
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal as error_of

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case, Definition, load_catalogue, make_case, matches, select
from parbench.bench.plan.catalogue import DEFINITIONS, DTYPES
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param, Value
from parbench.bench.plan.plan import PRESETS, Plan
from parbench.cli import DEFINITIONS as MODULES

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "all_reduce_two_step")
PAIRS = ("pingpong", "unidirectional", "bidirectional", "matrix")
WHOLE = (
    "all_reduce",
    "broadcast",
    "sendrecv",
    "all_to_all_v",
    "all_gather_v",
    "reduce",
    "copy",
    "to_device",
    "from_device",
    "pairwise",
    *PAIRS,
)
SIZELESS = ("barrier", "gemm")
JOINING = ("all_reduce", "reduce_scatter", "reduce", "all_reduce_two_step")
ONE_CALL = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_to_all_v", "reduce", "gather", "scatter")
GB = 1_000_000_000


def gloo(nproc: int = 4, rank_bytes: int | None = None) -> WorldSpec:
    return WorldSpec(nproc=nproc, backend="gloo", device="cpu", rank_bytes=rank_bytes)


def nccl(nproc: int = 4, rank_bytes: int | None = None) -> WorldSpec:
    return WorldSpec(nproc=nproc, backend="nccl", device="cuda", rank_bytes=rank_bytes)


def refusal(name: str, spec: WorldSpec, **params: object) -> str | None:
    definition = BY_NAME[name]
    return definition.refuse(definition.whole(params), spec)


def expanded(name: str, spec: WorldSpec, *keys: str, **params: Any) -> list[tuple[Any, ...]]:
    """Return these parameters of the cases that are made of what is given."""
    return [tuple(case.get(key) for key in keys) for case in BY_NAME[name].expand(params, spec)]


def test_every_definition_explains_itself_and_its_parameters_accept_their_defaults() -> None:
    assert sorted(BY_NAME) == sorted((*SHARDED, *WHOLE, *SIZELESS)), "every operation is held by a test below"
    assert len(BY_NAME) == len(DEFINITIONS)
    for name, definition in BY_NAME.items():
        assert definition.help
        for param in definition.params:
            assert param.help, (name, param.name)
            assert param.parse(param.default) == param.parse(str(param.default)) == param.default, (name, param.name)
    assert BY_NAME["all_to_all"].target == "parbench.bench.operations.collectives:all_to_all"
    assert BY_NAME["sendrecv"].target == "parbench.bench.operations.p2p:sendrecv"
    rooted = [name for name, definition in BY_NAME.items() if any(p.name == "root" for p in definition.params)]
    assert rooted == ["broadcast", "reduce", "gather", "scatter"]


def test_defaults_run_on_any_power_of_two_of_ranks() -> None:
    for name, nproc in itertools.product(BY_NAME, [1, 2, 4, 8]):
        expected = "target 1 is not one of the 1 ranks" if name in PAIRS and nproc == 1 else None
        assert refusal(name, gloo(nproc)) == refusal(name, nccl(nproc)) == expected, (name, nproc)


def test_reductions_that_a_type_cannot_hold_are_refused_in_words() -> None:
    for name in JOINING:
        assert refusal(name, gloo(), dtype="bool") == "the sum of bool is no bool: use redop=max, min or product"
        assert refusal(name, gloo(), dtype="int32", redop="avg") == "the average of int32 is no int32"
        assert refusal(name, gloo(), dtype="bool", redop="max", size_bytes=64) is None
        assert refusal(name, gloo(), dtype="bfloat16", redop="avg", size_bytes=64) is None
    for n, other in ((190, 191), (199, 198), (300, 301)):
        told = refusal("all_reduce", gloo(n), dtype="bfloat16", redop="avg")
        assert told == f"the average of {n} ranks cannot be told from that of {other} in bfloat16"
    for n in (96, 128, 189, 256):
        assert refusal("all_reduce", gloo(n), dtype="bfloat16", redop="avg") is None
    for n in (96, 1000, 1024):
        assert refusal("all_reduce", gloo(n), dtype="float16", redop="avg") is None
    for n, told in ((2, None), (3, "the average of 3 ranks is not exact in float8_e4m3fn"), (8, None)):
        assert refusal("all_reduce", nccl(n), dtype="float8_e4m3fn", redop="avg") == told


def test_an_average_of_one_rank_is_refused_on_nccl_which_leaves_elements_out() -> None:
    assert "NCCL before 2.29.7" in str(refusal("all_reduce", nccl(1), redop="avg"))
    assert refusal("all_reduce", nccl(1)) is refusal("all_reduce", nccl(2), redop="avg") is None
    assert refusal("all_reduce", gloo(1), redop="avg") is None


def test_float8_is_refused_on_gloo_in_words_and_carried_by_nccl() -> None:
    for dtype in DTYPES:
        expected = f"gloo carries no {dtype}" if dtype.startswith("float8") else None
        assert refusal("all_gather", gloo(), dtype=dtype) == expected
        assert refusal("all_gather", nccl(), dtype=dtype) is None


def test_what_gloo_does_not_carry_between_gpus_is_refused_with_what_does() -> None:
    spec = WorldSpec(nproc=2, backend="gloo", device="cuda")
    remedy = "use --backend nccl with a GPU for each rank, or --device cpu"
    for name in ("sendrecv", "pairwise", *PAIRS):
        assert refusal(name, spec) == f"gloo sends no CUDA tensors from one rank to another: {remedy}"
    for name in ("all_reduce", *SHARDED, "broadcast", "reduce", "all_gather_v", "all_to_all_v", "barrier"):
        assert refusal(name, spec) is None, name
        assert str(refusal(name, spec, mode="graph")).startswith("mode graph"), name
    assert refusal("copy", spec) is refusal("reduce_scatter", spec, mode="coalesced") is None
    for name in ("all_reduce", "all_gather"):
        told = refusal(name, spec, mode="coalesced")
        assert told == f"mode coalesced: gloo coalesces {name} of CPU tensors alone: {remedy}"


def test_a_mode_that_an_operation_does_not_have_is_refused_in_words() -> None:
    assert refusal("all_reduce", gloo(), mode="graph") == "mode graph needs CUDA; this is cpu"
    assert refusal("all_reduce", nccl(), mode="graph") is None
    assert refusal("barrier", nccl(), mode="graph") == "mode graph: the host waits in a barrier, which no graph holds"
    loaded = "mode graph: nothing else may run while a graph is captured, and background is gemm"
    assert refusal("all_reduce", nccl(), mode="graph", background="gemm") == loaded
    assert refusal("all_reduce", nccl(), mode="pipelined", background="gemm") is None
    several = "is several calls, or has no asynchronous form"
    apart = {"placement": "out_of_place"}
    for name, more in (("pingpong", {}), ("all_reduce_two_step", {}), ("barrier", {}), ("all_reduce", apart)):
        assert refusal(name, nccl(), mode="async", **more) == f"mode async: {name} {several}"
        assert refusal(name, nccl(), mode="coalesced", **more) == f"mode coalesced: nccl cannot coalesce {name}"
    for name in ("all_reduce", *ONE_CALL):
        assert refusal(name, nccl(), mode="async") is None, name
        assert refusal(name, nccl(), mode="coalesced") is None, name
        carried = name in ("all_reduce", "all_gather", "reduce_scatter")
        expected = None if carried else f"mode coalesced: gloo cannot coalesce {name}"
        assert refusal(name, gloo(), mode="coalesced") == expected
    for name in ("sendrecv", "unidirectional", "bidirectional", "matrix", "pairwise"):
        assert refusal(name, nccl(), mode="async") is None, name
        assert refusal(name, nccl(), mode="coalesced") == f"mode coalesced: nccl cannot coalesce {name}"
    told = refusal("pairwise", gloo(), mode="async", direction="in_turn")
    assert told == "mode async: pairwise with direction=in_turn is several calls"


def test_a_group_that_the_world_cannot_form_is_refused_with_the_equation() -> None:
    assert error_of(refusal, "all_reduce", gloo(), group="dp=2 tp=4:tp") == "dp(2) * tp(4) != world size(4)"
    told = error_of(refusal, "all_reduce", gloo(), group="pairs", group_index=2)
    assert told == "group_index 2 is not one of the 2 groups of 'pairs'"
    alone = refusal("all_reduce", gloo(), group="dp=4 tp=1:tp")
    assert alone == "group 'dp=4 tp=1:tp' has one rank: nothing moves"


def test_groups_pairs_and_rounds_are_measured_one_by_one_unless_it_is_said_which() -> None:
    group = ("group_index", "concurrent")
    made = expanded("all_reduce", gloo(), *group, group="pairs")
    assert made == [(0, False), (1, False), (0, True), (1, True)]
    assert expanded("all_reduce", gloo(), *group, group="contiguous:4") == [(0, False)]
    assert expanded("all_reduce", gloo(), *group, group="pairs", group_index=1, concurrent=True) == [(1, True)]
    assert list(BY_NAME["all_reduce"].expand({}, gloo())) == [{}]
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert expanded("matrix", gloo(3), "source", "target") == pairs
    assert expanded("matrix", gloo(3), "source", "target", source=1) == pairs[2:4]
    assert expanded("pairwise", gloo(4), "round") == [(0,), (1,), (2,)]
    assert expanded("pairwise", gloo(5), "round") == [(0,), (1,), (2,), (3,), (4,)]
    for given_params in ({"round": 2}, {"pairs": "0-2"}):
        assert list(BY_NAME["pairwise"].expand(given_params, gloo())) == [given_params]


def test_a_rank_a_round_or_a_row_that_there_is_not_is_refused_in_words() -> None:
    for name, params, told in (
        ("broadcast", {"root": 3}, None),
        ("broadcast", {"root": 4}, "root 4 is not one of the 4 ranks"),
        ("pingpong", {"source": 1, "target": 1}, "source 1 and target 1 are one rank"),
        ("pingpong", {"source": 4}, "source 4 is not one of the 4 ranks"),
        ("pairwise", {"round": 3}, "round 3 is not one of the 3 rounds of 4 ranks, 0 to 2"),
        ("pairwise", {"pairs": "0-4"}, "pairs '0-4': rank 4 is not one of the 4 ranks"),
        ("pairwise", {"pairs": "0-3 1-2"}, None),
        ("all_to_all_v", {"traffic": "1 2;3 4"}, "traffic has 2 rows; 4 ranks need 4"),
    ):
        assert refusal(name, gloo(4), **params) == told, (name, params)
    assert refusal("all_to_all_v", gloo(2), traffic="1 2;3 4") is None


def test_what_tells_measurements_of_a_round_apart_is_left_out_where_there_is_one() -> None:
    definition = BY_NAME["pairwise"]
    assert definition.case({"repeat": 0}).id == definition.case({}).id != definition.case({"repeat": 1}).id
    assert "pairs" not in definition.case({}).params


def test_a_size_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    for name, size, told in (
        ("all_reduce", 1001, "size 1001 B is not a multiple of 4 B (float32); nearest are 1000 and 1004"),
        ("all_gather", 1002, "size 1002 B is not a multiple of 4 ranks x 4 B (float32); nearest are 992 and 1008"),
        ("all_reduce", 2, "size 2 B is not a multiple of 4 B (float32); the least is 4"),
        ("all_gather", 4, "size 4 B is not a multiple of 4 ranks x 4 B (float32); the least is 16"),
    ):
        assert refusal(name, gloo(4), size_bytes=size) == told
    table = itertools.product((*SHARDED, *WHOLE), ("float16", "float64"), (998, 1008, 4096), (2, 3))
    for name, dtype, size, nproc in table:
        unit = DTYPES[dtype].itemsize * (nproc if name in SHARDED else 1)
        reason = refusal(name, gloo(nproc), size_bytes=size, dtype=dtype)
        assert (reason is None) == (size % unit == 0), (name, dtype, size, nproc)


def test_a_size_that_does_not_fit_in_memory_is_refused_with_both_amounts() -> None:
    for name in (*SHARDED, *WHOLE):
        expected = "size 1G needs about 6.4 GB a rank; a rank can have 2.0 GB"
        assert refusal(name, gloo(4, rank_bytes=2 * GB), size_bytes="1G") == expected, name
    needed = (1 << 20) * 6
    assert refusal("all_reduce", gloo(2, rank_bytes=needed), size_bytes="1M") is None
    assert refusal("all_reduce", gloo(2, rank_bytes=needed - 1), size_bytes="1M") is not None
    assert refusal("all_reduce", gloo(2, rank_bytes=None), size_bytes="1T") is None


EVERYTHING = load_catalogue(MODULES)
ALIKE = {"zero1", "hsdp", "tp", "ep_dispatch", "ep_layer", "hybrid"}  # of whose kind there is another
STEPS = {*ALIKE, "ddp", "fsdp", "tp_sp", "tp_fsdp", "pp", "cp", "ep_step"}
SELDOM = {"all_gather_v", "matrix", "pairwise", "gemm", "to_device", "from_device"}
OMITTED = {
    "smoke": {*SELDOM, *ALIKE},
    "node": {*SELDOM, *STEPS} - {"ddp"},
    "full": set[str](),
}
REFUSED_AT_3 = {
    **dict.fromkeys(("tp", "tp_sp"), "heads(4) % tp(3) != 0"),
    **dict.fromkeys(("ep_dispatch", "ep_layer", "ep_step"), "experts(8) % ep(3) != 0"),
    "hsdp": "replicate(1) * shard(2) != world size(3)",
    "tp_fsdp": "dp(1) * tp(2) != world size(3)",
    "pp": "layers(4) % stages(3) != 0: split = 2+1+... says how many each stage takes",
    "cp": "sequence(64) % cp(3) != 0",
}
"""Which training steps of the tiny shape cannot be divided among three ranks, and the equation."""


def plan(preset: str, backend: str = "gloo", nproc: int = 2) -> Plan:
    device = "cpu" if backend == "gloo" else "cuda"
    return make_plan(Options(preset=preset), EVERYTHING, WorldSpec(nproc=nproc, backend=backend, device=device))


def short(name: str) -> str:
    return name.partition(".")[2]


def test_every_preset_measures_every_operation_and_step_but_what_it_omits() -> None:
    assert list(PRESETS) == list(OMITTED)
    assert {short(definition.name) for definition in EVERYTHING if definition.name.startswith("workload.")} == STEPS
    for preset, omitted in OMITTED.items():
        planned = plan(preset)
        wanted = {short(definition.name) for definition in EVERYTHING} - omitted
        assert {short(case.name) for case in planned.cases} == wanted, preset
        assert preset == "full" or planned.skipped == ()
        for entry in PRESETS[preset].entries:
            for definition in select(EVERYTHING, [entry.name]):
                assert set(entry.set) <= {param.name for param in definition.params}, (preset, entry)


def test_only_what_cannot_be_divided_grouped_or_carried_is_skipped_with_the_reason() -> None:
    for nproc, refused in {2: {}, 3: REFUSED_AT_3, 4: {}}.items():
        planned = plan("full", "nccl", nproc)
        assert {short(case.name) for case in planned.cases} >= STEPS - refused.keys(), nproc
        steps = {short(entry.case.name): entry.reason for entry in planned.skipped if short(entry.case.name) in STEPS}
        assert steps == refused, nproc
        others = [entry for entry in planned.skipped if short(entry.case.name) not in STEPS]
        groups = {"across", "pairs"} if nproc % 2 else {"across"}
        assert {entry.case.params.get("group") for entry in others} == groups, nproc
        assert all("2 nodes" in entry.reason or "% 2 != 0" in entry.reason for entry in others)
    on_gloo = [entry for entry in plan("full").skipped if "group" not in entry.case.params]
    facts = {(entry.reason, entry.case.params["dtype"], entry.case.params["size_bytes"]) for entry in on_gloo}
    assert facts == {("gloo carries no float8_e4m3fn", "float8_e4m3fn", 1 << 20)}
    assert len(on_gloo) == 6  # the main operations


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(-1e30, 1e30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
PARAMS = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6)


@settings(deadline=None, max_examples=50)
@given(PARAMS, st.sampled_from("abcdef"), VALUES, st.randoms(use_true_random=False))
def test_the_id_is_of_the_values_whatever_their_order_and_is_given_again_to_what_is_read_back(
    params: dict[str, Value], name: str, value: Value, random: Random
) -> None:
    case = make_case("n", "t:f", params)
    shuffled = list(params.items())
    random.shuffle(shuffled)
    assert make_case("n", "t:f", dict(shuffled)).id == case.id
    changed = {**params, name: value}
    same = json.dumps(changed, sort_keys=True) == json.dumps(params, sort_keys=True)
    assert (make_case("n", "t:f", changed).id == case.id) == same
    read = msgspec.json.decode(msgspec.json.encode(case), type=Case)
    assert read == case
    assert make_case(read.name, read.target, read.params).id == case.id


def test_case_id_differs_for_values_that_compare_equal() -> None:
    values: list[Value] = [1, True, 1.0, "1", 0, False, ""]
    cases = [
        *(make_case("n", "t:f", {"x": value}) for value in values),
        make_case("m", "t:f", {}),
        make_case("n", "t:g", {}),
        make_case("n", "t:f", {}),
    ]
    assert len({case.id for case in cases}) == len(cases)


def test_a_definition_makes_the_same_case_from_text_and_from_values_and_refuses_nothing_unless_told() -> None:
    params = (Param(name="batch", kind="int", default=2, help="samples", minimum=1),)
    definition = Definition(name="step.mine", target="mine:prepare", help="for a test", params=params)
    assert definition.case({"batch": "3"}) == definition.case({"batch": 3}) != definition.case({})
    assert definition.case({}) == definition.case({"batch": 2}) == make_case("step.mine", "mine:prepare", {"batch": 2})
    assert definition.refuse({"batch": 1}, WorldSpec(nproc=1, backend="gloo", device="cpu")) is None
    assert error_of(definition.case, {"bach": 3}).startswith("step.mine has no parameter 'bach'")


def test_patterns_select_their_union_in_catalogue_order_and_none_selects_everything() -> None:
    """A pattern without a dot is held against the part after the dot."""
    fitting = ["collective.all_reduce", "collective.*", "all_reduce", "all_*", "*"]
    for pattern in [*fitting, "p2p.*", "collective", "reduce", "COLLECTIVE.*"]:
        assert matches("collective.all_reduce", pattern) is (pattern in fitting), pattern
    assert select(DEFINITIONS, []) == load_catalogue(["parbench.bench.plan.catalogue"]) == DEFINITIONS
    names = [definition.name for definition in select(DEFINITIONS, ["p2p.s*", "all_reduce", "collective.all_re*"])]
    assert names == ["collective.all_reduce", "collective.all_reduce_two_step", "p2p.sendrecv"]


def test_an_unknown_case_is_refused_with_the_nearest_name_and_where_to_look() -> None:
    for pattern, hint in (("al_reduce", "; did you mean 'all_reduce'?"), ("nothing_like_it", ""), ("step.*", "")):
        words = error_of(select, DEFINITIONS, ["collective.*", pattern])
        assert words == f"no case is named {pattern!r}{hint} (parbench list shows what can be measured)"


def test_ranks_sit_on_nodes_as_they_are_placed() -> None:
    for nodes, placement, hosts in ((1, "block", "000000"), (2, "block", "000111"), (3, "cyclic", "012012")):
        spec = WorldSpec(nproc=6, backend="gloo", device="cpu", nodes=nodes, placement=placement)
        assert "".join(spec.hosts) == hosts, (nodes, placement)
