"""The section on expert parallelism: time, imbalance, drops and bandwidth of each step."""

from collections.abc import Iterator

from parbench.bench.results.tables import Column, Table
from parbench.reports.analysis.steps import list_step_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import STEP_COLUMN, STEP_TIME_COLUMN, list_metric_columns

_RANKS_COLUMN = Column("ep", "EP", kind="count", help="ranks that share the experts of a layer")


def list_expert_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of expert-parallel steps.

    The table has no rows if no step recorded the load of its experts.
    """
    rows = [row for row in list_step_rows(data) if "rank_load" in row["result"].details]
    for row in rows:
        row["ep"] = row["axes"].get("ep", {}).get("ranks", 1)
    yield Table(
        "experts-table",
        "Expert parallelism",
        caption="expert load, dropped tokens, and the bandwidth of dispatch",
        columns=[
            STEP_COLUMN,
            _RANKS_COLUMN,
            STEP_TIME_COLUMN,
            *list_metric_columns("experts", rows),
        ],
        rows=rows,
    )
