"""Cases: ids that depend on the content only, and definitions that are found by name."""

import dataclasses
import json
from collections.abc import Mapping
from random import Random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.cases import Case, Definition, Setting, load_catalogue, make_case, matches, never_refused, select
from bench.definitions import DEFINITIONS
from bench.errors import UserError
from bench.params import Param, Value

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
PARAMS = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6)


@settings(deadline=None)
@given(PARAMS, st.randoms(use_true_random=False))
def test_the_id_does_not_depend_on_the_order_of_parameters(params: dict[str, Value], random: Random) -> None:
    shuffled = list(params.items())
    random.shuffle(shuffled)
    assert make_case("n", "t:f", dict(shuffled)).id == make_case("n", "t:f", params).id


@settings(deadline=None)
@given(PARAMS, st.sampled_from("abcdef"), VALUES)
def test_the_id_changes_with_every_value(params: dict[str, Value], name: str, value: Value) -> None:
    changed = {**params, name: value}
    assume(json.dumps(changed, sort_keys=True) != json.dumps(params, sort_keys=True))
    assert make_case("n", "t:f", changed).id != make_case("n", "t:f", params).id


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (1, "1"), (0, False), ("", 0)])
def test_values_that_python_or_people_confuse_have_different_ids(one: Value, other: Value) -> None:
    assert make_case("n", "t:f", {"x": one}).id != make_case("n", "t:f", {"x": other}).id


def test_the_id_changes_with_the_name_and_the_target() -> None:
    assert len({make_case("n", "t:f", {}).id, make_case("m", "t:f", {}).id, make_case("n", "t:g", {}).id}) == 3


def test_the_id_stays_the_same_from_version_to_version() -> None:
    """Stored runs are compared by id: a change of the canonical form orphans them all."""
    case = make_case("collective.all_reduce", "bench.collectives:all_reduce", {"dtype": "float32", "size_bytes": 1024})
    assert case.id == "02c4cf7f79d8"


@settings(deadline=None)
@given(PARAMS)
def test_a_case_reads_back_from_json_with_the_id_it_would_be_given_again(params: dict[str, Value]) -> None:
    case = make_case("n", "t:f", params)
    read = msgspec.json.decode(msgspec.json.encode(case), type=Case)
    assert read == case
    assert make_case(read.name, read.target, read.params).id == case.id


def test_a_case_keeps_its_own_copy_of_the_parameters() -> None:
    given_params: dict[str, Value] = {"x": 1}
    case = make_case("n", "t:f", given_params)
    given_params["x"] = 2
    assert case.params == {"x": 1}


def test_a_case_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        make_case("n", "t:f", {}).name = "m"  # type: ignore[misc]


def test_a_label_is_the_name_and_the_parameters() -> None:
    assert make_case("p2p.sendrecv", "t:f", {"size_bytes": 1024, "mode": "blocking"}).label == (
        "p2p.sendrecv size_bytes=1024 mode=blocking"
    )
    assert make_case("p2p.sendrecv", "t:f", {}).label == "p2p.sendrecv"


DEFINITION = Definition(
    name="step.mine",
    target="mine:prepare",
    help="for a test",
    params=(Param(name="batch", kind="int", default=2, help="samples", minimum=1),),
)


def test_a_definition_makes_the_same_case_from_text_and_from_values() -> None:
    assert DEFINITION.case({"batch": "3"}) == DEFINITION.case({"batch": 3})
    assert DEFINITION.case({}) == DEFINITION.case({"batch": 2})
    assert DEFINITION.case({}).target == "mine:prepare"


def test_a_definition_names_itself_when_it_refuses_a_parameter() -> None:
    with pytest.raises(UserError, match=r"step\.mine has no parameter 'bach': it has batch; did you mean 'batch'"):
        DEFINITION.case({"bach": 3})


def test_a_definition_refuses_nothing_unless_told() -> None:
    anywhere = Setting(nproc=1, backend="gloo", device="cpu")
    assert DEFINITION.refuse({"batch": 1}, anywhere) is None
    assert never_refused({}, anywhere) is None


@pytest.mark.parametrize(("name", "kind"), [("collective.all_reduce", "collective"), ("p2p.sendrecv", "p2p")])
def test_the_kind_is_the_part_before_the_dot(name: str, kind: str) -> None:
    assert dataclasses.replace(DEFINITION, name=name).kind == kind


def test_a_catalogue_is_the_definitions_of_its_modules_in_order() -> None:
    assert load_catalogue(["bench.definitions"]) == DEFINITIONS
    assert load_catalogue([]) == ()


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("collective.all_reduce", "collective.all_reduce", True),
        ("collective.all_reduce", "collective.*", True),
        ("collective.all_reduce", "all_reduce", True),
        ("collective.all_reduce", "all_*", True),
        ("collective.all_reduce", "*", True),
        ("collective.all_reduce", "p2p.*", False),
        ("collective.all_reduce", "collective", False),
        ("collective.all_reduce", "reduce", False),
        ("collective.all_reduce", "COLLECTIVE.*", False),
    ],
)
def test_a_pattern_without_a_dot_is_held_against_the_part_after_the_dot(name: str, pattern: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


def names(patterns: list[str]) -> list[str]:
    return [definition.name for definition in select(DEFINITIONS, patterns)]


def test_no_pattern_selects_everything_and_several_select_their_union_in_catalogue_order() -> None:
    assert select(DEFINITIONS, []) == DEFINITIONS
    assert names(["p2p.s*", "all_reduce", "collective.all_*"]) == [
        "collective.all_reduce",
        "collective.all_gather",
        "collective.all_to_all",
        "collective.all_to_all_v",
        "collective.all_reduce_two_step",
        "p2p.sendrecv",
    ]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("allreduce", "; did you mean 'all_reduce'?"),
        ("collective.al_reduce", "; did you mean 'collective.all_reduce'?"),
        ("p2p.send_recv", "; did you mean 'p2p.sendrecv'?"),
        ("nothing_like_it", ""),
        ("step.*", ""),
    ],
)
def test_an_unknown_case_is_refused_with_the_nearest_name_and_where_to_look(pattern: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        select(DEFINITIONS, ["collective.*", pattern])
    assert str(caught.value) == f"no case is named {pattern!r}{hint} (parbench list shows what can be measured)"


def test_a_setting_does_not_know_its_memory_unless_told() -> None:
    params: Mapping[str, Value] = DEFINITIONS[0].case({"size_bytes": "1T"}).params
    assert DEFINITIONS[0].refuse(params, Setting(nproc=2, backend="gloo", device="cpu")) is None


@pytest.mark.parametrize(
    ("nproc", "nodes", "placement", "hosts"),
    [(4, 1, "block", "0000"), (4, 2, "block", "0011"), (4, 2, "cyclic", "0101"), (6, 3, "cyclic", "012012")],
)
def test_ranks_sit_on_nodes_as_they_are_placed(nproc: int, nodes: int, placement: str, hosts: str) -> None:
    setting = Setting(nproc=nproc, backend="gloo", device="cpu", nodes=nodes, placement=placement)
    assert "".join(setting.hosts) == hosts
