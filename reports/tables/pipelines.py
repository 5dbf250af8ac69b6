"""The tables of pipeline steps: bubbles with their causes, and simulated schedules."""

from collections.abc import Iterator, Sequence

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.analysis.steps import StepRow
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.tables.columns import (
    ACTIVATIONS_COLUMN,
    STEP_COLUMN,
    STEP_TIME_COLUMN,
    list_metric_columns,
)

_SCHEDULE = Column("schedule", help="order of actions", is_result=True)
_CHUNKS = Column("chunks", "v", kind="count", help="virtual stages per rank")
_PIPELINE_COLUMNS = (
    STEP_COLUMN,
    _SCHEDULE,
    Column("ranks", "P", kind="count", help="ranks of the pipeline"),
    Column("microbatches", "M", kind="count", help="microbatches per step"),
    _CHUNKS,
    STEP_TIME_COLUMN,
)
_SIMULATED_COLUMNS = (
    STEP_COLUMN,
    _SCHEDULE,
    _CHUNKS,
    Column("seconds", "step time", kind="s", help="simulated time of a step, without latency"),
    metric_column("bubble_fraction"),
    metric_column("in_flight"),
    ACTIVATIONS_COLUMN,
)


def make_pipeline_tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """Yield the table of pipeline steps with their charts, then the table of simulated schedules.

    ``rows`` are steps with ``PipelineDetails``, from ``list_rows_with_details``. Yields nothing if
    there are none.
    """
    if not rows:
        return
    for row in rows:
        details: PipelineDetails = row["details"]
        row |= {name: getattr(details, name) for name in ("ranks", "microbatches", "chunks")}
        row["schedule"] = to_single_line(details.schedule)
    metric_columns = list_metric_columns("pipelines", rows)
    yield Table(
        "pipelines",
        "Pipelines",
        caption="bubble fraction measured, simulated and analytical, and the causes of idle time",
        columns=keep_known_columns([*_PIPELINE_COLUMNS, *metric_columns, ACTIVATIONS_COLUMN], rows),
        rows=rows,
        terms=["idle: schedule, imbalance, rest", "F, B, I, W"],
        figures=lambda: _chart_pipelines(rows),
    )
    simulated = [
        {
            "label": row["label"],
            "schedule": to_single_line(schedule.schedule),
            "chunks": schedule.chunks,
            "seconds": schedule.step_seconds,
            "bubble_fraction": schedule.bubble_fraction,
            "in_flight": schedule.in_flight,
            ACTIVATIONS_COLUMN.key: schedule.activation_bytes,
        }
        for row in rows
        for schedule in row["details"].comparison or ()
    ]
    yield Table(
        "schedules",
        "Schedules",
        caption="schedules simulated with the action times of each step, without latency",
        columns=keep_known_columns(_SIMULATED_COLUMNS, simulated),
        rows=simulated,
    )


def _chart_pipelines(rows: Sequence[StepRow]) -> Iterator[Chart]:
    """Yield a Gantt chart for each pipeline step whose actions were measured."""
    measured = [row for row in rows if row["details"].measured]
    for number, row in enumerate(measured, start=1):
        caption = f"Measured in repetition {row['repetition'] + 1}."
        if row["details"].predicted:
            caption += " Top: simulated with the mean time of each kind of action and no latency."
        yield chart_pipeline(
            number_name("pipeline", number),
            f"Pipeline: {row['label']}",
            caption,
            row["details"],
        )
