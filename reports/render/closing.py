"""The summary that a run ends with: verdicts, operations, steps and findings on one screen.

The summary is 80 characters wide. For a run of at most three operations, it has a table over
message sizes for each operation, otherwise one table with the largest bandwidth of each operation.
"""

import textwrap
from shlex import quote

from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.tables import Column, Table, is_missing, metric_column
from parbench.reports.analysis.operations import OPERATION_KEYS, select_operations
from parbench.reports.analysis.overview import summarize_operations, summarize_steps
from parbench.reports.frames import list_rows
from parbench.reports.render.terminal import Sheet, render_text
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import SIZE_COLUMN
from parbench.reports.tables.groups import list_link_tables
from parbench.reports.tables.side_by_side import list_setting_tables

WIDTH = 80
MAX_ROWS = 16
"""The largest number of rows of the tables of operations and of steps in the summary."""
MAX_TABULATED_OPERATIONS = 3
MAX_LINK_ROWS = 16
MAX_FINDINGS = 3
MAX_COMPARISONS = 2
MAX_REASON_LETTERS = 200
_TIME_COLUMN = Column("seconds", "time", kind="s", has_interval=True)
_SIZE_TABLE_COLUMNS = (
    SIZE_COLUMN,
    _TIME_COLUMN,
    metric_column("algbw"),
    metric_column("busbw"),
    Column("variation", kind="percent", is_result=True, grade_key="noise"),
    Column("repetitions"),
)
_OPERATION_COLUMNS = (
    Column("operation"),
    Column("latency", kind="s"),
    Column("busbw", "bus GB/s", kind="B/s", has_interval=True),
)
_STEP_COLUMNS = (
    Column("label", "step"),
    _TIME_COLUMN,
    *(
        Column(part, kind="number", number_format="{:.0f} %")
        for part in ("compute", "exposed", "idle", "overlap")
    ),
    Column("memory", kind="B"),
)


def render_closing(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return the summary of a report of one run as text. Other reports are rendered in full.

    The summary is 80 characters wide, and its last line has the command that prints all rows.
    ``width`` is the width of a full report in characters, None for no limit. ``color`` adds
    terminal colors.
    """
    if len(report.runs) != 1:
        return render_text(report, width, color)
    data = report.runs[0]
    sheet = Sheet(WIDTH, color)
    sheet.write_items(report.heading)
    sheet.write_text(*report.emulated, *data.plan.notes)
    sheet.write_verdicts(report.verdicts)
    size_tables = list(list_setting_tables(data)) or _make_size_tables(data)
    for table in size_tables:
        sheet.write_table(table)
    if not size_tables:
        sheet.write_table(_make_operation_table(data), MAX_ROWS)
    steps = Table(
        "steps", "Training steps", columns=_STEP_COLUMNS, rows=list(summarize_steps(data))
    )
    sheet.write_table(steps, MAX_ROWS)
    findings = [finding.text for finding in report.findings]
    for problem in reversed(report.problems):
        reason = textwrap.shorten(problem.reason, MAX_REASON_LETTERS, placeholder=" ...")
        text = f"{problem.case}: {problem.status} ({problem.repetitions} repetitions): {reason}"
        findings.insert(0, text)
    nothing = "Nothing stands out." if data.measured else "Nothing was measured."
    sheet.write_list("Look at first", findings or [nothing], MAX_FINDINGS)
    sheet.write_list("Settings compared", report.comparisons, MAX_COMPARISONS)
    sheet.write_text("", f"All rows: parbench show --all {quote(str(data.run.path))}")
    return sheet.text()


def _make_size_tables(data: RunData) -> list[Table]:
    """Return a table over message sizes for each operation, mode and type, then tables of links.

    A table of links has the bus bandwidth from each rank to each other rank. It is left out if more
    than 16 ranks send. The list is empty if the run has more than three operations.
    """
    operations = select_operations(data)
    if operations["operation"].nunique() > MAX_TABULATED_OPERATIONS:
        return []
    tables = []
    for names, cases in operations.groupby(OPERATION_KEYS, sort=False, dropna=False):
        rows = [
            {**row, "repetitions": f"{row['repetitions']}/{row['planned']}"}
            for row in list_rows(cases.sort_values("size"))
        ]
        title = ", ".join(str(name) for name in names if not is_missing(name))
        tables.append(Table("sizes", title, columns=_SIZE_TABLE_COLUMNS, rows=rows))
    link_tables = list_link_tables(data)
    return [*tables, *(table for table in link_tables if len(table.rows) <= MAX_LINK_ROWS)]


def _make_operation_table(data: RunData) -> Table:
    """Return the table of latency and largest bus bandwidth, with a row per operation.

    If the bandwidth limit of the run is known, a column has the bus bandwidth as its share.
    """
    columns = list(_OPERATION_COLUMNS)
    title = "Operations"
    if data.ceiling:
        rate = format_quantity(data.ceiling.bytes_per_second, "B/s")
        title += f" ({data.ceiling.name}: {rate})"
        columns.append(Column("share", f"% of {data.ceiling.name}", kind="percent", is_result=True))
    return Table("operations", title, columns=columns, rows=summarize_operations(data))
