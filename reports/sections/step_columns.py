"""The columns of the training steps' tables, as data: rates, where the time went, and memory by component.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from reports import cells
from reports.analysis.fits import Curve
from reports.analysis.labels import short_labels
from reports.analysis.step_parts import (
    SOURCES,
    MemoryLine,
    Prediction,
    by_axis,
    exposed_seconds,
    predict_comm,
    residual_fraction,
    state_bytes,
    worst_ratio,
)
from reports.analysis.summary import Row
from reports.sections.columns import (
    Column,
    T,
    figure,
    headline,
    known,
    lifted,
    metric_column,
    metric_columns,
    quality,
    words,
)

_MEMORY_HELP = "parameters, gradients and optimizer, measured, the fullest rank"


def step_columns(rows: Sequence[Row], curves: Sequence[Curve] = ()) -> tuple[Column[Row], ...]:
    """Return the columns of training steps; ``curves`` are the same run's, which predict the steps' communication."""
    predictions = {row.case.id: predict_comm(row, curves) for row in rows} if curves else {}
    measured: tuple[Column[Row], ...] = (
        *metric_columns("steps", rows),
        figure("exposed comm", exposed_seconds, cells.duration, "communication that no computation hides", 0),
        _predicted(predictions),
        _bytes_ratio(),
        figure("memory", state_bytes, cells.num_bytes, _MEMORY_HELP, 4),
    )
    return (
        _step(rows, lambda row: row),
        headline("step_time"),
        metric_column("tokens_per_second"),
        *known(measured, rows),
        *quality(),
        words("notes", lambda row: _notes(row, predictions), "what the row cannot claim", drop=10),
    )


def step_notes(rows: Sequence[Row], curves: Sequence[Curve] = ()) -> tuple[str, ...]:
    """Return what steps cannot claim, each note once with the steps that say so."""
    labels = short_labels(rows)
    found: dict[str, list[str]] = {}
    for row in rows:
        prediction = predict_comm(row, curves) if curves else None
        for note in (*row.notes, *(prediction.notes if prediction else ())):
            found.setdefault(note, []).append(labels[row.case.id])
    return tuple(_attributed(note, names, len(rows)) for note, names in found.items())


def _attributed(note: str, names: Sequence[str], num_steps: int) -> str:
    """Return a note after the steps that say so, unless it names its step itself."""
    if note.startswith(f"{names[0]}:"):
        return note
    return f"{'all steps' if len(names) == num_steps > 1 else ', '.join(names)}: {note}"


def time_columns(rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns of where the time of the steps' traced pass went; ``rows`` are all steps, for their names."""
    residual = replace(
        metric_column("residual", 6),
        text=lambda row: _hundredths(residual_fraction(row)),
        sort=residual_fraction,
    )
    return (_step(rows, lambda row: row), *metric_columns("times", rows), *known((residual,), rows))


def memory_columns(rows: Sequence[Row]) -> tuple[Column[MemoryLine], ...]:
    """Return the columns of memory by component, from three sources; ``rows`` are all steps, for their names."""
    return (
        _step(rows, lambda line: line.row),
        words("component", lambda line: line.component, "what the bytes hold"),
        *(_source(source) for source in SOURCES),
    )


def _step(rows: Sequence[Row], row_of: Callable[[T], Row]) -> Column[T]:
    """Return the column of names; how a step is called depends on what it must be told apart from."""
    labels = short_labels(rows)
    help_text = "the step, with the parameters in which steps differ"
    return words("step", lambda item: labels[row_of(item).case.id], help_text)


def _source(source: str) -> Column[MemoryLine]:
    column: Column[MemoryLine] = lifted(metric_column(f"{source}.COMPONENT"), lambda line: line.row)
    return replace(
        column, text=lambda line: cells.num_bytes(line.num_bytes(source)), sort=lambda line: line.num_bytes(source)
    )


def _predicted(predictions: dict[str, Prediction | None]) -> Column[Row]:
    def seconds(row: Row) -> float | None:
        prediction = predictions.get(row.case.id)
        return prediction.seconds if prediction else None

    def text(row: Row) -> str:
        prediction = predictions.get(row.case.id)
        told = cells.duration(seconds(row))
        is_beyond = prediction is not None and prediction.extrapolated and told != cells.UNKNOWN
        return f"{told} (extrapolated)" if is_beyond else told

    help_text = "the step's calls, one after another, by this run's own fits of the same operations"
    return Column(title="predicted comm", text=text, sort=seconds, help=help_text)


def _bytes_ratio() -> Column[Row]:
    """Return the worst axis's ratio, and which axis that is where there are several and it is not as expected."""

    def ratio(row: Row) -> float | None:
        worst = worst_ratio(row)
        return worst[1] if worst else None

    def text(row: Row) -> str:
        worst = worst_ratio(row)
        if worst is None:
            return cells.UNKNOWN
        told = f"{worst[1]:.3f}"
        return told if told == "1.000" or len(by_axis(row, "bytes_ratio")) == 1 else f"{told} ({worst[0]})"

    return replace(metric_column("bytes_ratio.AXIS", 3), text=text, sort=ratio)


def _notes(row: Row, predictions: dict[str, Prediction | None]) -> str:
    prediction = predictions.get(row.case.id)
    return "; ".join((*row.notes, *(prediction.notes if prediction else ()))) or cells.UNKNOWN


def _hundredths(fraction: float | None) -> str:
    """Return a fraction as a percentage with two decimals: what is nothing but rounding reads as 0.00."""
    return cells.UNKNOWN if fraction is None else f"{round(100 * fraction, 2) + 0.0:.2f} %"
