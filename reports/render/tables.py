"""Tables on standard output: fitted to a terminal, and never cut nor wrapped where there is none."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.results.runs import Run
from reports import cells
from reports.analysis.attention import hops, read_context
from reports.analysis.experts import atlas_columns, atlases, distinct, read_mixture, shares
from reports.analysis.findings import Findings, find
from reports.analysis.fits import fit_notes
from reports.analysis.group_kinds import kind_columns, largest, ratio_words
from reports.analysis.interference import contrasts, matrix_title
from reports.analysis.pipelines import comparisons
from reports.analysis.problems import Problem, bad_rows, emulations, not_measured, told_of_runs, warnings_of
from reports.analysis.several import Several
from reports.analysis.step_parts import broken_down, memory_lines
from reports.analysis.summary import Summary, unreadable
from reports.analysis.timelines import busy_ranks
from reports.sections.columns import (
    Column,
    T,
    busy_columns,
    communication_columns,
    fit_columns,
    pair_columns,
    slowed_columns,
)
from reports.sections.communication_section import grouped, grouped_columns, late_columns
from reports.sections.doubts import doubts, footnotes, heading, verdict_words
from reports.sections.node_section import (
    distance_words,
    distances,
    matrix_columns,
    matrix_ranks,
    node_columns,
    node_notes,
    node_rows,
)
from reports.sections.panels import Section
from reports.sections.parallel_columns import (
    compared_columns,
    context_columns,
    hop_columns,
    mixture_columns,
    pipeline_columns,
    share_columns,
)
from reports.sections.step_columns import memory_columns, step_columns, time_columns

_UNBOUNDED = 1_000_000
_STYLES = {
    "wrong": "bold red",
    "hang": "red",
    "failed": "red",
    "not measured": "yellow",
    "noisy": "yellow",
    "very noisy": "bold yellow",
}


def print_tables(run: Run, summary: Summary, file: TextIO | None = None, *, full: bool = False) -> None:
    """Write all tables to ``file``, by default standard output, as suits a terminal or a pipe."""
    _print(lambda width, color: render_tables(run, summary, width=width, color=color, full=full), file)


def print_several(several: Several, sections: Sequence[Section], file: TextIO | None = None) -> None:
    """Write several runs' sections to ``file``, by default standard output, as suits a terminal or a pipe."""
    _print(lambda width, color: render_several_tables(several, sections, width=width, color=color), file)


def _print(render: Callable[[int | None, bool], str], file: TextIO | None) -> None:
    out = sys.stdout if file is None else file
    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    text = render(width, terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))


def render_tables(run: Run, summary: Summary, *, width: int | None, color: bool = False, full: bool = False) -> str:
    """Return the tables as text; ``width`` is the terminal's columns, None for a pipe: nothing is cut or wrapped.

    ``full`` adds what takes reading more of the run's folder: traced steps rank by rank, and who comes late.
    """
    sheet = _Sheet(width, color)
    found = find(run, summary)
    curves, steps = found.curves, found.steps
    sheet.write(_clean(heading(run, summary)))
    sheet.write(*(Text(cells.visible(note), style="bold yellow") for note in emulations(run)))
    if found.nodes:
        _write_rows(sheet, "Nodes", node_columns(), node_rows(found.nodes))
        sheet.write(*(_clean(note) for note in node_notes(found.nodes)))
    _write_rows(
        sheet, "Collectives and point-to-point", communication_columns(found.communication), found.communication
    )
    _write_rows(sheet, "Fits", fit_columns(curves), curves)
    sheet.write(*(_clean(note) for note in fit_notes(curves, found.ceiling)))
    _write_contrasts(sheet, found)
    _write_rows(sheet, "Steps", step_columns(steps, curves), steps)
    _write_rows(sheet, "Where the time went", time_columns(steps), broken_down(steps))
    _write_pipelines(sheet, found)
    _write_contexts(sheet, found)
    _write_mixtures(sheet, found)
    _write_rows(sheet, "Memory by component", memory_columns(steps), memory_lines(steps))
    if full:
        _write_full(sheet, found)
    _write_problems(sheet, "Wrong, hung or failed", bad_rows(summary))
    _write_problems(sheet, "Not measured", not_measured(summary))
    if doubted := doubts(found):
        sheet.write("", _title("Slow or noisy"), *(_clean(doubt) for doubt in doubted))
    fine = summary.verdict.fine
    sheet.write("", Text(f"Verdict: {verdict_words(summary.verdict)}", style="" if fine else "bold red"))
    sheet.write(*(_clean(note) for note in (*warnings_of(run), *footnotes(run, summary))))
    return sheet.text()


