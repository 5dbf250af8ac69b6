"""The section on training steps: rates, where the time goes, communication, timelines, memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parbench.bench.results.details import COMPONENTS
from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.tables import (
    Column,
    Section,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.case_results import CaseResult
from parbench.reports.figures.chart import list_charts
from parbench.reports.figures.steps import chart_breakdown, chart_memory, chart_step_times
from parbench.reports.figures.timeline import LabeledTimeline, chart_timelines
from parbench.reports.labels import label_results
from parbench.reports.run_data import RunData
from parbench.reports.tables.pipelines import make_pipeline_tables, read_pipeline, read_pipelines
from parbench.reports.tables.step_columns import (
    QUALITY_COLUMNS,
    STEP_COLUMN,
    STEP_TIME_COLUMN,
    make_metric_columns,
    make_step_row,
)
from parbench.reports.tables.step_communication import (
    PredictedCommunication,
    make_volume_tables,
    predict_communication,
)
from parbench.reports.tables.step_parts import (
    find_worst_bytes_ratio,
    get_axis_values,
    get_deviating_profile,
    get_exposed_share,
    get_parts,
    get_profiled_seconds,
    get_share_of_profile,
    select_profiled,
    sum_memory,
)
from parbench.reports.timelines import (
    StepTimeline,
    measure_phases,
    measure_streams,
    name_stream,
)

LabeledStep = tuple[str, CaseResult]
MEMORY_SOURCES = ("memory_formula", "memory_counted", "memory")
_MAX_BOXES = 8000
"""The limit for the timelines of all steps, which keeps the page below a megabyte."""
_TERMS_OF_TABLE = {
    "step-time": ("parts of a step",),
    "step-timelines": ("phases",),
    "pipelines": ("idle: schedule, imbalance, p2p, rest", "F, B, I, W"),
}
_EXPOSED = Column(
    key="exposed",
    title="exposed",
    kind="percent",
    help="communication that computation does not hide, as a share of the profiled step",
    is_result=True,
)
_PREDICTED = Column(
    key="predicted",
    title="predicted comm",
    kind="s",
    help="time of the step's calls one after another, from this run's fits of the same operations",
    is_result=True,
)
_MEMORY = Column(
    key="memory",
    title="memory",
    kind="B",
    help="memory of all components, measured, maximum over ranks",
    is_result=True,
)
_PROFILED = Column(
    key="profiled",
    title="profiled step",
    kind="s",
    help="wall time of the profiled step, the sum of its parts and the residual",
    is_result=True,
)
_RESIDUAL = Column(
    key="residual_percent",
    title="residual",
    kind="number",
    number_format="{:.2f} %",
    help="share of the profiled step that no part accounts for",
    is_result=True,
)


def make_step_section(data: RunData) -> Section | None:
    """Return the tables of training steps, None without steps."""
    if not data.steps:
        return None
    labels = label_results(data.steps)
    steps = [(labels[step.case.id], step) for step in data.steps]
    predictions = {}
    if data.curves:
        predictions = {label: predict_communication(step, data.curves) for label, step in steps}
    pipelines = read_pipelines(data.measured)
    problems = [text for text in map(read_pipeline, data.measured) if isinstance(text, str)]
    tables = [
        _make_step_table(steps, predictions),
        *_make_part_tables(steps),
        *make_volume_tables(steps),
        *_make_timeline_tables(data.timelines, labels),
        *make_pipeline_tables(pipelines),
        *_make_memory_tables(steps),
    ]
    terms = [term for table in tables for term in _TERMS_OF_TABLE.get(table.id, ())]
    return Section(
        id="steps",
        title="Training steps",
        tables=tuple(tables),
        terms=tuple(terms),
        notes=tuple(problems),
    )


def _make_step_table(
    steps: Sequence[LabeledStep], predictions: Mapping[str, PredictedCommunication | None]
) -> Table:
    rows = []
    notes: dict[str, list[str]] = {}
    for label, step in steps:
        row = make_step_row(label, step)
        row["exposed"] = get_exposed_share(step)
        row["bytes_ratio"] = _format_worst_ratio(step)
        row["memory"] = sum_memory(step)
        prediction = predictions.get(label)
        row["predicted"] = _format_prediction(prediction)
        rows.append(row)
        notes[label] = [*step.notes, *(prediction.notes if prediction else ())]
    columns = [
        STEP_COLUMN,
        STEP_TIME_COLUMN,
        metric_column("tokens_per_second"),
        *make_metric_columns("steps", [step for _, step in steps]),
        _EXPOSED,
        _PREDICTED,
        metric_column("bytes_ratio.AXIS", key="bytes_ratio"),
        _MEMORY,
        *QUALITY_COLUMNS,
    ]
    return Table(
        id="steps-table",
        title="Training steps",
        caption="time, efficiency, communication and memory of each step",
        columns=keep_known_columns(columns, rows),
        rows=rows,
        notes=_attribute_notes(notes),
        figures=lambda: list_charts(chart_step_times(dict(steps))),
    )


def _format_prediction(prediction: PredictedCommunication | None) -> SortedText | float | None:
    if prediction is None or prediction.seconds is None:
        return None
    if not prediction.is_extrapolated:
        return prediction.seconds
    return SortedText(f"{format_seconds(prediction.seconds)} (extrapolated)", prediction.seconds)


def _format_worst_ratio(step: CaseResult) -> SortedText | None:
    """Return the ratio of the worst axis, with its name if there are several and it is not 1."""
    worst = find_worst_bytes_ratio(step)
    if worst is None:
        return None
    axis, ratio = worst
    text = f"{ratio:.3f}"
    if text != "1.000" and len(get_axis_values(step, "bytes_ratio")) > 1:
        text += f" ({axis})"
    return SortedText(text, ratio)


def _attribute_notes(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each note once, after the labels of its steps."""
    labels_by_note: dict[str, list[str]] = {}
    for label, step_notes in notes.items():
        for note in step_notes:
            labels_by_note.setdefault(note, []).append(label)
    attributed = []
    for note, labels in labels_by_note.items():
        is_common = len(labels) == len(notes) > 1
        attributed.append(f"{'all steps' if is_common else ', '.join(labels)}: {note}")
    return attributed


