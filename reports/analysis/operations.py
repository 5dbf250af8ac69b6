"""The communication operations of a run as a frame."""

from typing import TYPE_CHECKING

from parbench.reports.analysis.labels import label_operation
from parbench.reports.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

OPERATION_KEYS = ["operation", "mode", "dtype"]
"""The columns that identify an operation over sizes."""
CASE_KEYS = [*OPERATION_KEYS, "size"]
GROUP_PARAMS = ("group", "group_index", "concurrent")
"""The parameters that choose the ranks of an operation."""
LINKS = "p2p.matrix"
# Tables and figures read these metrics even if no case has them.
_METRICS = ("busbw", "algbw", "time_p99", "time_q10")


def select_operations(data: RunData) -> "pd.DataFrame":
    """Return the measured communication of a run, without the links of ``p2p.matrix``.

    The columns are the ones of ``RunData.cases``, and ``operation`` (``broadcast root=1``),
    ``mode``, ``dtype`` and ``size`` in bytes. The latter are empty or unknown if a case lacks the
    parameter.
    """
    cases = data.cases
    is_operation = cases["is_communication"] & (cases["name"] != LINKS) & cases["seconds"].notna()
    return add_operation_columns(cases[is_operation])


def add_operation_columns(cases: "pd.DataFrame", without: tuple[str, ...] = ()) -> "pd.DataFrame":
    """Add the columns of ``select_operations``. ``operation`` leaves out parameters ``without``."""
    missing = [name for name in _METRICS if name not in cases]
    cases = cases.reindex(columns=[*cases.columns, *missing])
    results = list(cases["result"])
    return cases.assign(
        operation=[label_operation(result.case, without) for result in results],
        mode=[str(result.case.params.get("mode", "")) for result in results],
        dtype=[str(result.case.params.get("dtype", "")) for result in results],
        size=cases.get("param_size_bytes"),
    )
