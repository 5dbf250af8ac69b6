"""A report as text: fitted to a terminal, and never cut nor wrapped where there is none."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from reports import cells
from reports.analysis.verdicts import Verdict
from reports.report import PROBLEM_COLUMNS, Column, Report, T

_UNBOUNDED = 1_000_000
_SHORT = 12
_LEVELS = {"good": "green", "doubtful": "yellow", "bad": "bold red"}
_STYLES = {
    "wrong": "bold red",
    "hang": "red",
    "failed": "red",
    "not measured": "yellow",
    "noisy": "yellow",
    "very noisy": "bold yellow",
}


def print_report(
    report: Report, file: TextIO | None = None, render: Callable[[Report, int | None, bool], str] | None = None
) -> None:
    """Write a report to ``file``, by default standard output, as suits a terminal or a pipe; by default all of it."""
    out = sys.stdout if file is None else file
    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = (render or render_text)(report, width, color)
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def render_text(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return a report as text; ``width`` is the terminal's columns, None for a pipe: nothing is cut or wrapped."""
    sheet = Sheet(width, color)
    if len(report.runs) == 1:
        sheet.tell(report.heading)
    sheet.tell(*report.emulated, style="bold yellow")
    for section in report.sections:
        tables = [table for table in section.tables if table.where != "page"]
        if tables or not section.tables:
            sheet.tell(*section.notes)
        for table in tables:
            write_table(sheet, table.title, table.columns, table.rows)
            sheet.tell(*table.notes)
    write_table(sheet, "Wrong, hung or failed", PROBLEM_COLUMNS, report.problems)
    write_table(sheet, "Not measured", PROBLEM_COLUMNS, report.not_measured)
    for title, told in (
        ("Look at first", [one.words for one in report.findings]),
        ("Settings compared", report.comparisons),
    ):
        if told:
            sheet.write("", Text(title, style="bold"))
            sheet.tell(*told)
    sheet.write("")
    sheet.write(*verdict_lines(report.verdicts))
    sheet.tell(*report.warnings, *report.footnotes)
    return sheet.text()


def verdict_lines(verdicts: Sequence[Verdict], width: int | None = None) -> list[Text]:
    """Return a line for each verdict, its word in the colour of how it stands, more where the width asks for them."""
    lines = []
    start = max(len(one.word) for one in verdicts) + 2
    for one in verdicts:
        told = cells.visible(one.sentence)
        parts = [told] if width is None else wrap(told, width - start, break_on_hyphens=False)
        lines.append(Text(f"{one.word:{start}}", style=_LEVELS[one.level]).append(parts[0], style="none"))
        lines += [Text(" " * start + part) for part in parts[1:]]
    return lines


class Sheet:
    """Text as wide as the terminal, or as its tables where there is none or it is too narrow for their numbers."""

    def __init__(self, width: int | None, color: bool) -> None:
        self.width = width
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            width=_UNBOUNDED,
            force_terminal=color,
            color_system="standard" if color else None,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    def tell(self, *sentences: str, style: str = "") -> None:
        self.write(*(Text(cells.visible(sentence), style=style) for sentence in sentences))

    def write(self, *parts: RichTable | Text | str) -> None:
        """Print each part on lines of its own; a table with numbers at least as wide as keeps words and them whole."""
        for part in parts:
            has_numbers = isinstance(part, RichTable) and any(one.justify == "right" for one in part.columns)
            least = self._console.measure(part).minimum if has_numbers else 0
            self._console.print(part, width=max(self.width, least) if self.width else _UNBOUNDED)

    def has_room(self, table: RichTable) -> bool:
        return self.width is None or self._console.measure(table).maximum <= self.width

    def text(self) -> str:
        return "".join(line.rstrip() + "\n" for line in self._buffer.getvalue().splitlines())


def write_table(
    sheet: Sheet, title: str, columns: Sequence[Column[T]], rows: Sequence[T], elsewhere: str = "all is in the report"
) -> None:
    """Print a table, and below it what the columns say for which the terminal has no room."""
    if not rows:
        return
    kept = list(columns)
    while not sheet.has_room(table := _rich_table(sheet, kept, rows)):
        droppable = max(kept, key=lambda column: column.drop)
        if droppable.drop == 0:
            break
        kept.remove(droppable)
    sheet.write("", Text(title, style="bold"), table)
    hidden = []
    for column in columns:
        if column not in kept:
            values = {column.text(row) for row in rows}
            hidden.append(f"{column.title} ({values.pop()})" if len(values) == 1 else column.title)
    if hidden:
        sheet.tell(f"No room for: {', '.join(hidden)}; {elsewhere}.")


def _rich_table(sheet: Sheet, columns: Sequence[Column[T]], rows: Sequence[T]) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD if sheet.width else None, pad_edge=False, padding=(0, 2, 0, 0))
    told = [[column.text(row) for column in columns] for row in rows]
    lines = [[Text(cells.visible(text), style=_STYLES.get(text, "")) for text in line] for line in told]
    for i, column in enumerate(columns):
        # a name or a note may take several lines of a terminal, a number may not
        widest = max(len(column.title), *(line[i].cell_len for line in lines))
        least = widest if column.number or widest <= _SHORT else None
        table.add_column(column.title, justify="right" if column.number else "left", min_width=least, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table
