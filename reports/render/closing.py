"""The summary that a run ends with: verdicts, operations, steps and findings on one screen.

The summary has about 54 lines of 80 columns. A run of at most three operations has their tables
over sizes instead of the largest bandwidth of each, and more lines if the tables need them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.tables import Column, SortedText, Table, is_missing, metric_column
from parbench.bench.text import pluralize
from parbench.reports.analysis.operations import select_operations
from parbench.reports.analysis.overview import OperationSummary, Overview, StepSummary
from parbench.reports.frames import list_rows
from parbench.reports.render.terminal import Sheet, render_text, wrap_text, write_verdicts
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import SIZE_COLUMN
from parbench.reports.tables.step_parts import find_deviating_profile, sum_memory

WIDTH = 80
MAX_LINES = 54
BAR_WIDTH = 12
MAX_NAME_WIDTH = 26
MAX_TABULATED_OPERATIONS = 3
MAX_TABULATED_ROWS = 60
MAX_STEPS = 6
MIN_OPERATIONS = 3
MAX_FINDINGS = 3
MAX_COMPARISONS = 2
MAX_LINES_OF_FINDING = 3
_TIME_COLUMN = Column(key="seconds", title="time", kind="s", has_interval=True, is_result=True)
_SIZE_TABLE_COLUMNS = (
    SIZE_COLUMN,
    _TIME_COLUMN,
    metric_column("algbw"),
    metric_column("busbw"),
    Column(key="variation", title="variation", kind="percent", is_result=True, grade_key="noise"),
    Column(key="repetitions", title="repetitions"),
)
_STEP_COLUMNS = (
    Column(key="name", title="step"),
    _TIME_COLUMN,
    *(
        Column(key=part, title=part, kind="number", number_format="{:.0f} %")
        for part in ("compute", "exposed", "idle", "overlap")
    ),
    Column(key="memory", title="memory", kind="B", is_result=True),
)


def render_closing(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return the summary of a run, or all tables of several runs.

    Rows that have no space are counted. The last line has the command that prints all rows.
    """
    overview = report.overview
    if overview is None:
        return render_text(report, width, color)
    sheet = Sheet(WIDTH, color)
    sheet.write_text(overview.setup, *report.emulated[:1])
    write_verdicts(sheet, overview.verdicts)
    last_lines = [*_list_findings(report), "", f"All rows  parbench show --all {overview.path}"]
    num_free = MAX_LINES - 1 - sheet.num_lines - len(last_lines)
    size_tables = _make_size_tables(report.runs[0])
    operations = _make_operation_table(overview)
    if size_tables:
        for table in size_tables:
            sheet.write_table(table)
        operations = replace(operations, rows=[])
    steps = _make_step_table(overview.steps)
    max_operations, max_steps = _choose_numbers_of_rows(operations, steps, num_free)
    _write_first_rows(sheet, operations, max_operations)
    _write_first_rows(sheet, steps, max_steps)
    sheet.write(*last_lines)
    return sheet.text()


