"""A report as plain text for a terminal or a pipe."""

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from parbench.bench.results.formatting import UNKNOWN, to_single_line
from parbench.bench.results.tables import Column, Row, Table
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.report import Report

UNBOUNDED = 1_000_000
"""The width of a sheet without a limit."""
MIN_WIDTH = 40
MIN_TEXT_WIDTH = 24
"""A column of text is wrapped to at least this width before its table is split."""
MAX_WORD_WIDTH = 40
"""A word that is longer than this is broken."""
MIN_TITLE_WIDTH = 10
GAP = 2

_SPACE_IN_QUANTITY = re.compile(r"(?<=\d) (?=(?:[num]?s|min|h|[KMGT]?i?B(?:/s)?|%|\[)(?![\w/]))")
_LEVEL_STYLES = {"good": "green", "doubtful": "yellow", "bad": "bold red"}
_GRADE_STYLES = {
    "wrong": "bold red",
    "hang": "red",
    "failed": "red",
    "not measured": "yellow",
    "noisy": "yellow",
    "very noisy": "bold yellow",
}


def print_report(
    report: Report,
    file: TextIO | None = None,
    render: Callable[[Report, int | None, bool], str] | None = None,
) -> None:
    """Write a report to a stream, in the width and the colors that the stream supports.

    ``file`` is the stream, by default standard output. ``render`` returns the text for a report, a
    width and a choice of color, by default ``render_text``.
    """
    stream = sys.stdout if file is None else file
    text = (render or render_text)(report, width_of(stream), uses_color(stream))
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def uses_color(stream: TextIO) -> bool:
    """Return True if text on a stream is colored, which is the default for a terminal.

    The environment variables NO_COLOR and FORCE_COLOR override the default.
    """
    console = Console(file=stream)
    return console.color_system is not None and not console.no_color


