"""Training steps: their rows, the parts of a step, and its communication.

The parts (compute, exposed communication, copies, idle) are measured in a profiled step, and add up
to its wall time.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from parbench.bench.results.details import (
    CommunicationDetails,
    CountedCall,
    Details,
    read_details,
)
from parbench.bench.results.tables import is_missing
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

T = TypeVar("T", bound=Details)
StepRow = dict[str, Any]
"""A row of ``RunData.cases`` that is a measured step, to which tables add values."""


def list_step_rows(data: RunData) -> list[StepRow]:
    """Return a new row for each measured training step, with None for unknown values.

    A row is a dict with the values of the case (``RunData.cases``) and these keys:

    - ``axes``: the size of each mesh axis as ``{"ranks": N}``, keyed by the axis name
    - ``time_p99``: the 99th percentile over iterations of the step time in seconds
    - ``repetitions``: the text ``4/5`` for four measured of five planned repetitions
    """
    case_ids = [step.case.id for step in data.steps]
    rows = []
    for case in list_rows(data.cases[data.cases["case_id"].isin(case_ids)]):
        row: StepRow = {name: None if is_missing(value) else value for name, value in case.items()}
        row["axes"] = row["result"].details.get("axes", {})
        row["time_p99"] = row.get(f"{row['headline']}_p99")
        row["repetitions"] = f"{row['repetitions']}/{row['planned']}"
        rows.append(row)
    return rows


def list_rows_with_details(data: RunData, kind: type[Details]) -> list[StepRow]:
    """Return rows of the training steps that recorded details of one type.

    ``kind`` is the type, such as ``PipelineDetails``. A row is a dict with the values of
    ``list_step_rows``, ``details`` (an object of the type), and ``repetition`` (the index, from 0,
    of the repetition that recorded the details).
    """
    rows = []
    for row in list_step_rows(data):
        repetition, details = find_details(row["result"], kind)
        if details is not None:
            rows.append({**row, "repetition": repetition, "details": details})
    return rows


def find_details(result: CaseResult, kind: type[T]) -> tuple[int, T | None]:
    """Return (repetition, details) of the first repetition that recorded details of type ``kind``.

    ``repetition`` is its index from 0. If no repetition recorded details of the type, the result is
    ``(0, None)``. Raises ``UserError`` if the details cannot be read.
    """
    for record in result.measured:
        details = read_details(record, kind)
        if details is not None:
            return record.repetition, details
    return 0, None


def get_axis_values(step: CaseResult, metric: str) -> dict[str, float | None]:
    """Return the values of a step's metrics named ``METRIC.AXIS``, keyed by mesh axis.

    ``metric`` is the first part of the name, such as ``bytes_sent``. Some metrics are split by
    phase (``phase_time``) or by component of memory (``memory``), which is then the key. Names with
    a third part, such as ``exposed_comm.cp.forward``, are left out. None is an unknown value.
    """
    values = {}
    for name, value in step.metrics.items():
        prefix, _, axis = name.partition(".")
        if prefix == metric and axis and "." not in axis:
            values[axis] = value.value
    return values


def sum_if_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of ``values``, None if a value is None or there are no values."""
    addends = list(values)
    known_addends = [value for value in addends if value is not None]
    is_known = bool(addends) and len(known_addends) == len(addends)
    return sum(known_addends) if is_known else None


def sum_memory(step: CaseResult) -> float | None:
    """Return the measured bytes of memory per rank in a step, summed over components.

    Each component (parameters, gradients, ...) is a maximum over ranks. None if a component is
    unknown or none was measured.
    """
    return sum_if_known(get_axis_values(step, "memory").values())


def get_parts(step: CaseResult) -> dict[str, float]:
    """Return the seconds of each part of the profiled step of a case, keyed by the part.

    The keys are ``compute``, ``exposed AXIS`` (communication on a mesh axis that neither compute
    nor copies hide), ``copy`` (exposed copies) and ``idle``. Unknown parts are left out.
    """
    exposed = get_axis_values(step, "exposed_comm")
    parts = {
        "compute": step.value("compute"),
        **{f"exposed {axis}": seconds for axis, seconds in exposed.items()},
        "copy": step.value("exposed_copy"),
        "idle": step.value("idle"),
    }
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def get_profiled_seconds(step: CaseResult) -> float | None:
    """Return the wall time of the profiled step in seconds, the sum of its parts.

    None if no step was profiled.
    """
    parts = get_parts(step)
    return sum(parts.values()) or None if "compute" in parts else None


def compute_profiled_share(step: CaseResult, seconds: float | None) -> float | None:
    """Return ``seconds`` as a fraction of the wall time of the profiled step of the case ``step``.

    None if ``seconds`` is None or no step was profiled.
    """
    profiled = get_profiled_seconds(step)
    return None if seconds is None or not profiled else seconds / profiled


def compute_exposed_share(step: CaseResult) -> float | None:
    """Return exposed communication on all axes as a fraction of the profiled step's wall time.

    None if the time of an axis is unknown, no axis communicates, or no step was profiled.
    """
    return compute_profiled_share(
        step, sum_if_known(get_axis_values(step, "exposed_comm").values())
    )


def get_calls(step: CaseResult) -> tuple[CountedCall, ...] | None:
    """Return the communication calls of rank 0 in one step, as counted at the process groups.

    An element stands for all calls of one mesh axis, operation and size. None if the calls were not
    recorded or differ between repetitions.
    """
    details = [read_details(record, CommunicationDetails) for record in step.records]
    calls = [detail.comm_calls for detail in details if detail is not None]
    return calls[0] if calls and all(other == calls[0] for other in calls) else None
