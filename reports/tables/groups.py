"""The tables of bus bandwidth by pair of ranks, by scope of process groups, and by group."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import GIGA, format_case_size, format_quantity
from parbench.bench.results.stats import median
from parbench.bench.results.tables import Column, Table, keep_known_columns, metric_column
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
from parbench.reports.analysis.topology import DISTANCES, Topology
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.figures.pairs import chart_links
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import CASE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

WITHIN_NODE = "within a node"
INTER_NODE = "inter-node"
MULTI_NODE = "multi-node"
"""The last of the three scopes of a process group.

Within a node, all ranks are on one node. An inter-node group has one rank on each of its nodes. A
multi-node group has several ranks on some of its nodes.
"""
CONCURRENT = " (concurrent)"
"""The suffix of columns for groups that all ran at the same time."""
MAX_FIGURES = 6
"""The largest number of figures of bandwidth by scope, one for each operation."""
_RATIO_COLUMNS = (
    Column(
        "ratio",
        "inter-node / within",
        kind="number",
        help="median bandwidth of groups between nodes relative to groups within a node",
        is_result=True,
    ),
    Column(
        f"ratio{CONCURRENT}",
        f"inter-node / within{CONCURRENT}",
        kind="number",
        help="the same while all groups run at once and share links",
        is_result=True,
    ),
)


def list_group_tables(data: RunData) -> Iterator[Table]:
    """Yield the tables of bus bandwidth of operations that several process groups ran.

    The first compares groups within a node and between nodes, if the run has several nodes. The
    second compares the groups.
    """
    cases = add_operation_columns(select_operations(data), without=GROUP_PARAMS)
    cases = cases[cases["busbw"] > 0]
    if data.nodes:
        yield _make_scope_table(cases, data.nodes)
    if "param_group" in cases:
        yield _make_group_table(cases[cases["param_group"].notna()])


def _find_scope(result: CaseResult, topology: Topology) -> str:
    """Return the scope of a case's group: ``within a node``, ``inter-node`` or ``multi-node``.

    Inter-node groups have one rank on each node, multi-node groups several ranks on some nodes.
    """
    # A group of all ranks does not list them.
    ranks = result.details.get("group_ranks") or range(len(topology.hosts))
    hosts = {topology.get_host(rank) for rank in ranks}
    if len(hosts) == 1:
        return WITHIN_NODE
    return INTER_NODE if len(hosts) == len(ranks) else MULTI_NODE


def _get_suffix(result: CaseResult) -> str:
    """Return `` (concurrent)`` if all groups ran at the same time, empty for a group on its own."""
    return CONCURRENT if result.case.params.get("concurrent") else ""


def _name_group(result: CaseResult) -> str:
    """Return the label of a case's process group: its parameter ``group``, then its ranks.

    An example is ``pairs 0,1``. If the ranks were not recorded, they are replaced by the group's
    index: ``pairs number 0``. `` (concurrent)`` follows if all groups ran at the same time.
    """
    params = result.case.params
    ranks = result.details.get("group_ranks") or []
    members = ",".join(map(str, ranks)) or f"number {params.get('group_index', 0)}"
    return f"{params['group']} {members}{_get_suffix(result)}"


def _make_scope_table(cases: "pd.DataFrame", topology: Topology) -> Table:
    """Return the table of bus bandwidth by group definition and scope, with ratios of scopes.

    A scope is ``within a node``, ``inter-node`` or ``multi-node``. A cell is the median over the
    groups of one definition, such as ``pairs``. The ratio is inter-node (otherwise multi-node)
    bandwidth over the bandwidth within a node. ``cases`` is a frame with a row per communication
    case.
    """
    scopes, definitions = [], []
    for result in cases["result"]:
        scope = f"{_find_scope(result, topology)}{_get_suffix(result)}"
        scopes.append(scope)
        definitions.append(f"{result.case.params.get('group', 'world')}, {scope}")
    cases = cases.assign(scope=scopes, definition=definitions)
    bandwidths = _pivot_bandwidth(cases, "definition")
    names = list(bandwidths.columns)
    for suffix in ("", CONCURRENT):
        columns = [f"{scope}{suffix}" for scope in (WITHIN_NODE, INTER_NODE, MULTI_NODE)]
        by_scope = _pivot_bandwidth(cases, "scope").reindex(bandwidths.index, columns=columns)
        within, inter, multi = (by_scope[column] for column in columns)
        bandwidths[f"ratio{suffix}"] = inter.fillna(multi) / within
    rows = list_rows(bandwidths.reset_index())
    table_columns = [*CASE_COLUMNS, *map(_make_bandwidth_column, names), *_RATIO_COLUMNS]
    return Table(
        "group-scopes",
        "Bandwidth by group scope, GB/s",
        caption="bus bandwidth within a node and between nodes, median of the groups",
        columns=keep_known_columns(table_columns, rows),
        rows=rows,
        terms=["busbw"],
        figures=partial(_chart_scopes, cases),
    )


def _make_group_table(cases: "pd.DataFrame") -> Table:
    """Return the table of bus bandwidth by process group, and of the slowest group on its own.

    ``cases`` is a frame with a row per communication case that ran on a group.
    """
    cases = cases.assign(group=[_name_group(result) for result in cases["result"]])
    bandwidths = _pivot_bandwidth(cases, "group")
    names = list(bandwidths.columns)
    isolated = bandwidths[[name for name in names if not name.endswith(CONCURRENT)]]
    bandwidths["slowest"] = isolated[isolated.count(axis="columns") > 1].idxmin(axis="columns")
    slowest = Column("slowest", help="slowest group that ran on its own")
    return Table(
        "operation-group",
        "Bandwidth by group, GB/s",
        caption="bus bandwidth of each group of ranks on its own and concurrently",
        columns=[*CASE_COLUMNS, *map(_make_bandwidth_column, names), slowest],
        rows=list_rows(bandwidths.reset_index()),
        terms=["busbw"],
    )


def _pivot_bandwidth(cases: "pd.DataFrame", column: str) -> "pd.DataFrame":
    """Return the median bus bandwidth in B/s of operations, by the values of a column.

    The result has a row for each operation, mode, type and size, and a column for each value of
    ``column`` in ``cases``. Rows with a single known value are left out.
    """
    bandwidths = cases.pivot_table(
        index=CASE_KEYS, columns=column, values="busbw", aggfunc="median", sort=False
    )
    return bandwidths[bandwidths.count(axis="columns") > 1]


def _make_bandwidth_column(name: str) -> Column:
    """Return the column of the bus bandwidth in a group or scope, with key and title ``name``."""
    return metric_column("busbw", key=name, title=name)


def _chart_scopes(cases: "pd.DataFrame") -> Iterator[Chart]:
    """Yield charts of bus bandwidth over size with a line for each group definition and scope.

    There is a chart for each of the first six operations. A line is the median over groups.
    """
    medians = cases.groupby([*CASE_KEYS, "definition"], sort=False)["busbw"].median().reset_index()
    operations = medians.groupby(OPERATION_KEYS, sort=False)
    for number, (setting, rows) in enumerate(operations, start=1):
        if number <= MAX_FIGURES and rows["definition"].nunique() > 1:
            chart = chart_lines(
                number_name("groups", number),
                f"Bandwidth by group scope: {', '.join(filter(None, map(str, setting)))}",
                "A line for each kind of group, the median of its groups.",
                make_lines(list_rows(rows), "definition", "size", "busbw", GIGA),
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
    """Return the table and the heat map of bus bandwidth from sender (row) to receiver (column).

    ``links`` is a frame of the measured pairs (``p2p.matrix``) of one size, type and mode.
    ``topology`` is None on a single host.
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
    """Return a sentence with the median bus bandwidth of pairs at each network distance.

    ``links`` is a frame of the measured pairs (``p2p.matrix``) of one table. The list has one
    sentence.
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