def render_several_tables(
    several: Several, sections: Sequence[Section], *, width: int | None, color: bool = False
) -> str:
    """Return sections of several runs as text, what they say first and the verdict last."""
    sheet = _Sheet(width, color)
    emulated = told_of_runs([one.run for one in several.runs], emulations)
    sheet.write(*(Text(cells.visible(note), style="bold yellow") for note in emulated))
    for section in sections:
        sheet.write(*(_clean(note) for note in section.notes))
        for panel in section.panels:
            _write_rows(sheet, panel.title, panel.columns, panel.rows)
            sheet.write(*(_clean(note) for note in panel.notes))
    sheet.write("", Text(f"Verdict: {several.verdict_words}", style="" if several.fine else "bold red"))
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


def _write_contrasts(sheet: _Sheet, found: Findings) -> None:
    """Print what rows cost beside others, groups side by side, and rates from rank to rank."""
    for title, prefix, slowed in contrasts(found.shown):
        _write_rows(sheet, title, slowed_columns(slowed, prefix), slowed)
    _write_rows(sheet, "Within and across nodes: bus bandwidth in GB/s", kind_columns(found.kinds), found.kinds)
    sheet.write(*(_clean(ratio_words(one)) for one in largest(found.kinds)))
    groups = grouped(found.communication)
    _write_rows(sheet, "Operation x group: bus bandwidth in GB/s", grouped_columns(groups), groups)
    for matrix in found.matrices:
        if found.nodes is None:
            _write_rows(sheet, matrix_title(matrix), pair_columns(matrix), matrix.ranks)
            continue
        columns, ranks = matrix_columns(matrix, found.nodes), matrix_ranks(matrix, found.nodes)
        _write_rows(sheet, matrix_title(matrix), columns, ranks)
        sheet.write(*(_clean(sentence) for sentence in distance_words(distances(matrix, found.nodes))))


def _write_pipelines(sheet: _Sheet, found: Findings) -> None:
    """Print what pipeline steps know of their bubbles, and how their schedules compare."""
    _write_rows(sheet, "Pipelines", pipeline_columns(found.pipelines), found.pipelines)
    for comparison in comparisons(found.pipelines):
        _write_rows(sheet, comparison.title, compared_columns(comparison.entries), comparison.entries)
    if found.unreadable:
        sheet.write("", *(_clean(sentence) for sentence in found.unreadable))


def _write_contexts(sheet: _Sheet, found: Findings) -> None:
    """Print what attention over ranks costs, and how its methods compare."""
    _write_rows(sheet, "Context parallelism", context_columns(found.contexts), found.contexts)
    told = [sentence for one in found.context_comparisons for sentence in one.sentences]
    sheet.write(*(_clean(sentence) for sentence in (*told, *unreadable(found.steps, read_context))))


def _write_mixtures(sheet: _Sheet, found: Findings) -> None:
    """Print what routing does to experts and ranks, and each scope's atlas of it."""
    _write_rows(sheet, "Expert parallelism", mixture_columns(found.mixtures), found.mixtures)
    for atlas in atlases(found.mixtures):
        _write_rows(sheet, atlas.title, atlas_columns(atlas), atlas.routings)
    sheet.write(*(_clean(sentence) for sentence in unreadable(found.steps, read_mixture)))


def _write_full(sheet: _Sheet, found: Findings) -> None:
    """Print what a table tells of the page's timelines and strips, from the run's folder."""
    lines = busy_ranks(found.timelines)
    _write_rows(sheet, "Traced steps, rank by rank", busy_columns(found.steps, lines), lines)
    moved, chosen = hops(found.contexts), shares(distinct(found.mixtures))
    _write_rows(sheet, "Attention's communications", hop_columns(moved), moved)
    _write_rows(sheet, "Who is chosen", share_columns(chosen), chosen)
    _write_rows(sheet, "Who comes late", late_columns(found.late), found.late)


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
