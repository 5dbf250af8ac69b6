"""The rows of steps, with the columns that several tables of steps share."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from parbench.bench.results.details import Details, MeshDetails, read_details
from parbench.bench.results.metrics import METRICS
from parbench.bench.results.records import Record
from parbench.bench.results.tables import Column, SortedText, is_missing, metric_column
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

T = TypeVar("T", bound=Details)
StepRow = dict[str, Any]
"""A row of ``RunData.cases`` that is a measured step, to which tables add values."""
STEP_COLUMN = Column(
    key="label", title="step", help="training step with the parameters in which steps differ"
)
STEP_TIME_COLUMN = metric_column("step_time", key="seconds", has_interval=True)
ACTIVATIONS_COLUMN = metric_column("memory.activations", title="activations")


def list_step_rows(data: RunData) -> list[StepRow]:
    """Return a new row for each measured step, with the ``axes`` of its mesh.

    Unknown values are None.
    """
    case_ids = [step.case.id for step in data.steps]
    rows = []
    for case in list_rows(data.cases[data.cases["case_id"].isin(case_ids)]):
        row: StepRow = {name: None if is_missing(value) else value for name, value in case.items()}
        mesh = read_first_details(row["result"], MeshDetails)
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
        record = find_record(row["result"], kind)
        if record is not None:
            row["repetition"] = record.repetition
            row["details"] = read_details(record, kind)
            if isinstance(row["details"], str):
                problems.append(row["details"])
            else:
                rows.append(row)
    return rows, problems


def list_metric_columns(table: str, rows: Sequence[StepRow]) -> list[Column]:
    """Return the columns of the metrics that are declared for a table and that a step has."""
    names = dict.fromkeys(name for row in rows for name in row["result"].metrics)
    columns = []
    for metric in METRICS:
        if table in metric.tables:
            columns += [metric_column(name) for name in names if metric.specialize(name)]
    return columns


def find_record(result: CaseResult, kind: type[Details]) -> Record | None:
    """Return the record of the first repetition with details of a kind."""
    for record in result.measured:
        if record.details.get(kind.key) is not None:
            return record
    return None


def read_first_details(result: CaseResult, kind: type[T]) -> T | str | None:
    """Return the details of the first repetition that has them, or a sentence about a problem."""
    record = find_record(result, kind)
    return read_details(record, kind) if record else None


def make_group_key(row: StepRow, varied_params: Collection[str]) -> object:
    """Return a key that is equal for steps which differ at most in some parameters."""
    case = row["result"].case
    params = {name: value for name, value in case.params.items() if name not in varied_params}
    return case.name, frozenset(params.items())
