"""The tables of collectives and point-to-point operations, and of their time over size."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.stats import Estimate
from parbench.bench.results.tables import (
    Column,
    SortedText,
    Table,
    metric_column,
)
from parbench.reports.analysis.fits import OperationCurve, describe_fits
from parbench.reports.analysis.labels import label_operation
from parbench.reports.analysis.operations import select_operations
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_bandwidth, list_operation_charts
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import (
    CASE_COLUMNS,
    OPERATION_COLUMNS,
    QUALITY_COLUMNS,
    TIME_COLUMN,
)

if TYPE_CHECKING:
    import pandas as pd

_FIT_COLUMNS = (
    Column(
        "latency",
        kind="s",
        help="time extrapolated to size 0 from the line of the smallest sizes, with its 95 % CI",
        has_interval=True,
    ),
    Column(
        "algbw",
        "algbw GB/s",
        kind="B/s",
        help="asymptotic algorithm bandwidth in 1e9 B/s, of the line of the largest sizes",
        has_interval=True,
    ),
    Column(
        "busbw",
        "busbw GB/s",
        kind="B/s",
        help="asymptotic bus bandwidth in 1e9 B/s, of the line of the largest sizes",
        has_interval=True,
    ),
    Column(
        "half_bandwidth",
        "n_1/2",
        kind="B",
        help="size at which half the bandwidth is reached: latency times bandwidth",
    ),
    Column(
        "breakpoint",
        kind="size",
        help="sizes between which another line begins, such as at a change of protocol",
    ),
    Column("outliers", help="sizes far from the fit, and their distance"),
    Column(
        "residual",
        kind="percent",
        is_result=True,
        help="median distance of times from the fit",
    ),
    Column(
        "efficiency",
        kind="percent",
        is_result=True,
        help="fitted bus bandwidth relative to the link speed, or to a memory copy on the host",
    ),
)


def list_communication_tables(data: RunData) -> list[Table]:
    """Return the tables of a run's collectives and p2p operations, and of the fits over size.

    There is a table with figures for each mode and data type, with a row per case. The list is empty
    without communication cases.
    """
    tables = []
    for index, (title, cases) in enumerate(group_operations(data), start=1):
        figures = partial(_chart_operations, data, index, title, cases)
        table = _make_operation_table(f"communication-{index}", title, cases, figures)
        tables.append(table)
    if data.curves:
        tables.append(_make_fit_table(data))
    return tables


def group_operations(data: RunData) -> "list[tuple[str, pd.DataFrame]]":
    """Return the communication cases grouped by mode, such as blocking, and data type.

    An element is (mode and data type as text, frame with a row per case). The columns of the frame
    are those of ``select_operations``.
    """
    operations = select_operations(data)
    if operations.empty:
        return []
    groups = operations.groupby(["mode", "dtype"], sort=False)
    return [
        (", ".join(filter(None, map(str, setting))) or "without mode or type", cases)
        for setting, cases in groups
    ]


def _chart_operations(
    data: RunData, index: int, title: str, cases: "pd.DataFrame"
) -> Iterator[Chart]:
    """Yield the charts of one table: bandwidth, efficiency and time over size, and latencies.

    The chart of bandwidth is left out for the first table, because it is above the sections of the
    report.

    ``cases`` is a frame with a row per communication case of one mode and data type. ``title`` is
    the mode and data type, which end the titles of the charts. ``index`` is a number from 1 that
    makes the names of the charts unique.
    """
    if index > 1:
        yield from list_charts(chart_bandwidth(index, title, cases, data.ceiling))
    yield from list_operation_charts(index, title, cases, data.ceiling)


def _make_operation_table(
    table_id: str, title: str, cases: "pd.DataFrame", figures: Callable[[], Iterator[Chart]]
) -> Table:
    """Return a table with a row for each case: time, bandwidth, noise and check.

    ``cases`` is a frame with a row per communication case (``select_operations``) of one mode and
    data type, which ``title`` names. ``figures`` makes the charts of the table.
    """
    rows = list_rows(cases)
    for row in rows:
        row["repetitions"] = f"{row['repetitions']}/{row['planned']}"
    columns = (
        *CASE_COLUMNS,
        TIME_COLUMN,
        metric_column("algbw"),
        metric_column("busbw"),
        *QUALITY_COLUMNS,
    )
    return Table(
        table_id,
        f"Operations: {title}",
        caption="time, bandwidth, noise and check of each case",
        columns=columns,
        rows=rows,
        terms=["busbw", "blocking, pipelined"],
        figures=figures,
    )


def _make_fit_table(data: RunData) -> Table:
    """Return the table of fits: latency, asymptotic bandwidth and breakpoints of each operation."""
    rows = [_make_fit_row(curve) for curve in data.curves]
    return Table(
        "fits",
        "Fits: latency and bandwidth",
        caption="model of time over size, and its error",
        columns=[*OPERATION_COLUMNS, *_FIT_COLUMNS],
        rows=rows,
        notes=describe_fits(data.ceiling),
        terms=["fit", "breakpoint", "outliers"],
    )


def _make_fit_row(curve: OperationCurve) -> dict[str, Any]:
    """Return the row of one fit for the table of fits, keyed by column (``_FIT_COLUMNS``)."""
    fit = curve.fit
    first, last = fit.segments[0], fit.segments[-1]
    case = curve.rows[0].case
    sizes = f"{format_case_size(first.last_bytes)} to {format_case_size(last.first_bytes)}"
    return {
        "operation": label_operation(case),
        "mode": case.params.get("mode"),
        "dtype": case.params.get("dtype"),
        **_make_cells("latency", first.latency, 1.0),
        **_make_cells("algbw", last.bandwidth, 1.0),
        **_make_cells("busbw", last.bandwidth, curve.busbw_factor),
        "half_bandwidth": last.half_bandwidth_bytes,
        "breakpoint": SortedText(sizes, first.last_bytes) if first != last else None,
        "outliers": ", ".join(
            f"{format_case_size(size)} {100 * error:+.0f} %" for size, error in fit.outliers
        ),
        "residual": fit.residual,
        "efficiency": curve.efficiency,
    }


def _make_cells(key: str, estimate: Estimate | None, factor: float | None) -> dict[str, float]:
    """Return the cells of a fitted quantity: ``KEY``, and its 95 % interval ``KEY_low, KEY_high``.

    ``KEY`` is ``key``. The value and the bounds of ``estimate`` are multiplied by ``factor``, such
    as from algorithm to bus bandwidth. Unknown bounds have no cell. The dict is empty if the
    estimate or the factor is None.
    """
    if estimate is None or factor is None:
        return {}
    bounds = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {
        f"{key}{suffix}": factor * bound for suffix, bound in bounds.items() if bound is not None
    }
