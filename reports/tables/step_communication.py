"""The communication of steps: its volume by mesh axis, and its time predicted from fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from parbench.bench.results.details import (
    BytesFormulaDetails,
    CommunicationDetails,
    CountedCall,
    read_details,
)
from parbench.bench.results.tables import Column, Table, keep_known_columns, metric_column
from parbench.bench.text import format_size
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.fits import OperationCurve, get_size
from parbench.reports.tables.step_parts import get_axis_values
from parbench.reports.tables.step_rows import STEP_COLUMN, StepRow, read_first_details

_PLAIN_PARAMS = {"size_bytes", "dtype", "mode", "group", "group_index", "concurrent"}
"""A curve with other parameters, such as a background load, does not predict a call of a step."""
_METRICS = {
    "calls": "calls",
    "bytes_expected": "analytical bytes",
    "bytes_sent": "counted bytes",
    "bytes_ratio": "bytes ratio",
    "exposed_comm": "exposed",
}
"""The metrics of an axis, with the titles of their columns."""
_COLUMNS = (
    STEP_COLUMN,
    Column(key="axis", title="axis", help="axis of the mesh, or process group"),
    Column(key="ranks", title="ranks", kind="count", help="ranks on the axis"),
    Column(key="formula", title="formula", help="analytical bytes that rank 0 sends"),
    *(
        metric_column(f"{metric}.the axis", key=metric, title=title)
        for metric, title in _METRICS.items()
    ),
)


def make_volume_table(steps: Sequence[StepRow]) -> Table:
    """Return the communication volume of steps, with a row for each axis that has counted bytes."""
    rows = []
    for step in steps:
        result = step["result"]
        details = read_first_details(result, BytesFormulaDetails)
        formulas = details.bytes_formula if isinstance(details, BytesFormulaDetails) else {}
        for axis in get_axis_values(result, "bytes_sent"):
            row = {name: result.value(f"{name}.{axis}") for name in _METRICS}
            ranks = step["axes"].get(axis, {}).get("ranks")
            identity = {"label": step["label"], "axis": axis, "ranks": ranks}
            rows.append({**identity, **row, "formula": formulas.get(axis)})
    return Table(
        id="communication-volume",
        title="Communication volume",
        caption="bytes that a rank sends in a step on each axis, analytical and counted",
        columns=keep_known_columns(_COLUMNS, rows),
        rows=rows,
    )


@dataclass(frozen=True, kw_only=True)
class PredictedCommunication:
    """The time of a step's calls one after another, None if an operation has no fit."""

    seconds: float | None
    notes: tuple[str, ...]


def predict_communication(
    step: CaseResult, curves: Sequence[OperationCurve]
) -> PredictedCommunication | None:
    """Predict the communication of a step from this run's fits, None without fits or calls.

    The ranks on an axis are not known by name, and a step waits for its slowest group. Of the
    fits of several groups, the slowest counts.
    """
    calls = get_calls(step)
    if calls is None or not curves:
        return None
    seconds = 0.0
    missing = []
    extrapolated = []
    for call in calls:
        candidates = _select_curves(call, step, curves)
        if not candidates:
            missing.append(call.description)
            continue
        slowest = max(candidates, key=lambda curve: curve.fit.predict(call.num_bytes))
        seconds += call.count * slowest.fit.predict(call.num_bytes)
        low = get_size(slowest.rows[0])
        high = get_size(slowest.rows[-1])
        if not low <= call.num_bytes <= high:
            measured = f"{format_size(low)} to {format_size(high)} were measured"
            size = format_size(call.num_bytes)
            extrapolated.append(f"{call.description}, {size} per call ({measured})")
    notes = [f"no blocking float32 fit predicts {call}" for call in dict.fromkeys(missing)]
    notes += [
        f"predicted communication is extrapolated for {call}"
        for call in dict.fromkeys(extrapolated)
    ]
    return PredictedCommunication(
        seconds=None if missing else seconds,
        notes=tuple(notes),
    )


def get_calls(step: CaseResult) -> tuple[CountedCall, ...] | None:
    """Return the calls of one step, None if they are not recorded or repetitions differ."""
    details = [read_details(record, CommunicationDetails) for record in step.records]
    recorded = [detail for detail in details if detail is not None]
    calls = [detail.comm_calls for detail in recorded if isinstance(detail, CommunicationDetails)]
    is_readable = len(calls) == len(recorded)
    if not calls or not is_readable or any(other != calls[0] for other in calls):
        return None
    return calls[0]


def _select_curves(
    call: CountedCall, step: CaseResult, curves: Sequence[OperationCurve]
) -> list[OperationCurve]:
    """Return the curves of the call's operation on as many ranks.

    Curves of whole worlds are preferred, then those of all groups at once, as on a mesh axis.
    """
    candidates = [curve for curve in curves if _is_same_operation(curve.rows[0], call, step)]
    worlds = [curve for curve in candidates if "group" not in curve.rows[0].case.params]
    concurrent = [curve for curve in candidates if curve.rows[0].case.params.get("concurrent")]
    return worlds or concurrent or candidates


def _is_same_operation(result: CaseResult, call: CountedCall, step: CaseResult) -> bool:
    """Return True if a case measures the operation of a call under the conditions of a step."""
    params = result.case.params
    return (
        result.case.short_name == call.op
        and result.num_ranks == call.ranks
        and params.get("mode") == "blocking"
        and params.get("dtype") == "float32"
        and params.keys() <= _PLAIN_PARAMS
        and result.world.backend == step.world.backend
        and result.world.device == step.world.device
    )
