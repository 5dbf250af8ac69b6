"""Lines over size, nodes and sequence length, and distributions of latency."""

import pandas as pd
import pytest

from parbench.bench.results.records import Record
from parbench.reports.analysis.fits import Ceiling
from parbench.reports.analysis.operations import select_operations
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import (
    chart_bandwidth,
    chart_latency,
    list_operation_charts,
)
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
    ceiling = Ceiling(name="link", bytes_per_second=1.5 * 4.096e6 / 3)
    operations = make_operations(*CURVE[::-1])
    bandwidth = chart_bandwidth(1, "", operations, ceiling)
    efficiency, time, _ = list_operation_charts(1, "", operations, ceiling)
    assert draw_lines(time) == {"all_reduce": [(1024, 1e-3), (4096, 3e-3)]}
    [(_, small), (_, large)] = draw_lines(bandwidth)["all_reduce"]
    assert [small, large] == pytest.approx([1.5 * 1.024e-3, 1.5 * 4.096e-3 / 3])  # GB/s
    assert draw_lines(efficiency)["all_reduce"][-1] == pytest.approx((4096, 1.0))
    names = [chart.name for chart in list_operation_charts(2, "", operations, None)]
    assert names == ["time_by_size_2", "latency_ecdf_2"]


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


def test_chart_shows_the_first_operations() -> None:
    names = [f"custom_{letter}" for letter in "abcdefgh"] + ["all_gather", "all_reduce"]
    records = [
        ok_record(collective_case(name, size_bytes))
        for name in names
        for size_bytes in (1024, 4096)
    ]
    chart = chart_bandwidth(1, "", make_operations(*records), None)
    assert list(draw_lines(chart)) == names[:8]
    assert chart is not None
    assert chart.caption.startswith("8 of 10 operations.")
