"""The report on training steps: rates, where the time went, timelines, and memory by component."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_seconds,
    make_formatter,
)
from parbench.bench.results.metrics import find_metric
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.labels import short_labels
from parbench.reports.analysis.steps import (
    SOURCES,
    Busy,
    MemoryLine,
    Prediction,
    Sent,
    broken_down,
    busy_ranks,
    by_axis,
    differing_trace,
    exposed_seconds,
    held_bytes,
    is_axis,
    memory_lines,
    predict_comm,
    sent_lines,
    share_of_traced,
    stream_words,
    traced_seconds,
    worst_ratio,
)
from parbench.reports.analysis.summary import Row
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.steps import (
    chart_breakdown,
    chart_memory,
    chart_step_times,
)
from parbench.reports.figures.timeline import chart_timelines
from parbench.reports.report import Column, Section, Table, known, number, words
from parbench.reports.sections.pipelines import pipeline_tables
from parbench.reports.sections.row_columns import (
    headline,
    metric_column,
    metric_columns,
    quality_columns,
    step_column,
)

_OF_AXIS: Mapping[str, Callable[[float | None], str]] = {
    "calls": format_number,
    "bytes_expected": format_bytes,
    "bytes_sent": format_bytes,
    "bytes_ratio": make_formatter("{:.3f}"),
    "exposed_comm": format_seconds,
}
_LETTERS = (
    "Formulas: Psi elements of e bytes, in FSDP those of a layer, root those outside of layers; M microbatches of n "
    "tokens, b sequences of s; h hidden; L layers; R ranks on the axis."
)
# of all timelines together, so that the page stays under a megabyte
_MAX_SPANS = 8000


def step_section(found: Analysis) -> Section | None:
    """Return the steps' tables; a parallelism that has tables of its own adds them here."""
    if not found.steps:
        return None
    tables: tuple[Table[Any], ...] = (
        *_steps(found),
        *_times(found),
        *_strategies(found),
        *_timelines(found),
        *pipeline_tables(found),
        *_memory(found),
    )
    terms = {
        "step-time": ("parts of a step",),
        "step-timelines": ("phases",),
        "pipelines": ("idle: schedule, imbalance, p2p, rest", "F, B, I, W"),
    }
    used = tuple(term for table in tables for term in terms.get(table.id, ()))
    return Section(id="steps", title="Steps", tables=tables, terms=used, notes=found.unreadable)


def _steps(found: Analysis) -> Iterator[Table[Row]]:
    steps = found.steps
    told = {row.case.id: predict_comm(row, found.curves) if found.curves else None for row in steps}
    notes = {
        case: list(prediction.notes) if prediction else [] for case, prediction in told.items()
    }
    notes = {row.case.id: [*row.notes, *notes[row.case.id]] for row in steps}
    yield Table(
        id="steps-table",
        title="Steps",
        caption="plotted data",
        columns=_step_columns(steps, told),
        rows=steps,
        # sentences would make the table wider than any page: they stand below it
        notes=_attributed(steps, notes),
        figures=lambda: list_charts(chart_step_times(steps)),
    )


def _step_columns(
    rows: Sequence[Row], told: Mapping[str, Prediction | None]
) -> tuple[Column[Row], ...]:
    def predicted(row: Row) -> float | None:
        prediction = told[row.case.id]
        return prediction.seconds if prediction else None

    def predicted_text(row: Row) -> str:
        prediction, text = told[row.case.id], format_seconds(predicted(row))
        is_beyond = prediction is not None and prediction.extrapolated and text != UNKNOWN
        return f"{text} (extrapolated)" if is_beyond else text

    def ratio(row: Row) -> float | None:
        worst = worst_ratio(row)
        return worst[1] if worst else None

    def ratio_text(row: Row) -> str:
        """Tell the worst axis's ratio, and which axis that is where there are several and it is not as expected."""
        worst = worst_ratio(row)
        text = f"{worst[1]:.3f}" if worst else UNKNOWN
        is_plain = (
            worst is None
            or text == "1.000"
            or len([*filter(is_axis, by_axis(row, "bytes_ratio"))]) == 1
        )
        return text if is_plain or worst is None else f"{text} ({worst[0]})"

    held_help = "what the fullest rank holds, activations too, measured"
    exposed_help = "communication that no computation hides, as a share of the traced step"
    calls_help = (
        "the step's calls, one after another, by this run's own fits of the same operations"
    )
    measured: tuple[Column[Row], ...] = (
        *metric_columns("steps", rows),
        number(
            "exposed",
            lambda row: share_of_traced(row, exposed_seconds(row)),
            format_percent,
            exposed_help,
        ),
        Column("predicted comm", predicted_text, predicted, calls_help),
        replace(metric_column("bytes_ratio.AXIS"), text=ratio_text, sort=ratio),
        number("memory", held_bytes, format_bytes, held_help),
    )
    time, tokens = headline("step_time", rows), metric_column("tokens_per_second")
    return (step_column(rows), time, tokens, *known(measured, rows), *quality_columns(rows))


