"""A report as text: tables are stacked where a terminal is too narrow, so that no number parts from its unit."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from rich.cells import cell_len

from parbench.bench.results import tables
from parbench.bench.results.formatting import UNKNOWN, to_single_line
from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.report import PROBLEM_COLUMNS, Column, Report, hoisted

_UNBOUNDED, _NARROWEST = 1_000_000, 40
_GAP, _WORDS, _LONGEST = (
    2,
    24,
    40,
)  # between columns; least of a column of words, and of a word in it
# between a number and its unit, two ends of an interval, and a number and its interval
_GLUED = re.compile(
    r"(?<=\d) (?=(?:[num]?s|min|h|[KMGT]?i?B(?:/s)?|%)(?![\w/]))|(?<=,) (?=[^\s,\[\]]+(?: %)?\])| (?=\[[-+\d])"
)
_BOLD, _RED, _YELLOW, _GREEN = "1", "31", "33", "32"
_LEVELS = {"good": _GREEN, "doubtful": _YELLOW, "bad": f"{_BOLD};{_RED}"}
_STYLES = {
    "wrong": f"{_BOLD};{_RED}",
    "hang": _RED,
    "failed": _RED,
    "not measured": _YELLOW,
    "noisy": _YELLOW,
    "very noisy": f"{_BOLD};{_YELLOW}",
}


def print_report(
    report: Report,
    file: TextIO | None = None,
    render: Callable[[Report, int | None, bool], str] | None = None,
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
    sheet.tell(*report.emulated, style=_STYLES["very noisy"])
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
            sheet.write("")
            sheet.tell(title, style=_BOLD)
            sheet.tell(*told)
    sheet.write("")
    write_verdicts(sheet, report.verdicts)
    sheet.tell(*report.warnings, *report.footnotes)
    return sheet.text()


def write_verdicts(sheet: "Sheet", verdicts: Sequence[Verdict]) -> None:
    """Write a line for each verdict, its word in the colour of how it stands, more where the width asks for them."""
    start = max(len(one.word) for one in verdicts) + 2
    for one in verdicts:
        first, *more = wrapped(to_single_line(one.sentence), sheet.width - start)
        sheet.write(sheet.styled(f"{one.word:{start}}", _LEVELS[one.level]) + first)
        sheet.write(*(" " * start + part for part in more))


def wrapped(text: str, width: int) -> list[str]:
    """Return text in lines, no number parted from its unit or interval."""
    is_short = cell_len(text) <= width
    found = (
        [text]
        if is_short
        else textwrap.wrap(_GLUED.sub("\xa0", text), width, break_on_hyphens=False)
    )
    return [line.replace("\xa0", " ") for line in found]


class Sheet:
    """Lines of at most ``width`` columns, of any length where that is None."""

    def __init__(self, width: int | None, color: bool) -> None:
        self.width = max(width, _NARROWEST) if width else _UNBOUNDED
        self._lines: list[str] = []
        self._color = color

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if style and self._color else text

    def tell(self, *sentences: str, style: str = "") -> None:
        for sentence in sentences:
            self.write(
                *(
                    self.styled(line, style)
                    for line in wrapped(to_single_line(sentence), self.width)
                )
            )

    def write(self, *lines: str) -> None:
        self._lines += [line.rstrip() for line in lines]

    def write_row(
        self,
        texts: Iterable[Sequence[str]],
        widths: Sequence[int],
        right: Sequence[bool],
        styles: Sequence[str],
    ) -> None:
        """Write cells of several lines side by side, numbers to the right."""
        for parts in zip_longest(*texts, fillvalue=""):
            line = []
            for part, width, is_right, style in zip(parts, widths, right, styles, strict=True):
                blank, told = (
                    " " * (width - cell_len(part)),
                    self.styled(part, style if part else ""),
                )
                line.append(blank + told if is_right else told + blank)
            self.write((" " * _GAP).join(line))

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def write_table(
    sheet: Sheet,
    title: str,
    columns: Sequence[Column[Any]] | Sequence[tables.Column],
    rows: Sequence[Any],
) -> None:
    """Write what all rows have alike, then a table, or several with the names of rows in each, or records.

    Names are the first columns, as many as tell all rows apart; of several tables one leaves out rows of which it
    knows nothing.
    """
    if not rows:
        return
    alike: str
    shown: Sequence[Any]
    if isinstance(columns[0], tables.Column):
        table = tables.Table(id="", title=title, columns=columns, rows=rows)
        alike, shown = table.constant, table.varying
    else:
        alike, shown = hoisted(columns, rows)
    sheet.write("")
    sheet.tell(title, style=_BOLD)
    sheet.tell(*filter(None, [alike]))
    told = [[to_single_line(column.format_cell(row)) for column in shown] for row in rows]
    names = next(
        (
            i
            for i in range(1, len(shown))
            if len({*map(tuple, (line[:i] for line in told))}) == len(told)
        ),
        1,
    )
    sizes = [
        _least_and_natural(column, [line[i] for line in told]) for i, column in enumerate(shown)
    ]
    blocks = _blocks([least for least, _ in sizes], names, sheet.width)
    if (len(blocks) > 1 and len(rows) == 1) or any(
        _total(sizes[i][0] for i in of) > sheet.width for of in blocks
    ):
        _write_records(sheet, shown, told, names)
        return
    for number, block in enumerate(blocks):
        of, room = [shown[i] for i in block], _stretched([sizes[i] for i in block], sheet.width)
        filled = [
            [wrapped(text, width) for text in (shown[i].title, *(line[i] for line in told))]
            for i, width in zip(block, room, strict=True)
        ]
        widths = [max(cell_len(part) for one in column for part in one) for column in filled]
        right = [column.is_number for column in of]
        heads, *texts = zip(*filled, strict=True)
        lower = [[""] * (max(map(len, heads)) - len(head)) + head for head in heads]
        sheet.write(*[""] * bool(number))
        sheet.write_row(lower, widths, right, [_BOLD] * len(of))
        for row, line, parts in zip(rows, told, texts, strict=True):
            if len(blocks) == 1 or {line[i] for i in block[names:]} != {UNKNOWN}:
                marks = [
                    (column.mark(row) if column.mark else "") or line[i]
                    for i, column in zip(block, of, strict=True)
                ]
                sheet.write_row(parts, widths, right, [_STYLES.get(mark, "") for mark in marks])


def _least_and_natural(column: Any, texts: Sequence[str]) -> tuple[int, int]:
    """Return the least width of a column and the one that wraps nothing; what is a number is never wrapped."""
    widest = max(map(cell_len, texts))
    parts = [
        part for text in (column.title, *texts) for part in _GLUED.sub("\xa0", text).split(" ")
    ]
    words = min(max(map(cell_len, parts)), _LONGEST)
    return max(words, widest if column.is_number else min(widest, _WORDS)), max(
        widest, cell_len(column.title)
    )


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _blocks(least: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Return the columns of each table that is no wider than can be, the names in each."""
    blocks = [[*range(names)]]
    for i in range(names, len(least)):
        if len(blocks[-1]) > names and _total(least[j] for j in (*blocks[-1], i)) > width:
            blocks.append([*range(names)])
        blocks[-1].append(i)
    return blocks


def _stretched(sizes: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Return each column's width, what is left of the line given to those that lack most of theirs."""
    if _total(whole := [max(size) for size in sizes]) <= width:
        return whole
    found = [least for least, _ in sizes]
    while _total(found) < width and any(
        natural > has for (_, natural), has in zip(sizes, found, strict=True)
    ):
        lacks = [natural / has for (_, natural), has in zip(sizes, found, strict=True)]
        found[lacks.index(max(lacks))] += 1
    return found


def _write_records(
    sheet: Sheet, shown: Sequence[Any], told: Sequence[Sequence[str]], names: int
) -> None:
    for line in told:
        sheet.tell(", ".join(text for text in line[:names] if text != UNKNOWN))
        pairs = zip(shown[names:], line[names:], strict=True)
        facts = [f"{column.title} {text}" for column, text in pairs if text != UNKNOWN]
        kept = (
            fact.replace(" ", "\xa0") if len(fact) < sheet.width - 2 else fact for fact in facts
        )
        sheet.write(*(f"  {part}" for part in wrapped("; ".join(kept), sheet.width - 2)))
