"""The summary that a run ends with: verdicts, operations, steps and findings on one screen.

The summary has at most 40 lines of 80 columns. A run of at most three operations has their tables
over sizes instead of the largest bandwidth of each, and more lines if the tables need them.
"""

from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

from parbench.bench.results.formatting import format_quantity, to_single_line
from parbench.bench.results.tables import Column, Row, SortedText, Table, metric_column
from parbench.bench.text import pluralize
from parbench.reports.frames import list_rows
from parbench.reports.labels import label_operation
from parbench.reports.overview import OperationSummary, Overview, StepSummary
from parbench.reports.render.terminal import Sheet, render_text, write_verdicts
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.tables.step_parts import find_deviating_profile, sum_memory

WIDTH = 80
MAX_LINES = 40
BAR_WIDTH = 12
MAX_NAME_WIDTH = 26
MAX_TABULATED_OPERATIONS = 3
MAX_TABULATED_ROWS = 60
MAX_STEPS = 6
MIN_OPERATIONS = 3
MAX_FINDINGS = 4
MAX_COMPARISONS = 2
MAX_LINES_OF_FINDING = 3


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
    series = _list_series(report.runs[0])
    operations = _make_operation_table(overview)
    if series:
        for title, rows in series.items():
            sheet.write_table(_make_size_table(title, rows))
        operations = replace(operations, rows=[])
    steps = _make_step_table(overview.steps)
    max_operations, max_steps = _choose_numbers_of_rows(operations, steps, num_free)
    _write_first_rows(sheet, operations, max_operations)
    _write_first_rows(sheet, steps, max_steps)
    sheet.write(*last_lines)
    return sheet.text()


def _choose_numbers_of_rows(operations: Table, steps: Table, num_free: int) -> tuple[int, int]:
    """Return the rows of both tables that fit in the free lines, operations before steps."""
    for max_steps in range(MAX_STEPS, 0, -1):
        num_left = num_free - _count_lines(steps, max_steps)
        num_operations = len(operations.rows)
        first = min(num_operations, num_left)
        last = min(num_operations, MIN_OPERATIONS)
        for max_operations in range(first, last - 1, -1):
            if _count_lines(operations, max_operations) <= num_left:
                return max_operations, max_steps
    return MIN_OPERATIONS, 1


def _count_lines(table: Table, max_rows: int) -> int:
    sheet = Sheet(WIDTH)
    _write_first_rows(sheet, table, max_rows)
    return sheet.num_lines


def _list_series(data: RunData) -> dict[str, list[Row]]:
    """Return the measured rows by operation, mode and element type if there are few operations."""
    rows = [
        row for row in list_rows(data.cases) if row["is_communication"] and row["result"].metrics
    ]
    if len({row["name"] for row in rows}) > MAX_TABULATED_OPERATIONS:
        return {}
    series: dict[str, list[Row]] = {}
    for row in rows[:MAX_TABULATED_ROWS]:
        params = row["result"].case.params
        settings = [str(params[name]) for name in ("mode", "dtype") if name in params]
        title = ", ".join([label_operation(row["result"].case), *settings])
        series.setdefault(title, []).append(row)
    return series


