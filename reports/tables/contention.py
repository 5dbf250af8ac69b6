"""The tables of contention: operations under a load relative to the same ones without it."""

from typing import Any

from parbench.bench.results.tables import Column, Section, Table, metric_column
from parbench.reports.comparisons import Comparison, compare_with_loads
from parbench.reports.labels import label_operation
from parbench.reports.run_data import RunData
from parbench.reports.tables.communication import SETTING_COLUMNS

TITLE = "Contention and interference"


def make_contention_section(data: RunData) -> Section | None:
    """Return the slow-down by concurrent groups, and by loads in the background."""
    tables = []
    concurrent = compare_with_loads(data, "concurrent")
    if concurrent:
        title = "Contention: all groups at once relative to one group"
        tables.append(_make_table("contention", title, concurrent))
    loads = compare_with_loads(data, "background")
    if loads:
        title = "Interference from background load"
        tables.append(_make_table("interference", title, loads))
    if not tables:
        return None
    return Section(id="contention-section", title=TITLE, tables=tables, terms=["slow-down"])


def _make_table(table_id: str, title: str, comparisons: list[Comparison]) -> Table:
    rows: dict[str, dict[str, Any]] = {}
    columns: dict[str, Column] = {}
    for comparison in comparisons:
        case = comparison.base.case
        row = rows.setdefault(case.id, _make_base_row(comparison))
        load = comparison.get_value(comparison.result)
        key = f"load_{load}"
        columns[key] = _make_load_column(key, load, comparison.param)
        effect = comparison.effect
        row[key] = effect.ratio
        if effect.low is not None and effect.high is not None:
            row[f"{key}_low"] = 1 + effect.low
            row[f"{key}_high"] = 1 + effect.high
    num_significant = sum(comparison.is_significant for comparison in comparisons)
    return Table(
        id=table_id,
        title=title,
        caption="time under the load relative to the time without it, paired by repetition",
        columns=[
            *SETTING_COLUMNS,
            metric_column("time", has_interval=True),
            *columns.values(),
        ],
        rows=list(rows.values()),
        notes=[
            f"{num_significant} of {len(comparisons)} differences are significant (false discovery rate 5 %)."
        ],
    )


def _make_base_row(comparison: Comparison) -> dict[str, Any]:
    base = comparison.base
    params = base.case.params
    time = base.metrics[base.headline]
    return {
        "operation": label_operation(base.case),
        "mode": params.get("mode"),
        "dtype": params.get("dtype"),
        "size": base.size_bytes,
        "time": time.value,
        "time_low": time.low,
        "time_high": time.high,
        "is_within_repetition": time.is_within_repetition,
    }


def _make_load_column(key: str, load: str, param: str) -> Column:
    title = "all groups" if param == "concurrent" else load
    return Column(
        key=key,
        title=f"{title}: slow-down",
        kind="number",
        help="time under this load relative to the time without it, with its 95 % CI",
        has_interval=True,
        is_result=True,
    )