def width_of(stream: TextIO) -> int | None:
    """Return the number of columns of a stream, None for no limit.

    A terminal and the variable ``COLUMNS`` limit the width, a pipe does not.
    """
    if stream.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def render_text(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return all tables, findings and verdicts of a report as text.

    ``width`` is the number of columns, None for no limit. ``color`` adds terminal colors.
    """
    sheet = Sheet(width, color)
    if len(report.runs) < 2:
        sheet.write_text(report.heading)
    sheet.write_text(*report.emulated, style=_GRADE_STYLES["very noisy"])
    for section in report.sections:
        visible_tables = [table for table in section.tables if table.where != "page"]
        if visible_tables or not section.tables:
            sheet.write_text(*section.notes)
        for table in visible_tables:
            sheet.write_table(table)
            sheet.write_text(*table.notes)
    sheet.write_table(report.problem_table)
    sheet.write_table(report.not_measured_table)
    sheet.write_list("Look at first", [finding.text for finding in report.findings])
    sheet.write_list("Settings compared", report.comparisons)
    sheet.write("")
    write_verdicts(sheet, report.verdicts)
    sheet.write_text(*report.warnings, *report.footnotes)
    return sheet.text()


def write_verdicts(sheet: "Sheet", verdicts: Sequence[ReportVerdict]) -> None:
    """Write each verdict to a sheet: its word in the color of its level, then its sentence."""
    indent = max(len(verdict.word) for verdict in verdicts) + GAP
    for verdict in verdicts:
        first_line, *other_lines = wrap_text(verdict.sentence, sheet.width - indent)
        word = sheet.style(f"{verdict.word:{indent}}", _LEVEL_STYLES[verdict.level])
        sheet.write(word + first_line, *(" " * indent + line for line in other_lines))


def wrap_text(text: str, width: int) -> list[str]:
    """Return text as lines of at most ``width`` columns.

    A number and its unit, and its interval, stay on one line.
    """
    text = to_single_line(text)
    if cell_len(text) <= width:
        return [text]
    joined = _SPACE_IN_QUANTITY.sub("\xa0", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


class Sheet:
    """Text with a limited width that is written line by line from top to bottom."""

    def __init__(self, width: int | None, color: bool = False) -> None:
        """Start an empty sheet of ``width`` columns, None for no limit.

        ``color`` adds terminal colors.
        """
        self.width = max(width, MIN_WIDTH) if width else UNBOUNDED
        self._lines: list[str] = []
        self._console = Console(
            file=io.StringIO(),
            width=self.width,
            color_system="standard" if color else None,
            force_terminal=color,
            no_color=not color,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
            _environ={},
        )

    def style(self, text: str, style: str) -> str:
        """Return text with the terminal codes of a rich style.

        The text is unchanged if the sheet has no color.
        """
        with self._console.capture() as capture:
            self._console.print(Text(text, style), end="", soft_wrap=True)
        return capture.get()

    def write(self, *lines: str) -> None:
        """Append lines, which must fit the width of the sheet."""
        self._lines += [line.rstrip() for line in lines]

    def write_text(self, *sentences: str, style: str = "") -> None:
        """Append sentences, each wrapped and on its own lines. ``style`` is a rich style."""
        for sentence in sentences:
            lines = wrap_text(sentence, self.width)
            self.write(*(self.style(line, style) if style else line for line in lines))

    def write_list(self, title: str, sentences: Sequence[str]) -> None:
        """Append an empty line, a bold title and sentences. Without sentences, append nothing."""
        if sentences:
            self.write("")
            self.write_text(title, style="bold")
            self.write_text(*sentences)

    @property
    def num_lines(self) -> int:
        """The number of lines written so far."""
        return len(self._lines)

    def write_table(self, table: Table, drops_columns: bool = False) -> None:
        """Append a table below its title and a sentence with the values that all rows share.

        Columns that do not fit the width go to further tables, which repeat the columns that
        identify the rows. A single row that does not fit is written as one line per column. With
        ``drops_columns`` the columns that do not fit are left out instead.
        """
        if not table.rows:
            return
        self.write("")
        self.write_text(table.title, style="bold")
        if table.constant:
            self.write_text(table.constant)
        columns = [self._lay_out(column, table.rows) for column in table.varying]
        blocks = _split_columns(columns, self.width)
        if drops_columns:
            blocks = blocks[:1]
        if len(blocks) > 1 and len(table.rows) == 1:
            self._write_record(columns)
            return
        for number, block in enumerate(blocks):
            if number > 0:
                self.write("")
            self._write_block(table.rows, block)

    def text(self) -> str:
        """Return the lines written so far as one text."""
        return "".join(f"{line}\n" for line in self._lines)

    def _lay_out(self, column: Column, rows: Sequence[Row]) -> "_TextColumn":
        """Return a column as text: its title and one cell per row.

        The title is wrapped to about the width of the cells.
        """
        cells = [to_single_line(column.format_cell(row)) for row in rows]
        title = to_single_line(column.title)
        if self.width != UNBOUNDED:
            width = max(MIN_TITLE_WIDTH, *map(cell_len, cells))
            title = "\n".join(textwrap.wrap(title, width, break_long_words=False))
        return _TextColumn(column, title, cells)

    def _write_block(self, rows: Sequence[Row], columns: Sequence["_TextColumn"]) -> None:
        """Append a grid of columns that fit the width.

        A cell has the color of its grade or status, if it has one.
        """
        grid = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for column in columns:
            is_number = column.column.is_number
            grid.add_column(
                Text(column.title),
                justify="right" if is_number else "left",
                no_wrap=is_number,
                overflow="fold",
            )
            grid.columns[-1].vertical = "top"
        for number, row in enumerate(rows):
            texts = []
            for column in columns:
                text = column.cells[number]
                grade = column.column.mark(row) or text
                texts.append(Text(text, _GRADE_STYLES.get(grade, "")))
            grid.add_row(*texts)
        self._print(grid)

    def _write_record(self, columns: Sequence["_TextColumn"]) -> None:
        """Append the only row of a table with one line per column: title, then value.

        Columns with an unknown value are left out.
        """
        grid = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=False)
        for column in columns:
            if column.cells[0] != UNKNOWN:
                grid.add_row(Text(column.column.title), Text(column.cells[0], overflow="fold"))
        self._print(grid)

    def _print(self, grid: RichTable) -> None:
        """Append the lines of a rich table."""
        with self._console.capture() as capture:
            self._console.print(grid)
        self.write(*capture.get().splitlines())


@dataclass
class _TextColumn:
    """A column whose title and cells are formatted as text."""

    column: Column
    title: str
    """The title, wrapped into lines."""
    cells: Sequence[str]
    """The text of the cell of each row, in the order of the rows."""

    @cached_property
    def min_width(self) -> int:
        """The smallest width in characters. Text wraps between words, numbers do not wrap."""
        lines = [*self.title.splitlines(), *self.cells]
        widest = max(map(cell_len, lines))
        if self.column.is_number:
            return widest
        longest_word = max(cell_len(word) for line in lines for word in line.split(" "))
        return min(widest, max(MIN_TEXT_WIDTH, min(longest_word, MAX_WORD_WIDTH)))


def _split_columns(columns: Sequence[_TextColumn], width: int) -> list[list[_TextColumn]]:
    """Return the columns in lists that each fit ``width`` characters as one table.

    Each list begins with the columns that identify the rows.
    """
    names = _list_name_columns(columns)
    if _measure(names) > width * 2 // 3:
        names = names[:1]
    blocks = [names]
    for column in columns[len(names) :]:
        block = [*blocks[-1], column]
        if _measure(block) <= width or blocks[-1] == names:
            blocks[-1] = block
        else:
            blocks.append([*names, column])
    return blocks


def _list_name_columns(columns: Sequence[_TextColumn]) -> list[_TextColumn]:
    """Return the fewest first columns whose cells together differ in all rows.

    If no number of columns does, return the first column.
    """
    rows = list(zip(*(column.cells for column in columns), strict=True))
    for count in range(1, len(columns)):
        if len({row[:count] for row in rows}) == len(rows):
            return list(columns[:count])
    return list(columns[:1])


def _measure(columns: Sequence[_TextColumn]) -> int:
    """Return the smallest width of columns next to each other, with gaps, in characters."""
    return sum(column.min_width + GAP for column in columns) - GAP
