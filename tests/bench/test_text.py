"""What people write in options and parameters: what is understood, and what is refused in one sentence."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from parbench.bench.plan.cases import Definition
from parbench.bench.plan.params import Kind, Param, Value, refuse_unknown
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


def test_a_size_is_a_whole_number_with_a_1024_based_unit() -> None:
    sizes = {"0": 0, "1024": 1024, "64k": 65536, "64KB": 65536, "64KiB": 65536, "64B": 64, " 3M ": 3 << 20}
    for text, num_bytes in {**sizes, "2G": 2 << 30, "1T": 1 << 40}.items():
        assert parse_size(text) == num_bytes, text
    words = ["", " ", "K", "1Z", "-1", "-4M", "1.5M", "1e6", "1 000", "1_000", "4 M", "0x10", "1K1", "³", "٣K"]
    for text in [*words, "9" * 5000]:
        told = f"size {text!r} is not understood: write a whole number of bytes with K, M, G or T (1024-based), "
        assert refusal(parse_size, text) == f"{told}such as 64K"


def test_the_last_line_is_the_last_that_says_something() -> None:
    assert [last_line(told) for told in ("", " \n", "a", "a\n b \r\n\n")] == ["", "", "a", "b"]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1 << 59), st.integers(1, 1023), st.sampled_from(["", "K", "M", "G", "T"]))
def test_a_size_is_written_in_the_largest_unit_that_holds_it_and_reads_back(many: int, count: int, unit: str) -> None:
    assert parse_size(format_size(many)) == many
    assert format_size(parse_size(f"{count}{unit}")) == f"{count}{unit}"


def test_sizes_are_lists_and_ranges_in_the_order_written_each_once() -> None:
    for text, sizes in (
        ("1K", (1024,)),
        (" 3M , 1K:8K ", (3 << 20, 1024, 2048, 4096, 8192)),
        ("1K:64K:X4", (1024, 4096, 16384, 65536)),
        ("1K:60K:x4", (1024, 4096, 16384)),
        ("1M:4M:+1M", (1 << 20, 2 << 20, 3 << 20, 4 << 20)),
        ("0:10:+4", (0, 4, 8)),
        ("7:7:x2", (7,)),
        ("7:7:+1", (7,)),
        ("4,1:4,2", (4, 1, 2)),
        ("1:10000:+1", tuple(range(1, 10_001))),
    ):
        assert parse_sizes(text) == sizes, text


def test_sizes_that_cannot_be_meant_are_refused_in_words() -> None:
    for words, *texts in (
        ("'1Z' is not understood", "1Z"),
        ("'' is not understood", "1K,,3M", "", "1K,", ":1K", "1K:", "1K:4K:+"),
        ("'-1' is not understood", "-1:4", "1K:4K:+-1"),
        ("start above their end: 4M > 1K", "4M:1K:x2"),
        ("not understood: write 1K,3M or a range", "1K:2K:x2:x3"),
        (
            "no usable step: ",
            *(f"1K:4K:{step}" for step in ("x1", "x0", "x1.5", "x²", "x", "4", "", "+0", "x" + "9" * 5000)),
        ),
        ("from a start above 0", "0:4K:x2", "0:4K"),
        ("more than 10000", "0:1T:+1", "1:10001:+1"),
    ):
        for text in texts:
            assert words in refusal(parse_sizes, text), text


def test_a_duration_is_seconds_unless_it_has_a_unit_and_is_above_zero() -> None:
    durations = {"90": 90.0, "90s": 90.0, "1.5s": 1.5, "2m": 120.0, "1h": 3600.0, "500ms": 0.5, " 3 ": 3.0}
    for text, seconds in durations.items():
        assert parse_duration(text) == pytest.approx(seconds), text
    for text in ("", "0", "0s", "0.0ms", "-1", "-3s", "1e3", "inf", "nan", "2M", "3 s", "s", "1d", "9" * 400):
        told = f"duration {text!r} is not understood: write a number above 0 with ms, s, m or h, such as 90s"
        assert refusal(parse_duration, text) == told


def test_a_duration_is_said_as_people_say_it() -> None:
    said = {0.85: "850 ms", 0.9994: "999 ms", 0.9996: "1 s", 1.0: "1 s", 42.4: "42 s", 59.6: "1 min 0 s"}
    for seconds, words in {**said, 200.0: "3 min 20 s"}.items():
        assert format_duration(seconds) == words


def test_a_link_is_a_number_of_bits_or_bytes() -> None:
    bits = {"400Gbit": 50e9, "400gbit": 50e9, "400 Gbit/s": 50e9, "200Gbps": 25e9, "200gbps": 25e9, "100Gb/s": 12.5e9}
    others = {"100mbit": 12.5e6, "1.6Tbit": 200e9, " 8bit ": 1.0, "8b/s": 1.0}
    num_bytes = {"50GB/s": 50e9, "50GBps": 50e9, "900MB/s": 900e6, "12.5kB/s": 12.5e3}
    for text, bytes_per_second in {**bits, **others, **num_bytes}.items():
        assert parse_link(text) == pytest.approx(bytes_per_second), text


def test_what_is_no_link_or_could_be_bits_or_bytes_is_refused_with_examples() -> None:
    words = ["", "400", "400G", "Gbit", "0Gbit", "0.0GB/s", "-1Gbit", "50GB", "50GiB/s", "4e2Gbit", "infGbit"]
    how = "write a number above 0 with its unit, 1e9-based, such as 400Gbit, 200Gbps, 100mbit or 50GB/s"
    for text in [*words, "1_0Gbit", "٣Gbit", "400Gbit/s/s", "400BPS", "400Xbit", "9" * 400 + "Gbit"]:
        assert refusal(parse_link, text) == f"link speed {text!r} is not understood: {how}"
    for text in ("50gb/s", "50mb/s"):
        told = f"link speed {text!r} could mean bits or bytes, which differ by eight: {how}"
        assert refusal(parse_link, text) == told


def test_each_kind_of_injection_is_understood_and_what_means_nothing_is_refused() -> None:
    for text, *parts in (
        ("late:1:3ms", "late", 1, 3e-3),
        ("slow:0:10%", "slow", 0, 0.1),
        ("corrupt:3", "corrupt", 3, 0.0),
    ):
        found = parse_fault(text, nproc=4)
        assert [found.kind, found.rank, found.amount, found.text] == [*parts[:2], pytest.approx(parts[2]), text]
    for text, told in (
        ("later:1:3ms", "late:RANK:3ms"),
        ("late:one:3ms", "late:RANK:3ms"),
        ("corrupt:1:3ms", "corrupt:RANK"),
        ("late:1:soon", "soon"),
        ("slow:1:10", "such as 10%"),
        ("slow:1:0%", "such as 10%"),
        (f"slow:1:{'9' * 40}%", "such as 10%"),
        (f"corrupt:{'9' * 5000}", "corrupt:RANK"),
        ("corrupt:4", "rank 4 is not one of the 4 ranks, 0 to 3"),
    ):
        assert told in refusal(parse_fault, text, nproc=4), text


def test_a_hint_is_given_only_for_a_close_word_and_choices_are_listed_as_a_sentence_would() -> None:
    hints = {"blockin": "; did you mean 'blocking'?", "piplined": "; did you mean 'pipelined'?", "xyz": "", "": ""}
    for word, hint in hints.items():
        assert did_you_mean(word, ("blocking", "pipelined")) == hint, word
    assert did_you_mean("word", iter(())) == ""
    said: dict[tuple[object, ...], str] = {("a",): "a", ("a", "b"): "a or b", ("a", "b", "c"): "a, b or c"}
    for choices, words in {**said, (1, 2.5): "1 or 2.5"}.items():
        assert listed(choices) == words


ACCEPTED: list[tuple[Kind, object, Value]] = [
    *(("int", found, value) for found, value in (("3", 3), (" -3 ", -3), (3, 3), (3.0, 3))),
    *(("float", found, value) for found, value in (("0.5", 0.5), (2, 2.0), ("1e-3", 0.001))),
    *(("str", word, word) for word in ("word", "")),
    *(("bool", found, True) for found in ("Yes", "on", 1, True)),
    *(("bool", found, False) for found in ("no", "FALSE", "off", 0)),
    *(("size", found, value) for found, value in (("64K", 65536), (4096, 4096), (4096.0, 4096))),
]
REFUSED: list[tuple[Kind, str, list[object]]] = [
    ("int", "a whole number", ["3.5", 3.5, "", True, None, [1], math.inf, math.nan, "9" * 5000]),
    ("float", "a number", ["half", "nan", "inf", -math.inf, False, {}]),
    ("str", "a word", [3, True]),
    ("bool", "true or false", ["maybe", 2, None]),
    ("size", "a size such as 64K", ["1Z", 1.5, True, None]),
]


def param(kind: Kind, *choices: Value, name: str = "x", default: Value = 1, **more: Any) -> Param:
    return Param(name=name, kind=kind, default=default, help="for a test", choices=choices, **more)


def test_each_kind_accepts_text_and_values_and_returns_its_own_type() -> None:
    for kind, found, value in ACCEPTED:
        parsed = param(kind).parse(found)
        assert (parsed, type(parsed)) == (value, type(value)), (kind, found)


def test_each_kind_refuses_what_it_is_not_and_says_what_it_is() -> None:
    for kind, words, values in REFUSED:
        for found in values:
            assert refusal(param(kind).parse, found) == f"x = {found!r} is not allowed: x is {words}"
    assert all(param(kind).allowed() for kind in get_args(Kind))


def test_a_choice_is_accepted_and_another_refused_with_the_list_and_the_nearest() -> None:
    mode = param("str", "blocking", "pipelined", name="mode")
    assert mode.parse("pipelined") == "pipelined"
    words = "mode = 'pipeline' is not allowed: mode is blocking or pipelined; did you mean 'pipelined'?"
    assert refusal(mode.parse, "pipeline") == words
    assert param("int", 1, 2, 4).parse("4") == 4


def test_bounds_are_inclusive_and_told() -> None:
    bounds: list[tuple[Kind, str, str]] = [("int", "2", "1"), ("float", "2.0", "1.999"), ("size", "2", "1")]
    for kind, at, below in bounds:
        assert param(kind, minimum=2).parse(at) == param(kind, maximum=2).parse(at) == 2
        words = refusal(param(kind, minimum=2).parse, below)
        assert words.startswith(f"x = {below!r} is not allowed: ")
        assert words.endswith(" of at least 2")
    words = "x = '1.01' is not allowed: x is a number of at least 0 and at most 1"
    assert refusal(param("float", minimum=0, maximum=1).parse, "1.01") == words
    words = "x = 0 is not allowed: x is a size such as 64K of at least 1"
    assert refusal(param("size", minimum=1).parse_many, "0:8:+4") == words


def test_many_values_are_separated_by_commas_in_the_order_written_each_once() -> None:
    assert param("int").parse_many("3, 1,3,2") == (3, 1, 2)
    assert param("bool").parse_many("true,off,yes") == (True, False)
    assert param("size").parse_many("1K:4K:x2,3M") == (1024, 2048, 4096, 3 << 20)
    for text in ("", "1,,2", "1,two"):
        assert refusal(param("int").parse_many, text).startswith("x = '"), text


def test_resolving_fills_in_defaults_in_declared_order_and_refuses_what_is_not_declared() -> None:
    declared = (param("int", name="first", default=7), param("str", name="second", default="b"))
    whole = Definition(name="a.case", target="t:f", help="", params=declared).whole
    assert list(whole({"second": "c"}).items()) == [("first", 7), ("second", "c")]
    assert whole({"first": "8"}) == {"first": 8, "second": "b"}
    words = "a.case has no parameter 'secnd': it has first or second; did you mean 'second'?"
    assert refusal(whole, {"secnd": "c"}) == words
    assert refusal(refuse_unknown, ["size"], [], "a.case") == "a.case has no parameter 'size': it has none"


def test_a_mesh_keeps_its_commas_and_its_order_and_refuses_in_its_own_words() -> None:
    assert param("mesh").parse_many("dp=2,pp=2 tp=2") == ("dp=2,pp=2,tp=2",)
    assert param("mesh").parse_many("tp=2,dp=2; dp=4") == ("tp=2,dp=2", "dp=4")
    assert param("mesh").parse("") == ""
    assert "mesh 'dp,tp=2' is not understood at 'dp'" in refusal(param("mesh").parse, "dp,tp=2")


def test_a_table_has_aligned_columns_and_shows_every_word_as_it_is() -> None:
    told = format_table([["name", "n"], ["[red]x[/red]", "10"], ["y" * 300, "7", "more"]], right=[1])
    assert told.splitlines() == [
        f"{'name':<300}   n",
        f"{'[red]x[/red]':<300}  10",
        f"{'y' * 300}   7  more",
    ]
    assert format_table([]) == ""


def test_a_file_is_replaced_whole_or_left_as_it_was_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    target, taken = tmp_path / "page.html", tmp_path / "taken"
    target.write_text("old")
    taken.mkdir()
    replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    for refused in (taken, tmp_path / "no" / "page.html"):
        with pytest.raises(OSError, match="directory"):
            replace_file(refused, b"new")
    assert sorted(tmp_path.iterdir()) == [target, taken]
