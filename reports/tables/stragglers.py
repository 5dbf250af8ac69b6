"""The table of arrival skew: by how much each rank arrives after the first one."""

from collections.abc import Sequence

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import Stragglers
from parbench.bench.results.tables import Column, Table, metric_column
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.labels import operation, short_labels
from parbench.reports.analysis.summary import Row
from parbench.reports.report import Section
from parbench.reports.stragglers import compute_arrival_delays

MAX_CASES = 24
MAX_RANK_COLUMNS = 16

COLUMNS = (
    Column(key="case", title="case", help="operation, or step with the parameters that differ"),
    Column(key="mode", title="mode", help="blocking or pipelined"),
    Column(key="dtype", title="dtype", help="element type"),
    Column(key="size", title="size", kind="size", help="total bytes as in nccl-tests, 1024-based"),
    metric_column("time", has_interval=True),
    metric_column("skew"),
    metric_column("transfer"),
    Column(
        key="late_rank", title="late rank", kind="count", help="rank that most often arrives last"
    ),
    Column(
        key="late_share",
        title="late share",
        kind="percent",
        help="share of iterations in which the late rank arrives last",
    ),
    Column(
        key="last_rank", title="last out", kind="count", help="rank that most often finishes last"
    ),
)


def make_arrival_section(analysis: Analysis) -> Section | None:
    """Return the cases with the largest arrival skew and the delay of each rank."""
    arrivals = _select_arrivals(analysis.shown)
    if not arrivals:
        return None
    labels = short_labels([row for row, _ in arrivals if not row.is_communication])
    rows = []
    for row, arrival in arrivals:
        label = labels.get(row.case.id) or operation(row.case)
        rows.append(_make_row(row, label, arrival) | _make_delays(analysis, row))
    ranks = sorted({key for row in rows for key in row if isinstance(key, int)})
    clocks = dict.fromkeys((arrival.method, arrival.uncertainty) for _, arrival in arrivals)
    table = Table(
        id="arrivals-table",
        title="Arrival skew and stragglers",
        caption=f"arrivals on one clock, the {len(rows)} cases with the largest skew",
        columns=(*COLUMNS, *map(_make_delay_column, ranks[:MAX_RANK_COLUMNS])),
        rows=rows,
        notes=[
            f"Clocks: {method}, uncertainty {format_seconds(uncertainty)}."
            for method, uncertainty in clocks
        ],
    )
    return Section(
        id="arrivals", title="Arrival skew and stragglers", tables=(table,), terms=("late",)
    )
