"""The grammar of what is left out of a sweep: what it means, and else the place and what may stand there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.params import Value
from slurm.exclude import check_names, parse_condition

POINT: dict[str, Value] = {
    "nodes": 8,
    "dtype": "float16",
    "size_bytes": 64 << 20,
    "skew": 0.5,
    "together": True,
    "placement": "block",
}


def holds(text: str) -> bool:
    return parse_condition(text).holds(POINT)


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        holds(text)
    words = str(caught.value)
    assert words.startswith(repr(text)), "every sentence begins with the condition"
    return words.removeprefix(f"{text!r} ")


@pytest.mark.parametrize(
    "text",
    [
        "nodes == 8",
        "8 == nodes",
        "nodes != 4",
        "nodes < 9",
        "nodes <= 8",
        "nodes > 7.5",
        "nodes >= 8",
        "nodes > -1",
        "size_bytes == 64M",
        "size_bytes < 1G",
        "size_bytes >= 64MiB",
        "skew == 5e-1",
        "dtype == 'float16'",
        'dtype == "float16"',
        "dtype in ['bfloat16', 'float16']",
        "nodes in [1, 8]",
        "nodes not in [1, 2]",
        "together == true",
        "together != false",
        "not nodes == 4",
        "not not nodes == 8",
        "nodes == 8 and dtype == 'float16'",
        "nodes == 1 or dtype == 'float16'",
        "(nodes == 1 or nodes == 8) and placement == 'block'",
        "dtype<'g'",
    ],
)
def test_a_condition_that_holds(text: str) -> None:
    assert holds(text)
    assert not holds(f"not ({text})")


def test_and_binds_closer_than_or_and_not_closer_than_and() -> None:
    assert holds("nodes == 8 or nodes == 8 and nodes == 1")
    assert not holds("(nodes == 8 or nodes == 8) and nodes == 1")
    assert holds("not nodes == 1 and nodes == 8")
    assert not holds("not (nodes == 8 and nodes == 8)")


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]))
def test_numbers_compare_as_numbers_do(left: int, right: int, sign: str) -> None:
    known = {"==": left == right, "!=": left != right, "<": left < right, "<=": left <= right, ">": left > right}
    expected = known.get(sign, left >= right)
    assert parse_condition(f"x {sign} {right}").holds({"x": left}) is expected


@given(st.recursive(st.sampled_from(["a == 1", "b == 1"]), lambda inner: st.tuples(inner, inner), max_leaves=8))
def test_conditions_nest_as_in_python(tree: object) -> None:
    def text(node: object) -> str:
        return node if isinstance(node, str) else f"(not {text(node[0])} and ({text(node[1])}))"  # type: ignore[index]

    for values in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1}):
        assert parse_condition(text(tree)).holds(values) == bool(eval(text(tree), {}, dict(values)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 8", "is not understood from character 7 on: '= 8'; did you mean '=='?"),
        ("nodes == 8; import os", "is not understood from character 11 on: '; import os'"),
        ("nodes == 8x", "is not understood from character 10 on: '8x'"),
        ("dtype == 'float16", 'is not understood from character 10 on: "\'float16"'),
        ("", "has its end where a name, a number, a size such as 64K or a word in quotes is expected"),
        ("nodes", "has its end where ==, !=, <, <=, >, >=, in or not in is expected"),
        ("nodes not 8", "has '8' at character 11 where in is expected"),
        ("nodes ==", "has its end where a name, a number, a size such as 64K or a word in quotes is expected"),
        ("nodes == and", "has 'and' at character 10 where a name, a number"),
        ("nodes in 8", "has '8' at character 10 where a list in brackets, such as [1, 2] is expected"),
        ("nodes in []", "has ']' at character 11 where a name"),
        ("nodes in [1 2]", "has '2' at character 13 where a comma or a closing bracket is expected"),
        ("nodes == 8 nodes", "has 'nodes' at character 12 where and, or or the end is expected"),
        ("1 < nodes < 9", "has '<' at character 11 where and, or or the end is expected"),
        ("(nodes == 8", "has its end where a closing parenthesis is expected"),
        ("nodes == 8)", "has ')' at character 11 where and, or or the end is expected"),
        ("f(nodes) == 8", "has '(' at character 2 where"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_place_and_what_may_stand_there(text: str, words: str) -> None:
    assert refusal(text).startswith(words)


def test_a_quoted_keyword_is_a_word() -> None:
    assert not holds("dtype == 'and'")
    assert not holds("dtype == 'true'")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes == 'eight'", "compares 8, a number, with 'eight', a word"),
        ("dtype == 16", "compares 'float16', a word, with 16, a number"),
        ("together == 1", "compares True, true or false, with 1, a number"),
        ("together < false", "compares True with False by <: use == or !="),
        ("nodes in [8, 'x']", "compares 8, a number, with 'x', a word"),
        ("nodes == 8 or dtype == 16", "compares 'float16', a word, with 16, a number"),
        ("nodes == 1 and dtype == 16", "compares 'float16', a word, with 16, a number"),
    ],
)
def test_values_of_different_kinds_are_refused_even_where_the_rest_decides(text: str, words: str) -> None:
    assert refusal(text) == words


def test_a_condition_knows_its_names_once_each() -> None:
    condition = parse_condition("nodes == 8 and (dtype in ['a', other] or nodes > true)")
    assert condition.names == ("nodes", "dtype", "other")


def test_an_unknown_name_is_refused_with_what_there_is_and_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        check_names(parse_condition("dtpye == 'x'"), POINT)
    assert str(caught.value) == (
        "\"dtpye == 'x'\" speaks of 'dtpye', and a point has nodes, dtype, size_bytes, skew, together or placement; "
        "did you mean 'dtype'?"
    )
    check_names(parse_condition("dtype == 'x'"), POINT)


def test_a_word_without_quotes_is_told_to_have_them() -> None:
    with pytest.raises(UserError, match=r"write a word as 'bfloat16', in quotes$"):
        check_names(parse_condition("dtype == bfloat16"), {"dtype": "x"})


@pytest.mark.parametrize("text", ["(" * 1000 + "nodes == 8" + ")" * 1000, "not " * 1000 + "nodes == 8"])
def test_what_is_nested_too_deep_is_refused_and_does_not_exhaust_the_stack(text: str) -> None:
    assert refusal(text) == "is nested more than 50 deep"
