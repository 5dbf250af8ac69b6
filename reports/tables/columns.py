"""The columns that several tables share."""

from collections.abc import Sequence

from parbench.bench.results.metrics import METRICS
from parbench.bench.results.tables import Column, metric_column
from parbench.reports.analysis.steps import StepRow

OPERATION_COLUMNS = (
    Column("operation", help="operation with its parameters"),
    Column("mode", help="blocking, pipelined, async or graph"),
    Column("dtype", help="element type"),
)
SIZE_COLUMN = Column("size", kind="size", help="total bytes as in nccl-tests, 1024-based")
TIME_COLUMN = metric_column("time", key="seconds", has_interval=True)
CASE_COLUMNS = (*OPERATION_COLUMNS, SIZE_COLUMN)
QUALITY_COLUMNS = (
    metric_column("time_p99"),
    Column(
        "noise",
        help="variation between repetitions, or between iterations of a single one: stable, fair, "
        "noisy, very noisy",
        grade_key="noise",
        is_result=True,
    ),
    Column("iterations", "n", kind="count", help="iterations of all repetitions"),
    Column(
        "repetitions",
        kind="count",
        help="repetitions that measured the case, of those planned",
    ),
    Column("stop", help="rule that ended the measurement, by repetition"),
    Column("check", help="comparison of the results with the reference"),
)
STEP_COLUMN = Column(
    "label", "step", help="training step with the parameters in which steps differ"
)
STEP_TIME_COLUMN = metric_column("step_time", key="seconds", has_interval=True)
ACTIVATIONS_COLUMN = metric_column("memory.activations", title="activations")


def list_metric_columns(table: str, rows: Sequence[StepRow]) -> list[Column]:
    """Return the columns of the metrics that a table of training steps shows.

    These are the metrics that are declared for ``table``, such as ``times``, and that at least one
    step has. ``rows`` has a row for each measured step (``list_step_rows``).
    """
    names = dict.fromkeys(name for row in rows for name in row["result"].metrics)
    columns = []
    for metric in METRICS:
        if table in metric.tables:
            columns += [metric_column(name) for name in names if metric.specialize(name)]
    return columns
