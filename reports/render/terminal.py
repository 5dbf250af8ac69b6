"""A report as text for a terminal or a pipe."""

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
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
MIN_WIDTH = 40
MIN_TEXT_WIDTH = 24
"""A column of text is wrapped to this width before its table is split."""
MAX_WORD_WIDTH = 40
"""A longer word is broken."""
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
    """Write a report to ``file``, by default standard output, as suits a terminal or a pipe."""
    stream = sys.stdout if file is None else file
    text = (render or render_text)(report, width_of(stream), uses_color(stream))
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def uses_color(stream: TextIO) -> bool:
    """Return True if text is colored: in a terminal, unless NO_COLOR or FORCE_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal or of ``COLUMNS``, None for a pipe, which has long lines."""
    if stream.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def render_text(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return all tables of a report as text. ``width`` None is unbounded."""
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
    """Write each verdict with its word in the color of its level."""
    indent = max(len(verdict.word) for verdict in verdicts) + GAP
    for verdict in verdicts:
        first_line, *other_lines = wrap_text(verdict.sentence, sheet.width - indent)
        word = sheet.style(f"{verdict.word:{indent}}", _LEVEL_STYLES[verdict.level])
        sheet.write(word + first_line, *(" " * indent + line for line in other_lines))


def wrap_text(text: str, width: int) -> list[str]:
    """Return text in lines. A number stays on the line of its unit and its interval."""
    text = to_single_line(text)
    if cell_len(text) <= width:
        return [text]
    joined = _SPACE_IN_QUANTITY.sub("\xa0", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


class Sheet:
    """Text of at most ``width`` columns that is written from top to bottom."""

    def __init__(self, width: int | None, color: bool = False) -> None:
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
        """Return text with the codes of a style if the sheet has color."""
        with self._console.capture() as capture:
            self._console.print(Text(text, style), end="", soft_wrap=True)
        return capture.get()

    def write(self, *lines: str) -> None:
        """Write lines that fit the width."""
        self._lines += [line.rstrip() for line in lines]

    def write_text(self, *sentences: str, style: str = "") -> None:
        """Write sentences, each on its own lines."""
        for sentence in sentences:
            lines = wrap_text(sentence, self.width)
            self.write(*(self.style(line, style) if style else line for line in lines))

    def write_list(self, title: str, sentences: Sequence[str]) -> None:
        """Write sentences below a title, nothing if there are none."""
        if sentences:
            self.write("")
            self.write_text(title, style="bold")
            self.write_text(*sentences)

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def write_table(self, table: Table, drops_columns: bool = False) -> None:
        """Write a table below its title and the values that all rows share.

        Columns that do not fit the width go to further tables, which repeat the columns that name
        the rows. A single row that does not fit is written as one line per column. With
        ``drops_columns`` the columns that do not fit are left out instead.
        """
        if not table.rows:
            return
        columns = table.varying
        self.write("")
        self.write_text(table.title, style="bold")
        if table.constant:
            self.write_text(table.constant)
        cells = [
            [to_single_line(column.format_cell(row)) for row in table.rows] for column in columns
        ]
        titles = [self._wrap_title(*pair) for pair in zip(columns, cells, strict=True)]
        widths = [
            _compute_min_width(column, [*title.splitlines(), *texts])
            for column, title, texts in zip(columns, titles, cells, strict=True)
        ]
        blocks = _split_columns(widths, _count_name_columns(cells), self.width)
        if drops_columns:
            blocks = blocks[:1]
        if len(blocks) > 1 and len(table.rows) == 1:
            self._write_record(columns, cells)
            return
        for number, block in enumerate(blocks):
            if number > 0:
                self.write("")
            self._write_block(table.rows, columns, titles, cells, block)

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)

    def _wrap_title(self, column: Column, cells: Sequence[str]) -> str:
        """Return the title of a column in lines that are about as long as its cells."""
        title = to_single_line(column.title)
        if self.width == UNBOUNDED:
            return title
        width = max(MIN_TITLE_WIDTH, *map(cell_len, cells))
        return "\n".join(textwrap.wrap(title, width, break_long_words=False))

    def _write_block(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column],
        titles: Sequence[str],
        cells: Sequence[Sequence[str]],
        block: Sequence[int],
    ) -> None:
        """Write the columns of a block. A cell is colored by its grade, or by its text."""
        grid = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for i in block:
            is_number = columns[i].is_number
            grid.add_column(
                Text(titles[i]),
                justify="right" if is_number else "left",
                no_wrap=is_number,
                overflow="fold",
            )
            grid.columns[-1].vertical = "top"
        for row_number, row in enumerate(rows):
            texts = []
            for i in block:
                text = cells[i][row_number]
                grade = columns[i].mark(row) or text
                texts.append(Text(text, _GRADE_STYLES.get(grade, "")))
            grid.add_row(*texts)
        self._print(grid)

    def _write_record(self, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
        grid = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=False)
        for column, [text] in zip(columns, cells, strict=True):
            if text != UNKNOWN:
                grid.add_row(Text(column.title), Text(text, overflow="fold"))
        self._print(grid)

    def _print(self, grid: RichTable) -> None:
        with self._console.capture() as capture:
            self._console.print(grid)
        self.write(*capture.get().splitlines())


def _compute_min_width(column: Column, lines: Sequence[str]) -> int:
    """Return the width that a column needs. Text is wrapped between words, numbers are not."""
    widest = max(map(cell_len, lines))
    if column.is_number:
        return widest
    longest_word = max(cell_len(word) for line in lines for word in line.split(" "))
    return min(widest, max(MIN_TEXT_WIDTH, min(longest_word, MAX_WORD_WIDTH)))


def _count_name_columns(cells: Sequence[Sequence[str]]) -> int:
    """Return the number of first columns that together distinguish all rows, otherwise 1."""
    rows = list(zip(*cells, strict=True))
    for count in range(1, len(cells)):
        if len({row[:count] for row in rows}) == len(rows):
            return count
    return 1


def _split_columns(widths: Sequence[int], num_names: int, width: int) -> list[list[int]]:
    """Return the positions of the columns of each table. Each begins with the name columns."""
    names = list(range(num_names))
    if sum(widths[:num_names]) > width * 2 // 3:
        names = [0]
    blocks = [names]
    for i in range(len(names), len(widths)):
        block = [*blocks[-1], i]
        total = sum(widths[k] + GAP for k in block) - GAP
        if total <= width or blocks[-1] == names:
            blocks[-1] = block
        else:
            blocks.append([*names, i])
    return blocks
