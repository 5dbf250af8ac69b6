"""The report on predictions: what parbench plan validate foretold beside what was measured."""

from parbench.bench.files import convert_read_errors, decode_json, read_file
from parbench.bench.results.details import PLAN_FILE, PLAN_SCHEMA, ComponentCheck, Validation
from parbench.bench.results.formatting import format_difference, format_quantity, format_seconds
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import check_schema
from parbench.bench.results.stats import WITHIN_REPETITION
from parbench.bench.text import UserError
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.report import Column, Section, Table, words


def predicted_section(found: Analysis) -> Section | None:
    """Return the run's predictions beside what it measured, None where nobody has asked for them."""
    file = found.run.path / PLAN_FILE
    if not file.exists():
        return None
    try:
        with convert_read_errors(PLAN_FILE, "is not what parbench plan validate wrote"):
            content = read_file(file)
            check_schema(content, PLAN_FILE, PLAN_SCHEMA)
            told = decode_json(content, Validation)
    except UserError as error:
        return _section(notes=(f"{error}: have it written again.",))
    left = tuple(f"Not predicted: {label}: {reason}" for label, reason in told.left_out.items())
    rows = tuple((step.label, one) for step in told.rows for one in step.components)
    if not rows:
        return _section(notes=left)
    said = ((step.label, note) for step in told.rows for note in (step.rule, *step.notes))
    links = (
        "the run's own collectives" if told.fits == told.run else f"the collectives of {told.fits}"
    )
    compute = " or ".join(dict.fromkeys(step.compute for step in told.rows))
    sources = f"{links} and each step's {compute} compute"
    table = Table(
        id="predictions",
        title="Predicted and measured",
        caption=f"from {sources}; parbench plan validate wrote it",
        columns=_COLUMNS,
        rows=rows,
        notes=(
            f"Predicted from {sources}.",
            *dict.fromkeys(f"{label}: {note}" for label, note in said if note),
            *left,
        ),
        where="page",
    )
    return _section(table)


def _section(*tables: "Table[tuple[str, ComponentCheck]]", notes: tuple[str, ...] = ()) -> Section:
    return Section(id="predicted", title="Predictions", tables=tables, notes=notes)


def _text(value: float | None, unit: str) -> str:
    return format_seconds(value) if unit == "s" else format_quantity(value, unit)


def _measured(one: ComponentCheck) -> str:
    measured = MetricValue(value=one.measured, unit=one.unit, low=one.low, high=one.high)
    text = format_difference(measured, lambda value: _text(value, one.unit))
    return f"{text} {WITHIN_REPETITION}" if one.is_within_repetition else text


_COLUMNS: "tuple[Column[tuple[str, ComponentCheck]], ...]" = (
    words("step", lambda row: row[0], "the training step"),
    words("component", lambda row: row[1].name, "what is predicted of it"),
    Column(
        "predicted",
        lambda row: _text(row[1].predicted, row[1].unit),
        lambda row: row[1].predicted,
        "from latency and bandwidth of measured curves, closed forms of bytes and memory, and the step's compute",
    ),
    Column(
        "measured",
        lambda row: _measured(row[1]),
        lambda row: row[1].measured,
        "the mean over repetitions, with its 95 % interval where it has one",
    ),
    Column(
        "error",
        lambda row: row[1].error_text,
        lambda row: row[1].error,
        "predicted / measured - 1, and whether the interval of what was measured holds the prediction",
    ),
)
