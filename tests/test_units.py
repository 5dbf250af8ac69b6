"""Sizes and durations: what is understood, what is refused, and that both read back."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UserError
from bench.units import format_duration, format_size, parse_duration, parse_size, parse_sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("64K", 65536),
        ("64k", 65536),
        ("64KB", 65536),
        ("64KiB", 65536),
        ("64B", 64),
        (" 3M ", 3 << 20),
        ("2G", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_a_size_is_a_whole_number_with_a_1024_based_unit(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "K", "1Z", "-1", "-4M", "1.5M", "1e6", "1 000", "1_000", "4 M", "0x10", "1K1", "³", "٣K", "9" * 5000],
)
def test_a_size_that_is_no_whole_number_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        UserError, match=r"not understood.*whole number of bytes with K, M, G or T.*such as 64K"
    ) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=1 << 59))
def test_every_size_reads_back_as_it_was_written(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


@settings(deadline=None)
@given(st.integers(1, 1023), st.sampled_from(["", "K", "M", "G", "T"]))
def test_a_size_is_written_in_the_largest_unit_that_holds_it(count: int, unit: str) -> None:
    assert format_size(parse_size(f"{count}{unit}")) == f"{count}{unit}"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K", (1024,)),
        ("1K,3M", (1024, 3 << 20)),
        (" 3M , 1K ", (3 << 20, 1024)),
        ("1K:8K", (1024, 2048, 4096, 8192)),
        ("1K:64K:x4", (1024, 4096, 16384, 65536)),
        ("1K:64K:X4", (1024, 4096, 16384, 65536)),
        ("1K:60K:x4", (1024, 4096, 16384)),
        ("1M:4M:+1M", (1 << 20, 2 << 20, 3 << 20, 4 << 20)),
        ("0:10:+4", (0, 4, 8)),
        ("7:7:x2", (7,)),
        ("7:7:+1", (7,)),
        ("4,1:4,2", (4, 1, 2)),
    ],
)
def test_sizes_are_lists_and_ranges_in_the_order_written_each_once(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@settings(deadline=None)
@given(st.integers(1, 1 << 20), st.integers(0, 1 << 30), st.integers(2, 16))
def test_a_geometric_range_steps_by_its_factor_and_stops_at_its_end(start: int, more: int, factor: int) -> None:
    sizes = parse_sizes(f"{start}:{start + more}:x{factor}")
    assert sizes[0] == start
    assert all(after == before * factor for before, after in pairwise(sizes))
    assert sizes[-1] <= start + more < sizes[-1] * factor


@settings(deadline=None)
@given(st.integers(0, 1 << 20), st.integers(0, 1000), st.integers(1, 1 << 20))
def test_an_arithmetic_range_steps_by_its_increment_and_stops_at_its_end(
    start: int, count: int, increment: int
) -> None:
    stop = start + count * increment + increment // 2
    sizes = parse_sizes(f"{start}:{stop}:+{increment}")
    assert sizes == tuple(start + i * increment for i in range(count + 1))


def test_a_range_may_be_long() -> None:
    assert len(parse_sizes("1:10000:+1")) == 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1Z", "'1Z' is not understood"),
        ("1K,,3M", "'' is not understood"),
        ("", "'' is not understood"),
        ("1K,", "'' is not understood"),
        (":1K", "'' is not understood"),
        ("1K:", "'' is not understood"),
        ("-1:4", "'-1' is not understood"),
        ("4M:1K:x2", "start above their end: 4M > 1K"),
        ("1K:2K:x2:x3", "not understood: write 1K,3M or a range"),
        ("1K:4K:x1", "no usable step: 'x1'"),
        ("1K:4K:x0", "no usable step: 'x0'"),
        ("1K:4K:x-2", "no usable step: 'x-2'"),
        ("1K:4K:x1.5", "no usable step: 'x1.5'"),
        ("1K:4K:x²", "no usable step: 'x²'"),
        ("1K:4K:x" + "9" * 5000, "no usable step"),
        ("1K:4K:x", "no usable step: 'x'"),
        ("1K:4K:4", "no usable step: '4'"),
        ("1K:4K:", "no usable step: ''"),
        ("0:4K:x2", "from a start above 0"),
        ("0:4K", "from a start above 0"),
        ("1K:4K:+0", r"no usable step: '\+0'"),
        ("1K:4K:+-1", "'-1' is not understood"),
        ("1K:4K:+", "'' is not understood"),
        ("0:1T:+1", "more than 10000: write a larger step"),
        ("1:10001:+1", "more than 10000"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), ("500ms", 0.5), (" 3 ", 3.0)],
)
def test_a_duration_is_seconds_unless_it_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "0.0ms", "-1", "-3s", "1e3", "inf", "nan", "2M", "3 s", "s", "1d", "9" * 400]
)
def test_a_duration_that_is_not_above_zero_or_not_finite_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not understood: write a number above 0 with ms, s, m or h, such as 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.85, "850 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (42.4, "42 s"),
        (59.6, "1 min 0 s"),
        (200.0, "3 min 20 s"),
    ],
)
def test_a_duration_is_said_as_people_say_it(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
