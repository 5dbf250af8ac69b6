"""The tables of contention: the time of operations under a load relative to unloaded ones."""

from collections.abc import Iterator, Sequence
from typing import Any

from parbench.bench.results.tables import Column, Table
from parbench.reports.analysis.comparisons import Comparison, compare_with_loads
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.stats import LEVEL
from parbench.reports.tables.columns import TIME_COLUMN

TITLES = {
    "concurrent": "Contention: all groups at once relative to one group",
    "background": "Interference from background load",
}
"""The titles of tables, keyed by the parameter that adds the load."""


def list_contention_tables(data: RunData) -> Iterator[Table]:
    """Yield a table of slowdowns by concurrent groups, and one of slowdowns by background loads.

    A slowdown is the time of a case under load over its time without load. A table without
    comparisons is left out.
    """
    for param in TITLES:
        comparisons = compare_with_loads(data, param)
        if comparisons:
            yield _make_table(data, param, comparisons)


def _make_table(data: RunData, param: str, comparisons: Sequence[Comparison]) -> Table:
    """Return the table of slowdowns, with a row per case without load and a column per load.

    ``param`` is the parameter that adds the load. ``comparisons`` compare a case under a load with
    the case without it.
    """
    cases = {row["case_id"]: row for row in list_rows(data.cases)}
    rows: dict[str, dict[str, Any]] = {}
    loads = dict.fromkeys(comparison.get_value(comparison.result) for comparison in comparisons)
    for comparison in comparisons:
        case_id = comparison.base.case.id
        row = rows.setdefault(case_id, dict(cases[case_id]))
        row |= comparison.effect.make_cells(comparison.get_value(comparison.result))
    return Table(
        id=f"contention-{param}",
        title=TITLES[param],
        caption="time under load relative to the time without it, paired by repetition",
        columns=[
            Column("label", "case", help="case without the load"),
            TIME_COLUMN,
            *(_make_load_column(param, load) for load in loads),
        ],
        rows=list(rows.values()),
        terms=["slow-down"],
        notes=[_describe_significance(comparisons)],
    )


def _make_load_column(param: str, load: str) -> Column:
    """Return the column of slowdowns under one load.

    ``load`` is the value of ``param``, the parameter that adds the load.
    """
    name = load if param == "background" else "all groups"
    return Column(
        load,
        f"slow-down by {name}",
        kind="number",
        help="time under this load relative to the time without it, with its 95 % CI",
        has_interval=True,
        is_result=True,
    )


def _describe_significance(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence with the number of slowdowns that differ significantly from 1."""
    effects = [comparison.effect for comparison in comparisons]
    if all(effect.p_value is None for effect in effects):
        return f"Not significant (n={max(effect.num_repetitions for effect in effects)})."
    num_significant = sum(comparison.is_significant for comparison in comparisons)
    return (
        f"{num_significant} of {len(comparisons)} differences are significant "
        f"(false discovery rate {100 * LEVEL:.0f} %)."
    )
