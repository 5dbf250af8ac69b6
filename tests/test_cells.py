import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports_fixtures import rate_metric, seconds_metric

from bench.records import Metric
from reports import cells


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.345, "12.3"),
        (1.2, "1.20"),
        (999.6, "1000"),
        (9.996, "10.0"),
        (123456.0, "123000"),
        (0.00012345, "0.000123"),
        (-12.345, "-12.3"),
        (0.0, "0"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert cells.significant(value) == text


@given(st.floats(min_value=1e-12, max_value=1e15))
def test_what_is_printed_is_within_half_a_digit(value: float) -> None:
    text = cells.significant(value)
    assert "e" not in text
    assert math.isclose(float(text), value, rel_tol=0.00501)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.345e-6, "12.3 us"),
        (0.5e-6, "0.500 us"),
        (999.96e-6, "1.00 ms"),
        (0.0456, "45.6 ms"),
        (1.0, "1.00 s"),
        (75.0, "75.0 s"),
        (0.0, "0 us"),
        (None, "-"),
    ],
)
def test_durations_choose_their_unit(seconds: float | None, text: str) -> None:
    assert cells.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.5e9, "B/s", "2.50 GB/s"),
        (1536.0, "B", "1.50 KiB"),
        (512.0, "B", "512 B"),
        (3 << 30, "B", "3.00 GiB"),
        (1234.0, "tokens/s", "1230 tokens/s"),
        (0.25, "", "0.250"),
        (None, "B", "-"),
        (math.nan, "s", "-"),
    ],
)
def test_quantities_bring_their_unit(value: float | None, unit: str, text: str) -> None:
    assert cells.quantity(value, unit) == text


def test_bandwidth_is_in_1e9_bytes() -> None:
    assert cells.gigabytes(1e9) == "1.00"
    assert cells.gigabytes(0.0) == "0"
    assert cells.gigabytes(None) == "-"


@pytest.mark.parametrize(("value", "text"), [(65536, "64K"), (1001, "1001"), (None, "-"), ("x", "-"), (True, "-")])
def test_sizes_are_written_as_people_do(value: object, text: str) -> None:
    assert cells.size(value) == text


def test_an_interval_is_in_the_unit_of_its_value() -> None:
    metric = Metric(value=950e-6, unit="s", better="lower", low=900e-6, high=1100e-6)
    assert cells.measured(metric) == "950 us [900, 1100]"
    assert cells.measured(Metric(value=2e9, unit="B/s", better="higher", low=1e9, high=3e9)) == "2.00 GB/s [1.00, 3.00]"


def test_without_an_interval_there_are_no_brackets() -> None:
    assert cells.measured(rate_metric(2e9)) == "2.00 GB/s"
    assert cells.measured(seconds_metric(None)) == "-"
    assert cells.measured(None) == "-"
    assert cells.interval(rate_metric(2e9)) == "-"


def test_words_are_counted() -> None:
    assert cells.counted((("precision", 4), ("budget", 1))) == "precision x4, budget"
    assert cells.counted(()) == "-"


def test_what_cannot_be_seen_is_written_out() -> None:
    assert cells.visible("a\x1b[31m\n  b\x00") == "a\\x1b[31m b\\x00"
    assert cells.visible("Größe 64K") == "Größe 64K"


def test_a_fraction_as_a_percentage() -> None:
    assert cells.percent(0.345) == "34.5 %"
    assert cells.percent(-0.02) == "-2.00 %"
    assert cells.percent(None) == cells.percent(float("nan")) == "-"
