"""The table of pipeline steps: bubbles with their causes."""

from collections.abc import Iterator, Sequence

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    Table,
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

_PIPELINE_COLUMNS = (
    STEP_COLUMN,
    Column("schedule", help="order of actions", is_result=True),
    Column("ranks", "P", kind="count", help="ranks of the pipeline"),
    Column("microbatches", "M", kind="count", help="microbatches per step"),
    Column("virtual_stages", "virtual stages (v)", kind="count", help="virtual stages per rank"),
    STEP_TIME_COLUMN,
)


def make_pipeline_tables(rows: Sequence[StepRow]) -> Iterator[Table]:
    """Yield the table of pipeline steps with their charts.

    ``rows`` are steps with ``PipelineDetails``, from ``list_rows_with_details``. Yields nothing if
    there are none.
    """
    if not rows:
        return
    for row in rows:
        details: PipelineDetails = row["details"]
        row |= {
            name: getattr(details, name) for name in ("ranks", "microbatches", "virtual_stages")
        }
        row["schedule"] = to_single_line(details.schedule)
    metric_columns = list_metric_columns("pipelines", rows)
    yield Table(
        "pipelines",
        "Pipelines",
        caption="bubble fraction measured, simulated and analytical, and the causes of the bubble",
        columns=[*_PIPELINE_COLUMNS, *metric_columns, ACTIVATIONS_COLUMN],
        rows=rows,
        terms=["bubble: schedule, imbalance, rest", "F, B, I, W"],
        figures=lambda: _chart_pipelines(rows),
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
