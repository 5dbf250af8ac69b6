"""The table of fits: latency, bandwidth and breakpoints of each operation."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import (
    format_case_size,
    format_quantity,
)
from parbench.bench.results.tables import Column, SortedText, Table, keep_known_columns
from parbench.reports.analysis.fits import OperationCurve, describe_fits
from parbench.reports.analysis.labels import label_operation
from parbench.reports.figures.chart import list_charts
from parbench.reports.figures.lines import chart_efficiency
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import OPERATION_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

FIT_COLUMNS = (
    Column(
        key="latency",
        title="latency",
        kind="s",
        help="time extrapolated to size 0 from the line of the smallest sizes, with its 95 % CI",
        has_interval=True,
        is_result=True,
    ),
    Column(
        key="algbw",
        title="algbw GB/s",
        kind="B/s",
        help="asymptotic algorithm bandwidth in 1e9 B/s, of the line of the largest sizes",
        has_interval=True,
        is_result=True,
    ),
    Column(
        key="busbw",
        title="busbw GB/s",
        kind="B/s",
        help="asymptotic bus bandwidth in 1e9 B/s, of the line of the largest sizes",
        has_interval=True,
        is_result=True,
    ),
    Column(
        key="half_bandwidth",
        title="n_1/2",
        kind="B",
        help="size at which half the bandwidth is reached: latency times bandwidth",
    ),
    Column(
        key="breakpoints",
        title="breakpoint",
        kind="size",
        help="size at which another line begins, such as a change of protocol, and the measured "
        "sizes next to it",
    ),
    Column(key="outliers", title="outliers", help="sizes far from the fit, and their distance"),
    Column(
        key="residual",
        title="residual",
        kind="percent",
        help="median distance of times from the fit",
        is_result=True,
    ),
    Column(
        key="efficiency",
        title="efficiency",
        kind="percent",
        help="fitted bus bandwidth relative to the link speed, or to a memory copy on the host",
        is_result=True,
    ),
)


def make_fit_table(data: RunData, operations: "pd.DataFrame") -> Table:
    """Return the fit of each operation, with a figure of the efficiency over size."""
    rows = [_make_row(curve) for curve in data.curves]
    return Table(
        id="fits",
        title="Fits: latency and bandwidth",
        caption="model of time over size, and its error",
        columns=[*OPERATION_COLUMNS, *keep_known_columns(FIT_COLUMNS, rows)],
        rows=rows,
        notes=describe_fits(data.curves, data.ceiling),
        figures=lambda: list_charts(chart_efficiency(operations, data.ceiling)),
    )


def _make_row(curve: OperationCurve) -> dict[str, Any]:
    fit = curve.fit
    first, last = fit.segments[0], fit.segments[-1]
    result = curve.rows[0]
    params = result.case.params
    row: dict[str, Any] = {
        "operation": label_operation(result.case),
        "mode": params.get("mode"),
        "dtype": params.get("dtype"),
        "latency": first.latency_seconds,
        "half_bandwidth": fit.half_bandwidth_bytes,
        "breakpoints": _format_breakpoints(fit),
        "outliers": ", ".join(
            f"{format_case_size(size)} {100 * error:+.0f} %" for size, error in fit.outliers
        ),
        "residual": fit.residual,
        "efficiency": curve.efficiency,
        "is_within_repetition": fit.repetitions < 2,
    }
    bounds = {
        "": last.bytes_per_second,
        "_low": last.bytes_per_second_low,
        "_high": last.bytes_per_second_high,
    }
    for suffix, bandwidth in bounds.items():
        if bandwidth is not None:
            row[f"algbw{suffix}"] = bandwidth
            if curve.busbw_factor is not None:
                row[f"busbw{suffix}"] = bandwidth * curve.busbw_factor
    row |= {"latency_low": first.latency_low, "latency_high": first.latency_high}
    if fit.repetitions == 2:
        # Two repetitions are too few for an interval.
        return {key: row[key] for key in row if not key.endswith(("_low", "_high"))}
    return row


def _format_breakpoints(fit: CurveFit) -> SortedText:
    """Return each breakpoint with the measured sizes between which it lies."""
    texts = []
    for size, (left, right) in zip(fit.breakpoints, pairwise(fit.segments), strict=True):
        sizes = f"{format_case_size(left.last_bytes)}, {format_case_size(right.first_bytes)}"
        texts.append(f"{format_quantity(size, 'B')} [{sizes}]")
    return SortedText(", ".join(texts), fit.breakpoints[0] if fit.breakpoints else None)
