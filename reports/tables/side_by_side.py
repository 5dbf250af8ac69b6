"""The times of the same cases side by side: by setting, by load, by environment, and by run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parbench.bench.plan.cases import Case
from parbench.bench.results.tables import Column, Table
from parbench.bench.text import name_first, pluralize
from parbench.reports.analysis.case_results import CaseResult, group_results
from parbench.reports.analysis.labels import label_cases
from parbench.reports.run_data import RunData
from parbench.reports.run_set import RunSet
from parbench.reports.stats import estimate_paired_effect, estimate_unpaired_effect

if TYPE_CHECKING:
    import pandas as pd

MAX_RUNS = 8
"""The largest number of runs that the table of runs shows."""
MAX_UNMATCHED = 4
"""The largest number of cases of one run only that a note names."""
ALONE = "alone"
"""The name of the column of cases without concurrent groups or background load."""
UNSET = "unset"
"""The text of an environment variable that a setting leaves unset."""
LOADS = {
    "concurrent": "Contention: all groups at once relative to one group",
    "background": "Interference from background load",
}
"""The titles of tables, keyed by the parameter of a case that adds load.

The load is other process groups that run the operation at the same time (``concurrent``), or a
GEMM that every rank computes at the same time (``background``).
"""

ComparedCase = tuple[str, Mapping[str, CaseResult]]
"""The label of a case, and its results on several sides, keyed by the name of the side.

A side is a column of the comparison: a run (``run 1``), an environment, a setting or a load.
"""


def list_setting_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of times by setting of environment variables, such as ``NCCL_ALGO=Ring``.

    Yields nothing if no case ran with two settings.
    """
    variables = list(
        dict.fromkeys(name for result in data.measured for name in result.case.variables)
    )
    cases = _group_by_params(data, variables) if variables else []
    if cases:
        yield _make_table("settings", f"Time by {' '.join(variables)}", cases, is_paired=True)


def list_contention_tables(data: RunData) -> Iterator[Table]:
    """Yield a table of times with concurrent groups, then a table with background loads.

    The load of an operation is concurrent process groups in the first table, and background load in
    the second. Both compare the time of an operation under load with its time without load. A table
    is left out if no operation ran with and without the load.
    """
    for param, title in LOADS.items():
        cases = [case for case in _group_by_params(data, [param]) if ALONE in case[1]]
        if cases:
            yield _make_table(f"contention-{param}", title, cases, is_paired=True)


def make_run_table(run_set: RunSet) -> Table:
    """Return the table of times of the cases that at least two runs measured.

    A row is a case, and a column is a run. Only the first eight runs are shown. Cases of two runs
    are on one row if they are equal except for ``RunSet.varied_params``, the parameters that are
    constant within runs but differ between runs. A note names the cases that only one run measured.
    """
    cases = run_set.cases
    cases = cases[cases["run"] <= MAX_RUNS]
    cases = cases.assign(side=[f"run {number}" for number in cases["run"]])
    compared = _group_by_side(cases, ["match"])
    notes = []
    unmatched = cases[cases.groupby("match")["run"].transform("nunique") == 1]
    if len(unmatched) and len(run_set.runs) > 1:
        labels = name_first(list(unmatched["side"] + " " + unmatched["label"]), MAX_UNMATCHED)
        notes.append(f"{pluralize(len(unmatched), 'case')} in one run only: {', '.join(labels)}.")
    if len(run_set.runs) > MAX_RUNS:
        notes.append(f"The first {MAX_RUNS} of {len(run_set.runs)} runs are shown.")
    return _make_table("side-by-side-table", "Side by side", compared, is_paired=False, notes=notes)


def make_environment_table(run_set: RunSet) -> Table:
    """Return the table of times of the cases that ran in at least two environments of a sweep.

    An environment is the values of the environment variables that differ between points of the
    sweep. A column is an environment. The cases of a row have equal parameters, nodes, ranks per
    node and distribution of ranks.
    """
    cases = run_set.cases
    has_environment = cases["environment"] != ""
    cases = cases[has_environment & cases["is_whole_world"]]
    cases = cases.assign(side=cases["environment"])
    compared = _group_by_side(cases, ["case_id", "nodes", "ranks_per_node", "distribution"])
    return _make_table("environments-table", "Environments side by side", compared, is_paired=False)


