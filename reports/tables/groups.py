"""The tables of groups of ranks: bandwidth by scope, and by group."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import (
    format_case_size,
    format_gigabytes,
    format_number,
)
from parbench.bench.results.tables import Column, Section, Table, keep_known_columns
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_groups
from parbench.reports.frames import list_rows
from parbench.reports.groups import (
    INTER_NODE,
    MULTI_NODE,
    SCOPES,
    WITHIN_NODE,
    BandwidthByScope,
    compute_bandwidth_by_scope,
    select_groups,
)
from parbench.reports.operations import SETTING
from parbench.reports.run_data import RunData
from parbench.reports.tables.communication import SETTING_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

MAX_FIGURES = 6


def make_group_section(data: RunData) -> Section | None:
    """Return the bandwidth of operations that several groups of ranks ran."""
    groups = select_groups(data)
    by_scope = compute_bandwidth_by_scope(groups)
    tables = [_make_scope_table(by_scope)] if by_scope else []
    group_table = _make_group_table(groups)
    if group_table is not None:
        tables.append(group_table)
    if not tables:
        return None
    return Section(id="groups", title="Groups", tables=tables, terms=["busbw"])


def _make_scope_table(by_scope: Sequence[BandwidthByScope]) -> Table:
    scopes = dict.fromkeys(scope for bandwidth in by_scope for scope in bandwidth.bandwidths)
    ordered = sorted(scopes, key=lambda scope: (scope.is_concurrent, SCOPES.index(scope.scope)))
    columns = [
        *SETTING_COLUMNS,
        *(
            Column(
                key=scope.label,
                title=scope.label,
                kind="B/s",
                help=f"bus bandwidth in 1e9 B/s, median of the groups: {scope.label}",
                is_result=True,
            )
            for scope in ordered
        ),
        Column(
            key="ratio",
            title="inter-node / within",
            kind="number",
            help="bus bandwidth between nodes relative to that within a node",
            is_result=True,
        ),
        Column(
            key="concurrent_ratio",
            title="inter-node / within, concurrent",
            kind="number",
            help="the same while all groups run at once and share links",
            is_result=True,
        ),
    ]
    rows = [_make_scope_row(bandwidth) for bandwidth in by_scope]
    return Table(
        id="group-scopes",
        title="Bandwidth by group scope, GB/s",
        caption="bus bandwidth within a node and between nodes, median of the groups",
        columns=keep_known_columns(columns, rows),
        rows=rows,
        notes=_describe_ratios(by_scope),
        figures=partial(_chart_scopes, by_scope),
    )


def _make_scope_row(bandwidth: BandwidthByScope) -> dict[str, Any]:
    row: dict[str, Any] = {
        "operation": bandwidth.operation,
        "mode": bandwidth.mode,
        "dtype": bandwidth.dtype,
        "size": bandwidth.size,
        "ratio": bandwidth.compute_ratio(),
        "concurrent_ratio": bandwidth.compute_ratio(is_concurrent=True),
    }
    return row | {scope.label: value for scope, value in bandwidth.bandwidths.items()}


def _get_setting(bandwidth: BandwidthByScope) -> tuple[str, str, str]:
    return bandwidth.operation, bandwidth.mode, bandwidth.dtype


def _group_by_setting(
    by_scope: Sequence[BandwidthByScope],
) -> Iterator[tuple[tuple[str, str, str], list[BandwidthByScope]]]:
    """Yield each operation, mode and type with its bandwidths in the order of size."""
    ordered = sorted(by_scope, key=lambda bandwidth: (_get_setting(bandwidth), bandwidth.size))
    for setting, group in groupby(ordered, key=_get_setting):
        yield setting, list(group)


def _describe_ratios(by_scope: Sequence[BandwidthByScope]) -> list[str]:
    """Return a sentence for the largest size of each operation with a known ratio."""
    sentences = []
    for (operation, *settings), sizes in _group_by_setting(by_scope):
        known = [bandwidth for bandwidth in sizes if bandwidth.compute_ratio() is not None]
        if known:
            largest = known[-1]
            remote = largest.find_scope(INTER_NODE, MULTI_NODE)
            local = largest.find_scope(WITHIN_NODE)
            name = ", ".join([operation, *filter(None, settings), format_case_size(largest.size)])
            sentences.append(
                f"{name}: {remote.label} groups reach {format_number(largest.compute_ratio())} of "
                f"the bandwidth of {local.label} groups "
                f"({format_gigabytes(largest.bandwidths[remote])} and "
                f"{format_gigabytes(largest.bandwidths[local])} GB/s)."
            )
    return sentences


def _chart_scopes(by_scope: Sequence[BandwidthByScope]) -> Iterator[Chart]:
    for index, (setting, sizes) in enumerate(_group_by_setting(by_scope), start=1):
        if index <= MAX_FIGURES:
            title = ", ".join(filter(None, setting))
            yield from list_charts(chart_groups(index, title, sizes))


def _make_group_table(groups: "pd.DataFrame") -> Table | None:
    """Return the bandwidth of operations that at least two groups ran, with a column per group."""
    cases = groups[groups["members"].notna()]
    if cases.empty:
        return None
    bandwidths = cases.pivot_table(
        index=[*SETTING, "size"], columns="members", values="busbw", aggfunc="last", sort=False
    )
    bandwidths = bandwidths[bandwidths.count(axis=1) > 1]
    if bandwidths.empty:
        return None
    names = list(bandwidths.columns)
    isolated = cases.loc[~cases["is_concurrent"], "members"].unique()
    isolated_bandwidths = bandwidths[isolated]
    comparable = isolated_bandwidths[isolated_bandwidths.count(axis=1) > 1]
    bandwidths["slowest"] = comparable.idxmin(axis=1)
    columns = [
        *SETTING_COLUMNS,
        *(
            Column(key=name, title=name, kind="B/s", help=f"bus bandwidth of {name} in 1e9 B/s")
            for name in names
        ),
        Column(
            key="slowest", title="slowest", help="group with the lowest bandwidth, run on its own"
        ),
    ]
    return Table(
        id="operation-group",
        title="Bandwidth by group, GB/s",
        caption="bus bandwidth of each group of ranks on its own and concurrently",
        columns=columns,
        rows=list_rows(bandwidths.reset_index()),
    )
