"""The rank by rank matrix of bandwidths."""

from functools import partial
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import format_case_size, format_number, format_quantity
from parbench.bench.results.tables import Column, Section, Table
from parbench.bench.text import pluralize
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.pairs import chart_links
from parbench.reports.operations import LINKS, add_setting
from parbench.reports.run_data import RunData
from parbench.reports.topology import DISTANCES, Topology

if TYPE_CHECKING:
    import pandas as pd


def make_link_section(data: RunData) -> Section | None:
    """Return the bandwidth from each rank to each other rank, for each size, type and mode."""
    cases = add_setting(data.cases[data.cases["name"] == LINKS])
    tables: list[Table] = []
    for (size, dtype, mode), links in cases.groupby(["size", "dtype", "mode"], sort=False):
        if links["busbw"].count() > 1:
            title = f"Rank to rank: bus bandwidth in GB/s, {format_case_size(size)} {dtype}, {mode}"
            bandwidths = pivot_links(links, data.nodes)
            tables.append(_make_table(len(tables) + 1, title, bandwidths, data.nodes))
    if not tables:
        return None
    return Section(id="pairs", title="Rank to rank", tables=tables)


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


def _make_table(
    number: int, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> Table:
    ranks = list(bandwidths.index)
    names = {rank: f"{rank} {topology.get_host(rank)}" if topology else f"{rank}" for rank in ranks}
    rows: list[dict[str, Any]] = bandwidths.rename(columns=str).to_dict("records")
    for rank, row in zip(ranks, rows, strict=True):
        row["sender"] = names[rank]
    columns = [Column(key="sender", title="from \\ to", help="sending rank")]
    columns += [
        Column(
            key=str(rank),
            title=names[rank],
            kind="B/s",
            help=f"bus bandwidth to rank {rank} in 1e9 B/s",
            is_result=True,
        )
        for rank in ranks
    ]
    return Table(
        id=f"pairs-{number}",
        title=title,
        caption="a row for each sender, a column for each receiver",
        columns=columns,
        rows=rows,
        notes=describe_distances(bandwidths, topology) if topology else (),
        figures=partial(_chart, number, title, bandwidths, topology),
    )


def _chart(
    number: int, title: str, bandwidths: "pd.DataFrame", topology: Topology | None
) -> list[Chart]:
    return list_charts(chart_links(number, title, bandwidths, topology))


def describe_distances(bandwidths: "pd.DataFrame", topology: Topology) -> list[str]:
    """Return sentences with the median bandwidth at each distance, and relative to the nearest."""
    links = bandwidths.stack().dropna()
    distances = [topology.get_distance(rank, peer) for rank, peer in links.index]
    groups = links.groupby(distances)
    medians = {
        distance: groups.median()[distance] for distance in DISTANCES if distance in distances
    }
    counts = groups.count()
    texts = [
        f"{distance} {format_quantity(bandwidth, 'B/s')} ({pluralize(counts[distance], 'pair')})"
        for distance, bandwidth in medians.items()
    ]
    sentences = [f"Median bandwidth: {', '.join(texts)}."]
    nearest, *farther = medians
    ratios = [
        f"{distance} {format_number(medians[distance] / medians[nearest])}" for distance in farther
    ]
    if ratios:
        sentences.append(f"Relative to {nearest}: {', '.join(ratios)}.")
    return sentences
