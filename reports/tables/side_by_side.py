"""The times of the same cases in several runs or environments, one column each."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from parbench.bench.results.tables import Column, Row, Table
from parbench.reports.analysis.labels import label_cases
from parbench.reports.frames import list_rows
from parbench.reports.run_set import RunSet
from parbench.reports.stats import estimate_unpaired_effect

MAX_SIDES = 8
"""The largest number of runs that the table shows."""
_CASE = Column("case", help="what ran")
_NODES = Column("nodes", kind="count", help="number of nodes")


def make_side_by_side_table(run_set: RunSet) -> Table:
    """Return the table of times of the cases that at least two runs measured.

    Only the first eight runs are shown. Cases match if they are equal without the parameters in
    which the runs differ.
    """
    cases = run_set.cases
    cases = cases[cases["run"] <= MAX_SIDES].drop_duplicates(["match", "run"], keep="last")
    rows = []
    for _, matching in cases.groupby("match", sort=False):
        if len(matching) > 1:
            results = {f"run {row['run']}": [row] for row in list_rows(matching)}
            rows.append({"result": matching["result"].iloc[0], **compare_times(results)})
    notes = []
    if rows and len(run_set.runs) > MAX_SIDES:
        notes.append(
            f"The first {MAX_SIDES} of {len(run_set.runs)} runs are shown. "
            "Name fewer runs to see others: parbench report RUN..."
        )
    names = [f"run {number}" for number in run_set.runs if number <= MAX_SIDES]
    return _make_table("side-by-side", "Side by side", [_CASE], names, rows, notes)


def make_environment_table(run_set: RunSet) -> Table:
    """Return the table of times of the cases that ran in at least two environments of a sweep.

    An environment is a named set of variables. Nodes and ranks of a row are equal.
    """
    cases = run_set.cases
    names = [name for name in cases["environment"].unique() if name]
    cases = cases[cases["environment"].isin(names) & cases["is_whole_world"] & cases["is_current"]]
    rows = []
    for _, repeats in cases.groupby("case_id", sort=False):
        for _, layout in repeats.groupby(["nodes", "ranks_per_node", "distribution"]):
            results: dict[str, list[Row]] = {}
            for row in list_rows(layout):
                results.setdefault(row["environment"], []).append(row)
            if len(results) > 1:
                first = {"result": layout["result"].iloc[0], "nodes": layout["nodes"].iloc[0]}
                rows.append({**first, **compare_times(results)})
    return _make_table("environments", "Environments side by side", [_CASE, _NODES], names, rows)


def _make_table(
    table_id: str,
    title: str,
    columns: Sequence[Column],
    names: Sequence[str],
    rows: Sequence[dict[str, Any]],
    notes: Sequence[str] = (),
) -> Table:
    """Return a table with the times of several runs or environments side by side.

    It has the ``columns``, then the time of each of ``names``, and for each name but the first the
    ratio of its time to that of the first.

    ``names`` are the runs or environments. ``rows`` have the cells of ``compare_times`` and the
    ``result`` that names the case. ``columns`` come first.
    """
    labels = label_cases([row["result"] for row in rows])
    for row in rows:
        row["case"] = labels[row["result"].case.id]
    times = [
        Column(
            name,
            kind="s",
            has_interval=True,
            help=f"time in {name} with its 95 % interval",
        )
        for name in names
    ]
    ratios = [
        Column(
            f"{name} ratio",
            f"{name} / first",
            kind="number",
            has_interval=True,
            is_result=True,
            help=f"time in {name} relative to the first of the row, with its 95 % interval",
        )
        for name in names[1:]
    ]
    return Table(
        f"{table_id}-table",
        title,
        caption="times, and their ratios to the first that measured the case",
        columns=[*columns, *times, *ratios],
        rows=rows,
        terms=["ratio", "interval"],
        notes=notes,
        where="page",
    )


def compare_times(results: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return the cells of one case: seconds in each run or environment, and ratios to the first.

    ``results`` are rows of the case (``RunSet.cases``), keyed by the name of the run or
    environment. The keys of the result are ``NAME``, ``NAME_low`` and ``NAME_high`` for the seconds
    and their interval, and ``NAME ratio`` with its bounds. The seconds are the median over the rows
    of the name. A ratio compares the repetitions of all these rows. A run with one repetition has
    an interval only if all runs have one repetition.
    """
    cells: dict[str, Any] = {}
    rows = [row for side in results.values() for row in side]
    cells["is_within_repetition"] = all(row["is_within_repetition"] for row in rows)
    base: dict[int, float] = {}
    for name, side in results.items():
        cells[name] = median(row["seconds"] for row in side)
        is_comparable = cells["is_within_repetition"] or not side[0]["is_within_repetition"]
        if len(side) == 1 and is_comparable:
            cells[f"{name}_low"] = side[0]["seconds_low"]
            cells[f"{name}_high"] = side[0]["seconds_high"]
        seconds = [value for row in side for value in _list_repetitions(row)]
        repetitions = dict(enumerate(seconds))
        if not base:
            base = repetitions
            continue
        effect = estimate_unpaired_effect(base, repetitions)
        if effect:
            cells |= effect.make_cells(f"{name} ratio")
    return cells


def _list_repetitions(row: Row) -> list[float]:
    """Return the duration of a row's case in each repetition in seconds, in repetition order."""
    result = row["result"]
    return list(result.by_repetition(result.headline).values())
