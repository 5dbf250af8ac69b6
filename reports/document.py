"""What a plan shows as a report: its tables with their figures drawn, in any of the report's forms."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

from markupsafe import Markup

from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentColumn,
    DocumentTable,
    GanttChart,
    StackedBars,
    Unit,
)
from parbench.reports import cells, report
from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.figures.bars import draw_stacks
from parbench.reports.figures.gantt import detail_of, draw_pipeline, last_of
from parbench.reports.figures.lines import draw_points
from parbench.reports.figures.palette import MEMORY, STEP
from parbench.reports.figures.svg import Drawing, figure
from parbench.reports.render.show import rendered
from parbench.reports.render.terminal import render_text, width_of
from parbench.reports.report import Report, Section

_TEXTS: dict[Unit, Callable[[float | None], str]] = {
    "number": cells.significant,
    "s": cells.duration,
    "GB": lambda value: cells.quantity(value, "GB"),
    "share": cells.percent,
}
_STACKS: dict[str, tuple[dict[str, str], Unit, str]] = {
    "memory": (MEMORY, "GB", "memory of a rank"),
    "step": (
        {**STEP, "bubble": STEP["idle"]},
        "s",
        "time of a step",
    ),
}


def render_document(document: Document, form: str) -> bytes:
    """Return a plan's document as ``tables``, ``html``, ``markdown`` or ``json``."""
    told = report_of_document(document)
    return (
        render_text(told, width_of(sys.stdout)).encode()
        if form == "tables"
        else rendered(told, form)
    )


def report_of_document(document: Document) -> Report:
    told = "every number follows from formulas and declared rates; nothing was measured"
    verdict = Verdict(word="PREDICTED", level="good", told=told)
    if document.problem:
        verdict = Verdict(word="TOO LARGE", level="bad", told=document.problem)
    sections = (
        Section(
            id=part.id,
            title=part.title,
            tables=tuple(map(_table, part.tables)),
            notes=tuple(part.notes),
        )
        for part in document.parts
    )
    return Report(
        name=document.name,
        verdicts=(verdict,),
        code=0,
        runs=(),
        sections=tuple(sections),
        heading=document.heading,
        tiles=tuple(document.tiles),
    )


def _table(table: DocumentTable) -> report.Table[tuple[Cell, ...]]:
    return report.Table(
        id=table.id,
        title=table.title,
        caption=table.caption,
        columns=tuple(_column(i, column) for i, column in enumerate(table.columns)),
        rows=tuple(map(tuple, table.rows)),
        notes=tuple(table.notes),
        figures=partial(_figures, table),
    )


def _column(place: int, column: DocumentColumn) -> report.Column[tuple[Cell, ...]]:
    is_number = column.unit != "text"
    return report.Column(
        column.title,
        lambda row: text_of(column, row[place]),
        lambda row: row[place],
        column.help,
        number=is_number,
        is_result=is_number,
    )


def text_of(column: DocumentColumn, cell: Cell) -> str:
    if cell is None or isinstance(cell, str):
        return cell or cells.UNKNOWN
    return _TEXTS[column.unit](cell)


def _figures(table: DocumentTable) -> Iterator[Markup]:
    for i, one in enumerate(table.figures):
        told = one.caption
        drawn: Drawing | None
        if isinstance(one, GanttChart):
            detail = detail_of(one)
            drawn = draw_pipeline(one, detail, last_of(one.facts.predicted or ()))
            told = f"{told} {detail.note}".rstrip()
        elif isinstance(one, StackedBars):
            hues, unit, quantity = _STACKS[one.quantity]
            drawn = draw_stacks([*one.bars.items()], hues, quantity, _TEXTS[unit], one.limit)
        else:
            axes = [(axis.title, _TEXTS[axis.unit]) for axis in (one.x, one.y)]
            drawn = draw_points(one.points, one.front, *axes)
        yield from figure(drawn, f"{table.id}-figure-{i}", one.title, told)