def _make_size_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of one operation over its sizes."""
    by_size = sorted(rows, key=lambda row: row["result"].size_bytes or 0)
    with_repetitions = [
        {**row, "repetitions": f"{row['repetitions']}/{row['planned']}"} for row in by_size
    ]
    columns = [
        Column(key="param_size_bytes", title="size", kind="size"),
        Column(key="seconds", title="time", kind="s", has_interval=True, is_result=True),
        metric_column("algbw"),
        metric_column("busbw"),
        Column(
            key="variation",
            title="variation",
            kind="percent",
            is_result=True,
            grade_key="noise",
        ),
        Column(key="repetitions", title="repetitions"),
    ]
    return Table(id="series", title=title, columns=columns, rows=with_repetitions)


def _make_operation_table(overview: Overview) -> Table:
    columns = [
        Column(key="name", title="operation"),
        Column(key="latency", title="latency", kind="s", is_result=True),
        Column(key="busbw", title="bus GB/s", kind="B/s", has_interval=True, is_result=True),
    ]
    if overview.ceiling:
        bandwidth = format_quantity(overview.ceiling.bytes_per_second, "B/s")
        title = f"of {overview.ceiling.name} ({bandwidth})"
        columns.append(Column(key="share", title=title, is_result=True))
    rows = [_make_operation_row(operation) for operation in overview.operations]
    return Table(id="operations", title="Operations", columns=columns, rows=rows)


def _make_operation_row(operation: OperationSummary) -> dict[str, Any]:
    rate = operation.busbw
    return {
        "name": _shorten(operation.name),
        "latency": operation.latency,
        "busbw": rate.value if rate else None,
        "busbw_low": rate.low if rate else None,
        "busbw_high": rate.high if rate else None,
        "is_within_repetition": rate.is_within_repetition if rate else False,
        "share": _format_bar(operation.share),
    }


def _make_step_table(steps: Sequence[StepSummary]) -> Table:
    columns = [
        Column(key="name", title="step"),
        Column(key="seconds", title="time", kind="s", has_interval=True, is_result=True),
        Column(key="compute", title="compute", kind="number", number_format="{:.0f} %"),
        Column(key="exposed", title="exposed", kind="number", number_format="{:.0f} %"),
        Column(key="idle", title="idle", kind="number", number_format="{:.0f} %"),
        Column(key="overlap", title="overlap", kind="number", number_format="{:.0f} %"),
        Column(key="memory", title="memory", kind="B", is_result=True),
    ]
    rows = [_make_step_row(step) for step in steps]
    num_different = sum(find_deviating_profile(step.result) is not None for step in steps)
    notes = []
    if num_different:
        traced = pluralize(num_different, "step")
        notes.append(f"Shares are of profiled steps. {traced} took another time when profiled.")
    return Table(id="steps", title="Training steps", columns=columns, rows=rows, notes=notes)


def _make_step_row(step: StepSummary) -> dict[str, Any]:
    time = step.result.metrics.get(step.result.headline)
    shares = {**step.parts, "overlap": step.overlap}
    return {
        "name": _shorten(step.name),
        "seconds": time.value if time else None,
        "seconds_low": time.low if time else None,
        "seconds_high": time.high if time else None,
        "is_within_repetition": time.is_within_repetition if time else False,
        **{name: 100 * share for name, share in shares.items() if share is not None},
        "memory": sum_memory(step.result),
    }


def _write_first_rows(sheet: Sheet, table: Table, max_rows: int) -> None:
    """Write the first rows of a table, the number of the others, and its notes."""
    if not table.rows:
        return
    first = replace(table, rows=table.rows[:max_rows])
    sheet.write_table(first, drops_columns=True)
    num_hidden = len(table.rows) - max_rows
    if num_hidden > 0:
        sheet.write(f"  and {num_hidden} more")
    sheet.write_text(*table.notes)


def _list_findings(report: Report) -> list[str]:
    """Return the lines of what failed and of what stands out."""
    problems = [
        f"{problem.case}: {problem.status} ({problem.repetitions} repetitions): {problem.reason}"
        for problem in report.problems
    ]
    findings = [*problems, *(finding.text for finding in report.findings)]
    lines = ["", "Nothing stands out."]
    if findings:
        lines = _number_sentences("Look at first", findings, MAX_FINDINGS)
    return lines + _number_sentences("Settings compared", report.comparisons, MAX_COMPARISONS)


def _number_sentences(title: str, sentences: Sequence[str], max_sentences: int) -> list[str]:
    if not sentences:
        return []
    lines = ["", title]
    for number, sentence in enumerate(sentences[:max_sentences], start=1):
        first, *others = wrap(
            to_single_line(sentence),
            WIDTH - 5,
            break_on_hyphens=False,
            max_lines=MAX_LINES_OF_FINDING,
            placeholder=" ...",
        )
        lines += [f"  {number}. {first}", *(f"     {line}" for line in others)]
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
