"""The tables of collectives and point-to-point operations, and of their time over size."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.results.tables import (
    Section,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.analysis.operations import OPERATION_KEYS, select_operations
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_bandwidth_and_time, chart_latency
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.bandwidth_levels import make_level_table
from parbench.reports.tables.columns import (
    CASE_COLUMNS,
    OPERATION_COLUMNS,
    QUALITY_COLUMNS,
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
    groups = operations.groupby(["mode", "dtype"], sort=False)
    for index, (setting, cases) in enumerate(groups, start=1):
        title = ", ".join(filter(None, map(str, setting))) or "without mode or type"
        figures = partial(_chart_operations, data, index, title, cases)
        table = _make_operation_table(f"communication-{index}", title, cases)
        tables.append(replace(table, where="page", figures=figures))
    levels = make_level_table(operations)
    if levels is not None:
        tables.append(levels)
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
    """Return operations over sizes, and a table of those with one size."""
    num_sizes = operations.groupby(OPERATION_KEYS)["size"].transform("nunique")
    swept = operations[num_sizes > 1]
    others = operations[num_sizes <= 1]
    tables = [] if swept.empty else _make_sweep_tables(swept)
    if not others.empty:
        table = _make_operation_table("communication", "Operations of one size", others)
        tables.append(replace(table, where="terminal"))
    return tables


def _make_operation_table(table_id: str, title: str, cases: "pd.DataFrame") -> Table:
    """Return a table with a row for each case of a frame from ``select_operations``."""
    rows = list_rows(cases)
    for row in rows:
        repetitions = row["repetitions"]
        row["repetitions"] = SortedText(f"{repetitions}/{row['planned']}", repetitions)
    columns = (
        *CASE_COLUMNS,
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


def _make_sweep_tables(operations: "pd.DataFrame") -> list[Table]:
    """Return time and bus bandwidth with a column for each size and a row for each operation.

    Intervals of one repetition are shown only if all are.
    """
    title = "Time over size"
    is_within_repetition = operations["is_within_repetition"]
    if is_within_repetition.all():
        title += f", {WITHIN_REPETITION}"
    else:
        operations = operations.copy()
        operations.loc[is_within_repetition, ["seconds_low", "seconds_high"]] = None
    sweeps = operations.pivot_table(
        index=OPERATION_KEYS,
        columns="size",
        values=["seconds", "seconds_low", "seconds_high", "busbw"],
        aggfunc="last",
        sort=False,
    )
    names = sweeps.columns.get_level_values(0)
    column_sizes = sweeps.columns.get_level_values("size")
    # A bound of an interval has the key of its value with a suffix.
    sweeps.columns = [
        re.sub("seconds|busbw", rf"\g<0>_{size}", name)
        for name, size in zip(names, column_sizes, strict=True)
    ]
    rows = list_rows(sweeps.reset_index())
    sizes = sorted(int(size) for size in operations["size"].unique())
    times = [
        metric_column(
            "time", key=f"seconds_{size}", title=format_case_size(size), has_interval=True
        )
        for size in sizes
    ]
    bandwidths = [
        metric_column("busbw", key=f"busbw_{size}", title=format_case_size(size)) for size in sizes
    ]
    note = "report.html has the noise, iterations and checks of each size."
    return [
        Table(
            id="time-over-size",
            title=title,
            columns=[*OPERATION_COLUMNS, *times],
            rows=rows,
            where="terminal",
        ),
        Table(
            id="busbw-over-size",
            title="Bus bandwidth over size, GB/s",
            columns=[*OPERATION_COLUMNS, *keep_known_columns(bandwidths, rows)],
            rows=rows,
            notes=[note],
            where="terminal",
        ),
    ]
