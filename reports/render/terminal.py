"""A report as plain text for a terminal or a pipe."""

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import Column, Row, Table
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.report import Report

UNBOUNDED = 1_000_000
"""The number of columns of a sheet whose width has no limit."""
MIN_WIDTH = 40
MIN_TEXT_WIDTH = 24
"""A column of text is wrapped to at least this width before its table is split."""
MIN_TITLE_WIDTH = 10
GAP = 2
"""The number of spaces between two columns of a table."""

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
    render: "Callable[[Report, int | None, bool], str] | None" = None,
) -> None:
    """Write a report to a stream, in the width and the colors that the stream supports.

    ``file`` is the stream, by default standard output. ``render(report, width, has_color)`` returns
    the text, by default ``render_text``. A terminal gets colors and a pipe does not, unless the
    environment variable NO_COLOR or FORCE_COLOR is set.
    """
    stream = sys.stdout if file is None else file
    console = Console(file=stream)
    has_color = console.color_system is not None and not console.no_color
    text = (render or render_text)(report, width_of(stream), has_color)
    encoding = stream.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        text = text.replace("·", "-")  # an escaped one would make lines longer than the terminal
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def width_of(stream: TextIO) -> int | None:
    """Return the number of character columns of a stream, None for no limit.

    The width is limited for a terminal, and if the environment variable ``COLUMNS`` is set.
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
        sheet.write_items(report.heading)
    sheet.write_text(*report.emulated)
    for section in report.sections:
        sheet.write_text(*section.notes)
        for table in section.tables:
            sheet.write_table(table, has_caption=True)
    sheet.write_table(report.problem_table)
    sheet.write_table(report.not_measured_table)
    sheet.write_list("Look at first", [finding.text for finding in report.findings])
    sheet.write_list("Settings compared", report.comparisons)
    sheet.write_text("")
    sheet.write_verdicts(report.verdicts)
    sheet.write_text(*report.footnotes)
    return sheet.text()


class Sheet:
    """Collects text of limited width (sentences, lists, tables) from top to bottom."""

    def __init__(self, width: int | None, color: bool = False) -> None:
        """Start an empty sheet of ``width`` character columns, at least 40. None for no limit.

        ``color`` adds terminal colors.
        """
        self.width = max(width, MIN_WIDTH) if width else UNBOUNDED
        self._output = io.StringIO()
        self._console = Console(
            file=self._output,
            width=self.width,
            color_system="standard" if color else None,
            force_terminal=color,
            no_color=not color,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    def write_text(self, *sentences: str, style: str = "") -> None:
        """Append sentences, each wrapped and on its own lines. ``style`` is a rich style."""
        for sentence in sentences:
            self._console.print(Text(to_single_line(sentence), style))

    def write_items(self, text: str) -> None:
        """Append items that middle dots separate. Lines break only between items if they fit."""
        lines: list[str] = []
        for item in to_single_line(text).split(" · "):
            line = f"{lines[-1]} · {item}" if lines else item
            if lines and cell_len(line) <= self.width:
                lines[-1] = line
            else:
                lines.append(item)
        self._console.print(Text("\n".join(lines)))

    def write_list(
        self, title: str, sentences: Sequence[str], max_sentences: int | None = None
    ) -> None:
        """Append an empty line, a bold title and numbered sentences, nothing without sentences.

        At most ``max_sentences`` are appended, then the number of the others. None means no limit.
        """
        if not sentences:
            return
        self.write_text("")
        self.write_text(title, style="bold")
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        for number, sentence in enumerate(sentences[:max_sentences], start=1):
            # A command begins a new line.
            text = to_single_line(sentence).replace(" -> ", "\n-> ")
            grid.add_row(f"  {number}.", Text(text))
        self._console.print(grid)
        self._write_rest(len(sentences), max_sentences)

    def write_verdicts(self, verdicts: Sequence[ReportVerdict]) -> None:
        """Append a row for each verdict: its word in the color of its level, then its sentence."""
        grid = RichTable.grid(padding=(0, GAP, 0, 0))
        for verdict in verdicts:
            word = Text(verdict.word, _LEVEL_STYLES[verdict.level], no_wrap=True)
            grid.add_row(word, Text(to_single_line(verdict.sentence)))
        self._console.print(grid)

    def write_table(
        self, table: Table, max_rows: int | None = None, *, has_caption: bool = False
    ) -> None:
        """Append a table: title, caption (if ``has_caption``), values that all rows share, rows, and notes.

        A table without rows has only its notes. Columns that do not fit the width go to further
        tables below, which repeat the first columns. At most ``max_rows`` rows are appended, then
        the number of the others. None means no limit.
        """
        if table.rows:
            self.write_text("")
            self.write_text(table.title, style="bold")
            if has_caption and table.caption:
                caption = table.caption.removesuffix(".")
                self.write_text(f"{caption[0].upper()}{caption[1:]}.")
            if table.constant:
                self.write_text(table.constant)
            layouts = [_lay_out(column, table.rows[:max_rows]) for column in table.varying]
            first_block, *more_blocks = _split_columns(layouts, self.width)
            self._write_block(first_block)
            for block in more_blocks:
                self.write_text("")
                self._write_block(block)
            self._write_rest(len(table.rows), max_rows)
        self.write_text(*table.notes)

    def text(self) -> str:
        """Return the lines written so far as one text."""
        return "".join(f"{line.rstrip()}\n" for line in self._output.getvalue().splitlines())

    def _write_rest(self, total: int, max_items: int | None) -> None:
        """Append ``and 5 more`` if a list of ``total`` items was cut to ``max_items``.

        None for ``max_items`` means that the list was not cut.
        """
        if max_items is not None and total > max_items:
            self._console.print(f"  and {total - max_items} more")

    def _write_block(self, layouts: "Sequence[_Layout]") -> None:
        """Append columns and their cells as one table. The columns must fit the width."""
        grid = RichTable(
            *(column for column, _ in layouts),
            box=None,
            padding=(0, GAP, 0, 0),
            pad_edge=False,
            header_style="bold",
        )
        for cells in zip(*(cells for _, cells in layouts), strict=True):
            grid.add_row(*cells)
        self._console.print(grid)


_Layout = tuple[RichColumn, Sequence[Text]]
"""A column of a table for rich, and its cells in the colors of their grades or statuses.

