"""Numbers as text: three significant digits, a unit, and a dash for what is unknown."""

import math

import pytest

from parbench.bench.results.formatting import (
    format_number,
    format_quantity,
    format_with_interval,
    to_single_line,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.996, "10.0"),
        (0.00012345, "0.000123"),
        (-12.345, "-12.3"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_significant_has_three_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5e-6, "s", "0.500 us"),
        (999.96e-6, "s", "1.00 ms"),
        (75.0, "s", "75.0 s"),
        (2.5e9, "B/s", "2.50 GB/s"),
        (1024.0, "B", "1.00 KiB"),
        (1234.0, "tokens/s", "1230 tokens/s"),
        (0.25, "", "0.250"),
    ],
)
def test_quantity_has_a_unit(value: float, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text


def test_control_characters_are_escaped() -> None:
    assert to_single_line("a\x1b[31m\n  b\x00") == "a\\x1b[31m b\\x00"
    assert to_single_line("Größe 64K") == "Größe 64K"


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "text"),
    [
        (1.05e-3, 950e-6, 1.1e-3, "s", "1.05 ms [0.950, 1.10]"),
        (0.0, 0.0, 3.0, "s", "0 s [0, 3.00]"),
        (1.0, 1.0, 2048.0, "B", "0.000977 KiB [0.000977, 2.00]"),
    ],
)
def test_interval_has_a_unit_that_fits_its_largest_end(
    value: float, low: float, high: float, unit: str, text: str
) -> None:
    assert format_with_interval((value, low, high), unit, str) == text
