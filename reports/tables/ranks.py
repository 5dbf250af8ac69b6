"""The rank by rank matrix of bandwidths."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import format_number, format_quantity
from parbench.bench.results.stats import median
from parbench.bench.results.tables import Column, Section, Table
from parbench.bench.text import pluralize
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.pairs import chart_links
from parbench.reports.links import LinkMatrix, list_link_matrices
from parbench.reports.run_data import RunData
from parbench.reports.tables.communication import make_operation_table
from parbench.reports.topology import DISTANCES, Topology

if TYPE_CHECKING:
    import pandas as pd


def make_link_section(data: RunData) -> Section | None:
    """Return the bandwidth from each rank to each other rank, ordered by node.

    Pages have a heat map and a table with a row for each link, terminals the matrix.
    """
    tables = []
    for index, matrix in enumerate(list_link_matrices(data), start=1):
        tables += _make_tables(matrix, index, data.nodes)
    if not tables:
        return None
    return Section(id="pairs", title="Rank to rank", tables=tables)


def _make_tables(matrix: LinkMatrix, index: int, topology: Topology | None) -> list[Table]:
    title = f"Rank to rank: bus bandwidth in GB/s, {matrix.title}"
    bandwidths = matrix.bandwidths
    notes: list[str] = []
    if topology is not None:
        ranks = topology.order_by_node(list(bandwidths.index))
        bandwidths = bandwidths.reindex(index=ranks, columns=ranks)
        notes = describe_distances(bandwidths, topology)
    page_table = make_operation_table(f"pairs-{index}", title, matrix.cases)
    figures = partial(_chart_links, index, title, bandwidths, topology)
    matrix_table = _make_matrix_table(f"pairs-{index}-matrix", title, bandwidths, topology)
    return [
        replace(page_table, where="page", figures=figures, notes=notes),
        replace(matrix_table, where="terminal", notes=notes),
    ]


def _chart_links(
    index: int, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> list[Chart]:
    return list_charts(chart_links(index, title, bandwidths, topology))


def _make_matrix_table(
    table_id: str, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> Table:
    names = {
        rank: f"{rank} {topology.get_host(rank)}" if topology else str(rank)
        for rank in bandwidths.index
    }
    columns = [Column(key="sender", title="from \\ to", help="sending rank")]
    for rank, name in names.items():
        columns.append(
            Column(
                key=f"to_{rank}",
                title=name,
                kind="B/s",
                help=f"bus bandwidth to rank {rank} in 1e9 B/s",
                is_result=True,
            )
        )
    rows: list[dict[str, Any]] = []
    for rank, values in bandwidths.iterrows():
        row = {f"to_{receiver}": value for receiver, value in values.items()}
        rows.append({"sender": names[rank], **row})
    return Table(
        id=table_id,
        title=title,
        caption="a row for each sender, a column for each receiver",
        columns=columns,
        rows=rows,
    )


def describe_distances(bandwidths: "pd.DataFrame", topology: Topology) -> list[str]:
    """Return sentences with the median bandwidth at each distance, and relative to the nearest."""
    by_distance: dict[str, list[float]] = defaultdict(list)
    for (rank, peer), bandwidth in bandwidths.stack().dropna().items():
        by_distance[topology.get_distance(rank, peer)].append(bandwidth)
    distances = [distance for distance in DISTANCES if distance in by_distance]
    if not distances:
        return []
    medians = {distance: median(by_distance[distance]) for distance in distances}
    texts = []
    for distance, bandwidth in medians.items():
        count = pluralize(len(by_distance[distance]), "pair")
        texts.append(f"{distance} {format_quantity(bandwidth, 'B/s')} ({count})")
    sentences = [f"Median bandwidth: {', '.join(texts)}."]
    nearest, *farther = distances
    ratios = [
        f"{distance} {format_number(medians[distance] / medians[nearest])}" for distance in farther
    ]
    if ratios:
        sentences.append(f"Relative to {nearest}: {', '.join(ratios)}.")
    return sentences
