"""The columns that several tables share."""

from parbench.bench.results.tables import Column, metric_column

OPERATION_COLUMNS = (
    Column(key="operation", title="operation", help="operation with its parameters"),
    Column(key="mode", title="mode", help="blocking or pipelined"),
    Column(key="dtype", title="dtype", help="element type"),
)
SIZE_COLUMN = Column(
    key="size", title="size", kind="size", help="total bytes as in nccl-tests, 1024-based"
)
CASE_COLUMNS = (*OPERATION_COLUMNS, SIZE_COLUMN)
QUALITY_COLUMNS = (
    metric_column("time_p99"),
    metric_column("time_q10"),
    Column(
        key="noise",
        title="noise",
        help="variation between repetitions, within a single one: stable, fair, noisy, very noisy",
        grade_key="noise",
        is_result=True,
    ),
    Column(key="iterations", title="n", kind="count", help="iterations of all repetitions"),
    Column(
        key="num_effective",
        title="n_eff",
        kind="count",
        help="number of independent iterations that would be as precise",
    ),
    Column(
        key="repetitions",
        title="repetitions",
        kind="count",
        help="repetitions that measured the case, of those planned",
    ),
    Column(key="stop", title="stop", help="rule that ended the measurement, by repetition"),
    Column(key="check", title="check", help="comparison of the results with the reference"),
)
