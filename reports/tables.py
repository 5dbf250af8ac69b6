"""Tables on standard output: fitted to a terminal, and never cut nor wrapped where there is none."""

import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.runs import Run
from reports import cells
from reports.breakdown import broken_down, memory_lines
from reports.columns import Column, T, communication_columns, fit_columns, pair_columns, slowed_columns
from reports.contrasts import Pairs, contrasts, matrix_title, pairs
from reports.fits import ceiling_of, fit_curves, fit_notes
from reports.footnotes import footnotes, heading, verdict_words
from reports.problems import Problem, bad_rows, not_measured
from reports.step_columns import memory_columns, step_columns, time_columns
from reports.summary import Row, Summary

_UNBOUNDED = 1_000_000
_STYLES = {
    "wrong": "bold red",
    "hang": "red",
    "failed": "red",
    "not measured": "yellow",
    "noisy": "yellow",
    "wild": "bold yellow",
}


def print_tables(run: Run, summary: Summary, file: TextIO | None = None) -> None:
    """Write all tables to ``file``, by default standard output, as suits a terminal or a pipe."""
    out = sys.stdout if file is None else file
    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = render_tables(run, summary, width=width, color=color)
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def render_tables(run: Run, summary: Summary, *, width: int | None, color: bool = False) -> str:
    """Return the tables as text; ``width`` is the terminal's columns, None for a pipe: nothing is cut or wrapped."""
    sheet = _Sheet(width, color)
    shown = [row for row in summary.rows if row.metrics]
    matrices = pairs(shown)
    in_matrices = {row.case.id for matrix in matrices for row in matrix.rows.values()}
    communication = [row for row in shown if row.is_communication and row.case.id not in in_matrices]
    steps = [row for row in shown if not row.is_communication]
    sheet.write(_clean(heading(run, summary)))
    _write_rows(sheet, "Collectives and point-to-point", communication_columns(communication), communication)
    ceiling = ceiling_of(run, communication)
    curves = fit_curves(communication, ceiling)
    _write_rows(sheet, "Fits", fit_columns(curves), curves)
    sheet.write(*(_clean(note) for note in fit_notes(curves, ceiling)))
    _write_contrasts(sheet, shown, matrices)
    _write_rows(sheet, "Steps", step_columns(steps, curves), steps)
    _write_rows(sheet, "Where the time went", time_columns(steps), broken_down(steps))
    _write_rows(sheet, "Memory by component", memory_columns(steps), memory_lines(steps))
    _write_problems(sheet, "Wrong, hung or failed", bad_rows(summary))
    _write_problems(sheet, "Not measured", not_measured(summary))
    fine = summary.verdict.fine
    sheet.write("", Text(f"Verdict: {verdict_words(summary.verdict)}", style="" if fine else "bold red"))
    sheet.write(*(_clean(note) for note in footnotes(run, summary)))
    return sheet.text()


class _Sheet:
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

    def write(self, *parts: Table | Text | str, at_least: int = 0) -> None:
        """Print each part on lines of its own, ``at_least`` so many columns wide."""
        for part in parts:
            self._console.print(part, width=max(self.width, at_least) if self.width else _UNBOUNDED)

    def least_width(self, table: Table) -> int:
        """Return the columns below which a table would break words or numbers."""
        return self._console.measure(table).minimum

    def has_room(self, table: Table) -> bool:
        """Say whether a table fits without breaking lines."""
        return self.width is None or self._console.measure(table).maximum <= self.width

    def text(self) -> str:
        """Return all that was written, without blanks at the ends of lines."""
        return "".join(line.rstrip() + "\n" for line in self._buffer.getvalue().splitlines())


def _write_rows(sheet: _Sheet, title: str, columns: Sequence[Column[T]], rows: Sequence[T]) -> None:
    """Print a table, and below it what the columns say for which the terminal has no room."""
    if not rows:
        return
    kept = list(columns)
    while not sheet.has_room(table := _rows_table(sheet, kept, rows)):
        droppable = max(kept, key=lambda column: column.drop)
        if droppable.drop == 0:
            break
        kept.remove(droppable)
    sheet.write("", _title(title), table, at_least=sheet.least_width(table))
    if hidden := [_hidden(column, rows) for column in columns if column not in kept]:
        sheet.write(_clean(f"No room for: {', '.join(hidden)}; all is in the report."))


def _write_contrasts(sheet: _Sheet, rows: Sequence[Row], matrices: Sequence[Pairs]) -> None:
    """Print what rows cost beside others, and rates from rank to rank."""
    for title, prefix, slowed in contrasts(rows):
        _write_rows(sheet, title, slowed_columns(slowed, prefix), slowed)
    for matrix in matrices:
        _write_rows(sheet, matrix_title(matrix), pair_columns(matrix), matrix.ranks)


def _rows_table(sheet: _Sheet, columns: Sequence[Column[T]], rows: Sequence[T]) -> Table:
    table = _table(sheet)
    texts = [[_cell(column.text(row)) for column in columns] for row in rows]
    for i, column in enumerate(columns):
        # a name or a note may take several lines of a terminal, a number may not
        widest = max(len(column.title), *(line[i].cell_len for line in texts)) if column.number else None
        table.add_column(column.title, justify="right" if column.number else "left", min_width=widest)
    for line in texts:
        table.add_row(*line)
    return table


def _write_problems(sheet: _Sheet, title: str, problems: Sequence[Problem]) -> None:
    if not problems:
        return
    table = _table(sheet)
    for name in ("case", "status", "launches", "reason"):
        table.add_column(name, no_wrap=name in ("status", "launches"), overflow="fold")
    for one in problems:
        table.add_row(*(_cell(text) for text in (one.case, one.status, one.launches, one.reason)))
    sheet.write("", _title(title), table)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _table(sheet: _Sheet) -> Table:
    return Table(
        box=box.SIMPLE_HEAD if sheet.width else None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def _hidden(column: Column[T], rows: Sequence[T]) -> str:
    """Return the column's title, and its value where all rows share it."""
    values = {column.text(row) for row in rows}
    return f"{column.title} ({values.pop()})" if len(values) == 1 else column.title


def _cell(text: str) -> Text:
    cell = _clean(text)
    cell.stylize(_STYLES.get(text, ""))
    return cell


def _clean(text: str) -> Text:
    return Text(cells.visible(text))
