"""Texts of options and parameters: sizes, durations, links, faults and typed parameters."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.plan.params import Kind, Param, Setting, Value
from parbench.bench.plan.plan import parse_fault
from parbench.bench.text import (
    format_duration,
    format_size,
    parse_duration,
    parse_link,
    parse_size,
    parse_sizes,
)
from tests.support.refusals import usage_error

HUGE = "9" * 5000

# --- sizes ---


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("64k", 65536),
        ("64KiB", 65536),
        (" 3M ", 3 << 20),
    ],
)
def test_parse_size(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "1Z", "-4M", "1.5M", "٣K", HUGE])
def test_parse_size_refuses(text: str) -> None:
    assert repr(text) in usage_error(parse_size, text)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1 << 59))
def test_format_size_round_trip(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (" 3M , 1K:8K ", (3 << 20, 1024, 2048, 4096, 8192)),
        ("1K:60K:x4", (1024, 4096, 16384)),
    ],
)
def test_parse_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("1K,,3M", "''"),
        ("4M:1K:x2", "'4M:1K:x2'"),
        ("1K:4K:x1", "'1K:4K:x1'"),
        ("0:4K", "'0:4K'"),
        ("1M:8M:+1M", "'+1M'"),
    ],
)
def test_parse_sizes_refuses(text: str, fact: str) -> None:
    assert fact in usage_error(parse_sizes, text)


# --- durations and links ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("500ms", 0.5),
        (" 3 ", 3.0),
    ],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0.0ms", "-1", "1e3", "nan", "2M"])
def test_parse_duration_refuses(text: str) -> None:
    assert repr(text) in usage_error(parse_duration, text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.85, "850 ms"),
        (0.9996, "1 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("400gbit", 50e9),
        ("200Gbps", 25e9),
        ("50GB/s", 50e9),
        ("12.5kB/s", 12.5e3),
    ],
)
def test_parse_link(text: str, bytes_per_second: float) -> None:
    assert parse_link(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize("text", ["400G", "0Gbit", "-1Gbit", "50GB", "50gb/s"])
def test_parse_link_refuses(text: str) -> None:
    assert repr(text) in usage_error(parse_link, text)


# --- faults to inject ---


@pytest.mark.parametrize(
    ("text", "rank", "amount"),
    [
        ("late:1:3ms", 1, 3e-3),
        ("slow:0:10%", 0, 0.1),
        ("corrupt:3", 3, 0),
    ],
)
def test_parse_fault(text: str, rank: int, amount: float) -> None:
    fault = parse_fault(text, nproc=4)
    assert fault.kind == text.partition(":")[0]
    assert fault.rank == rank
    assert fault.amount == pytest.approx(amount)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("later:1:3ms", "'later:1:3ms'"),
        ("corrupt:1:3ms", "corrupt:RANK"),
        ("late:1:soon", "soon"),
        ("slow:1:much", "10%"),
        ("corrupt:4", "'4'"),
    ],
)
def test_parse_fault_refuses(text: str, fact: str) -> None:
    assert fact in usage_error(parse_fault, text, nproc=4)


# --- typed parameters ---


def make_param(
    kind: Kind, *choices: Value, name: str = "x", default: Value = 1, **limits: Any
) -> Param:
    return Param(name=name, kind=kind, default=default, help="help", choices=choices, **limits)


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        ("int", " -3 ", (-3,)),
        ("float", "1e-3", (0.001,)),
        ("str", "", ("",)),
        ("bool", "True,FALSE,0", (True, False)),
        ("int", "3, 1,3,2", (3, 1, 2)),
        ("size", "1K:4K:x2,3M", (1024, 2048, 4096, 3 << 20)),
        ("size", [4096, "1K:2K"], (4096, 1024, 2048)),
        # Axes of a mesh are separated by commas or spaces, meshes by semicolons.
        ("mesh", "dp=2,pp=2 tp=2", ("dp=2,pp=2,tp=2",)),
        ("mesh", "tp=2,dp=2; dp=4", ("tp=2,dp=2", "dp=4")),
    ],
)
def test_param_parses_values_of_its_type(
    kind: Kind, text: Setting, values: tuple[Value, ...]
) -> None:
    parsed = make_param(kind).parse_many(text)
    assert parsed == values
    assert type(parsed[0]) is type(values[0])


@pytest.mark.parametrize(
    ("kind", "value", "fact"),
    [
        ("int", 3.5, "x = 3.5 is not allowed"),
        ("int", True, "x = True is not allowed"),
        ("int", math.inf, "x = inf is not allowed"),
        ("float", "nan", "x = 'nan' is not allowed"),
        ("bool", "maybe", "x = 'maybe' is not allowed"),
        ("size", 1.5, "x = 1.5 is not allowed"),
        ("int", "", "x = ''"),
        ("int", "1,two", "x = 'two'"),
        ("int", "1,y=2", "--set y=2"),
        ("mesh", "dp,tp=2", "'dp,tp=2'"),
    ],
)
def test_param_refuses_other_values(kind: Kind, value: Any, fact: str) -> None:
    assert fact in usage_error(make_param(kind).parse_many, value)


def test_param_accepts_only_its_choices() -> None:
    mode = make_param("str", "blocking", "pipelined", name="mode")
    assert mode.parse("pipelined") == "pipelined"
    assert "blocking or pipelined" in usage_error(mode.parse, "pipeline")


def test_param_limits_are_inclusive_for_each_value() -> None:
    param = make_param("size", minimum=2, maximum=2)
    assert param.parse("2") == 2
    assert "from 2 to 2" in usage_error(param.parse_many, "1:8:x2")
    assert "from 2 to 2" in usage_error(param.parse_many, "2:8")
