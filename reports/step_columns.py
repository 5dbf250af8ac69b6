"""The columns of the training steps' tables, as data: rates, where the time went, and memory by component.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.breakdown import (
    MemoryLine,
    axes,
    by_axis,
    exposed_seconds,
    residual_fraction,
    state_bytes,
    worst_ratio,
)
from reports.columns import Column, T, figure, headline, known, quality, words
from reports.fits import Curve
from reports.labels import short_labels
from reports.predict import Prediction, predict_comm
from reports.summary import Row


def step_columns(rows: Sequence[Row], curves: Sequence[Curve] = ()) -> tuple[Column[Row], ...]:
    """Return the columns of training steps; ``curves`` are the same run's, which predict the steps' communication."""
    predictions = {row.case.id: predict_comm(row, curves) for row in rows} if curves else {}
    tokens_help = "tokens that all ranks together train on in a second"
    measured: tuple[Column[Row], ...] = (
        figure("mfu", lambda row: row.value("mfu"), cells.percent, "model FLOPs over the peak's, PaLM's formula", 2),
        _metric("compute", "compute", "time in which a rank computes, of the traced step", 5),
        figure("exposed comm", exposed_seconds, cells.duration, "communication that no computation hides", 0),
        _predicted(predictions),
        _bytes_ratio(),
        figure("memory", state_bytes, _bytes, "parameters, gradients and optimizer, measured, the fullest rank", 4),
    )
    return (
        _step(rows, lambda row: row),
        headline("step time"),
        figure("tokens/s", lambda row: row.value("tokens_per_second"), cells.significant, tokens_help, 0),
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
    wait_help = "time in which the step's own code waits for communication to end"
    skew_help = "time that communication waits for the last rank to arrive"
    tracing_help = "how much longer the traced step takes than the timed one"
    residual_help = "what compute, exposed, copy and idle leave of the wall time: zero if the identity holds"
    columns = (
        _metric("compute", "compute", "time in which a rank computes", 0),
        *(
            _metric(f"exposed {axis}", f"exposed_comm.{axis}", f"communication on {axis} that nothing hides", 0)
            for axis in axes(rows, "exposed_comm")
        ),
        _metric("copy", "exposed_copy", "copies that neither computation nor communication hides", 0),
        _metric("idle", "idle", "time in which a rank does nothing at all", 0),
        _metric("outside", "outside_pipeline", "what a pipeline's step takes beyond it, such as the update", 5),
        _metric("ect", "ect", "effective communication time: the step less the step without communication", 1),
        _metric("wait", "comm_wait", wait_help, 3),
        _metric("contention", "contention", "how much longer computing takes with communication beside it", 2),
        _metric("skew", "comm_skew", skew_help, 4),
        *(
            _metric(f"transfer {axis}", f"comm_transfer.{axis}", f"communication on {axis} of the last to arrive", 7)
            for axis in axes(rows, "comm_transfer")
        ),
        figure("tracing", lambda row: row.value("tracing_overhead"), cells.percent, tracing_help, 5),
        figure("residual", residual_fraction, _hundredths, residual_help, 6),
    )
    return (_step(rows, lambda row: row), *known(columns, rows))


def memory_columns(rows: Sequence[Row]) -> tuple[Column[MemoryLine], ...]:
    """Return the columns of memory by component, from three sources; ``rows`` are all steps, for their names."""
    return (
        _step(rows, lambda line: line.row),
        words("component", lambda line: line.component, "what the bytes hold"),
        _source("formula", "memory_formula", "what theory says of the shapes and the layout"),
        _source("counted", "memory_counted", "bytes of the tensors that a rank holds, each storage once"),
        _source("measured", "memory", "bytes taken while the step ran, on the fullest rank"),
    )


def _step(rows: Sequence[Row], row_of: Callable[[T], Row]) -> Column[T]:
    """Return the column of names; how a step is called depends on what it must be told apart from."""
    labels = short_labels(rows)
    help_text = "the step, with the parameters in which steps differ"
    return words("step", lambda item: labels[row_of(item).case.id], help_text)


def _metric(title: str, name: str, help_text: str, drop: int) -> Column[Row]:
    return figure(title, lambda row: row.value(name), cells.duration, help_text, drop)


def _source(title: str, source: str, help_text: str) -> Column[MemoryLine]:
    return figure(title, lambda line: line.num_bytes(source), _bytes, help_text, 0)


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

    help_text = "bytes sent over those that theory expects, on the axis where they differ most"
    return Column(title="bytes ratio", text=text, sort=ratio, help=help_text, drop=3)


def _notes(row: Row, predictions: dict[str, Prediction | None]) -> str:
    prediction = predictions.get(row.case.id)
    return "; ".join((*row.notes, *(prediction.notes if prediction else ()))) or cells.UNKNOWN


def _bytes(num_bytes: float | None) -> str:
    return cells.quantity(num_bytes, "B")


def _hundredths(fraction: float | None) -> str:
    """Return a fraction as a percentage with two decimals: what is nothing but rounding reads as 0.00."""
    return cells.UNKNOWN if fraction is None else f"{round(100 * fraction, 2) + 0.0:.2f} %"
