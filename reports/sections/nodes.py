"""The report on ranks: where they ran, rates from one to another, what distance costs, who comes late, each
repetition."""

from collections.abc import Iterator
from typing import Any

from parbench.bench.results.formatting import (
    format_case_size,
    format_gigabytes,
    format_number,
    format_quantity,
)
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.contrasts import Pairs
from parbench.reports.figures.chart import list_charts
from parbench.reports.figures.pairs import chart_pairs
from parbench.reports.report import Column, Section, Table, number
from parbench.reports.sections.communication import PLOTTED
from parbench.reports.sections.row_columns import (
    communication_columns,
)
from parbench.reports.topology import DISTANCES, Topology


def pair_section(found: Analysis) -> Section | None:
    """Return the rank-by-rank matrices, node by node where ranks are on several; on the page their rows too."""
    tables = [
        table
        for i, matrix in enumerate(found.matrices, start=1)
        for table in pair_tables(matrix, i, found.nodes)
    ]
    return Section(id="pairs", title="Rank to rank", tables=tuple(tables)) if tables else None


def pair_tables(matrix: Pairs, index: int, nodes: Topology | None) -> Iterator[Table[Any]]:
    """Yield the page's table with a row for each pair and a heat map, and the terminal's matrix."""
    rows, params = tuple(matrix.rows.values()), matrix.first.case.params
    told = f"{format_case_size(matrix.first.size_bytes)} {params.get('dtype', '-')}, {params.get('mode', '-')}"
    title = f"Rank to rank: bus bandwidth in GB/s, {told}"
    ranks = nodes.order_by_node(matrix.ranks) if nodes else matrix.ranks
    notes = distance_words(matrix, nodes) if nodes else ()
    yield Table(
        id=f"pairs-{index}",
        title=title,
        caption=PLOTTED,
        columns=communication_columns(rows),
        rows=rows,
        notes=notes,
        figures=lambda: list_charts(chart_pairs(index, title, matrix, nodes)),
        where="page",
    )

    def name(rank: int) -> str:
        return f"{rank} {nodes.hosts[rank]}" if nodes and rank < len(nodes.hosts) else str(rank)

    def receiver(target: int) -> Column[int]:
        told = f"bus bandwidth to rank {target} in 1e9 B/s"
        return number(
            name(target), lambda source: matrix.rate(source, target), format_gigabytes, told
        )

    sender = Column(
        "from \\ to",
        name,
        float,
        "the rank that sends, and those that receive",
        number=nodes is None,
    )
    yield Table(
        id=f"pairs-{index}-matrix",
        title=title,
        caption="a line for each sender, a column for each receiver",
        columns=(sender, *map(receiver, ranks)),
        rows=ranks,
        notes=notes,
        where="terminal",
    )


def distance_words(matrix: Pairs, nodes: Topology) -> tuple[str, ...]:
    """Return the median rate of the pairs at each distance in a sentence, and what the farther are of the nearest."""
    rates: dict[str, list[float]] = {}
    for a, b in matrix.rows:
        if max(a, b) < len(nodes.hosts) and (rate := matrix.rate(a, b)):
            rates.setdefault(nodes.get_distance(a, b), []).append(rate)
    medians = {name: median(rates[name]) for name in DISTANCES if name in rates}
    if not medians:
        return ()
    told = (
        f"{name} {format_quantity(rate, 'B/s')} ({pluralize(len(rates[name]), 'pair')})"
        for name, rate in medians.items()
    )
    (nearest, best), *others = medians.items()
    ratios = [f"{name} runs at {format_number(rate / best)} of {nearest}" for name, rate in others]
    return (f"Medians: {', '.join(told)}.", *([f"{', '.join(ratios)}."] if ratios else []))