def render_verdicts(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return the verdicts of a run."""
    sheet = Sheet(WIDTH, color)
    if report.overview is not None:
        write_verdicts(sheet, report.overview.verdicts)
    return sheet.text()


def _choose_numbers_of_rows(operations: Table, steps: Table, num_free: int) -> tuple[int, int]:
    """Return the rows of both tables that fit in the free lines, operations before steps."""
    for max_steps in range(MAX_STEPS, 0, -1):
        num_left = num_free - _count_lines(steps, max_steps)
        num_operations = len(operations.rows)
        upper_limit = min(num_operations, num_left)
        lower_limit = min(num_operations, MIN_OPERATIONS)
        for max_operations in range(upper_limit, lower_limit - 1, -1):
            if _count_lines(operations, max_operations) <= num_left:
                return max_operations, max_steps
    return MIN_OPERATIONS, 1


def _count_lines(table: Table, max_rows: int) -> int:
    sheet = Sheet(WIDTH)
    _write_first_rows(sheet, table, max_rows)
    return sheet.num_lines


def _make_size_tables(data: RunData) -> list[Table]:
    """Return the table over sizes of each operation, mode and type if there are few operations."""
    operations = select_operations(data)
    if operations["operation"].nunique() > MAX_TABULATED_OPERATIONS:
        return []
    tables = []
    settings = operations[:MAX_TABULATED_ROWS].groupby(
        ["operation", "mode", "dtype"], sort=False, dropna=False
    )
    for names, cases in settings:
        rows = [
            {**row, "repetitions": f"{row['repetitions']}/{row['planned']}"}
            for row in list_rows(cases.sort_values("size"))
        ]
        title = ", ".join(str(name) for name in names if not is_missing(name))
        tables.append(Table(id="sizes", title=title, columns=_SIZE_TABLE_COLUMNS, rows=rows))
    return tables


def _make_operation_table(overview: Overview) -> Table:
    columns = [
        Column(key="name", title="operation"),
        Column(key="latency", title="latency", kind="s", is_result=True),
        Column(key="busbw", title="bus GB/s", kind="B/s", has_interval=True, is_result=True),
    ]
    title = "Operations"
    if overview.ceiling:
        name = overview.ceiling.name
        bandwidth = format_quantity(overview.ceiling.bytes_per_second, "B/s")
        title = f"Operations ({name}: {bandwidth})"
        columns.append(Column(key="share", title=f"of {name}", is_result=True))
    rows = [_make_operation_row(operation) for operation in overview.operations]
    return Table(id="operations", title=title, columns=columns, rows=rows)


def _make_operation_row(operation: OperationSummary) -> dict[str, Any]:
    return {
        "name": _shorten(operation.name),
        "latency": operation.latency,
        **_make_metric_cells("busbw", operation.busbw),
        "share": _format_bar(operation.share),
    }


def _make_step_table(steps: Sequence[StepSummary]) -> Table:
    rows = [_make_step_row(step) for step in steps]
    num_different = sum(find_deviating_profile(step.result) is not None for step in steps)
    notes = []
    if num_different:
        traced = pluralize(num_different, "step")
        notes.append(f"Shares are of profiled steps. {traced} took another time when profiled.")
    return Table(id="steps", title="Training steps", columns=_STEP_COLUMNS, rows=rows, notes=notes)


def _make_step_row(step: StepSummary) -> dict[str, Any]:
    shares = {**step.parts, "overlap": step.overlap}
    return {
        "name": _shorten(step.name),
        **_make_metric_cells("seconds", step.result.metrics.get(step.result.headline)),
        **{name: 100 * share for name, share in shares.items() if share is not None},
        "memory": sum_memory(step.result),
    }


def _make_metric_cells(key: str, metric: MetricValue | None) -> dict[str, Any]:
    """Return the cells of a column with an interval."""
    if metric is None:
        return {}
    return {
        key: metric.value,
        f"{key}_low": metric.low,
        f"{key}_high": metric.high,
        "is_within_repetition": metric.is_within_repetition,
    }


def _write_first_rows(sheet: Sheet, table: Table, max_rows: int) -> None:
    """Write the first rows of a table, the number of the others, and its notes."""
    if not table.rows:
        return
    short_table = replace(table, rows=table.rows[:max_rows])
    sheet.write_table(short_table, drops_columns=True)
    num_hidden = len(table.rows) - max_rows
    if num_hidden > 0:
        sheet.write(f"  and {num_hidden} more")
    sheet.write_text(*table.notes)


def _list_findings(report: Report) -> list[str]:
    """Return the lines of what failed and of what stands out."""
    findings = [
        (
            f"{problem.case}: {problem.status} ({problem.repetitions} repetitions): {problem.reason}",
            "",
        )
        for problem in report.problems
    ]
    findings += [(finding.message, finding.command) for finding in report.findings]
    comparisons = [(sentence, "") for sentence in report.comparisons]
    lines = _number_sentences("Look at first", findings, MAX_FINDINGS)
    if not findings:
        lines = ["", "Nothing stands out."]
    return lines + _number_sentences("Settings compared", comparisons, MAX_COMPARISONS)


def _number_sentences(
    title: str, sentences: Sequence[tuple[str, str]], max_sentences: int
) -> list[str]:
    """Return sentences, of which long ones are cut, each with its complete command below."""
    if not sentences:
        return []
    lines = ["", title]
    for number, (sentence, command) in enumerate(sentences[:max_sentences], start=1):
        wrapped = wrap_text(sentence, WIDTH - 5)
        if len(wrapped) > MAX_LINES_OF_FINDING:
            last_line = wrapped[MAX_LINES_OF_FINDING - 1]
            wrapped = [*wrapped[: MAX_LINES_OF_FINDING - 1], f"{last_line[: WIDTH - 9]} ..."]
        if command:
            wrapped += wrap_text(f"-> {command}", WIDTH - 5)
        lines += [f"  {number}. {wrapped[0]}", *(f"     {line}" for line in wrapped[1:])]
    num_hidden = len(sentences) - max_sentences
    if num_hidden > 0:
        lines.append(f"  and {num_hidden} more")
    return lines


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_WIDTH else f"{name[: MAX_NAME_WIDTH - 3]}..."


def _format_bar(share: float | None) -> SortedText | None:
    if share is None:
        return None
    bar = "#" * round(min(share, 1.0) * BAR_WIDTH)
    return SortedText(f"{100 * share:5.0f} % {bar}", share)
