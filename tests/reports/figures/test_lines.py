"""Lines over size, nodes and sequence length, and points of two quantities."""

import pytest

from parbench.bench.results.records import Record
from parbench.reports.figures.lines import (
    RATE,
    TIME,
    curve_lines,
    draw_against,
    draw_sizes,
)
from tests.support.figure_parts import parse_drawing
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import collective_case, ok_record, rate_metric


def make_record(size_bytes: int, seconds: float) -> Record:
    return ok_record(collective_case(size_bytes=size_bytes), seconds=seconds)


CURVE = [make_record(1024, 1e-3), make_record(4096, 3e-3)]


def test_lines_are_ordered_by_size_in_their_unit() -> None:
    rows = summarize_rows(*CURVE[::-1])
    parts = parse_drawing(draw_sizes(curve_lines(rows, "time"), TIME))
    [(title, path)] = parts.lines.items()
    assert title == "all_reduce: 1K: 1.00 ms, 4K: 3.00 ms"
    assert path.points == sorted(path.points)
    [bandwidth] = curve_lines(rows, "busbw")
    rates = sorted(point[1] for point in bandwidth.points)
    assert rates == pytest.approx([1.5 * 1.024e-3, 1.5 * 4.096e-3 / 3])  # GB/s


@pytest.mark.parametrize("value", [None, 0.0])
def test_value_without_a_logarithm_is_left_out(value: float | None) -> None:
    unknown = ok_record(collective_case(size_bytes=8), metrics={"busbw": rate_metric(value)})
    [line] = curve_lines(summarize_rows(unknown, *CURVE), "busbw")
    assert [point[0] for point in line.points] == [1024, 4096]


def test_draw_against_orders_by_nodes() -> None:
    rates = {"a": {4: 1.0, 1: 8.0, 2: 2.0}, "b": {0: 1.0, 1: 1.0, 2: 0.0, 4: 0.5}}
    parts = parse_drawing(draw_against(rates, RATE))
    assert list(parts.lines) == ["a: 1: 8.00, 2: 2.00, 4: 1.00", "b: 1: 1.00, 4: 0.500"]
    assert draw_against({"a": {4: 1.0}}, TIME) is None
