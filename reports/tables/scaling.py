"""Scaling of cases over numbers of nodes or ranks, with times, bandwidths and efficiency."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from parbench.bench.results.formatting import GIGA, format_quantity
from parbench.bench.results.tables import Column, Row, SortedText, Table
from parbench.bench.text import pluralize
from parbench.reports.analysis.labels import label_cases
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.run_set import RunSet

if TYPE_CHECKING:
    import pandas as pd

MAX_LINES = 12
"""The largest number of series that a scaling chart draws."""
_SERIES = ("case_id", "ranks_per_node", "distribution", "environment")
"""The columns that are equal in a series. All but the first are its layout."""
_PERFECT = "A level line at 100 % is perfect scaling."
_IDEAL = (1.0, "ideal")
Unit = Literal["node", "rank"]
"""The machine part whose number grows along a scaling series."""


def list_node_scaling_tables(run_set: RunSet) -> list[Table]:
    """Return the table of cases that ran on several numbers of nodes with equal ranks per node.

    The list is empty if no case did.
    """
    cases = run_set.cases
    # An imported file may not state the number of nodes, which is recorded as 0.
    cases = cases[cases["nodes"] > 0]
    return _list_tables("over-nodes", "Scaling over nodes", cases, "node")


def list_rank_scaling_tables(run_set: RunSet) -> list[Table]:
    """Return the table of cases that ran on several numbers of ranks, however placed on nodes.

    The list is empty if no case did.
    """
    cases = run_set.cases.assign(ranks_per_node=0.0, distribution="")
    return _list_tables("scaling", "Scaling over ranks", cases, "rank")


def _list_tables(table_id: str, title: str, cases: "pd.DataFrame", unit: Unit) -> list[Table]:
    """Return the table of cases over a growing number of nodes or ranks, as a list.

    ``cases`` is a frame with a row per case and run (``RunSet.cases``). Cases on a part of the
    ranks, and runs that a later run repeats, are left out. The list is empty if no case ran on two
    numbers.
    """
    cases = cases[cases["is_whole_world"] & cases["is_current"]]
    count = "nodes" if unit == "node" else "world_size"
    series = _assign_series(cases).astype({count: int})
    repeats = series.groupby([*_SERIES, "is_communication", count], sort=False)
    medians = repeats[["scaling_value", "rate"]].median().dropna().reset_index()
    rows = [
        _make_row(points.sort_values(count).set_index(count))
        for _, points in medians.groupby([*_SERIES], sort=False)
        if len(points) > 1
    ]
    if not rows:
        return []
    _label_rows(rows, cases)
    notes = []
    if len(rows) > MAX_LINES:
        notes.append(f"The first {MAX_LINES} of {len(rows)} series are drawn.")
    max_repeats = repeats.size().max()
    if max_repeats > 1:
        notes.append(f"Values are medians of up to {max_repeats} runs.")
    counts = sorted({number for row in rows for number in row["values"]})
    table = Table(
        f"{table_id}-table",
        title,
        caption="bus bandwidth or step time, and parallel efficiency",
        columns=_make_columns(counts, unit),
        rows=rows,
        terms=["parallel efficiency", "busbw"],
        notes=notes,
        figures=lambda: _list_scaling_charts(table_id.replace("-", "_"), rows, unit),
    )
    return [table]


def _assign_series(cases: "pd.DataFrame") -> "pd.DataFrame":
    """Return the cases, repeated for each series to which they belong.

    A series is a case in one layout: ranks per node, distribution and environment. A case that
    needs no distribution, such as one on a single node, belongs to the series of each distribution.
    """
    keys = ["case_id", "ranks_per_node", "environment"]
    order = cases.groupby("case_id", sort=False).ngroup()
    ordered = cases.loc[order.sort_values(kind="stable").index]
    layouts = ordered[[*keys, "distribution"]].drop_duplicates()
    series = layouts.merge(ordered, on=keys, suffixes=("", "_of_case"))
    distribution = series["distribution_of_case"]
    return series[(distribution == series["distribution"]) | (distribution == "")]


def _make_row(points: "pd.DataFrame") -> dict[str, Any]:
    """Return the row of one case in one layout over growing numbers of nodes or ranks.

    ``points`` has the case's results, indexed by the number of nodes or ranks. In the row,
    ``values`` (B/s or seconds) and ``efficiencies`` (fractions) are keyed by this number. An
    efficiency is relative to the smallest number. It is 1 if the rate of a step is proportional to
    the number, or if bus bandwidth is constant.
    """
    row: dict[str, Any] = {name: points[name].iloc[0] for name in (*_SERIES, "is_communication")}
    efficiencies = points["rate"] / points["rate"].iloc[0]
    if not row["is_communication"]:
        efficiencies /= points.index / points.index[0]
    row["metric"] = "busbw" if row["is_communication"] else "step time"
    row["unit"] = "B/s" if row["is_communication"] else "s"
    row["values"] = points["scaling_value"].to_dict()
    row["efficiencies"] = efficiencies.to_dict()
    for number, value in row["values"].items():
        row[f"value_{number}"] = SortedText(format_quantity(value, row["unit"]), value)
    for number, efficiency in list(row["efficiencies"].items())[1:]:
        row[f"efficiency_{number}"] = efficiency
    return row


def _label_rows(rows: Sequence[dict[str, Any]], cases: "pd.DataFrame") -> None:
    """Set ``case`` in each row: the label of the case, then the parts of its layout that differ.

    ``cases`` is the frame with the results of the rows.
    """
    results = cases.drop_duplicates("case_id").set_index("case_id")["result"]
    labels = label_cases([results[row["case_id"]] for row in rows])
    for row in rows:
        parts = [labels[row["case_id"]]]
        for name in _SERIES[1:]:
            if row[name] and any(other_row[name] != row[name] for other_row in rows):
                is_number = name == "ranks_per_node"
                parts.append(f"{row[name]:g} per node" if is_number else row[name])
        row["case"] = ", ".join(parts)


def _make_columns(counts: Sequence[int], unit: Unit) -> list[Column]:
    """Return the columns of a scaling table, two for each number of nodes or ranks.

    ``counts`` are these numbers in ascending order. The columns have the value and the efficiency.
    The smallest number has no efficiency, because it is the reference.
    """
    columns = [
        Column("case", help="what ran, with the layout where it differs"),
        Column("metric", help="what is shown: bus bandwidth or step time"),
    ]
    if unit == "node":
        columns += [
            Column(
                "ranks_per_node",
                "ranks per node",
                kind="number",
                number_format="{:g}",
                help="number of ranks on each node",
            ),
            Column("distribution", help="how ranks lie on nodes, as found"),
        ]
    for number in counts:
        title = pluralize(number, unit)
        columns.append(
            Column(
                f"value_{number}",
                title,
                kind="number",
                is_result=True,
                help=f"bus bandwidth or step time on {title}",
            )
        )
    for number in counts[1:]:
        title = pluralize(number, unit)
        columns.append(
            Column(
                f"efficiency_{number}",
                f"efficiency {title}",
                kind="percent",
                is_result=True,
                help=f"parallel efficiency on {title} relative to the fewest {unit}s of the row",
            )
        )
    return columns


def _list_scaling_charts(name: str, rows: Sequence[Row], unit: Unit) -> list[Chart]:
    """Return the charts of a scaling table, with a line for each series.

    Over nodes these are bandwidth, step time and efficiency, over ranks only efficiency. ``name``
    is the first chart's name.
    """
    points = [
        {"case": row["case"], "unit": row["unit"], "number": number, "value": value}
        | {"efficiency": row["efficiencies"][number]}
        for row in rows[:MAX_LINES]
        for number, value in row["values"].items()
    ]
    bandwidths = [point for point in points if point["unit"] == "B/s"]
    times = [point for point in points if point["unit"] == "s"]
    caption = "A line for each case and layout."
    axis = quantities.count_of(f"{unit}s")
    title = f"Parallel efficiency over {unit}s"
    lines = make_lines(points, "case", "number", "efficiency")
    quantity = quantities.EFFICIENCY
    if unit == "rank":
        return list_charts(chart_lines(name, title, _PERFECT, lines, axis, quantity, _IDEAL))
    return list_charts(
        chart_lines(
            name,
            f"Bus bandwidth over {unit}s",
            caption,
            make_lines(bandwidths, "case", "number", "value", GIGA),
            axis,
            quantities.BANDWIDTH,
        ),
        chart_lines(
            number_name(name, 2),
            f"Step time over {unit}s",
            caption,
            make_lines(times, "case", "number", "value"),
            axis,
            quantities.TIME,
        ),
        chart_lines(number_name(name, 3), title, _PERFECT, lines, axis, quantity, _IDEAL),
    )
