"""The communication operations of a run as a frame."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from parbench.reports.labels import label_operation
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

LINKS = "p2p.matrix"
SETTING = ["operation", "mode", "dtype"]
"""The columns that identify an operation over sizes."""
_METRICS = ("time", "algbw", "busbw", "time_p99", "time_q10")


def select_operations(data: RunData) -> "pd.DataFrame":
    """Return the measured communication of a run, without the links of ``p2p.matrix``.

    The columns are those of ``RunData.cases``, and ``operation`` (``broadcast root=1``), ``mode``,
    ``dtype`` and ``size`` in bytes. They are empty or unknown if a case lacks the parameter.
    """
    is_link = data.cases["name"] == LINKS
    return _add_setting(data.cases[data.cases["is_communication"] & ~is_link])


def select_links(data: RunData) -> "pd.DataFrame":
    """Return the measured links between single ranks, with the columns of operations."""
    return _add_setting(data.cases[data.cases["name"] == LINKS])


def _add_setting(cases: "pd.DataFrame") -> "pd.DataFrame":
    cases = cases[cases["seconds"].notna()]
    missing = [name for name in _METRICS if name not in cases]
    cases = cases.reindex(columns=[*cases.columns, *missing])
    results = cases["result"]
    return cases.assign(
        operation=[label_operation(result.case) for result in results],
        mode=[str(result.case.params.get("mode", "")) for result in results],
        dtype=[str(result.case.params.get("dtype", "")) for result in results],
        size=cases.get("param_size_bytes"),
    )


def group_cases(cases: "pd.DataFrame", *varied_params: str) -> "Iterator[tuple[Any, pd.DataFrame]]":
    """Yield groups of cases that differ at most in the values of these parameters."""
    columns = ["name", "world_size", "nodes", "backend", "device"]
    for column in cases:
        param = str(column).removeprefix("param_")
        if param != column and param not in varied_params:
            columns.append(str(column))
    yield from cases.groupby(columns, sort=False, dropna=False)
