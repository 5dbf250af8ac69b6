"""From what the user asked to a plan: products, narrowing, skipping with a reason, refusing in words."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS as EVERYTHING
from bench.errors import UserError
from bench.params import Param
from bench.plan import Plan
from bench.planning import Request, make_plan
from bench.presets import PRESETS, Entry

GLOO = Setting(nproc=2, backend="gloo", device="cpu")
GLOO4 = dataclasses.replace(GLOO, nproc=4)
ALL_REDUCE = "collective.all_reduce"
# six operations that planning is shown with; more would show no more
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
DEFINITIONS = tuple(definition for definition in EVERYTHING if definition.name.partition(".")[2] in NAMES)


def plan(setting: Setting = GLOO, **asked: object) -> Plan:
    """Plan a smoke run unless told otherwise: it is the smallest."""
    return make_plan(Request(**{"preset": "smoke", **asked}), DEFINITIONS, setting)  # type: ignore[arg-type]


def refusal(setting: Setting = GLOO, **asked: object) -> str:
    with pytest.raises(UserError) as caught:
        plan(setting, **asked)
    return str(caught.value)


def test_a_plan_carries_the_setting_and_what_the_preset_decides() -> None:
    made = plan()
    preset = PRESETS["smoke"]
    assert (made.preset, made.nproc, made.backend, made.device) == ("smoke", 2, "gloo", "cpu")
    assert (made.launches, made.budget_seconds, made.timeout_seconds, made.measure) == (
        preset.launches,
        preset.budget_seconds,
        preset.timeout_seconds,
        preset.measure,
    )


def test_what_the_user_says_goes_before_the_preset() -> None:
    made = plan(launches=7, budget_seconds=1.5, timeout_seconds=2.5)
    assert (made.launches, made.budget_seconds, made.timeout_seconds) == (7, 1.5, 2.5)


def test_an_unknown_preset_is_refused_with_the_choices_and_the_nearest() -> None:
    assert refusal(preset="nod") == "no preset is named 'nod': it is smoke, node or full; did you mean 'node'?"


def test_nothing_asked_is_the_node_preset() -> None:
    assert make_plan(Request(), DEFINITIONS, GLOO) == plan(preset="node")


def test_cases_come_in_the_order_of_the_catalogue_and_of_the_values() -> None:
    made = plan(only=("p2p.sendrecv", "all_reduce"), settings={"size_bytes": "4K,1K"})
    assert [(case.name, case.params["size_bytes"]) for case in made.cases] == [
        (ALL_REDUCE, 4096),
        (ALL_REDUCE, 1024),
        ("p2p.sendrecv", 4096),
        ("p2p.sendrecv", 1024),
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["float32", "float64", "int8"]), min_size=1, unique=True),
    st.lists(st.sampled_from(["blocking", "pipelined"]), min_size=1, unique=True),
)
def test_a_plan_holds_the_product_of_all_values(sizes: list[int], dtypes: list[str], modes: list[str]) -> None:
    given_texts = {"size_bytes": ",".join(f"{size}K" for size in sizes), "dtype": ",".join(dtypes)}
    made = plan(only=("all_reduce",), settings={**given_texts, "mode": ",".join(modes)})
    assert len(made.cases) == len(sizes) * len(dtypes) * len(modes)
    assert {tuple(case.params.values()) for case in made.cases} == {
        (size * 1024, dtype, mode) for size in sizes for dtype in dtypes for mode in modes
    }


def test_a_setting_replaces_the_presets_values_and_cases_that_become_equal_are_one() -> None:
    made = plan(preset="node", only=("all_reduce",), settings={"mode": "blocking", "size_bytes": "1K"})
    assert [case.params for case in made.cases] == [{"size_bytes": 1024, "dtype": "float32", "mode": "blocking"}]


def test_a_setting_of_one_operation_leaves_the_others_as_they_are() -> None:
    made = plan(settings={"root": "1"})
    assert {case.params["root"] for case in made.cases if case.name == "collective.broadcast"} == {1}
    assert {case.name for case in made.cases} == {definition.name for definition in DEFINITIONS}


def test_given_entries_replace_the_presets_and_choose_the_cases() -> None:
    made = plan(entries=(Entry(name="p2p.*", set={"size_bytes": "8K"}), Entry(name="all_gather")))
    assert [(case.name, case.params["size_bytes"]) for case in made.cases] == [
        ("collective.all_gather", 1 << 20),
        ("p2p.sendrecv", 8192),
    ]


def test_two_entries_for_one_case_both_count() -> None:
    entries = (Entry(name="all_reduce", set={"size_bytes": "1K,2K"}), Entry(name="all_*", set={"size_bytes": "2K,4K"}))
    made = plan(entries=entries, only=("all_reduce",))
    assert [case.params["size_bytes"] for case in made.cases] == [1024, 2048, 4096]


def test_an_operation_outside_the_presets_entries_runs_with_its_defaults() -> None:
    mine = Definition(
        name="step.mine", target="m:f", help="x", params=(Param(name="a", kind="int", default=3, help="x"),)
    )
    made = make_plan(Request(preset="smoke", only=("mine",)), (*DEFINITIONS, mine), GLOO)
    assert [case.params for case in made.cases] == [{"a": 3}]


def test_narrowing_to_nothing_is_refused() -> None:
    words = refusal(entries=(Entry(name="p2p.*"),), only=("all_reduce",))
    assert words == "--only all_reduce leaves nothing of the plan's cases"


@pytest.mark.parametrize("asked", [{"only": ("allreduce",)}, {"entries": (Entry(name="allreduce"),)}])
def test_an_unknown_case_is_refused_wherever_it_is_named(asked: dict[str, object]) -> None:
    assert "no case is named 'allreduce'; did you mean 'all_reduce'?" in refusal(**asked)  # type: ignore[arg-type]


def test_an_unknown_setting_is_refused_with_what_there_is_and_the_nearest() -> None:
    words = refusal(settings={"dtpye": "float16"})
    assert words == (
        "--set: what was chosen (6 cases) has no parameter 'dtpye': "
        "it has beside, dtype, group, member, mode, placement, redop, root, size_bytes or together; "
        "did you mean 'dtype'?"
    )
    assert refusal(only=("all_reduce",), settings={"root": "0"}).startswith(f"{ALL_REDUCE} has no parameter 'root'")


def test_an_unknown_parameter_of_an_entry_is_refused_and_not_dropped() -> None:
    words = refusal(entries=(Entry(name="all_reduce", set={"dtyp": "float16"}),))
    assert words.startswith(f"{ALL_REDUCE} has no parameter 'dtyp'")
    assert words.endswith("did you mean 'dtype'?")
    assert "'p2p.*'" not in words
    assert "case 'collective.*' (5 cases) has no parameter 'siz'" in refusal(
        entries=(Entry(name="collective.*", set={"siz": "1K"}),)
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("size_bytes", "1Z", "'1Z' is not understood"),
        ("size_bytes", "4M:1K:x2", "start above their end"),
        ("dtype", "float31", "did you mean 'float32'"),
        ("mode", "fast", "mode is blocking, pipelined, async, coalesced or graph"),
        ("root", "-1", "root is a whole number of at least 0"),
        ("root", "", "root = '' is not allowed"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(name: str, text: str, words: str) -> None:
    assert words in refusal(settings={name: text})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("dtype", "float8_e5m2", "dtype = float8_e5m2: gloo carries no float8_e5m2"),
        ("dtype", "float32,float8_e5m2", "dtype = float8_e5m2: gloo carries no float8_e5m2"),
        (
            "size_bytes",
            "1001",
            "size_bytes = 1001: size 1001 B is not a multiple of 4 B (float32); nearest are 1000 and 1004",
        ),
    ],
)
def test_a_value_asked_for_by_name_under_which_nothing_runs_is_refused(name: str, text: str, words: str) -> None:
    assert refusal(settings={name: text}) == words


def test_a_root_that_is_no_rank_is_refused() -> None:
    assert refusal(settings={"root": "2"}) == "root = 2: root 2 is not one of the 2 ranks"


def test_a_size_that_suits_only_some_operations_runs_there_and_is_skipped_elsewhere_with_the_reason() -> None:
    made = plan(GLOO4, settings={"size_bytes": "1002", "dtype": "float16"})
    assert [case.name for case in made.cases] == [ALL_REDUCE, "collective.broadcast", "p2p.sendrecv"]
    assert [(skipped.case.name, skipped.reason) for skipped in made.skipped] == [
        (name, "size 1002 B is not a multiple of 4 ranks x 2 B (float16); nearest are 1000 and 1008")
        for name in ("collective.all_gather", "collective.reduce_scatter", "collective.all_to_all")
    ]


def test_every_case_of_the_product_is_either_run_or_skipped() -> None:
    made = plan(GLOO4, settings={"size_bytes": "2,1002,1024", "dtype": "float16,float32"})
    identities = [case.id for case in made.cases] + [skipped.case.id for skipped in made.skipped]
    assert len(identities) == len(set(identities)) == 6 * 3 * 2


def test_a_size_that_does_not_fit_in_memory_is_refused_where_asked_for() -> None:
    small = dataclasses.replace(GLOO, rank_bytes=1_000_000_000)
    assert refusal(small, settings={"size_bytes": "1K,1G"}) == (
        "size_bytes = 1073741824: size 1G needs about 6.4 GB a rank; a rank can have 1.0 GB"
    )


def test_a_size_that_does_not_fit_in_memory_is_skipped_where_a_preset_has_it() -> None:
    made = plan(dataclasses.replace(GLOO, rank_bytes=3 << 20))
    assert {case.params["size_bytes"] for case in made.cases} == {1024}
    assert {skipped.case.params["size_bytes"] for skipped in made.skipped} == {1 << 20}


def test_a_plan_of_which_nothing_can_run_is_refused_with_the_first_case_and_its_reason() -> None:
    words = refusal(dataclasses.replace(GLOO, rank_bytes=1), only=("all_gather",))
    assert words == (
        "none of the 2 cases asked for can run here; "
        "collective.all_gather size_bytes=1024 dtype=float32 mode=blocking: "
        "size 1K needs about 0.0 GB a rank; a rank can have 0.0 GB"
    )


def test_a_value_of_a_plan_file_under_which_nothing_can_run_is_refused() -> None:
    words = refusal(entries=(Entry(name="all_gather", set={"size_bytes": "4"}),))
    assert words == "size_bytes = 4: size 4 B is not a multiple of 2 ranks x 4 B (float32); the least is 8"


@pytest.mark.parametrize("nproc", [3, 5, 6, 7])
def test_a_presets_sizes_are_rounded_up_to_what_any_number_of_ranks_can_share(nproc: int) -> None:
    made = plan(dataclasses.replace(GLOO, nproc=nproc))
    assert not made.skipped
    sizes = sorted({int(case.params["size_bytes"]) for case in made.cases})
    assert [size % (8 * nproc) for size in sizes] == [0, 0]
    assert [0 <= size - about < 8 * nproc for size, about in zip(sizes, (1024, 1 << 20), strict=True)] == [True, True]


def test_a_size_that_the_user_gives_is_never_rounded() -> None:
    made = plan(dataclasses.replace(GLOO, nproc=3), settings={"size_bytes": "1K"})
    assert {case.params["size_bytes"] for case in made.cases} == {1024}
    assert {skipped.case.name for skipped in made.skipped} == {
        "collective.all_gather",
        "collective.reduce_scatter",
        "collective.all_to_all",
    }


def test_planning_the_same_request_twice_gives_the_same_plan() -> None:
    assert plan(preset="full") == plan(preset="full")


def test_a_group_that_cannot_be_formed_is_refused_where_asked_for_and_skipped_where_a_preset_has_it() -> None:
    three = dataclasses.replace(GLOO, nproc=3)
    assert refusal(three, only=(ALL_REDUCE,), settings={"group": "pairs"}) == (
        "group = pairs: group 'pairs' cannot be formed: world size(3) % 2 != 0"
    )
    skipped = [entry for entry in plan(three, preset="full").skipped if entry.case.params.get("group") == "pairs"]
    assert {entry.reason for entry in skipped} == {"group 'pairs' cannot be formed: world size(3) % 2 != 0"}
