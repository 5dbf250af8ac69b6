"""Scaling of cases over numbers of nodes or ranks, with times, bandwidths and efficiency."""

from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import GIGA, format_quantity
from parbench.bench.results.tables import Column, Row, SortedText, Table
from parbench.bench.text import pluralize
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.frames import list_rows
from parbench.reports.run_set import RunSet

if TYPE_CHECKING:
    import pandas as pd

MAX_LINES = 12
"""The largest number of series that a scaling chart draws."""
_LAYOUT = ["ranks_per_node", "distribution", "environment"]
"""The columns that are equal in a series: the points of one case over nodes or ranks."""
_IDEAL = (1.0, "ideal")
"""The position and the label of the line of perfect scaling in the chart of efficiency."""


def list_scaling_tables(run_set: RunSet) -> list[Table]:
    """Return the table of cases that ran on several numbers of nodes with equal ranks per node.

    If no case did, it is the table of cases that ran on several numbers of ranks with any ranks per
    node. The list has at most one table. Cases in which not all ranks took part are left out.
    """
    cases = run_set.cases
    cases = cases[cases["is_whole_world"]]
    by_rank = cases.assign(ranks_per_node=0.0, distribution="")
    for unit, counted in (("node", _repeat_for_distributions(cases)), ("rank", by_rank)):
        points = _make_points(counted, "nodes" if unit == "node" else "world_size")
        if not points.empty:
            return [_make_table(unit, points)]
    return []


def _repeat_for_distributions(cases: "pd.DataFrame") -> "pd.DataFrame":
    """Return the cases, with a copy of each single-node case for each distribution of ranks.

    Cases on a single node have no distribution. Their copies are the first points of the series of
    ``block`` and of ``cyclic``, if the same case ran with these distributions on several nodes. A
    case that ran with no distribution stays as it is. ``cases`` is a frame with a row per case and
    run (``RunSet.cases``).
    """
    import pandas as pd

    is_distributed = cases["distribution"] != ""
    names = cases.loc[is_distributed, ["case_id", "distribution"]].drop_duplicates()
    others = cases[~is_distributed].drop(columns="distribution")
    repeated = others.merge(names, on="case_id", how="left").fillna({"distribution": ""})
    return pd.concat([repeated, cases[is_distributed]])


def _make_points(cases: "pd.DataFrame", count: str) -> "pd.DataFrame":
    """Return a row for each case, layout and number of nodes or ranks, with its efficiency.

    A layout is the ranks per node, the distribution of ranks and the environment. ``count`` is the
    column with the number, ``nodes`` or ``world_size``. Cases with a single number are left out.
    The columns of the result are:

    - ``case``: the label of the case with the layout
    - ``number``: the number of nodes or ranks
    - ``value``: bus bandwidth in B/s or step time in seconds, the median over repeated runs
    - ``is_communication``: True if ``value`` is a bandwidth
    - ``efficiency``: the parallel efficiency relative to the smallest number, as a fraction

    The efficiency of a step is its rate (tokens or steps per second) over the rate at the smallest
    number, divided by the ratio of the numbers. The efficiency of communication is its bus
    bandwidth over the bus bandwidth at the smallest number.
    """
    keys = ["case_id", "label", "is_communication", *_LAYOUT]
    cases = cases[cases[count] > 0]
    medians = cases.groupby([*keys, count], sort=False)[["scaling_value", "rate"]].median()
    points = medians.dropna().reset_index().sort_values(count, kind="stable")
    points = points.rename(columns={"scaling_value": "value", count: "number"})
    series = points.groupby(keys, sort=False)
    growth = points["number"] / series["number"].transform("first")
    speedup = points["rate"] / series["rate"].transform("first")
    points["efficiency"] = speedup / growth.where(~points["is_communication"], 1.0)
    points["case"] = [_label_series(row) for row in list_rows(points)]
    return points[series["number"].transform("size") > 1]


def _label_series(row: Row) -> str:
    """Return the label of a series, such as ``ddp, 2 per node, block``, from a row of the series.

    It has the label of the case, the ranks per node, the distribution and the environment.
    """
    per_node = f"{row['ranks_per_node']:g} per node" if row["ranks_per_node"] else ""
    parts = (row["label"], per_node, row["distribution"], row["environment"])
    return ", ".join(part for part in parts if part)


def _make_table(unit: str, points: "pd.DataFrame") -> Table:
    """Return the table of cases over a growing number of nodes or ranks.

    ``points`` is the frame of ``_make_points``. ``unit`` is ``node`` or ``rank``.
    """
    rows: list[dict[str, Any]] = []
    for case, series in points.groupby("case", sort=False):
        row: dict[str, Any] = {"case": case}
        for point in list_rows(series):
            text = format_quantity(point["value"], "B/s" if point["is_communication"] else "s")
            row[f"value_{point['number']}"] = SortedText(text, point["value"])
            row[f"efficiency_{point['number']}"] = point["efficiency"]
        rows.append(row)
    numbers = sorted(points["number"].unique())
    columns = [Column("case", help="what ran, with the layout of ranks and the environment")]
    for number in numbers:
        title = pluralize(int(number), unit)
        columns.append(
            Column(
                f"value_{number}",
                title,
                kind="number",
                is_result=True,
                help=f"bus bandwidth or step time on {title}, median of repeated runs",
            )
        )
    for number in numbers[1:]:
        title = pluralize(int(number), unit)
        columns.append(
            Column(
                f"efficiency_{number}",
                f"efficiency {title}",
                kind="percent",
                is_result=True,
                help=f"parallel efficiency on {title} relative to the fewest {unit}s of the row",
            )
        )
    return Table(
        "scaling-table",
        f"Scaling over {unit}s",
        caption="bus bandwidth or step time, and parallel efficiency",
        columns=columns,
        rows=rows,
        terms=["parallel efficiency", "busbw"],
        figures=lambda: _list_charts(unit, points),
    )


def _list_charts(unit: str, points: "pd.DataFrame") -> list[Chart]:
    """Return the charts of bus bandwidth, step time and efficiency, with a line for each series.

    At most twelve series are drawn. A chart without data is left out. ``points`` is the frame of
    ``_make_points``. ``unit`` is ``node`` or ``rank``.
    """
    drawn = points[points["case"].isin(points["case"].unique()[:MAX_LINES])]
    is_communication = drawn["is_communication"]
    axis = quantities.count_of(f"{unit}s")
    caption = f"A line for each case and layout, at most {MAX_LINES}."
    return list_charts(
        chart_lines(
            "scaling",
            f"Bus bandwidth over {unit}s",
            caption,
            make_lines(list_rows(drawn[is_communication]), "case", "number", "value", GIGA),
            axis,
            quantities.BANDWIDTH,
        ),
        chart_lines(
            "scaling_2",
            f"Step time over {unit}s",
            caption,
            make_lines(list_rows(drawn[~is_communication]), "case", "number", "value"),
            axis,
            quantities.TIME,
        ),
        chart_lines(
            "scaling_3",
            f"Parallel efficiency over {unit}s",
            "A horizontal line at 100 % is perfect scaling.",
            make_lines(list_rows(drawn), "case", "number", "efficiency"),
            axis,
            quantities.EFFICIENCY,
            _IDEAL,
        ),
    )