def _make_part_tables(steps: Sequence[LabeledStep]) -> Iterator[Table]:
    labels = {step.case.id: label for label, step in steps}
    profiled = select_profiled(step for _, step in steps)
    if not profiled:
        return
    rows = []
    notes = []
    for step in profiled:
        label = labels[step.case.id]
        row = make_step_row(label, step)
        row["profiled"] = get_profiled_seconds(step)
        residual = get_share_of_profile(step, step.value("residual"))
        if residual is not None:
            row["residual_percent"] = round(100 * residual, 2) + 0.0  # no negative zero
        rows.append(row)
        deviating = get_deviating_profile(step)
        if deviating is not None:
            step_time = format_seconds(step.seconds)
            notes.append(
                f"{label}: the profiled step took {format_seconds(deviating)}, "
                f"uninstrumented steps took {step_time}."
            )
    metric_columns = make_metric_columns("times", profiled)
    yield Table(
        id="step-time",
        title="Where the time goes",
        caption="parts of the profiled step, with communication by axis of the mesh",
        columns=keep_known_columns([STEP_COLUMN, _PROFILED, *metric_columns, _RESIDUAL], rows),
        rows=rows,
        notes=notes,
        figures=lambda: list_charts(
            chart_breakdown({labels[step.case.id]: get_parts(step) for step in profiled})
        ),
    )


def _make_timeline_tables(
    timelines: Sequence[StepTimeline], labels: Mapping[str, str]
) -> Iterator[Table]:
    if not timelines:
        return
    rows = []
    charted = []
    notes = []
    for step in timelines:
        label = labels[step.result.case.id]
        if step.timeline is None:
            notes.append(f"{label} has no timeline: {step.problem}.")
            continue
        charted.append(LabeledTimeline(label, step.repetition, step.timeline))
        for rank in step.timeline.ranks:
            row: dict[str, Any] = {"step": label, "rank": rank.rank}
            row["wall"] = (rank.stop_us - rank.start_us) / 1e6
            row |= {f"phase {name}": value for name, value in measure_phases(rank).items()}
            row |= {f"stream {name}": value for name, value in measure_streams(rank).items()}
            rows.append(row)
    yield Table(
        id="step-timelines",
        title="Profiled steps by rank",
        caption="busy time of each rank; parbench export --format chrome-trace has every event",
        columns=_make_timeline_columns(rows),
        rows=rows,
        notes=notes,
        figures=lambda: chart_timelines(charted, _MAX_BOXES),
    )


def _make_timeline_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [
        STEP_COLUMN,
        Column(key="rank", title="rank", kind="count", help="rank in the world"),
        Column(key="wall", title="wall", kind="s", help="wall time of the step on this rank"),
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in sorted(keys, key=lambda key: key.startswith("stream ")):
        kind, _, name = key.partition(" ")
        title = name_stream(name) if kind == "stream" else name
        if name:
            help_text = f"time of {title}, overlaps counted once"
            columns.append(Column(key=key, title=title, kind="s", help=help_text, is_result=True))
    return columns


def _make_memory_tables(steps: Sequence[LabeledStep]) -> Iterator[Table]:
    rows = [row for label, step in steps for row in _make_memory_rows(label, step)]
    if not rows:
        return
    columns = [
        STEP_COLUMN,
        Column(key="component", title="component", help="content of the memory"),
        *(metric_column(f"{source}.COMPONENT", key=source) for source in MEMORY_SOURCES),
    ]
    yield Table(
        id="step-memory",
        title="Memory by component",
        caption="analytical, counted and measured bytes",
        columns=columns,
        rows=rows,
        figures=lambda: list_charts(chart_memory(_stack_memory(rows))),
    )


def _make_memory_rows(label: str, step: CaseResult) -> Iterator[dict[str, Any]]:
    """Yield the bytes of each component by source, the usual components first."""
    by_source = {source: get_axis_values(step, source) for source in MEMORY_SOURCES}
    components = [*COMPONENTS, *(name for values in by_source.values() for name in values)]
    for component in dict.fromkeys(components):
        num_bytes = {source: values.get(component) for source, values in by_source.items()}
        if any(value is not None for value in num_bytes.values()):
            yield {"step": label, "component": component, **num_bytes}


def _stack_memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the measured bytes of each step by component."""
    stacks: dict[str, dict[str, float]] = {}
    for row in rows:
        stacks.setdefault(row["step"], {})[row["component"]] = row["memory"] or 0.0
    return stacks
