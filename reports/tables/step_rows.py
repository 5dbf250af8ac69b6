"""The rows of steps, with the columns that several tables of steps share."""

from collections.abc import Sequence
from typing import Any, TypeVar

from parbench.bench.results.details import Details, MeshDetails, read_details
from parbench.bench.results.metrics import METRICS
from parbench.bench.results.tables import Column, SortedText, metric_column
from parbench.reports.case_results import CaseResult
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
    """Return a new row for each measured step, with the ``axes`` of its mesh."""
    case_ids = [step.case.id for step in data.steps]
    frame = data.cases[data.cases["case_id"].isin(case_ids)]
    rows = [dict(row) for row in list_rows(frame)]
    for row in rows:
        mesh = read_first_details(row["result"], MeshDetails)
        row["axes"] = mesh.axes if isinstance(mesh, MeshDetails) else {}
        row["time_p99"] = row.get(f"{row['headline']}_p99")
        row["time_q10"] = row.get(f"{row['headline']}_q10")
        row["repetitions"] = SortedText(
            f"{row['repetitions']}/{row['planned']}", row["repetitions"]
        )
    return rows


def list_rows_with_details(data: RunData, kind: type[Details]) -> tuple[list[StepRow], list[str]]:
    """Return the steps that recorded ``details`` of a kind, and sentences about unreadable ones."""
    rows = []
    problems = []
    for row in list_step_rows(data):
        row["details"] = read_first_details(row["result"], kind)
        if isinstance(row["details"], str):
            problems.append(row["details"])
        elif row["details"] is not None:
            rows.append(row)
    return rows, problems


def list_metric_columns(table: str, rows: Sequence[StepRow]) -> list[Column]:
    """Return the columns of the metrics that are declared for a table and that a step has."""
    names = dict.fromkeys(name for row in rows for name in row["result"].metrics)
    return [
        metric_column(name)
        for metric in METRICS
        if table in metric.tables
        for name in names
        if metric.specialize(name)
    ]


def read_first_details(result: CaseResult, kind: type[T]) -> T | str | None:
    """Return the details of the first repetition that has them, or a sentence about a problem."""
    for record in result.measured:
        details = read_details(record, kind)
        if details is not None:
            return details
    return None
