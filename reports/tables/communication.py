"""The tables of collectives and point-to-point operations, and of their time over size."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.results.tables import (
    Column,
    ColumnKind,
    Section,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_bandwidth_and_time, chart_latency
from parbench.reports.frames import list_rows
from parbench.reports.operations import group_cases, select_operations
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import (
    OPERATION_COLUMNS,
    QUALITY_COLUMNS,
    SETTING_COLUMNS,
)
from parbench.reports.tables.fits import make_fit_table

if TYPE_CHECKING:
    import pandas as pd

CAPTION = "plotted data"


def make_communication_section(data: RunData) -> Section | None:
    """Return the operations of a run, and their fits.

    Pages have a table and figures for each mode and type. On a terminal, operations of several
    sizes are rows of a table over size.
    """
    operations = select_operations(data)
    if operations.empty:
        return None
    tables = _make_terminal_tables(operations)
    settings = operations.groupby(["mode", "dtype"], sort=False)
    for index, ((mode, dtype), cases) in enumerate(settings, start=1):
        title = ", ".join(filter(None, (mode, dtype))) or "without mode or type"
        figures = partial(_chart_operations, data, index, title, cases)
        table = make_operation_table(f"communication-{index}", title, cases)
        tables.append(replace(table, where="page", figures=figures))
    terms = ["busbw", "blocking, pipelined"]
    if data.curves:
        tables.append(make_fit_table(data, operations))
        terms += ["fit", "breakpoint", "outliers"]
    return Section(id="communication", title="Communication", tables=tables, terms=terms)


def _chart_operations(
    data: RunData, index: int, title: str, cases: "pd.DataFrame"
) -> Iterator[Chart]:
    case_ids = set(cases["case_id"])
    curves = [curve for curve in data.curves if curve.rows[0].case.id in case_ids]
    yield from chart_bandwidth_and_time(index, title, cases, curves, data.ceiling)
    yield from list_charts(chart_latency(index, title, cases))


def _make_terminal_tables(operations: "pd.DataFrame") -> list[Table]:
    """Return operations over sizes, and a table of the others."""
    groups = [cases for _, cases in group_cases(operations, "size_bytes")]
    sweeps = [cases for cases in groups if cases["size"].nunique() > 1]
    tables = _make_sweep_tables(sweeps) if sweeps else []
    swept_ids = {case_id for cases in sweeps for case_id in cases["case_id"]}
    others = operations[~operations["case_id"].isin(swept_ids)]
    if not others.empty:
        title = "Collectives and point-to-point"
        if sweeps:
            title += ", of one size"
        table = make_operation_table("communication", title, others)
        tables.append(replace(table, where="terminal"))
    return tables


def make_operation_table(table_id: str, title: str, cases: "pd.DataFrame") -> Table:
    """Return a table with a row for each case of a frame from ``select_operations``."""
    rows = [dict(row) for row in list_rows(cases)]
    for row in rows:
        repetitions = row["repetitions"]
        row["repetitions"] = SortedText(f"{repetitions}/{row['planned']}", repetitions)
    columns = (
        *SETTING_COLUMNS,
        metric_column("time", key="seconds", has_interval=True),
        metric_column("algbw"),
        metric_column("busbw"),
        *QUALITY_COLUMNS,
    )
    return Table(
        id=table_id,
        title=title,
        caption=CAPTION,
        columns=keep_known_columns(columns, rows),
        rows=rows,
    )


def _make_sweep_tables(sweeps: Sequence["pd.DataFrame"]) -> list[Table]:
    """Return time and bus bandwidth with a column for each size and a row for each operation."""
    sizes = sorted({int(size) for cases in sweeps for size in cases["size"]})
    rows = [_make_sweep_row(cases) for cases in sweeps]
    time_title = "Collectives and point-to-point: time over size"
    time_columns = [
        _make_size_column(size, "time", "s", "median with its 95 % CI") for size in sizes
    ]
    if all(cases["is_within_repetition"].all() for cases in sweeps):
        # The title of the table is shorter than that of each column.
        time_title += f", {WITHIN_REPETITION}"
        rows = [{**row, "is_within_repetition": False} for row in rows]
    busbw_columns = [
        _make_size_column(size, "busbw", "B/s", "bus bandwidth in 1e9 B/s, as in nccl-tests")
        for size in sizes
    ]
    return [
        Table(
            id="time-over-size",
            title=time_title,
            caption=CAPTION,
            columns=[*OPERATION_COLUMNS, *time_columns],
            rows=rows,
            where="terminal",
        ),
        Table(
            id="busbw-over-size",
            title="Collectives and point-to-point: bus bandwidth over size, GB/s",
            caption=CAPTION,
            columns=[*OPERATION_COLUMNS, *keep_known_columns(busbw_columns, rows)],
            rows=rows,
            notes=[
                "Noise, iterations and checks of each size: report.html, or parbench report "
                "--format csv."
            ],
            where="terminal",
        ),
    ]


def _make_size_column(size: int, metric: str, kind: ColumnKind, text: str) -> Column:
    return Column(
        key=f"{metric}_{size}",
        title=format_case_size(size),
        kind=kind,
        help=text,
        has_interval=metric == "time",
        grade_key=f"noise_{size}",
        is_result=True,
    )


def _make_sweep_row(cases: "pd.DataFrame") -> dict[str, Any]:
    """Return the row of an operation, with a time and a bandwidth for each size."""
    first = cases.iloc[0]
    row: dict[str, Any] = {column.key: first[column.key] for column in OPERATION_COLUMNS}
    row["is_within_repetition"] = bool(cases["is_within_repetition"].any())
    for case in list_rows(cases):
        size = case["size"]
        row |= {
            f"busbw_{size}": case["busbw"],
            f"noise_{size}": case["noise"],
            f"time_{size}": case["seconds"],
            f"time_{size}_low": case["seconds_low"],
            f"time_{size}_high": case["seconds_high"],
        }
    return row
