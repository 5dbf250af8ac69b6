"""The table of arrival skew: by how much each rank arrives after the first one."""

from collections.abc import Sequence
from typing import Any

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.records import Stragglers
from parbench.bench.results.tables import Column, Section, Table, metric_column
from parbench.reports.case_results import CaseResult
from parbench.reports.labels import label_operation, label_results
from parbench.reports.run_data import RunData
from parbench.reports.stragglers import compute_arrival_delays

TITLE = "Arrival skew and stragglers"
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


def make_arrival_section(data: RunData) -> Section | None:
    """Return the cases with the largest arrival skew and the delay of each rank."""
    arrivals = _select_arrivals(data.measured)
    if not arrivals:
        return None
    labels = label_results([row for row, _ in arrivals if not row.is_communication])
    rows = []
    ranks: set[int] = set()
    for row, arrival in arrivals:
        delays = compute_arrival_delays(data.run, row)
        ranks |= delays.keys()
        cells = _make_cells(row, arrival)
        cells["case"] = labels.get(row.case.id) or label_operation(row.case)
        rows.append(cells | {_delay_key(rank): seconds for rank, seconds in delays.items()})
    clocks = dict.fromkeys((arrival.method, arrival.uncertainty) for _, arrival in arrivals)
    table = Table(
        id="arrivals-table",
        title=TITLE,
        caption=f"arrivals on one clock, the {len(rows)} cases with the largest skew",
        columns=[*COLUMNS, *map(_make_delay_column, sorted(ranks)[:MAX_RANK_COLUMNS])],
        rows=rows,
        notes=[
            f"Clocks: {method}, uncertainty {format_seconds(uncertainty)}."
            for method, uncertainty in clocks
        ],
    )
    return Section(id="arrivals", title=TITLE, tables=[table], terms=["late"])


def _select_arrivals(rows: Sequence[CaseResult]) -> list[tuple[CaseResult, Stragglers]]:
    """Return the cases with the largest skew, in the order of the rows."""
    arrivals = []
    for row in rows:
        recorded = [record.arrival for record in row.measured if record.arrival]
        if recorded and row.value("skew") is not None:
            arrivals.append((row, recorded[0]))
    by_skew = sorted(arrivals, key=lambda pair: pair[0].value("skew") or 0.0)
    largest = {row.case.id for row, _ in by_skew[-MAX_CASES:]}
    return [(row, arrival) for row, arrival in arrivals if row.case.id in largest]


def _make_cells(row: CaseResult, arrival: Stragglers) -> dict[str, Any]:
    time = row.metrics[row.headline]
    return {
        "mode": row.case.params.get("mode"),
        "dtype": row.case.params.get("dtype"),
        "size": row.size_bytes,
        "time": time.value,
        "time_low": time.low,
        "time_high": time.high,
        "is_within_repetition": time.is_within_repetition,
        "skew": row.value("skew"),
        "transfer": row.value("transfer"),
        "late_rank": arrival.late_rank,
        "late_share": arrival.share,
        "last_rank": arrival.last_out_rank,
    }


def _delay_key(rank: int) -> str:
    return f"delay_{rank}"


def _make_delay_column(rank: int) -> Column:
    return Column(
        key=_delay_key(rank),
        title=f"rank {rank}",
        kind="s",
        help=f"median delay of rank {rank}'s arrival relative to the first rank",
    )
