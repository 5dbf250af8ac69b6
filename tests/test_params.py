"""Parameters: every kind accepts what it means and refuses the rest in one sentence."""

import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UserError
from bench.params import Kind, Param, Value, resolve, unknown_parameter


def param(kind: Kind, *choices: Value, minimum: float | None = None, name: str = "x", default: Value = 1) -> Param:
    return Param(name=name, kind=kind, default=default, help="for a test", choices=choices, minimum=minimum)


@pytest.mark.parametrize(
    ("kind", "found", "value"),
    [
        ("int", "3", 3),
        ("int", " -3 ", -3),
        ("int", 3, 3),
        ("int", 3.0, 3),
        ("float", "0.5", 0.5),
        ("float", 2, 2.0),
        ("float", "1e-3", 0.001),
        ("str", "word", "word"),
        ("str", "", ""),
        ("bool", "Yes", True),
        ("bool", "no", False),
        ("bool", "on", True),
        ("bool", 1, True),
        ("bool", True, True),
        ("bool", "FALSE", False),
        ("bool", "off", False),
        ("bool", 0, False),
        ("size", "64K", 65536),
        ("size", 4096, 4096),
        ("size", 4096.0, 4096),
    ],
)
def test_each_kind_accepts_text_and_values_and_returns_its_own_type(kind: Kind, found: object, value: Value) -> None:
    parsed = param(kind).parse(found)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "found", "words"),
    [
        ("int", "3.5", "a whole number"),
        ("int", 3.5, "a whole number"),
        ("int", "", "a whole number"),
        ("int", True, "a whole number"),
        ("int", None, "a whole number"),
        ("int", [1], "a whole number"),
        ("int", float("inf"), "a whole number"),
        ("int", float("nan"), "a whole number"),
        ("int", "9" * 5000, "a whole number"),
        ("float", "half", "a number"),
        ("float", "nan", "a number"),
        ("float", "inf", "a number"),
        ("float", float("-inf"), "a number"),
        ("float", False, "a number"),
        ("float", {}, "a number"),
        ("str", 3, "a word"),
        ("str", True, "a word"),
        ("bool", "maybe", "true or false"),
        ("bool", 2, "true or false"),
        ("bool", None, "true or false"),
        ("size", "1Z", "a size such as 64K"),
        ("size", 1.5, "a size such as 64K"),
        ("size", True, "a size such as 64K"),
        ("size", None, "a size such as 64K"),
    ],
)
def test_each_kind_refuses_what_it_is_not_and_says_what_it_is(kind: Kind, found: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        param(kind).parse(found)
    assert str(caught.value) == f"x = {found!r} is not allowed: x is {words}"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_can_say_what_it_allows(kind: Kind) -> None:
    assert param(kind).allowed()


def test_a_choice_is_accepted_and_another_refused_with_the_list_and_the_nearest() -> None:
    mode = param("str", "blocking", "pipelined", name="mode")
    assert mode.parse("pipelined") == "pipelined"
    with pytest.raises(UserError) as caught:
        mode.parse("pipeline")
    expected = "mode = 'pipeline' is not allowed: mode is blocking or pipelined; did you mean 'pipelined'?"
    assert str(caught.value) == expected


def test_choices_of_numbers_are_compared_as_numbers() -> None:
    assert param("int", 1, 2, 4).parse("4") == 4
    with pytest.raises(UserError, match="x is 1, 2 or 4"):
        param("int", 1, 2, 4).parse("3")


@pytest.mark.parametrize(("kind", "at", "below"), [("int", "2", "1"), ("float", "2.0", "1.999"), ("size", "2", "1")])
def test_a_minimum_is_inclusive(kind: Kind, at: str, below: str) -> None:
    assert param(kind, minimum=2).parse(at) == 2
    with pytest.raises(UserError, match=rf"x = '{re.escape(below)}' is not allowed: .* of at least 2"):
        param(kind, minimum=2).parse(below)


def test_many_values_are_separated_by_commas_in_the_order_written_each_once() -> None:
    assert param("int").parse_many("3, 1,3,2") == (3, 1, 2)
    assert param("bool").parse_many("true,off,yes") == (True, False)


def test_many_sizes_may_be_a_range() -> None:
    assert param("size").parse_many("1K:4K:x2,3M") == (1024, 2048, 4096, 3 << 20)


@pytest.mark.parametrize("text", ["", "1,,2", "1,two"])
def test_one_bad_value_among_many_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"x = '.*' is not allowed"):
        param("int").parse_many(text)


def test_a_size_below_the_minimum_is_refused_even_inside_a_range() -> None:
    with pytest.raises(UserError, match="x = 0 is not allowed: x is a size such as 64K of at least 1"):
        param("size", minimum=1).parse_many("0:8:+4")


@settings(deadline=None)
@given(st.one_of(st.integers(-(1 << 60), 1 << 60), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_number_written_out_reads_back_exactly(value: float) -> None:
    kind: Kind = "int" if isinstance(value, int) else "float"
    assert param(kind).parse(str(value)) == value
    assert param(kind).parse(value) == value


DECLARED = (param("int", name="first", default=7), param("str", name="second", default="b"))


def test_resolving_fills_in_defaults_in_declared_order() -> None:
    assert list(resolve(DECLARED, {"second": "c"}, "a.case").items()) == [("first", 7), ("second", "c")]
    assert resolve(DECLARED, {"first": "8"}, "a.case") == {"first": 8, "second": "b"}


def test_resolving_refuses_an_unknown_parameter_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        resolve(DECLARED, {"secnd": "c"}, "a.case")
    assert str(caught.value) == "a.case has no parameter 'secnd': it has first or second; did you mean 'second'?"


def test_what_has_no_parameters_says_so() -> None:
    assert str(unknown_parameter("size", [], "a.case")) == "a.case has no parameter 'size': it has none"


def test_a_mesh_keeps_its_commas_and_its_order() -> None:
    assert param("mesh").parse_many("dp=2,pp=2 tp=2") == ("dp=2,pp=2,tp=2",)
    assert param("mesh").parse_many("tp=2,dp=2; dp=4") == ("tp=2,dp=2", "dp=4")
    assert param("mesh").parse("") == ""


def test_a_mesh_that_is_none_is_refused_in_its_own_words() -> None:
    with pytest.raises(UserError, match="mesh 'dp,tp=2' is not understood at 'dp'"):
        param("mesh").parse("dp,tp=2")
