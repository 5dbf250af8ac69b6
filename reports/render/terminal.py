"""A report as text: tables are stacked where a terminal is too narrow, so that no number parts from its unit."""

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

from reports import cells
from reports.analysis.verdicts import Verdict
from reports.report import PROBLEM_COLUMNS, Column, Report, T, hoisted

_UNBOUNDED, _NARROWEST = 1_000_000, 40
_GAP, _WORDS, _LONGEST = 2, 24, 40  # between columns; least of a column of words, and of a word in it
# between a number and its unit, two ends of an interval, and a number and its interval
_GLUED = re.compile(
    r"(?<=\d) (?=(?:[num]?s|min|h|[KMGT]?i?B(?:/s)?|%)(?![\w/]))|(?<=,) (?=[^\s,\[\]]+(?: %)?\])| (?=\[[-+\d])"
)
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
    color = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = (render or render_text)(report, width_of(out), color)
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def width_of(out: TextIO) -> int | None:
    """Return the columns of a terminal, or those that COLUMNS asks for; None for a pipe: a row is a line for grep."""
    return shutil.get_terminal_size().columns if out.isatty() or os.environ.get("COLUMNS") else None


def render_text(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return a report as text, no line longer than ``width``; None is unbounded: nothing is wrapped or stacked."""
    sheet = Sheet(width, color)
    if len(report.runs) < 2:
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
    sheet.write("", *verdict_lines(report.verdicts, sheet.width))
    sheet.tell(*report.warnings, *report.footnotes)
    return sheet.text()


def verdict_lines(verdicts: Sequence[Verdict], width: int | None = None) -> list[Text]:
    """Return a line for each verdict, its word in the colour of how it stands, more where the width asks for them."""
    lines = []
    start = max(len(one.word) for one in verdicts) + 2
    for one in verdicts:
        first, *more = wrapped(cells.visible(one.sentence), width and width - start)
        lines.append(Text(f"{one.word:{start}}", style=_LEVELS[one.level]).append(first, style="none"))
        lines += [Text(" " * start + part) for part in more]
    return lines


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return text in lines, no number parted from its unit or interval."""
    if width is None or cell_len(text) <= width:
        return [text]
    found = textwrap.wrap(_GLUED.sub("\xa0", text), max(width, 1), break_on_hyphens=False, subsequent_indent=indent)
    return [line.replace("\xa0", " ") for line in found]


class Sheet:
    """Lines of text, sentences wrapped to ``width`` where there is one."""

    def __init__(self, width: int | None, color: bool) -> None:
        self.width = width and max(width, _NARROWEST)
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
        for sentence in sentences:
            self.write(*(Text(line, style=style) for line in wrapped(cells.visible(sentence), self.width)))

    def write(self, *parts: RichTable | Text | str) -> None:
        for part in parts:
            self._console.print(part)

    def text(self) -> str:
        return "".join(line.rstrip() + "\n" for line in self._buffer.getvalue().splitlines())


def write_table(sheet: Sheet, title: str, columns: Sequence[Column[T]], rows: Sequence[T]) -> None:
    """Print what all rows have alike, then a table, or several with the names of rows in each, or records.

    Names are the first columns, as many as tell all rows apart; of several tables one leaves out rows of which it
    knows nothing.
    """
    if not rows:
        return
    alike, shown = hoisted(columns, rows)
    sheet.write("")
    sheet.write(*(Text(line, style="bold") for line in wrapped(title, sheet.width)))
    sheet.tell(*filter(None, [alike]))
    told = [[cells.visible(column.text(row)) for column in shown] for row in rows]
    names = next((i for i in range(1, len(shown)) if len({*map(tuple, (line[:i] for line in told))}) == len(told)), 1)
    sizes = [_widths(column, [line[i] for line in told]) for i, column in enumerate(shown)]
    blocks = _blocks(sizes, names, sheet.width)
    if not blocks or (len(blocks) > 1 and len(rows) == 1):
        _write_records(sheet, shown, told, names)
        return
    for number, block in enumerate(blocks):
        widths = _stretched([sizes[i] for i in block], sheet.width)
        table = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for i, width in zip(block, widths, strict=True):
            head = "\n".join(wrapped(shown[i].title, width))
            table.add_column(head, justify="right" if shown[i].number else "left", no_wrap=True)
        for row, line in zip(rows, told, strict=True):
            if len(blocks) > 1 and {line[i] for i in block[names:]} == {cells.UNKNOWN}:
                continue
            marks = [shown[i].mark for i in block]
            styles = [_STYLES.get(mark(row) if mark else line[i], "") for i, mark in zip(block, marks, strict=True)]
            parts = ["\n".join(wrapped(line[i], width)) for i, width in zip(block, widths, strict=True)]
            table.add_row(*(Text(part, style=style) for part, style in zip(parts, styles, strict=True)))
        sheet.write(*([""] if number else []), table)


def _widths(column: Column[T], texts: Sequence[str]) -> tuple[int, int]:
    """Return the least width of a column and the one that wraps nothing; what is a number is never wrapped."""
    widest = max(map(cell_len, texts))
    parts = [part for text in (column.title, *texts) for part in _GLUED.sub("\xa0", text).split(" ")]
    words = min(max(map(cell_len, parts)), _LONGEST)
    return max(words, widest if column.number else min(widest, _WORDS)), max(widest, cell_len(column.title))


def _blocks(sizes: Sequence[tuple[int, int]], names: int, width: int | None) -> list[list[int]]:
    """Return the columns of each table that fits, the names in each; none where names leave no room for a column."""
    if width is None:
        return [[*range(len(sizes))]]
    blocks, block = [], [*range(min(names, len(sizes)))]
    for i in range(names, len(sizes)):
        if not _fits(sizes, [*block, i], width):
            blocks.append(block)
            block = block[:names]
        block = [*block, i]
    blocks = [one for one in [*blocks, block] if len(one) > names or len(sizes) <= names]
    return blocks if all(_fits(sizes, one, width) for one in blocks) else []


def _fits(sizes: Sequence[tuple[int, int]], block: Sequence[int], width: int) -> bool:
    return sum(sizes[i][0] + _GAP for i in block) - _GAP <= width


def _stretched(sizes: Sequence[tuple[int, int]], width: int | None) -> list[int]:
    """Return each column's width, what is left of the line given to those that lack most of theirs."""
    if width is None:
        return [natural for _, natural in sizes]
    found = [least for least, _ in sizes]
    for _ in range(width - sum(found) - _GAP * (len(found) - 1)):
        lacks = [natural / has for (_, natural), has in zip(sizes, found, strict=True)]
        if max(lacks) > 1:
            found[lacks.index(max(lacks))] += 1
    return found


def _write_records(sheet: Sheet, shown: Sequence[Column[T]], told: Sequence[Sequence[str]], names: int) -> None:
    for line in told:
        named = ", ".join(text for text in line[:names] if text != cells.UNKNOWN)
        sheet.write(*wrapped(named, sheet.width, "  "))
        pairs = zip(shown[names:], line[names:], strict=True)
        facts = [f"{column.title} {text}" for column, text in pairs if text != cells.UNKNOWN]
        room = (sheet.width or _UNBOUNDED) - 2
        kept = (fact.replace(" ", "\xa0") if len(fact) < room else fact for fact in facts)
        sheet.write(*(f"  {part}" for part in wrapped("; ".join(kept), room)))
