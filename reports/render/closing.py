"""The summary that a run ends with: verdicts, operations, steps and findings on one screen.

The summary has about 64 lines of 80 columns. A run of at most three operations has their tables
over message sizes instead of the largest bandwidth of each, and more lines if the tables need them.
"""

from collections.abc import Sequence
from dataclasses import replace

from parbench.bench.results.formatting import format_quantity
from parbench.bench.results.tables import Column, SortedText, Table, is_missing, metric_column
from parbench.bench.text import pluralize
from parbench.reports.analysis.expected_bandwidth import describe_expected
from parbench.reports.analysis.operations import OPERATION_KEYS, select_operations
from parbench.reports.analysis.overview import summarize_operations, summarize_steps
from parbench.reports.frames import list_rows
from parbench.reports.render.terminal import Sheet, render_text, wrap_text, write_verdicts
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import SIZE_COLUMN
from parbench.reports.tables.groups import list_link_tables
from parbench.reports.tables.side_by_side import list_setting_tables

WIDTH = 80
MAX_LINES = 64
BAR_WIDTH = 12
MAX_NAME_WIDTH = 26
MAX_TABULATED_OPERATIONS = 3
MAX_TABULATED_ROWS = 60
MAX_LINK_ROWS = 16
MAX_STEPS = 6
MIN_OPERATIONS = 3
TITLE_LINES = 13
"""The lines of the titles, headers and notes of two tables."""
MAX_FINDINGS = 3
MAX_COMPARISONS = 2
MAX_LINES_OF_FINDING = 3
_TIME_COLUMN = Column("seconds", "time", kind="s", has_interval=True)
_SIZE_TABLE_COLUMNS = (
    SIZE_COLUMN,
    _TIME_COLUMN,
    metric_column("algbw"),
    metric_column("busbw"),
    Column("variation", kind="percent", is_result=True, grade_key="noise"),
    Column("repetitions"),
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
    """Return the summary of a report with one run as text, otherwise all its tables.

    ``width`` is the number of columns of these tables, None for no limit. ``color`` adds terminal
    colors. Rows that have no space are counted. The last line has the command that prints all rows.
    """
    if not report.setup:
        return render_text(report, width, color)
    data = report.runs[0]
    sheet = Sheet(WIDTH, color)
    sheet.write_text(report.setup, *report.emulated[:1])
    write_verdicts(sheet, report.verdicts)
    last_lines = [*_list_findings(report), "", f"All rows  parbench show --all {data.run.path}"]
    num_rows = MAX_LINES - TITLE_LINES - sheet.num_lines - len(last_lines)
    steps = _make_step_table(data)
    num_steps = min(MAX_STEPS, len(steps.rows), max(1, num_rows - MIN_OPERATIONS))
    size_tables = list(list_setting_tables(data)) or _make_size_tables(data)
    for table in size_tables:
        sheet.write_table(table)
    sheet.write_text(*describe_expected(data))
    if not size_tables:
        num_operations = max(MIN_OPERATIONS, num_rows - num_steps)
        _write_first_rows(sheet, _make_operation_table(data), num_operations)
    _write_first_rows(sheet, steps, num_steps)
    sheet.write(*last_lines)
    return sheet.text()


def render_verdicts(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return the verdicts of a run as text of 80 columns. ``width`` is not used.

    ``color`` adds terminal colors.
    """
    sheet = Sheet(WIDTH, color)
    write_verdicts(sheet, report.verdicts)
    return sheet.text()


def _make_size_tables(data: RunData) -> list[Table]:
    """Return a table over message sizes for each operation, mode and type, then tables of links.

    A table of links has the bandwidth from each rank to each other rank, and is left out if it is
    large. The list is empty if the run has more than three operations.
    """
    operations = select_operations(data)
    if operations["operation"].nunique() > MAX_TABULATED_OPERATIONS:
        return []
    tables = []
    settings = operations[:MAX_TABULATED_ROWS].groupby(OPERATION_KEYS, sort=False, dropna=False)
    for names, cases in settings:
        rows = [
            {**row, "repetitions": f"{row['repetitions']}/{row['planned']}"}
            for row in list_rows(cases.sort_values("size"))
        ]
        title = ", ".join(str(name) for name in names if not is_missing(name))
        tables.append(Table("sizes", title, columns=_SIZE_TABLE_COLUMNS, rows=rows))
    num_rows = 0
    for table in list_link_tables(data):
        num_rows += len(table.rows)
        if num_rows <= MAX_LINK_ROWS:
            tables.append(table)
    return tables


def _make_operation_table(data: RunData) -> Table:
    """Return the table of latency, bus bandwidth and share of the ceiling, a row per operation.

    The ceiling is the bandwidth limit of the run. Without one, the share is left out.
    """
    columns = [
        Column("operation"),
        Column("latency", kind="s"),
        Column("busbw", "bus GB/s", kind="B/s", has_interval=True),
    ]
    title = "Operations"
    ceiling = data.ceiling
    if ceiling:
        title += f" ({ceiling.name}: {format_quantity(ceiling.bytes_per_second, 'B/s')})"
        columns.append(Column("share", f"of {ceiling.name}", is_result=True))
    rows = [
        {**row, "operation": _shorten(row["operation"]), "share": _format_bar(row["share"])}
        for row in summarize_operations(data)
    ]
    return Table("operations", title, columns=columns, rows=rows)


def _make_step_table(data: RunData) -> Table:
    """Return the table of training steps: time, memory, and shares of the profiled step."""
    rows = [{**step, "label": _shorten(step["label"])} for step in summarize_steps(data)]
    num_different = sum(row["is_profile_deviating"] for row in rows)
    notes = []
    if num_different:
        traced = pluralize(num_different, "step")
        notes.append(
            "Shares are of one profiled step of each row. "
            f"{traced} took clearly more or less time when profiled than the median."
        )
    return Table("steps", "Training steps", columns=_STEP_COLUMNS, rows=rows, notes=notes)


def _write_first_rows(sheet: Sheet, table: Table, max_rows: int) -> None:
    """Write the first ``max_rows`` rows of a table, the number of hidden rows, and its notes."""
    sheet.write_table(replace(table, rows=table.rows[:max_rows]), drops_columns=True)
    num_hidden = len(table.rows) - max_rows
    if num_hidden > 0:
        sheet.write(f"  and {num_hidden} more")
    sheet.write_text(*table.notes)


def _list_findings(report: Report) -> list[str]:
    """Return the lines of the summary about failed cases, findings and compared settings."""
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
    """Return lines with a title and numbered sentences, each with its command below.

    ``sentences`` are pairs of a sentence and a command, which may be empty. Long sentences are cut,
    and the number of sentences beyond ``max_sentences`` is added. Without sentences, there are no
    lines.
    """
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
    """Return a name cut to 26 characters, with ``...`` at the end if it is cut."""
    return name if len(name) <= MAX_NAME_WIDTH else f"{name[: MAX_NAME_WIDTH - 3]}..."


def _format_bar(share: float) -> SortedText | None:
    """Return a fraction as a percentage with a bar, ``50 % ######``, None if it is missing."""
    if is_missing(share):
        return None
    bar = "#" * round(min(share, 1.0) * BAR_WIDTH)
    return SortedText(f"{100 * share:5.0f} % {bar}", share)