def _attributed(rows: Sequence[Row], notes: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return each note once, after the names of its steps."""
    labels, found = short_labels(rows), dict[str, list[str]]()
    for row in rows:
        for note in notes[row.case.id]:
            found.setdefault(note, []).append(labels[row.case.id])
    return tuple(
        f"{'all steps' if len(names) == len(rows) > 1 else ', '.join(names)}: {note}"
        for note, names in found.items()
    )


def _times(found: Analysis) -> Iterator[Table[Row]]:
    steps = found.steps
    if rows := broken_down(steps):
        # two decimals: what is nothing but rounding reads as 0.00
        residual = replace(
            metric_column("residual"),
            text=lambda row: make_formatter("{:.2f} %")(_hundredths(row)),
            sort=lambda row: share_of_traced(row, row.value("residual")),
        )
        told = "the traced step from start to end: the sum of its parts"
        whole: Column[Row] = number("traced step", traced_seconds, format_seconds, told)
        yield Table(
            id="step-time",
            title="Where the time went",
            caption="parts of the traced step, on axes of the mesh",
            columns=(
                step_column(steps),
                whole,
                *metric_columns("times", steps),
                *known((residual,), steps),
            ),
            rows=rows,
            notes=_differing(rows),
            figures=lambda: list_charts(chart_breakdown(steps)),
        )


def _strategies(found: Analysis) -> Iterator[Table[Sent]]:
    if not (lines := sent_lines(found.steps)):
        return

    def of_axis(name: str, text: Callable[[float | None], str]) -> Column[Sent]:
        metric = find_metric(f"{name}.AXIS")
        assert metric is not None, f"metric {name} is not declared"
        column: Column[Sent] = number(
            name.replace("_", " "), lambda line: line.value(name), text, metric.help
        )
        return replace(column, is_result=True)

    yield Table(
        id="strategies",
        title="What each strategy sends",
        caption="bytes of a rank in a step, by formula and as counted",
        columns=(
            step_column(found.steps).of(lambda line: line.row),
            words(
                "axis",
                lambda line: line.axis,
                "the mesh's axis, or process group, that is communicated on",
            ),
            number("ranks", lambda line: line.ranks, format_count, "ranks on the axis"),
            words(
                "formula", lambda line: line.formula or "-", "the bytes in closed form, of rank 0"
            ),
            *known((of_axis(name, text) for name, text in _OF_AXIS.items()), lines),
        ),
        rows=lines,
        notes=(_LETTERS,) * any(line.formula for line in lines),
    )


def _differing(rows: Sequence[Row]) -> tuple[str, ...]:
    labels = short_labels(rows)
    known = [
        (labels[row.case.id], wall, row.seconds) for row in rows if (wall := differing_trace(row))
    ]
    told = (
        f"{name} {format_seconds(wall)}, timed {format_seconds(timed)}"
        for name, wall, timed in known
    )
    return (
        (f"Traced steps that took more or less than timed ones: {'; '.join(told)}.",)
        if known
        else ()
    )


def _hundredths(row: Row) -> float | None:
    fraction = share_of_traced(row, row.value("residual"))
    return None if fraction is None else round(100 * fraction, 2) + 0.0


def _timelines(found: Analysis) -> Iterator[Table[Busy]]:
    if not found.timelines:
        return
    lines = busy_ranks(found.timelines)
    yield Table(
        id="step-timelines",
        title="Traced steps, rank by rank",
        caption="what each rank of a traced step was busy with; parbench export --format chrome-trace gives it whole",
        columns=_busy_columns(found.steps, lines),
        rows=lines,
        notes=tuple(
            f"No timeline of {one.row.case.label}: {one.why_not}."
            for one in found.timelines
            if one.why_not
        ),
        figures=lambda: _draw_timelines(found),
    )


def _draw_timelines(found: Analysis) -> Iterator[Chart]:
    labels = short_labels(found.steps)
    steps = [
        (labels[traced.row.case.id], traced.repetition, traced.timeline)
        for traced in found.timelines
        if traced.timeline
    ]
    return chart_timelines(steps, _MAX_SPANS)


def _busy_columns(steps: Sequence[Row], lines: Sequence[Busy]) -> tuple[Column[Busy], ...]:
    def phase(name: str) -> Column[Busy]:
        return number(
            name,
            lambda one: one.by_phase.get(name),
            format_seconds,
            f"time in the step's own {name}",
        )

    def stream(name: str) -> Column[Busy]:
        title = stream_words(name)
        told = f"time in which {title} was under way, overlaps counted once"
        return number(title, lambda one: one.by_stream.get(name), format_seconds, told)

    return (
        step_column(steps).of(lambda one: one.traced.row),
        number("rank", lambda one: one.rank, format_count, "the rank"),
        number(
            "wall",
            lambda one: one.wall_seconds,
            format_seconds,
            "the traced step on this rank, from start to end",
        ),
        *map(phase, dict.fromkeys(name for one in lines for name in one.by_phase)),
        *map(stream, dict.fromkeys(name for one in lines for name in one.by_stream)),
    )


def _memory(found: Analysis) -> Iterator[Table[MemoryLine]]:
    def of_source(source: str) -> Column[MemoryLine]:
        column: Column[Any] = metric_column(f"{source}.COMPONENT").of(lambda line: line.row)
        return replace(
            column,
            text=lambda line: format_bytes(line.num_bytes(source)),
            sort=lambda line: line.num_bytes(source),
        )

    steps = found.steps
    if lines := memory_lines(steps):
        component: Column[MemoryLine] = words(
            "component", lambda line: line.component, "what the bytes hold"
        )
        yield Table(
            id="step-memory",
            title="Memory by component",
            caption="formula, count and measurement side by side",
            columns=(
                step_column(steps).of(lambda line: line.row),
                component,
                *map(of_source, SOURCES),
            ),
            rows=lines,
            figures=lambda: list_charts(chart_memory(steps)),
        )
