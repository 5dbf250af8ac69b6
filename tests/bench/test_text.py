"""Texts of options and parameters: sizes, durations, links, faults and typed parameters."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.plan.cases import Definition
from parbench.bench.plan.params import Kind, Param, Value
from parbench.bench.plan.plan import parse_fault
from parbench.bench.text import (
    did_you_mean,
    format_duration,
    format_size,
    format_table,
    last_line,
    listed,
    parse_duration,
    parse_link,
    parse_size,
    parse_sizes,
    replace_file,
)
from tests.support.refusals import usage_error

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("64k", 65536), ("64KiB", 65536), ("64B", 64), (" 3M ", 3 << 20), ("1T", 1 << 40)],
)
def test_parse_size_units(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "K", "1Z", "-4M", "1.5M", "1_000", "4 M", "³", "٣K", HUGE])
def test_parse_size_refuses(text: str) -> None:
    assert repr(text) in usage_error(parse_size, text)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1 << 59), st.integers(1, 1023), st.sampled_from(["", "K", "M", "G", "T"]))
def test_format_size_round_trip(num_bytes: int, count: int, unit: str) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes
    assert format_size(parse_size(f"{count}{unit}")) == f"{count}{unit}"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (" 3M , 1K:8K ", (3 << 20, 1024, 2048, 4096, 8192)),
        ("1K:60K:x4", (1024, 4096, 16384)),
        ("0:10:+4", (0, 4, 8)),
        ("7:7:X2", (7,)),
        ("4,1:4,2", (4, 1, 2)),
        ("1:10000:+1", tuple(range(1, 10_001))),
    ],
)
def test_parse_sizes_lists_and_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("1K,,3M", "''"),
        ("1K:4K:+-1", "'-1'"),
        ("4M:1K:x2", "4M > 1K"),
        ("1K:2K:x2:x3", "a range"),
        *((f"1K:4K:{step}", "step") for step in ("x1", "x1.5", "x²", "4", "", "+0", "x" + HUGE)),
        ("0:4K", "above 0"),
        ("1:10001:+1", "10000"),
    ],
)
def test_parse_sizes_refuses(text: str, fact: str) -> None:
    assert fact in usage_error(parse_sizes, text)


def test_parse_duration_units() -> None:
    seconds = {"90": 90.0, "1.5s": 1.5, "2m": 120.0, "1h": 3600.0, "500ms": 0.5, " 3 ": 3.0}
    assert {text: parse_duration(text) for text in seconds} == pytest.approx(seconds)
    for text in ("", "0.0ms", "-1", "1e3", "inf", "nan", "2M", "3 s", "1d", "9" * 400):
        assert repr(text) in usage_error(parse_duration, text)


def test_format_duration() -> None:
    texts = {0.85: "850 ms", 0.9996: "1 s", 42.4: "42 s", 59.6: "1 min 0 s", 200.0: "3 min 20 s"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts


def test_parse_link_units() -> None:
    bits = {"400gbit": 50e9, "400 Gbit/s": 50e9, "200Gbps": 25e9, "100Gb/s": 12.5e9, " 8bit ": 1.0}
    num_bytes = {"50GB/s": 50e9, "50GBps": 50e9, "12.5kB/s": 12.5e3}
    speeds = {**bits, **num_bytes}
    assert {text: parse_link(text) for text in speeds} == pytest.approx(speeds)
    for text in ("", "400G", "0Gbit", "-1Gbit", "50GB", "4e2Gbit", "٣Gbit", "9" * 400 + "Gbit"):
        assert repr(text) in usage_error(parse_link, text)
    assert "bits or bytes" in usage_error(parse_link, "50gb/s")


@pytest.mark.parametrize(
    ("text", "kind", "rank", "amount"),
    [
        ("late:1:3ms", "late", 1, 3e-3),
        ("slow:0:10%", "slow", 0, 0.1),
        ("corrupt:3", "corrupt", 3, 0),
    ],
)
def test_parse_fault(text: str, kind: str, rank: int, amount: float) -> None:
    fault = parse_fault(text, nproc=4)
    assert (fault.kind, fault.rank, fault.text) == (kind, rank, text)
    assert fault.amount == pytest.approx(amount)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("later:1:3ms", "tests.support.late:RANK:3ms"),
        ("corrupt:1:3ms", "corrupt:RANK"),
        ("late:1:soon", "soon"),
        ("slow:1:0%", "10%"),
        (f"slow:1:{'9' * 40}%", "10%"),
        (f"corrupt:{HUGE}", "corrupt:RANK"),
        ("corrupt:4", "rank 4"),
    ],
)
def test_parse_fault_refuses(text: str, fact: str) -> None:
    assert fact in usage_error(parse_fault, text, nproc=4)


def test_did_you_mean_suggests_close_words() -> None:
    assert "'blocking'" in did_you_mean("blockin", ("blocking", "pipelined"))
    assert did_you_mean("xyz", ("blocking", "pipelined")) == ""
    assert did_you_mean("word", ()) == ""


def test_listed_joins_choices() -> None:
    assert listed(("a",)) == "a"
    assert listed(("a", "b", 2.5)) == "a, b or 2.5"


ACCEPTED: list[tuple[Kind, object, Value]] = [
    ("int", " -3 ", -3),
    ("int", 3.0, 3),
    ("float", "1e-3", 0.001),
    ("float", 2, 2.0),
    ("str", "", ""),
    *(("bool", value, True) for value in ("Yes", "on", 1)),
    *(("bool", value, False) for value in ("no", "FALSE", 0)),
    ("size", "64K", 65536),
    ("size", 4096.0, 4096),
]
REFUSED: dict[Kind, list[object]] = {
    "int": ["3.5", 3.5, "", True, None, [1], math.inf, math.nan, HUGE],
    "float": ["half", "nan", "inf", -math.inf, False, {}],
    "str": [3, True],
    "bool": ["maybe", 2, None],
    "size": ["1Z", 1.5, True, None],
}


def param(kind: Kind, *choices: Value, name: str = "x", default: Value = 1, **limits: Any) -> Param:
    return Param(name=name, kind=kind, default=default, help="help", choices=choices, **limits)


def test_param_parses_to_its_own_type() -> None:
    for kind, text, value in ACCEPTED:
        parsed = param(kind).parse(text)
        assert (parsed, type(parsed)) == (value, type(value)), (kind, text)


@pytest.mark.parametrize("kind", REFUSED)
def test_param_refuses_other_kinds(kind: Kind) -> None:
    for value in REFUSED[kind]:
        assert f"x = {value!r} is not allowed" in usage_error(param(kind).parse, value)


def test_param_accepts_its_choices_only() -> None:
    mode = param("str", "blocking", "pipelined", name="mode")
    assert mode.parse("pipelined") == "pipelined"
    message = usage_error(mode.parse, "pipeline")
    assert "blocking or pipelined" in message
    assert "mean 'pipelined'" in message
    assert param("int", 1, 2, 4).parse("4") == 4


def test_param_limits_are_inclusive() -> None:
    limits: list[tuple[Kind, str, str]] = [
        ("int", "2", "1"),
        ("float", "2.0", "1.999"),
        ("size", "2", "1"),
    ]
    for kind, limit, below in limits:
        assert param(kind, minimum=2).parse(limit) == 2
        assert param(kind, maximum=2).parse(limit) == 2
        assert "at least 2" in usage_error(param(kind, minimum=2).parse, below)
    assert "at most 1" in usage_error(param("float", minimum=0, maximum=1).parse, "1.01")


def test_param_parses_many_values() -> None:
    assert param("int").parse_many("3, 1,3,2") == (3, 1, 2)
    assert param("bool").parse_many("true,off,yes") == (True, False)
    assert param("size").parse_many("1K:4K:x2,3M") == (1024, 2048, 4096, 3 << 20)
    assert "x = 0" in usage_error(param("size", minimum=1).parse_many, "0:8:+4")
    for text in ("", "1,,2", "1,two"):
        assert "x = '" in usage_error(param("int").parse_many, text)


def test_mesh_param_keeps_commas() -> None:
    assert param("mesh").parse_many("dp=2,pp=2 tp=2") == ("dp=2,pp=2,tp=2",)
    assert param("mesh").parse_many("tp=2,dp=2; dp=4") == ("tp=2,dp=2", "dp=4")
    assert param("mesh").parse("") == ""
    assert "mesh 'dp,tp=2'" in usage_error(param("mesh").parse, "dp,tp=2")


def test_definition_fills_in_defaults() -> None:
    params = (param("int", name="first", default=7), param("str", name="second", default="b"))
    whole = Definition(name="a.case", target="t:f", help="", params=params).whole
    assert list(whole({"second": "c"}).items()) == [("first", 7), ("second", "c")]
    assert whole({"first": "8"}) == {"first": 8, "second": "b"}
    message = usage_error(whole, {"secnd": "c"})
    assert "a.case has no parameter 'secnd'" in message
    assert "mean 'second'" in message


def test_last_line_skips_blank_lines() -> None:
    assert [last_line(text) for text in ("", " \n", "a\n b \r\n\n")] == ["", "", "b"]


def test_format_table_aligns_columns() -> None:
    rows = [["name", "n"], ["[red]x[/red]", "10"], ["y" * 300, "7", "more"]]
    assert format_table(rows, right=[1]).splitlines() == [
        f"{'name':<300}   n",
        f"{'[red]x[/red]':<300}  10",
        f"{'y' * 300}   7  more",
    ]
    assert format_table([]) == ""


def test_replace_file_leaves_no_partial_file(tmp_path: Path) -> None:
    target, folder = tmp_path / "page.html", tmp_path / "folder"
    target.write_text("old")
    folder.mkdir()
    replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    for path in (folder, tmp_path / "no" / "page.html"):
        with pytest.raises(OSError, match="directory"):
            replace_file(path, b"new")
    assert sorted(tmp_path.iterdir()) == [folder, target]
