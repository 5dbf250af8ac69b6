"""Training steps: their rows, the parts of a step, and its communication predicted from fits.

The parts are measured in a profiled step, to whose wall time they add up together with the
residual.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parbench.bench.results.details import (
    CommunicationDetails,
    CountedCall,
    Details,
    MeshDetails,
    read_details,
)
from parbench.bench.results.formatting import format_bytes
from parbench.bench.results.tables import SortedText, is_missing
from parbench.bench.text import format_size
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.fits import OperationCurve, get_size
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

T = TypeVar("T", bound=Details)
StepRow = dict[str, Any]
"""A row of ``RunData.cases`` that is a measured step, to which tables add values."""
_PLAIN_PARAMS = {"size_bytes", "dtype", "mode", "group", "group_index", "concurrent"}
"""A curve with other parameters, such as a background load, does not predict a call of a step."""
_MAX_DEVIATION = 0.1
"""The largest relative difference between profiled and uninstrumented steps that is usual."""


def list_step_rows(data: RunData) -> list[StepRow]:
    """Return a new row for each measured step, with the ``axes`` of its mesh.

    Unknown values are None.
    """
    case_ids = [step.case.id for step in data.steps]
    rows = []
    for case in list_rows(data.cases[data.cases["case_id"].isin(case_ids)]):
        row: StepRow = {name: None if is_missing(value) else value for name, value in case.items()}
        _, mesh = find_details(row["result"], MeshDetails)
        row["axes"] = mesh.axes if isinstance(mesh, MeshDetails) else {}
        row["time_p99"] = row.get(f"{row['headline']}_p99")
        row["time_q10"] = row.get(f"{row['headline']}_q10")
        repetitions = f"{row['repetitions']}/{row['planned']}"
        row["repetitions"] = SortedText(repetitions, row["repetitions"])
        rows.append(row)
    return rows


def list_rows_with_details(data: RunData, kind: type[Details]) -> tuple[list[StepRow], list[str]]:
    """Return the steps with details of a kind, and sentences about unreadable details.

    The rows have the ``details`` and the ``repetition`` that recorded them.
    """
    rows = []
    problems = []
    for row in list_step_rows(data):
        row["repetition"], details = find_details(row["result"], kind)
        if isinstance(details, str):
            problems.append(details)
        else:
            rows.append({**row, "details": details})
    return rows, [problem for problem in problems if problem]


def find_details(result: CaseResult, kind: type[T]) -> tuple[int, T | str]:
    """Return the first repetition with details of a kind, and the details.

    A sentence replaces details that cannot be read. It is empty if no repetition has details.
    """
    for record in result.measured:
        details = read_details(record, kind)
        if details is not None:
            return record.repetition, details
    return 0, ""


def get_axis_values(step: CaseResult, metric: str) -> dict[str, float | None]:
    """Return the values of a metric of a step, such as ``bytes_sent``, keyed by mesh axis.

    Parts of an axis such as ``cp.forward`` are left out.
    """
    values = {}
    for name, value in step.metrics.items():
        prefix, _, axis = name.partition(".")
        if prefix == metric and axis and "." not in axis:
            values[axis] = value.value
    return values


def sum_if_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of values, None if one of them is unknown or there are none."""
    addends = list(values)
    known_addends = [value for value in addends if value is not None]
    is_known = bool(addends) and len(known_addends) == len(addends)
    return sum(known_addends) if is_known else None


def find_worst_ratio(ratios: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return the axis whose ratio differs most from 1, with its ratio. None if all are unknown."""
    known_ratios = [(axis, ratio) for axis, ratio in ratios.items() if ratio is not None]
    return max(known_ratios, key=lambda pair: abs(pair[1] - 1), default=None)


def sum_exposed_communication(step: CaseResult) -> float | None:
    """Return the seconds of exposed communication on all axes, None if one is unknown."""
    return sum_if_known(get_axis_values(step, "exposed_comm").values())


def sum_memory(step: CaseResult) -> float | None:
    """Return the measured bytes of all memory components, maximum over ranks, None if unknown."""
    return sum_if_known(get_axis_values(step, "memory").values())


def get_parts(step: CaseResult) -> dict[str, float]:
    """Return the seconds of each known part of the profiled step, keyed by part."""
    exposed = get_axis_values(step, "exposed_comm")
    parts = {
        "compute": step.value("compute"),
        **{f"exposed {axis}": seconds for axis, seconds in exposed.items()},
        "copy": step.value("exposed_copy"),
        "idle": step.value("idle"),
    }
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def get_profiled_seconds(step: CaseResult) -> float | None:
    """Return the wall time of the profiled step in seconds, None if no step was profiled."""
    parts = get_parts(step)
    if "compute" not in parts:
        return None
    return sum(parts.values()) + (step.value("residual") or 0.0) or None


def find_deviating_profile(step: CaseResult) -> float | None:
    """Return the seconds of the profiled step if they deviate clearly from the step time.

    The result is None if they differ by at most the share ``_MAX_DEVIATION``, or if either time is
    unknown.
    """
    profiled = get_profiled_seconds(step)
    if not profiled or not step.seconds:
        return None
    return profiled if abs(profiled / step.seconds - 1) > _MAX_DEVIATION else None


def compute_profiled_share(step: CaseResult, seconds: float | None) -> float | None:
    """Return ``seconds`` over the wall time of the profiled step, None if either is unknown."""
    profiled = get_profiled_seconds(step)
    return None if seconds is None or not profiled else seconds / profiled


def compute_exposed_share(step: CaseResult) -> float | None:
    """Return the share of the profiled step with exposed communication, None if unknown."""
    return compute_profiled_share(step, sum_exposed_communication(step))


@dataclass(frozen=True, kw_only=True)
class PredictedCommunication:
    """The time of a step's calls one after another, None if an operation has no fit."""

    seconds: float | None
    notes: Sequence[str]


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
            size = format_bytes(call.num_bytes)
            extrapolated.append(f"{call.description}, {size} per call ({measured})")
    notes = []
    if missing:
        notes.append(f"no blocking float32 fit predicts {'; '.join(dict.fromkeys(missing))}")
    if extrapolated:
        calls_text = "; ".join(dict.fromkeys(extrapolated))
        notes.append(f"predicted communication is extrapolated for {calls_text}")
    return PredictedCommunication(seconds=None if missing else seconds, notes=notes)


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
    """Return the curves of the call's operation on the same number of ranks.

    Curves of whole worlds are preferred, then curves of all groups at once, as on a mesh axis.
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
