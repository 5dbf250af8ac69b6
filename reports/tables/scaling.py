"""Scaling of cases over numbers of nodes or ranks: rates and parallel efficiency."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from parbench.bench.results.formatting import GIGA, format_quantity
from parbench.bench.results.tables import Column, Row, Section, SortedText, Table, is_missing
from parbench.bench.text import pluralize
from parbench.reports.figures import quantities
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.lines import chart_scaling
from parbench.reports.labels import label_cases
from parbench.reports.run_set import RunSet

if TYPE_CHECKING:
    import pandas as pd

MAX_LINES = 12
_LAYOUT = ("ranks_per_node", "distribution", "environment")
_PERFECT = "A level line at 100 % is perfect scaling."
Unit = Literal["node", "rank"]


def make_node_scaling_section(run_set: RunSet) -> Section | None:
    """Return the cases that ran on several numbers of nodes with the same ranks per node."""
    cases = run_set.cases
    # An imported file may not state the number of nodes, which is recorded as 0.
    cases = cases[cases["nodes"] > 0]
    return _make_section("over-nodes", "Scaling over nodes", cases, "node")


def make_rank_scaling_section(run_set: RunSet) -> Section | None:
    """Return the cases that ran on several numbers of ranks, regardless of their nodes."""
    cases = run_set.cases.assign(ranks_per_node=0.0, distribution="")
    return _make_section("scaling", "Scaling over ranks", cases, "rank")


def _make_section(section_id: str, title: str, cases: "pd.DataFrame", unit: Unit) -> Section | None:
    cases = cases[cases["is_whole_world"] & cases["is_current"]]
    count = "nodes" if unit == "node" else "world_size"
    series = _join_layouts(cases)
    pivot = series.pivot_table(
        index=["case_id", *_LAYOUT],
        columns=count,
        values=["scaling_value", "rate"],
        aggfunc="median",
        sort=False,
    )
    if pivot.empty:
        return None
    pivot = pivot[pivot["scaling_value"].count(axis="columns") > 1]
    rows = _make_rows(pivot, cases)
    if not rows:
        return None
    notes = []
    if len(rows) > MAX_LINES:
        notes.append(f"The first {MAX_LINES} of {len(rows)} series are drawn.")
    max_repeats = series.groupby(["case_id", *_LAYOUT, count]).size().max()
    if max_repeats > 1:
        notes.append(f"Values are medians of up to {max_repeats} runs.")
    counts = sorted({number for row in rows for number in row["values"]})
    table = Table(
        id=f"{section_id}-table",
        title=title,
        caption="bus bandwidth or step time, and parallel efficiency",
        columns=_make_columns(counts, unit),
        rows=rows,
        notes=notes,
        figures=lambda: _draw(section_id.replace("-", "_"), rows, unit),
    )
    return Section(
        id=section_id, title=title, tables=[table], terms=["parallel efficiency", "busbw"]
    )


def _join_layouts(cases: "pd.DataFrame") -> "pd.DataFrame":
    """Return the cases by series, which is a case in one layout, in the order of the cases.

    Cases that need no distribution, such as those on one node, are in the series of each.
    """
    keys = ["case_id", "ranks_per_node", "environment"]
    order = cases.groupby("case_id", sort=False).ngroup()
    ordered = cases.loc[order.sort_values(kind="stable").index]
    layouts = ordered[[*keys, "distribution"]].drop_duplicates()
    series = layouts.merge(ordered, on=keys, suffixes=("", "_of_case"))
    is_member = series["distribution_of_case"].isin([""])
    is_member |= series["distribution_of_case"] == series["distribution"]
    return series[is_member]


def _make_rows(pivot: "pd.DataFrame", cases: "pd.DataFrame") -> list[dict[str, Any]]:
    results = cases.drop_duplicates("case_id").set_index("case_id")["result"]
    labels = label_cases(list(results[pivot.index.get_level_values("case_id").unique()]))
    differing = [name for name in _LAYOUT if pivot.index.get_level_values(name).nunique() > 1]
    values = pivot["scaling_value"].to_dict("records")
    rates = pivot["rate"].to_dict("records")
    rows = []
    for index, series_values, series_rates in zip(pivot.index, values, rates, strict=True):
        case_id, *layout = index
        row: dict[str, Any] = dict(zip(_LAYOUT, layout, strict=True))
        parts = [
            f"{row[name]:g} per node" if name == "ranks_per_node" else row[name]
            for name in differing
        ]
        row["case"] = ", ".join([labels[case_id], *filter(None, parts)])
        row["is_communication"] = results[case_id].is_communication
        row["metric"] = "busbw" if row["is_communication"] else "step time"
        row["values"] = _drop_missing(series_values)
        row["efficiencies"] = _compute_efficiencies(
            _drop_missing(series_rates), is_work_constant=row["is_communication"]
        )
        measure = "B/s" if row["is_communication"] else "s"
        for number, value in row["values"].items():
            row[f"value_{number}"] = SortedText(format_quantity(value, measure), value)
        for number, value in list(row["efficiencies"].items())[1:]:
            row[f"efficiency_{number}"] = value
        rows.append(row)
    return rows


def _drop_missing(values: Mapping[Any, float]) -> dict[int, float]:
    return {int(number): value for number, value in sorted(values.items()) if not is_missing(value)}


def _compute_efficiencies(
    rates: Mapping[int, float], *, is_work_constant: bool
) -> dict[int, float]:
    """Return the parallel efficiency at each number of nodes or ranks, relative to the smallest.

    Ideally the rate of a step grows as their number, and bus bandwidth stays constant.
    """
    if not rates:
        return {}
    smallest = min(rates)
    efficiencies = {}
    for number, rate in rates.items():
        ideal = 1.0 if is_work_constant else number / smallest
        efficiencies[number] = rate / rates[smallest] / ideal
    return efficiencies


def _make_columns(counts: Sequence[int], unit: Unit) -> list[Column]:
    columns = [
        Column(key="case", title="case", help="what ran, with the layout where it differs"),
        Column(key="metric", title="metric", help="what is shown: bus bandwidth or step time"),
    ]
    if unit == "node":
        columns += [
            Column(
                key="ranks_per_node",
                title="ranks per node",
                kind="number",
                number_format="{:g}",
                help="number of ranks on each node",
            ),
            Column(
                key="distribution", title="distribution", help="how ranks lie on nodes, as found"
            ),
        ]
    for number in counts:
        title = pluralize(number, unit)
        columns.append(
            Column(
                key=f"value_{number}",
                title=title,
                kind="number",
                is_result=True,
                help=f"bus bandwidth or step time on {title}",
            )
        )
    for number in counts[1:]:
        title = pluralize(number, unit)
        columns.append(
            Column(
                key=f"efficiency_{number}",
                title=f"efficiency {title}",
                kind="percent",
                is_result=True,
                help=f"parallel efficiency on {title} relative to the fewest {unit}s of the row",
            )
        )
    return columns


def _draw(name: str, rows: Sequence[Row], unit: Unit) -> Iterator[Chart]:
    """Yield bandwidth, step time and efficiency over nodes, only efficiency over ranks."""
    bandwidths, times, efficiencies = {}, {}, {}
    for row in rows[:MAX_LINES]:
        efficiencies[row["case"]] = row["efficiencies"]
        if row["is_communication"]:
            bandwidths[row["case"]] = {
                number: value / GIGA for number, value in row["values"].items()
            }
        else:
            times[row["case"]] = row["values"]
    caption = "A line for each case and layout."
    charts = [
        (f"Bus bandwidth over {unit}s", caption, bandwidths, quantities.BANDWIDTH),
        (f"Step time over {unit}s", caption, times, quantities.TIME),
        (f"Parallel efficiency over {unit}s", _PERFECT, efficiencies, quantities.EFFICIENCY),
    ]
    if unit == "rank":
        charts = charts[2:]
    for index, (title, chart_caption, lines, quantity) in enumerate(charts, start=1):
        chart_name = number_name(name, index)
        yield from list_charts(
            chart_scaling(chart_name, title, chart_caption, lines, f"{unit}s", quantity)
        )
