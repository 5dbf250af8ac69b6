"""The tables of links and groups: from rank to rank, by scope of the groups, and of each group."""

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
"""The three scopes of a group: one node, one rank per node, or several ranks on some nodes."""
CONCURRENT = " (concurrent)"
MAX_FIGURES = 6
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
    """Yield the bandwidth of operations that several groups of ranks ran."""
    cases = add_operation_columns(select_operations(data), without=GROUP_PARAMS)
    cases = cases[cases["busbw"] > 0]
    if data.nodes:
        yield _make_scope_table(cases, data.nodes)
    if "param_group" in cases:
        yield _make_group_table(cases[cases["param_group"].notna()])


def _find_scope(result: CaseResult, topology: Topology) -> str:
    """Return the scope of the ranks that ran a case."""
    # A group of all ranks does not list them.
    ranks = result.details.get("group_ranks") or range(len(topology.hosts))
    hosts = {topology.get_host(rank) for rank in ranks}
    if len(hosts) == 1:
        return WITHIN_NODE
    return INTER_NODE if len(hosts) == len(ranks) else MULTI_NODE


def _get_suffix(result: CaseResult) -> str:
    """Return the suffix of columns for groups that ran at once, empty for one group."""
    return CONCURRENT if result.case.params.get("concurrent") else ""


def _name_group(result: CaseResult) -> str:
    """Return a group with its ranks, such as ``pairs 0,1``."""
    params = result.case.params
    ranks = result.details.get("group_ranks") or []
    members = ",".join(map(str, ranks)) or f"number {params.get('group_index', 0)}"
    return f"{params['group']} {members}{_get_suffix(result)}"


def _make_scope_table(cases: "pd.DataFrame", topology: Topology) -> Table:
    """Return the median bandwidth of the groups of each definition, and the ratios of scopes."""
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
    """Return the table of bandwidth by group, and of the slowest group that ran by itself."""
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
    """Return the median bus bandwidth in B/s, with a row per setting and columns by ``column``.

    Settings with a single value are left out.
    """
    bandwidths = cases.pivot_table(
        index=CASE_KEYS, columns=column, values="busbw", aggfunc="median", sort=False
    )
    return bandwidths[bandwidths.count(axis="columns") > 1]


def _make_bandwidth_column(name: str) -> Column:
    """Return the column of the bus bandwidth of a group or scope."""
    return metric_column("busbw", key=name, title=name)


def _chart_scopes(cases: "pd.DataFrame") -> Iterator[Chart]:
    """Yield the bandwidth over size of the first operations, with a line for each scope."""
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
    """Yield the bandwidth from each rank to each other rank, for each size, type and mode."""
    cases = add_operation_columns(data.cases[data.cases["name"] == LINKS])
    number = 1
    for (size, dtype, mode), links in cases.groupby(["size", "dtype", "mode"], sort=False):
        if links["busbw"].count() > 1:
            title = f"Rank to rank: bus bandwidth in GB/s, {format_case_size(size)} {dtype}, {mode}"
            yield _make_link_table(number, title, links, data.nodes)
            number += 1


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


def _make_link_table(
    number: int, title: str, links: "pd.DataFrame", topology: Topology | None
) -> Table:
    """Return the table of bandwidth with a row per sender and a column per receiver."""
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
