"""Lines over size, nodes and sequence length, and distributions of latency."""

import pandas as pd
import pytest

from parbench.bench.results.records import Record
from parbench.reports.analysis.fits import Ceiling
from parbench.reports.analysis.operations import select_operations
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import (
    chart_bandwidth_and_time,
    chart_efficiency,
    chart_latency,
    chart_lines,
    make_lines,
)
from parbench.reports.figures.quantities import BANDWIDTH, count_of
from parbench.reports.run_data import RunData
from tests.support.reports.figure_parts import find_lines
from tests.support.reports.report_rows import run_from_records
from tests.support.reports.reports_fixtures import collective_case, ok_record


def make_record(size_bytes: int, seconds: float) -> Record:
    return ok_record(collective_case(size_bytes=size_bytes), seconds=seconds)


def make_operations(*records: Record) -> pd.DataFrame:
    return select_operations(RunData(run_from_records(*records)))


CURVE = [make_record(1024, 1e-3), make_record(4096, 3e-3)]


def draw_lines(chart: Chart | None) -> dict[str, list[tuple[float, float]]]:
    assert chart is not None
    return dict(find_lines(chart.draw().axes[0]))


def test_lines_are_ordered_by_size_in_their_unit() -> None:
    operations = make_operations(*CURVE[::-1])
    bandwidth, time = chart_bandwidth_and_time(1, "", operations, [], None)
    assert draw_lines(time) == {"all_reduce": [(1024, 1e-3), (4096, 3e-3)]}
    [(_, small), (_, large)] = draw_lines(bandwidth)["all_reduce"]
    assert [small, large] == pytest.approx([1.5 * 1.024e-3, 1.5 * 4.096e-3 / 3])  # GB/s


def test_efficiency_is_relative_to_the_ceiling() -> None:
    ceiling = Ceiling(name="link", bytes_per_second=1.5 * 4.096e6 / 3)
    operations = make_operations(*CURVE)
    lines = draw_lines(chart_efficiency(operations, ceiling))
    assert lines["all_reduce"][-1] == pytest.approx((4096, 1.0))
    assert chart_efficiency(operations, None) is None


def test_latency_is_the_share_of_iterations_at_the_smallest_size() -> None:
    operations = make_operations(*CURVE)
    lines = draw_lines(chart_latency(1, "", operations))
    [(label, points)] = lines.items()
    assert label == "all_reduce 1K"
    times, shares = zip(*points, strict=True)
    samples = CURVE[0].samples.values
    assert (times[0], times[-1]) == (min(samples), max(samples))
    assert list(shares) == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_points_that_a_log_axis_cannot_show_are_left_out() -> None:
    rates = {"a": {4: 1.0, 1: 8.0, 2: 2.0}, "b": {0: 1.0, 1: 1.0, 2: 0.0, 4: 0.5}}
    rows = [
        {"case": case, "nodes": nodes, "rate": rate}
        for case, by_nodes in rates.items()
        for nodes, rate in by_nodes.items()
    ]
    lines = make_lines(rows, "case", "nodes", "rate")
    drawn = draw_lines(chart_lines("name", "", "", lines, count_of("nodes"), BANDWIDTH))
    assert drawn == {"a": [(1, 8.0), (2, 2.0), (4, 1.0)], "b": [(1, 1.0), (4, 0.5)]}