A column of text has at least the width ``min_width``. Cells of a column of numbers do not wrap.
"""


def _lay_out(column: Column, rows: Sequence[Row]) -> _Layout:
    """Return a column for rich and its cell in each row, in the color of its grade or status.

    The title is wrapped to the width of the widest cell, at least ``MIN_TITLE_WIDTH``.
    """
    cells = []
    for row in rows:
        text = to_single_line(column.format_cell(row))
        cells.append(Text(text, _GRADE_STYLES.get(column.mark(row) or text, "")))
    widest = max(cell.cell_len for cell in cells)
    title_width = max(MIN_TITLE_WIDTH, widest)
    lines = textwrap.wrap(to_single_line(column.title), title_width, break_long_words=False)
    width = max(widest, *map(cell_len, lines))
    layout = RichColumn(
        Text("\n".join(lines)),
        justify="right" if column.is_number else "left",
        no_wrap=column.is_number,
        overflow="fold",
        min_width=width if column.is_number else min(width, MIN_TEXT_WIDTH),
    )
    return layout, cells


def _split_columns(layouts: Sequence[_Layout], width: int) -> list[list[_Layout]]:
    """Divide the columns of a table into lists that each fit ``width`` characters as one table.

    Each list begins with the first columns of the table, which name the row: the columns of text
    before the first column of numbers, at most two.
    """
    names = list(takewhile(lambda layout: not layout[0].no_wrap, layouts[:2]))
    blocks = [names]
    for layout in layouts[len(names) :]:
        block = [*blocks[-1], layout]
        used = sum((column.min_width or 0) + GAP for column, _ in block) - GAP
        if used <= width or blocks[-1] == names:
            blocks[-1] = block
        else:
            blocks.append([*names, layout])
    return blocks
