"""The tables of pipeline steps: bubbles with their causes, and schedules compared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from parbench.bench.results.details import PipelineDetails, read_details
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import Column, Table, keep_known_columns, metric_column
from parbench.reports.case_results import CaseResult
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.labels import label_differences
from parbench.reports.tables.step_rows import (
    ACTIVATIONS_COLUMN,
    STEP_TIME_COLUMN,
    StepRow,
    list_metric_columns,
)

_SCHEDULE_PARAMS = ("schedule", "microbatches", "chunks", "order", "split")
"""The parameters in which compared steps may differ. All others make another model."""
_MAX_BOXES = 5000
"""The limit for the charts of all pipelines, which keeps the page below a megabyte."""
_SCHEDULE = Column(
    key="schedule", title="schedule", help="order of actions, with the parameters that differ"
)
_CHUNKS = Column(key="chunks", title="v", kind="count", help="virtual stages per rank")
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
class RecordedPipeline:
    """The details of a pipeline that one repetition of a step recorded."""

    repetition: int
    details: PipelineDetails

    @property
    def caption(self) -> str:
        measured = f"measured in repetition {self.repetition + 1}."
        if not self.details.predicted:
            return measured.capitalize()
        simulated = "simulated with the mean time of each kind of action and no latency"
        return f"Top: {simulated}. Bottom: {measured}"


def read_pipeline(result: CaseResult) -> RecordedPipeline | str | None:
    """Return the pipeline of a step, None for another case, or a sentence about a problem.

    The repetition is the first with a measured timeline, or the first one.
    """
    pipelines = []
    for record in result.measured:
        details = read_details(record, PipelineDetails)
        if isinstance(details, str):
            return details
        if details is not None:
            pipelines.append(RecordedPipeline(repetition=record.repetition, details=details))
    with_timeline = [pipeline for pipeline in pipelines if pipeline.details.measured]
    return next(iter([*with_timeline, *pipelines]), None)


def make_pipeline_tables(steps: Sequence[StepRow]) -> Iterator[Table]:
    """Yield the table of pipelines with their charts, and one for each model with its schedules."""
    pipelines = {row["case_id"]: read_pipeline(row["result"]) for row in steps}
    rows = []
    for row in steps:
        pipeline = pipelines[row["case_id"]]
        if isinstance(pipeline, RecordedPipeline):
            details = pipeline.details
            values = {name: getattr(details, name) for name in ("ranks", "microbatches", "chunks")}
            rows.append({**row, **values, "pipeline": pipeline})
    if not rows:
        return
    differences = label_differences([row["result"] for row in rows], ["schedule"])
    for row in rows:
        schedule = row["pipeline"].details.schedule
        row["schedule"] = to_single_line(f"{schedule} {differences[row['case_id']]}")
    metric_columns = list_metric_columns("pipelines", rows)
    yield Table(
        id="pipelines",
        title="Pipelines",
        caption="bubble fraction measured, simulated and analytical, and the causes of idle time",
        columns=keep_known_columns([*_PIPELINE_COLUMNS, *metric_columns, ACTIVATIONS_COLUMN], rows),
        rows=rows,
        figures=lambda: _chart_pipelines(rows),
    )
    yield from _make_schedule_tables(rows)


def _chart_pipelines(rows: Sequence[StepRow]) -> Iterator[Chart]:
    measured = [row for row in rows if row["pipeline"].details.measured]
    for number, row in enumerate(measured, start=1):
        pipeline: RecordedPipeline = row["pipeline"]
        name = number_name("pipeline", number)
        title = f"Pipeline: {row['schedule']}"
        max_boxes = _MAX_BOXES // len(measured)
        yield chart_pipeline(name, title, pipeline.caption, pipeline.details, max_boxes=max_boxes)


def _make_schedule_tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """Yield the measured and simulated schedules of each model on equal ranks, fastest first."""
    models = label_differences([row["result"] for row in rows], _SCHEDULE_PARAMS)
    groups: dict[object, list[StepRow]] = {}
    for row in rows:
        params = row["result"].case.params.items()
        model = frozenset(param for param in params if param[0] not in _SCHEDULE_PARAMS)
        setup = (row["name"], model, row["ranks"], row["microbatches"])
        groups.setdefault(setup, []).append(row)
    for number, group in enumerate(groups.values(), start=1):
        schedules = [*map(_make_measured_row, group), *_make_simulated_rows(group)]
        schedules.sort(key=lambda row: (row["step_seconds"] is None, row["step_seconds"]))
        first = group[0]
        title = f"Schedules: {first['ranks']} ranks, {first['microbatches']} microbatches"
        if models[first["case_id"]]:
            title += f", {models[first['case_id']]}"
        if len(schedules) > 1:
            yield Table(
                id=f"schedules-{number}",
                title=title,
                caption="measured, and simulated without latency; the fastest first",
                columns=keep_known_columns(_SCHEDULE_COLUMNS, schedules),
                rows=schedules,
            )


def _make_measured_row(row: StepRow) -> Mapping[str, Any]:
    result = row["result"]
    return {
        **row,
        "source": "measured",
        "step_seconds": result.seconds,
        "activation_bytes": result.value("memory.activations"),
    }


def _make_simulated_rows(group: Sequence[StepRow]) -> Iterator[Mapping[str, Any]]:
    """Yield the schedules that the first step simulated and that were not measured."""
    measured = {(row["pipeline"].details.schedule, row["chunks"]) for row in group}
    comparisons = (row["pipeline"].details.comparison for row in group)
    for schedule in next(filter(None, comparisons), ()):
        if (schedule.schedule, schedule.chunks) not in measured:
            name = to_single_line(schedule.schedule)
            fields = msgspec.structs.asdict(schedule)
            yield fields | {"schedule": name, "source": "simulated"}
