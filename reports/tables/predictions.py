"""The section on predictions: what ``parbench plan validate`` predicted, and what was measured."""

from collections.abc import Sequence
from typing import Any

from parbench.bench.files import convert_read_errors, decode_json, read_file
from parbench.bench.results.details import PLAN_FILE, PLAN_SCHEMA, ComponentCheck, Validation
from parbench.bench.results.formatting import format_difference, format_quantity, format_seconds
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import check_schema
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.results.tables import Column, Section, SortedText, Table
from parbench.bench.text import UserError
from parbench.reports.run_data import RunData

_COLUMNS = (
    Column(key="step", title="step", help="training step"),
    Column(key="component", title="component", help="predicted quantity of the step"),
    Column(
        key="predicted",
        title="predicted",
        kind="number",
        help="from fitted latency and bandwidth, analytical bytes and memory, and compute time",
    ),
    Column(
        key="measured",
        title="measured",
        kind="number",
        help="mean over repetitions with its 95 % interval",
    ),
    Column(
        key="error",
        title="error",
        kind="number",
        help="predicted / measured - 1, and whether the prediction is within the interval",
    ),
)


def make_prediction_section(data: RunData) -> Section | None:
    """Return the predictions for the run, None if there are none."""
    file = data.run.path / PLAN_FILE
    if not file.exists():
        return None
    try:
        with convert_read_errors(PLAN_FILE, "is not what parbench plan validate wrote"):
            content = read_file(file)
            check_schema(content, PLAN_FILE, PLAN_SCHEMA)
            validation = decode_json(content, Validation)
    except UserError as error:
        return _make_section([], [f"{error}. Write it again with parbench plan validate."])
    missing = [f"Not predicted: {step}: {why}" for step, why in validation.left_out.items()]
    rows = [
        _make_row(step.label, component)
        for step in validation.rows
        for component in step.components
    ]
    if not rows:
        return _make_section([], missing)
    sources = _describe_sources(validation)
    notes = [f"Predicted from {sources}."]
    for step in validation.rows:
        notes += [f"{step.label}: {note}" for note in (step.rule, *step.notes) if note]
    table = Table(
        id="predictions",
        title="Predicted and measured",
        caption=f"predicted by parbench plan validate from {sources}",
        columns=_COLUMNS,
        rows=rows,
        notes=[*dict.fromkeys(notes), *missing],
        where="page",
    )
    return _make_section([table], [])


def _make_section(tables: Sequence[Table], notes: Sequence[str]) -> Section:
    return Section(id="predicted", title="Predictions", tables=tuple(tables), notes=tuple(notes))


def _describe_sources(validation: Validation) -> str:
    links = "the collectives of this run"
    if validation.fits != validation.run:
        links = f"the collectives of {validation.fits}"
    compute = " or ".join(dict.fromkeys(step.compute for step in validation.rows))
    return f"{links} and the {compute} compute time of each step"


def _make_row(step: str, component: ComponentCheck) -> dict[str, Any]:
    def format_value(value: float | None) -> str:
        if component.unit == "s":
            return format_seconds(value)
        return format_quantity(value, component.unit)

    value = MetricValue(
        value=component.measured, unit=component.unit, low=component.low, high=component.high
    )
    measured = format_difference(value, format_value)
    if component.is_within_repetition:
        measured += f" {WITHIN_REPETITION}"
    return {
        "step": step,
        "component": component.name,
        "predicted": SortedText(format_value(component.predicted), component.predicted),
        "measured": SortedText(measured, component.measured),
        "error": SortedText(component.error_text, component.error),
    }
