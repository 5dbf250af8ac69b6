"""The rank by rank matrix of bandwidths."""

from collections import defaultdict
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import format_case_size, format_quantity
from parbench.bench.results.stats import median
from parbench.bench.results.tables import Column, Section, Table, metric_column
from parbench.bench.text import pluralize
from parbench.reports.analysis.operations import LINKS, add_operation_columns
from parbench.reports.analysis.topology import DISTANCES, Topology
from parbench.reports.figures.chart import list_charts
from parbench.reports.figures.pairs import chart_links
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd


def make_link_section(data: RunData) -> Section | None:
    """Return the bandwidth from each rank to each other rank, for each size, type and mode."""
    cases = add_operation_columns(data.cases[data.cases["name"] == LINKS])
    tables: list[Table] = []
    for (size, dtype, mode), links in cases.groupby(["size", "dtype", "mode"], sort=False):
        if links["busbw"].count() > 1:
            title = f"Rank to rank: bus bandwidth in GB/s, {format_case_size(size)} {dtype}, {mode}"
            tables.append(_make_table(len(tables) + 1, title, links, data.nodes))
    if not tables:
        return None
    return Section("pairs", "Rank to rank", tables=tables)


def pivot_links(links: "pd.DataFrame", topology: Topology | None) -> "pd.DataFrame":
    """Return the bandwidth in B/s with a row per sender and a column per receiver.

    The ranks are ordered by node. Unknown links are NaN.
    """
    bandwidths = links.pivot_table(
        index="param_source", columns="param_target", values="busbw", aggfunc="last"
    )
    ranks = sorted({*bandwidths.index, *bandwidths.columns})
    if topology is not None:
        ranks = list(topology.order_by_node(ranks))
    return bandwidths.reindex(index=ranks, columns=ranks)


def _make_table(number: int, title: str, links: "pd.DataFrame", topology: Topology | None) -> Table:
    bandwidths = pivot_links(links, topology)
    names = {
        str(rank): f"{rank} {topology.get_host(rank)}" if topology else str(rank)
        for rank in bandwidths.index
    }
    labeled = bandwidths.rename(index=str, columns=str).assign(sender=list(names.values()))
    columns = [Column("sender", "from \\ to", help="sending rank")]
    columns += [metric_column("busbw", key=rank, title=name) for rank, name in names.items()]
    return Table(
        f"pairs-{number}",
        title,
        caption="a row for each sender, a column for each receiver",
        columns=columns,
        rows=list_rows(labeled),
        notes=describe_distances(links, topology) if topology else (),
        figures=lambda: list_charts(chart_links(number, title, bandwidths, topology)),
    )


def describe_distances(links: "pd.DataFrame", topology: Topology) -> list[str]:
    """Return a sentence with the median bandwidth at each distance."""
    by_distance: dict[str, list[float]] = defaultdict(list)
    for link in list_rows(links[links["busbw"].notna()]):
        distance = topology.get_distance(link["param_source"], link["param_target"])
        by_distance[distance].append(link["busbw"])
    texts = [
        f"{distance} {format_quantity(median(by_distance[distance]), 'B/s')} "
        f"({pluralize(len(by_distance[distance]), 'pair')})"
        for distance in DISTANCES
        if distance in by_distance
    ]
    return [f"Median bandwidth: {', '.join(texts)}."]
