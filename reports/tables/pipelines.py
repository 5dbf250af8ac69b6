"""The tables of pipeline steps: bubbles with their causes, and schedules compared."""

from collections.abc import Iterator, Sequence

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.analysis.labels import label_differences
from parbench.reports.analysis.steps import StepRow
from parbench.reports.figures.chart import Chart, number_name
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.tables.columns import (
    ACTIVATIONS_COLUMN,
    STEP_TIME_COLUMN,
    list_metric_columns,
)

_SCHEDULE_PARAMS = ("schedule", "microbatches", "chunks", "split")
"""The parameters in which compared steps may differ. All others make another model."""
_SCHEDULE = Column("schedule", help="order of actions, with the parameters that differ")
_CHUNKS = Column("chunks", "v", kind="count", help="virtual stages per rank")
_PIPELINE_COLUMNS = (
    _SCHEDULE,
    Column("ranks", "P", kind="count", help="ranks of the pipeline"),
    Column("microbatches", "M", kind="count", help="microbatches per step"),
    _CHUNKS,
    STEP_TIME_COLUMN,
)
_SCHEDULE_COLUMNS = (
    _SCHEDULE,
    Column(
        "source",
        help="measured in this run, or simulated with the action times of its first such step",
    ),
    _CHUNKS,
    STEP_TIME_COLUMN,
    metric_column("bubble_fraction"),
    metric_column("in_flight"),
    ACTIVATIONS_COLUMN,
)


def make_pipeline_tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """Yield the table of pipeline steps with their charts, then a table of schedules per model.

    ``rows`` are steps with ``PipelineDetails``, from ``list_rows_with_details``. Yields nothing if
    there are none.
    """
    if not rows:
        return
    differences = label_differences([row["result"] for row in rows], ["schedule"])
    for row in rows:
        details: PipelineDetails = row["details"]
        row |= {name: getattr(details, name) for name in ("ranks", "microbatches", "chunks")}
        row["schedule"] = to_single_line(f"{details.schedule} {differences[row['case_id']]}")
    metric_columns = list_metric_columns("pipelines", rows)
    yield Table(
        "pipelines",
        "Pipelines",
        caption="bubble fraction measured, simulated and analytical, and the causes of idle time",
        columns=keep_known_columns([*_PIPELINE_COLUMNS, *metric_columns, ACTIVATIONS_COLUMN], rows),
        rows=rows,
        terms=["idle: schedule, imbalance, p2p, rest", "F, B, I, W"],
        figures=lambda: _chart_pipelines(rows),
    )
    yield from _make_schedule_tables(rows)


def _chart_pipelines(rows: Sequence[StepRow]) -> Iterator[Chart]:
    """Yield a Gantt chart for each pipeline step whose actions were measured."""
    measured = [row for row in rows if row["details"].measured]
    for number, row in enumerate(measured, start=1):
        caption = f"Measured in repetition {row['repetition'] + 1}."
        if row["details"].predicted:
            caption += " Top: simulated with the mean time of each kind of action and no latency."
        yield chart_pipeline(
            number_name("pipeline", number),
            f"Pipeline: {row['schedule']}",
            caption,
            row["details"],
        )


def _make_schedule_tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """Yield a table for each model that compares its measured and simulated schedules.

    The steps of a table have equal ranks and microbatches. The fastest schedule comes first.
    """
    models = label_differences([row["result"] for row in rows], _SCHEDULE_PARAMS)
    groups: dict[object, list[StepRow]] = {}
    for row in rows:
        setup = (row["result"].make_key(*_SCHEDULE_PARAMS), row["ranks"], row["microbatches"])
        groups.setdefault(setup, []).append(row)
    for number, group in enumerate(groups.values(), start=1):
        schedules = [*({**row, "source": "measured"} for row in group), *_simulate(group)]
        schedules.sort(key=lambda row: (row["seconds"] is None, row["seconds"]))
        first = group[0]
        title = f"Schedules: {first['ranks']} ranks, {first['microbatches']} microbatches"
        if models[first["case_id"]]:
            title += f", {models[first['case_id']]}"
        if len(schedules) > 1:
            yield Table(
                f"schedules-{number}",
                title,
                caption="measured, and simulated without latency; the fastest first",
                columns=keep_known_columns(_SCHEDULE_COLUMNS, schedules),
                rows=schedules,
            )


def _simulate(group: Sequence[StepRow]) -> Iterator[StepRow]:
    """Yield a row for each schedule that was simulated but not measured in a group of steps.

    The simulations are from the first step of ``group`` that has any.
    """
    measured = {(row["details"].schedule, row["chunks"]) for row in group}
    comparisons = (row["details"].comparison for row in group)
    for simulated in next(filter(None, comparisons), ()):
        if (simulated.schedule, simulated.chunks) not in measured:
            yield {
                "schedule": to_single_line(simulated.schedule),
                "source": "simulated",
                "chunks": simulated.chunks,
                "seconds": simulated.step_seconds,
                "bubble_fraction": simulated.bubble_fraction,
                "in_flight": simulated.in_flight,
                ACTIVATIONS_COLUMN.key: simulated.activation_bytes,
            }
