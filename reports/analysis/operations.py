"""The communication cases of a run as a pandas frame."""

from typing import TYPE_CHECKING

from parbench.reports.analysis.labels import label_operation
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

OPERATION_KEYS = ["operation", "mode", "dtype"]
"""The columns whose values identify one curve of time or bandwidth over sizes."""
CASE_KEYS = [*OPERATION_KEYS, "size"]
"""The columns that together identify one communication case."""
GROUP_PARAMS = ("group", "group_index", "concurrent")
"""The parameters that choose the ranks that take part in an operation."""
LINKS = "p2p.matrix"
"""The name of the benchmark of all pairs of ranks, which has tables and figures of its own."""
# Tables and figures read these metrics even if no case has them.
_METRICS = ("busbw", "algbw", "time_p99")


def select_operations(data: RunData) -> "pd.DataFrame":
    """Return a frame of the communication cases with a known time, without pairs of ``p2p.matrix``.

    The columns are the ones of ``RunData.cases``, and ``operation`` (``broadcast root=1``),
    ``mode``, ``dtype`` and ``size`` in bytes. If a case lacks the parameter, ``mode`` and ``dtype``
    are empty and ``size`` is unknown.
    """
    cases = data.cases
    is_operation = cases["is_communication"] & (cases["name"] != LINKS) & cases["seconds"].notna()
    return add_operation_columns(cases[is_operation])


def add_operation_columns(cases: "pd.DataFrame", without: tuple[str, ...] = ()) -> "pd.DataFrame":
    """Return a frame of cases with the added columns ``operation``, ``mode``, ``dtype``, ``size``.

    ``operation`` is the name with its parameters, such as ``broadcast root=1``, but not the
    parameters in ``without``. ``size`` is in bytes. If no case has the metrics ``busbw``, ``algbw``
    or ``time_p99``, their columns are added with unknown values.
    """
    missing = [name for name in _METRICS if name not in cases]
    cases = cases.reindex(columns=[*cases.columns, *missing])
    results = list(cases["result"])
    return cases.assign(
        operation=[label_operation(result.case, without) for result in results],
        mode=[str(result.case.params.get("mode", "")) for result in results],
        dtype=[str(result.case.params.get("dtype", "")) for result in results],
        size=cases.get("param_size_bytes"),
    )
