"""What a plan shows as a report: its tables with their figures drawn, in any of the report's forms."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentColumn,
    DocumentTable,
    Figure,
    GanttChart,
    StackedBars,
    Unit,
)
from parbench.bench.results.formatting import (
    UNKNOWN,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
)
from parbench.reports import report
from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.figures.changes import chart_pareto
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.pipeline import chart_predicted_pipeline
from parbench.reports.figures.quantities import Quantity
from parbench.reports.figures.steps import chart_stacks
from parbench.reports.figures.style import MEMORY, STEP
from parbench.reports.render.show import rendered
from parbench.reports.render.terminal import render_text, width_of
from parbench.reports.report import Report, Section

_TEXTS: dict[Unit, Callable[[float | None], str]] = {
    "number": format_number,
    "s": format_seconds,
    "GB": lambda value: format_quantity(value, "GB"),
    "share": format_percent,
}
_STACKS: dict[str, tuple[dict[str, str], Quantity]] = {
    "memory": (MEMORY, Quantity(title="memory of a rank", text=_TEXTS["GB"], is_log=False)),
    "step": (STEP, Quantity(title="time of a step", text=_TEXTS["s"], is_log=False)),
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
    if not document.is_prediction:
        described = "the tables are quoted from the sources; nothing was predicted or measured"
        verdict = Verdict(word="PUBLISHED", level="good", told=described)
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
        return cell or UNKNOWN
    return _TEXTS[column.unit](cell)


def _figures(table: DocumentTable) -> Iterator[Chart]:
    for number, figure in enumerate(table.figures, start=1):
        yield from list_charts(_chart(f"{table.id}_figure_{number}", figure))


def _chart(name: str, figure: Figure) -> Chart | None:
    if isinstance(figure, GanttChart):
        return chart_predicted_pipeline(name, figure.title, figure.caption, figure.facts)
    if isinstance(figure, StackedBars):
        hues, quantity = _STACKS[figure.quantity]
        stacks = list(figure.bars.items())
        return chart_stacks(
            name, figure.title, figure.caption, stacks, hues, quantity, figure.limit
        )
    axes = (_quantity(figure.x), _quantity(figure.y))
    return chart_pareto(name, figure.title, figure.caption, figure.points, figure.front, axes)


def _quantity(axis: DocumentColumn) -> Quantity:
    return Quantity(title=axis.title, text=_TEXTS[axis.unit])
