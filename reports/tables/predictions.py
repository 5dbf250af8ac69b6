"""The section on predictions: the numbers of ``parbench plan validate`` next to measured ones."""

from parbench.bench.files import convert_read_errors, decode_json, read_file
from parbench.bench.results.details import PLAN_FILE, PLAN_SCHEMA, Validation
from parbench.bench.results.formatting import format_measurement, format_quantity
from parbench.bench.results.records import check_schema
from parbench.bench.results.tables import Column, Row, SortedText, Table
from parbench.bench.text import UserError
from parbench.reports.run_data import RunData

_COLUMNS = (
    Column("step", help="training step"),
    Column("component", help="predicted quantity of the step"),
    Column(
        "predicted",
        kind="number",
        help="from fitted latency and bandwidth, analytical bytes and memory, and compute time",
    ),
    Column(
        "measured",
        kind="number",
        help="mean over repetitions with its 95 % interval",
    ),
    Column(
        "error",
        kind="number",
        help="predicted / measured - 1",
    ),
)


def list_prediction_tables(data: RunData) -> list[Table]:
    """Return the table of predicted and measured quantities as a list, empty without predictions.

    The predictions are read from the plan file in the folder of the run.
    """
    file = data.run.path / PLAN_FILE
    if not file.exists():
        return []
    rows: list[Row] = []
    try:
        with convert_read_errors(PLAN_FILE, "is not what parbench plan validate wrote"):
            content = read_file(file)
            check_schema(content, PLAN_FILE, PLAN_SCHEMA)
            validation = decode_json(content, Validation)
        notes = [f"Not predicted: {step}: {why}" for step, why in validation.left_out.items()]
        for step in validation.rows:
            for component in step.components:
                measured = component.measured
                predicted = format_quantity(component.predicted, measured.unit)
                row = {
                    "step": step.label,
                    "component": component.name,
                    "predicted": SortedText(predicted, component.predicted),
                    "measured": SortedText(format_measurement(measured), measured.value),
                    "error": SortedText(component.error_text, component.error),
                }
                rows.append(row)
            notes += [f"{step.label}: {note}" for note in (step.rule, *step.notes) if note]
    except UserError as error:
        notes = [f"{error}. Write it again with parbench plan validate."]
    table = Table(
        "predictions",
        "Predicted and measured",
        caption="predicted by parbench plan validate",
        columns=_COLUMNS,
        rows=rows,
        notes=list(dict.fromkeys(notes)),
        where="page",
    )
    return [table]
