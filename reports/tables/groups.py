"""The tables of bus bandwidth by scope of process groups, by group, and by pair of ranks.

The scope of a group is the way in which its ranks lie on nodes: ``within a node``, ``inter-node``
(one rank on each node) or ``multi-node`` (several ranks on some nodes).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import GIGA, format_case_size, format_quantity
from parbench.bench.results.stats import median
from parbench.bench.results.tables import Column, Table, metric_column
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.operations import (
    CASE_KEYS,
    GROUP_PARAMS,
    LINKS,
    OPERATION_KEYS,
    add_operation_columns,
    select_operations,
)
from parbench.reports.analysis.topology import DISTANCES, WITHIN_NODE, Topology
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.figures.pairs import chart_links
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import CASE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

INTER_NODE = "inter-node"
MULTI_NODE = "multi-node"
"""The scope of a process group on several nodes, some of which have several of its ranks.

With one rank on each node the scope is ``INTER_NODE``, on a single node ``WITHIN_NODE``.
"""
CONCURRENT = " (concurrent)"
"""The suffix of a scope or group in cases in which all groups ran at the same time."""
MAX_FIGURES = 6
"""The largest number of figures of bandwidth by scope, one for each operation."""


def list_group_tables(data: RunData) -> Iterator[Table]:
    """Yield the tables of bus bandwidth of operations that several process groups ran.

    If the run has several nodes, the first table has a column per scope: groups within a node,
    inter-node groups and multi-node groups. The next table has a column per group. It is left out
    if all cases ran on all ranks.
    """
    cases = add_operation_columns(select_operations(data), without=GROUP_PARAMS)
    cases = cases[cases["busbw"] > 0]
    topology = data.nodes
    if topology is not None:
        scopes = [_find_scope(result, topology) for result in cases["result"]]
        by_scope = cases.assign(side=scopes)
        yield _make_group_table(
            "group-scopes",
            "Bandwidth by group scope, GB/s",
            by_scope,
            partial(_chart_scopes, by_scope),
        )
    if "param_group" in cases:
        groups = cases[cases["param_group"].notna()]
        groups = groups.assign(side=[_name_group(result) for result in groups["result"]])
        yield _make_group_table("operation-group", "Bandwidth by group, GB/s", groups)


def _find_scope(result: CaseResult, topology: Topology) -> str:
    """Return the scope of a case's process group, the placement of its ranks on nodes.

    The scopes are ``within a node``, ``inter-node`` (several nodes with one rank on each) and
    ``multi-node`` (several nodes with several ranks on some). `` (concurrent)`` is appended if all
    groups ran at the same time.
    """
    # A group of all ranks does not list them.
    ranks = result.details.get("group_ranks") or range(len(topology.hosts))
    hosts = {topology.get_host(rank) for rank in ranks}
    scope = INTER_NODE if len(hosts) == len(ranks) else MULTI_NODE
    if len(hosts) == 1:
        scope = WITHIN_NODE
    return scope + (CONCURRENT if result.case.params.get("concurrent") else "")


def _name_group(result: CaseResult) -> str:
    """Return the label of a case's process group: its parameter ``group``, then its ranks.

    An example is ``pairs 0,1``. `` (concurrent)`` is appended if all groups ran at the same time.
    """
    params = result.case.params
    members = ",".join(map(str, result.details.get("group_ranks") or ["all"]))
    return f"{params['group']} {members}" + (CONCURRENT if params.get("concurrent") else "")


def _make_group_table(
    table_id: str,
    title: str,
    cases: "pd.DataFrame",
    figures: Callable[[], Iterable[Chart]] = tuple,
) -> Table:
    """Return the table of bus bandwidth with a column for each scope or group.

    ``cases`` is a frame with a row per communication case, whose column ``side`` has the text of
    its scope (``_find_scope``) or its group (``_name_group``). A row is an operation, mode, data
    type and size. A cell is the median over the cases of a scope or group. Rows with fewer than two
    known cells are left out. ``figures`` makes the charts of the table.
    """
    bandwidths = cases.pivot_table(
        index=CASE_KEYS, columns="side", values="busbw", aggfunc="median", sort=False
    )
    names = list(bandwidths.columns)
    bandwidths = bandwidths[bandwidths.count(axis="columns") > 1]
    return Table(
        table_id,
        title,
        caption="bus bandwidth of groups of ranks, alone and concurrent, median over groups",
        columns=[*CASE_COLUMNS, *(metric_column("busbw", key=name, title=name) for name in names)],
        rows=list_rows(bandwidths.reset_index()),
        terms=["busbw"],
        figures=figures,
    )


def _chart_scopes(cases: "pd.DataFrame") -> Iterator[Chart]:
    """Yield charts of bus bandwidth over size with a line for each scope, the median of its groups.

    There is a chart for each of the first six combinations of operation, mode and data type.
    ``cases`` is a frame with a row per communication case, whose column ``side`` has the scope of
    its process group, such as ``inter-node``.
    """
    medians = cases.groupby([*CASE_KEYS, "side"], sort=False)["busbw"].median().reset_index()
    operations = list(medians.groupby(OPERATION_KEYS, sort=False))[:MAX_FIGURES]
    for number, (setting, rows) in enumerate(operations, start=1):
        chart = chart_lines(
            number_name("groups", number),
            f"Bandwidth by group scope: {', '.join(filter(None, map(str, setting)))}",
            "A line for each scope, the median of its groups.",
            make_lines(list_rows(rows), "side", "size", "busbw", GIGA),
            quantities.SIZE,
            quantities.BANDWIDTH,
        )
        yield from list_charts(chart)


def list_link_tables(data: RunData) -> Iterator[Table]:
    """Yield tables of bus bandwidth from each rank to each other rank, from ``p2p.matrix``.

    There is a table for each size, data type and mode with at least two measured pairs.
    """
    cases = add_operation_columns(data.cases[data.cases["name"] == LINKS])
    number = 1
    for (size, dtype, mode), links in cases.groupby(["size", "dtype", "mode"], sort=False):
        if links["busbw"].count() > 1:
            title = f"Rank to rank: bus bandwidth in GB/s, {format_case_size(size)} {dtype}, {mode}"
            yield _make_link_table(number, title, links, data.nodes)
            number += 1


def pivot_links(links: "pd.DataFrame", topology: Topology | None) -> "pd.DataFrame":
    """Return the bus bandwidth in B/s with a row for each sender and a column for each receiver.

    ``links`` is a frame of the measured pairs (``p2p.matrix``) of one size, type and mode. Ranks
    are ordered by node if the topology is known. Pairs that were not measured are NaN.
    """
    bandwidths = links.pivot_table(
        index="param_source", columns="param_target", values="busbw", aggfunc="last"
    )
    ranks = sorted({*bandwidths.index, *bandwidths.columns})
    if topology is not None:
        ranks = list(topology.order_by_node(ranks))
    return bandwidths.reindex(index=ranks, columns=ranks)


def _make_link_table(
    number: int, title: str, links: "pd.DataFrame", topology: Topology | None
) -> Table:
    """Return the table of bus bandwidth from sender (row) to receiver (column), with its heat map.

    ``links`` is a frame of the measured pairs (``p2p.matrix``) of one size, type and mode.
    ``topology`` has the hosts of the ranks, None for a single host. ``number`` is a number from 1
    that makes the id of the table unique.
    """
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
    """Return a sentence with the median bus bandwidth of pairs of ranks at each network distance.

    The list has one sentence. ``links`` is a frame of the measured pairs (``p2p.matrix``) of one
    size, type and mode. ``topology`` has the hosts of the ranks.
    """
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