def _group_by_params(data: RunData, params: Sequence[str]) -> list[ComparedCase]:
    """Return the cases of a run that ran with at least two values of the parameters ``params``.

    ``params`` are environment variables, or a parameter that adds load: concurrent groups
    (``concurrent``) or background load (``background``). A case with load has one parameter more
    than the case without load. An element has the label of a case without ``params``, and its
    results keyed by the values of ``params`` as text, the result with fewest parameters first.
    """
    compared: list[ComparedCase] = []
    for group in group_results(data.measured, *params):
        results = sorted(group, key=lambda result: len(result.case.params))
        parts = data.labels[results[0].case.id].split()
        label = " ".join(part for part in parts if part.partition("=")[0] not in params)
        sides = {_name_side(result.case, params): result for result in results}
        if len(sides) > 1:
            compared.append((label, sides))
    return compared


def _name_side(case: Case, params: Sequence[str]) -> str:
    """Return the values of ``params`` in a case as text, ``alone`` if it has none of them.

    An example is ``Ring``. The value True is replaced by the name of its parameter, and an empty
    value by ``unset``.
    """
    values = {name: case.params[name] for name in params if name in case.params}
    texts = [name if value is True else str(value or UNSET) for name, value in values.items()]
    return " ".join(texts) or ALONE


def _group_by_side(cases: "pd.DataFrame", keys: list[str]) -> list[ComparedCase]:
    """Return the cases of several runs that were measured on at least two sides (columns).

    ``cases`` is a frame with a row per case and run (``RunSet.cases``), whose column ``side`` has
    the name of the side, such as ``run 1``. Rows with equal values of the columns ``keys`` are the
    same case. If a case has several rows on a side, the last one counts.
    """
    groups = [
        dict(zip(group["side"], group["result"], strict=True))
        for _, group in cases.groupby(keys, sort=False)
    ]
    groups = [sides for sides in groups if len(sides) > 1]
    first_results = [next(iter(sides.values())) for sides in groups]
    labels = label_cases(first_results)
    compared: list[ComparedCase] = []
    for result, sides in zip(first_results, groups, strict=True):
        nodes = f", {pluralize(result.world.nodes, 'node')}" if result.world.nodes > 1 else ""
        compared.append((f"{labels[result.case.id]}{nodes}", sides))
    return compared


def _make_table(
    table_id: str,
    title: str,
    cases: Sequence[ComparedCase],
    *,
    is_paired: bool,
    notes: Sequence[str] = (),
) -> Table:
    """Return a table with a row per case: its time on each side, and ratios to the first side.

    A side is a column of the comparison, such as ``run 1``. ``is_paired`` is True if the sides are
    cases of one run, whose repetitions of equal index are compared with each other.
    """
    names = dict.fromkeys(name for _, sides in cases for name in sides)
    rows = [{"case": label, **compare_times(sides, is_paired=is_paired)} for label, sides in cases]
    times = [
        Column(name, kind="s", has_interval=True, help=f"time of {name} with its 95 % interval")
        for name in names
    ]
    ratios = [
        Column(
            f"{name} ratio",
            f"{name} / first",
            kind="number",
            has_interval=True,
            is_result=True,
            help=f"time of {name} relative to the first time of the row, with its 95 % interval",
        )
        for name in names
    ]
    return Table(
        table_id,
        title,
        caption="times, and their ratios to the first time of the row",
        columns=[Column("case", help="what ran"), *times, *ratios],
        rows=rows,
        terms=["ratio", "interval"],
        notes=notes,
    )


def compare_times(sides: Mapping[str, CaseResult], *, is_paired: bool) -> dict[str, Any]:
    """Return the cells of one case: seconds on each side, and ratios to the first side.

    ``sides`` has the results of the case, keyed by the name of the side. For each side, the keys
    are ``NAME``, ``NAME_low`` and ``NAME_high`` (seconds and their 95 % interval). For each side
    except the first, there are also ``NAME ratio`` and its bounds. A ratio compares the repetitions
    of equal index if ``is_paired``, otherwise all repetitions of both sides.
    """
    cells: dict[str, Any] = {}
    estimate_effect = estimate_paired_effect if is_paired else estimate_unpaired_effect
    base = next(iter(sides.values()))
    for name, result in sides.items():
        cells[name] = result.seconds
        metric = result.metrics[result.headline]
        cells |= {f"{name}_low": metric.low, f"{name}_high": metric.high}
        effect = estimate_effect(
            base.by_repetition(base.headline), result.by_repetition(base.headline)
        )
        if effect and result is not base:
            cells |= effect.make_cells(f"{name} ratio")
    return cells
