"""The tables of pipeline steps: bubbles with their causes, and schedules compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from parbench.bench.results.details import PipelineDetails, SimulatedSchedule, read_details
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.records import Record
from parbench.bench.results.tables import Column, Table, keep_known_columns, metric_column
from parbench.reports.analysis.summary import Summary
from parbench.reports.case_results import CaseResult
from parbench.reports.figures.pipeline import PipelineStep, chart_pipelines
from parbench.reports.labels import label_differences
from parbench.reports.tables.step_columns import (
    STEP_TIME_COLUMN,
    make_metric_columns,
    make_step_row,
)

_SCHEDULE_PARAMS = ("schedule", "microbatches", "chunks", "order", "split")
"""The parameters in which compared steps may differ. All others make another model."""
_MAX_BOXES = 5000
"""The limit for the charts of all pipelines, which keeps the page below a megabyte."""
_TIMELINE_KEYS = ("measured", "predicted", "idle")
_SCHEDULE = Column(
    key="schedule", title="schedule", help="order of actions, with the parameters that differ"
)
_CHUNKS = Column(
    key="chunks",
    title="v",
    kind="count",
    help="virtual stages per rank",
)
_ACTIVATIONS = metric_column("memory.activations", title="activations")
_PIPELINE_COLUMNS = (
    _SCHEDULE,
    Column(key="ranks", title="P", kind="count", help="ranks of the pipeline"),
    Column(key="microbatches", title="M", kind="count", help="microbatches per step"),
    _CHUNKS,
    STEP_TIME_COLUMN,
)
_SCHEDULE_COLUMNS = (
    _SCHEDULE,
    Column(
        key="source",
        title="source",
        help="measured in this run, or simulated with the action times of its first such step",
    ),
    _CHUNKS,
    metric_column("step_time", key="step_seconds"),
    metric_column("bubble_fraction"),
    metric_column("in_flight"),
    metric_column("memory.activations", key="activation_bytes", title="activations"),
)


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The result of a pipeline step, with the details that one repetition recorded."""

    result: CaseResult
    repetition: int
    details: PipelineDetails


def read_pipeline(result: CaseResult) -> PipelineResult | str | None:
    """Return a pipeline step, None for another case, or a sentence about unreadable details.

    The repetition is the first with a measured timeline, or the first one.
    """
    pipelines = []
    for record in result.measured:
        details = read_details(record, PipelineDetails)
        if isinstance(details, str):
            return details
        if details is not None:
            repetition = record.repetition
            pipelines.append(PipelineResult(result=result, repetition=repetition, details=details))
    with_timeline = [pipeline for pipeline in pipelines if pipeline.details.measured]
    return next(iter([*with_timeline, *pipelines]), None)


def read_pipelines(results: Iterable[CaseResult]) -> tuple[PipelineResult, ...]:
    """Return the pipeline steps whose details can be read."""
    pipelines = map(read_pipeline, results)
    return tuple(pipeline for pipeline in pipelines if isinstance(pipeline, PipelineResult))


def drop_timelines(summary: Summary) -> Summary:
    """Return a summary without the timelines in the details of its records, which are large."""
    rows = [replace(row, records=tuple(map(_drop_timelines, row.records))) for row in summary.rows]
    return replace(summary, rows=tuple(rows))


def _drop_timelines(record: Record) -> Record:
    pipeline = record.details.get(PipelineDetails.key)
    if not isinstance(pipeline, Mapping):
        return record
    kept = {name: value for name, value in pipeline.items() if name not in _TIMELINE_KEYS}
    return msgspec.structs.replace(record, details={**record.details, PipelineDetails.key: kept})


def label_schedules(pipelines: Sequence[PipelineResult]) -> dict[str, str]:
    """Return by case id the schedule with the other parameters in which the steps differ."""
    differences = label_differences([pipeline.result for pipeline in pipelines], ["schedule"])
    labels = {}
    for pipeline in pipelines:
        case_id = pipeline.result.case.id
        labels[case_id] = to_single_line(f"{pipeline.details.schedule} {differences[case_id]}")
    return labels


