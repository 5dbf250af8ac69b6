"""The report on context parallelism: steps, and their methods compared."""

from collections.abc import Iterator, Sequence

from parbench.bench.results.formatting import (
    format_bytes,
    format_count,
    format_percent,
    make_formatter,
    to_single_line,
)
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.attention import OF_METHOD, Context, read_context
from parbench.reports.analysis.labels import differences
from parbench.reports.analysis.summary import Row, unreadable
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import chart_context_methods
from parbench.reports.report import Column, Section, Table, known, number, words
from parbench.reports.sections.row_columns import headline, metric_column, metric_columns


def attention_section(found: Analysis) -> Section | None:
    """Return the tables of context-parallel steps; where Ulysses sends less than a ring stands below the first."""
    unread = unreadable(found.steps, read_context)
    if not found.contexts and not unread:
        return None
    tables: list[Table[Context]] = []
    if found.contexts:
        tables.append(
            Table(
                id="context-table",
                title="Context parallelism",
                caption="bytes each way, how even the ranks' pairs are, and what communication is exposed",
                columns=context_columns(found.contexts),
                rows=found.contexts,
                notes=tuple(one.crossover for one in found.context_comparisons if one.crossover),
                figures=lambda: _draw(found),
            )
        )
    return Section(id="context", title="Context parallelism", tables=tuple(tables), notes=unread)


def _draw(found: Analysis) -> Iterator[Chart]:
    for index, comparison in enumerate(found.context_comparisons, start=1):
        yield from chart_context_methods(index, comparison)


def context_columns(found: Sequence[Context]) -> tuple[Column[Context], ...]:
    def ratio(direction: str) -> Column[Context]:
        told = f"bytes sent {direction} over the closed form's, on the axis where they differ most"
        text = make_formatter("{:.3f}")
        return number(f"ratio {direction}", lambda one: one.bytes_ratio(direction), text, told)

    def row_of(one: Context) -> Row:
        return one.row

    rows = [one.row for one in found]
    exposed_help = (
        "attention's communication that no computation hides, as a share of the traced step"
    )
    columns: tuple[Column[Context], ...] = (
        metric_column("tokens_per_second").of(row_of),
        number(
            "bytes sent",
            lambda one: one.sent_bytes(),
            format_bytes,
            "by a rank's attention in a step",
        ),
        ratio("forward"),
        ratio("backward"),
        number("exposed cp", lambda one: one.exposed_share, format_percent, exposed_help),
        *(column.of(row_of) for column in metric_columns("attention", rows)),
        metric_column("memory.activations", title="activations").of(row_of),
    )
    return (*_identity(found), headline("step_time", rows).of(row_of), *known(columns, found))


def _identity(found: Sequence[Context]) -> tuple[Column[Context], ...]:
    """Return the columns that tell steps apart; ``found`` are all steps, for their names."""
    others = differences([one.row for one in found], OF_METHOD)
    name_help = "how queries meet keys of other ranks, with the parameters in which steps differ"
    return (
        words(
            "method",
            lambda one: to_single_line(f"{one.method} {others[one.row.case.id]}"),
            name_help,
        ),
        number("cp", lambda one: one.ranks, format_count, "ranks that share a sequence"),
        number(
            "sequence", lambda one: one.facts.sequence, format_count, "tokens of a whole sequence"
        ),
    )
