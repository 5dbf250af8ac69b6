"""Lines over size, nodes and sequence length, and points of two quantities."""

import re

import pytest

from parbench.bench.results.records import Record
from parbench.reports import cells
from parbench.reports.analysis.contrasts import kinds
from parbench.reports.analysis.fits import fit_curves
from parbench.reports.analysis.ranks import nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.figures.lines import (
    RATE,
    TIME,
    curve_lines,
    draw_against,
    draw_kinds,
    draw_points,
    draw_sizes,
)
from tests.support.figure_parts import Parts, parse_drawing
from tests.support.nodes_fixtures import FAR_RATE, sample_node_run
from tests.support.report_rows import summarize_rows
from tests.support.reports_fixtures import collective_case, ok_record, rate_metric, sample_run


def make_record(size_bytes: int, seconds: float) -> Record:
    return ok_record(collective_case(size_bytes=size_bytes), seconds=seconds)


CURVE = [make_record(1024, 1e-3), make_record(4096, 3e-3)]


def read_hues(parts: Parts) -> dict[str, str]:
    return {title.partition(":")[0]: path.hue for title, path in parts.lines.items()}


def test_operations_keep_their_color() -> None:
    rows = []
    for row in summarize(sample_run()).rows:
        if row.metrics and row.case.params.get("mode") == "pipelined":
            rows.append(row)
    rates = parse_drawing(draw_sizes(curve_lines(rows, "busbw"), RATE))
    times = parse_drawing(draw_sizes(curve_lines(rows, "time"), TIME))
    hues = read_hues(rates)
    assert hues == read_hues(times)
    assert len(set(hues.values())) == 6
    assert sorted(rates.line_names) == sorted(hues)
    assert {"1K", "1M", "16M"} <= set(rates.texts)


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


def test_fit_is_a_dashed_line_with_breakpoint() -> None:
    records = []
    for exponent in range(10, 25):
        size = 1 << exponent
        seconds = 10e-6 + size / 1e9 if size <= 1 << 16 else 100e-6 + size / 5e9
        records.append(make_record(size, seconds))
    rows = summarize_rows(*records)
    [curve] = fit_curves(rows, None)
    [breakpoint_bytes] = curve.fit.breakpoints
    [line] = curve_lines(rows, "time", [curve])
    small, large = line.fit
    assert small[0][0] == 1024
    assert small[-1][0] == large[0][0] == breakpoint_bytes
    assert large[-1] == pytest.approx((1 << 24, curve.fit.predict(1 << 24)))
    paths = parse_drawing(draw_sizes([line], TIME)).paths
    dashed = [path for path in paths if "dasharray:4 2" in path.style]
    assert len(dashed) == 2
    assert len(dashed[0].points) > 10  # a straight line is bent on logarithmic axes


def test_group_kinds_are_lines_over_size() -> None:
    run = sample_node_run()
    parts = parse_drawing(draw_kinds(kinds(summarize(run).rows, nodes_of(run))))
    names = {"world", "node", "node, together", "across", "across, together"}
    assert set(parts.line_names) == names
    [across] = [title for title in parts.lines if title.startswith("across: ")]
    rates = dict(re.findall(r"(\d+[KM]): ([\d.]+)", across))
    assert list(rates) == ["64K", "1M", "4M"]
    assert float(rates["4M"]) == pytest.approx(FAR_RATE / 1e9, rel=0.01)


def test_draw_against_orders_by_nodes() -> None:
    rates = {"a": {4: 1.0, 1: 8.0, 2: 2.0}, "b": {0: 1.0, 1: 1.0, 2: 0.0, 4: 0.5}}
    parts = parse_drawing(draw_against(rates, RATE))
    assert list(parts.lines) == ["a: 1: 8.00, 2: 2.00, 4: 1.00", "b: 1: 1.00, 4: 0.500"]
    assert draw_against({"a": {4: 1.0}}, TIME) is None


def test_points_mark_and_join_the_front() -> None:
    points = {"fast": (1.0, 80.0), "small": (4.0, 20.0), "beaten": (4.0, 80.0)}
    time_axis = ("step time", cells.duration)
    memory_axis = ("memory", "{:.0f} GB".format)
    parts = parse_drawing(draw_points(points, ["fast", "small"], time_axis, memory_axis))
    titles = [path.title for path in parts.paths if path.title]
    assert titles == ["fast: 1.00 s, 80 GB", "small: 4.00 s, 20 GB", "beaten: 4.00 s, 80 GB"]
    [front] = [path for path in parts.paths if "stroke-width:1.5" in path.style]
    (fast_x, fast_y), (small_x, small_y) = front.points
    assert fast_x < small_x
    assert fast_y < small_y  # y grows from the top down
    assert "beaten" not in parts.texts
