"""The tables of groups of ranks: bandwidth by scope of the groups, and of each group."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from parbench.bench.results.formatting import GIGA
from parbench.bench.results.tables import Column, Section, Table, keep_known_columns, metric_column
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.operations import (
    CASE_KEYS,
    GROUP_PARAMS,
    OPERATION_KEYS,
    add_operation_columns,
    select_operations,
)
from parbench.reports.analysis.topology import Topology
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import CASE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

WITHIN_NODE = "within a node"
INTER_NODE = "inter-node"
MULTI_NODE = "multi-node"
"""All ranks of a group on one node, each on another node, or several on some of the nodes."""
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


def make_group_section(data: RunData) -> Section | None:
    """Return the bandwidth of operations that several groups of ranks ran."""
    cases = add_operation_columns(select_operations(data), without=GROUP_PARAMS)
    cases = cases[cases["busbw"] > 0]
    tables = []
    if data.nodes:
        tables.append(_make_scope_table(cases, data.nodes))
    if "param_group" in cases:
        tables.append(_make_group_table(cases[cases["param_group"].notna()]))
    tables = [table for table in tables if table.rows]
    if not tables:
        return None
    return Section("groups", "Groups", tables=tables, terms=["busbw"])


def _find_scope(result: CaseResult, topology: Topology) -> str:
    """Return the scope of the group of ranks that ran a case."""
    # A group of all ranks does not list them.
    ranks = result.details.get("group_ranks") or range(len(topology.hosts))
    hosts = {topology.get_host(rank) for rank in ranks}
    if len(hosts) == 1:
        return WITHIN_NODE
    return INTER_NODE if len(hosts) == len(ranks) else MULTI_NODE


def _get_suffix(result: CaseResult) -> str:
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
        figures=partial(_chart_scopes, cases),
    )


def _make_group_table(cases: "pd.DataFrame") -> Table:
    """Return the bandwidth of each group, and the slowest of those that ran on their own."""
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
    )


def _pivot_bandwidth(cases: "pd.DataFrame", column: str) -> "pd.DataFrame":
    """Return the median bandwidth by setting and ``column``, of settings with two or more."""
    bandwidths = cases.pivot_table(
        index=CASE_KEYS, columns=column, values="busbw", aggfunc="median", sort=False
    )
    return bandwidths[bandwidths.count(axis="columns") > 1]


def _make_bandwidth_column(name: str) -> Column:
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