def make_pipeline_tables(pipelines: Sequence[PipelineResult]) -> Iterator[Table]:
    """Yield the table of pipelines with their charts, and one for each model with its schedules."""
    if not pipelines:
        return
    labels = label_schedules(pipelines)
    rows = []
    charted = []
    for pipeline in pipelines:
        label = labels[pipeline.result.case.id]
        rows.append(_make_row(label, pipeline))
        if pipeline.details.measured:
            charted.append(PipelineStep(label, pipeline.repetition, pipeline.details))
    metric_columns = make_metric_columns("pipelines", [row.result for row in pipelines])
    yield Table(
        id="pipelines",
        title="Pipelines",
        caption="bubble fraction measured, simulated and analytical, and the causes of idle time",
        columns=keep_known_columns([*_PIPELINE_COLUMNS, *metric_columns, _ACTIVATIONS], rows),
        rows=rows,
        figures=lambda: chart_pipelines(charted, _MAX_BOXES),
    )
    yield from _make_schedule_tables(pipelines, labels)


def _make_row(label: str, pipeline: PipelineResult) -> dict[str, Any]:
    details = pipeline.details
    return make_step_row(label, pipeline.result) | {
        "schedule": label,
        "ranks": details.ranks,
        "microbatches": details.microbatches,
        "chunks": details.chunks,
    }


def _make_schedule_tables(
    pipelines: Sequence[PipelineResult], labels: Mapping[str, str]
) -> Iterator[Table]:
    """Yield the measured and simulated schedules of each model on equal ranks, fastest first."""
    models = label_differences([row.result for row in pipelines], _SCHEDULE_PARAMS)
    groups: dict[object, list[PipelineResult]] = {}
    for pipeline in pipelines:
        groups.setdefault(_get_setup(pipeline), []).append(pipeline)
    for number, group in enumerate(groups.values(), start=1):
        rows = [*_make_measured_rows(group, labels), *_make_simulated_rows(group)]
        rows.sort(key=lambda row: (row["step_seconds"] is None, row["step_seconds"]))
        details = group[0].details
        title = f"Schedules: {details.ranks} ranks, {details.microbatches} microbatches"
        model = models[group[0].result.case.id]
        if len(rows) > 1:
            yield Table(
                id=f"schedules-{number}",
                title=f"{title}, {model}" if model else title,
                caption="measured, and simulated without latency; the fastest first",
                columns=keep_known_columns(_SCHEDULE_COLUMNS, rows),
                rows=rows,
            )


def _get_setup(pipeline: PipelineResult) -> object:
    """Return what the steps of one comparison have in common."""
    case = pipeline.result.case
    model = {name: value for name, value in case.params.items() if name not in _SCHEDULE_PARAMS}
    details = pipeline.details
    return case.name, frozenset(model.items()), details.ranks, details.microbatches


def _make_measured_rows(
    group: Sequence[PipelineResult], labels: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for pipeline in group:
        result = pipeline.result
        yield {
            "schedule": labels[result.case.id],
            "source": "measured",
            "chunks": pipeline.details.chunks,
            "step_seconds": result.seconds,
            "bubble_fraction": result.value("bubble_fraction"),
            "in_flight": result.value("in_flight"),
            "activation_bytes": result.value("memory.activations"),
        }


def _make_simulated_rows(group: Sequence[PipelineResult]) -> Iterator[dict[str, Any]]:
    """Yield the schedules that the first step simulated and that were not measured."""
    measured = {(pipeline.details.schedule, pipeline.details.chunks) for pipeline in group}
    comparisons = (pipeline.details.comparison for pipeline in group)
    simulated: Sequence[SimulatedSchedule] = next(filter(None, comparisons), ())
    for schedule in simulated:
        if (schedule.schedule, schedule.chunks) not in measured:
            fields = msgspec.structs.asdict(schedule)
            name = to_single_line(schedule.schedule)
            yield fields | {"schedule": name, "source": "simulated"}
