"""The table of arrival skew: by how much each rank arrives after the first one."""

from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.tables import Column, Section, Table, metric_column
from parbench.reports.analysis.stragglers import compute_arrival_delays, find_arrival
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

TITLE = "Arrival skew and stragglers"
MAX_CASES = 24
MAX_RANK_COLUMNS = 16
COLUMNS = (
    Column("label", "case", help="operation or step"),
    metric_column("time", key="seconds", has_interval=True),
    metric_column("skew"),
    metric_column("transfer"),
    Column("late_rank", "late rank", kind="count", help="rank that most often arrives last"),
    Column(
        "late_share",
        "late share",
        kind="percent",
        help="share of iterations in which the late rank arrives last",
    ),
    Column(
        "last_rank",
        "last to finish",
        kind="count",
        help="rank that most often finishes last",
    ),
)


def make_arrival_section(data: RunData) -> Section | None:
    """Return the cases with the largest arrival skew and the delay of each rank."""
    arrivals = {result.case.id: find_arrival(result) for result in data.measured}
    cases = data.cases.reindex(columns=[*data.cases.columns.union(["skew", "transfer"])])
    has_arrival = cases["case_id"].map(arrivals).notna()
    rows = list_rows(cases[has_arrival].nlargest(MAX_CASES, "skew").sort_index())
    if not rows:
        return None
    ranks: set[int] = set()
    clocks: dict[str, None] = {}
    for row in rows:
        arrival = arrivals[row["case_id"]]
        assert arrival is not None
        clocks[f"{arrival.method}, uncertainty {format_seconds(arrival.uncertainty)}"] = None
        row |= {
            "late_rank": arrival.late_rank,
            "late_share": arrival.share,
            "last_rank": arrival.last_out_rank,
        }
        delays = compute_arrival_delays(data.run, row["result"])
        row |= {f"delay_{rank}": seconds for rank, seconds in delays.items()}
        ranks |= delays.keys()
    table = Table(
        "arrivals-table",
        TITLE,
        caption=f"arrivals on one clock, the {len(rows)} cases with the largest skew",
        columns=[*COLUMNS, *map(_make_delay_column, sorted(ranks)[:MAX_RANK_COLUMNS])],
        rows=rows,
        notes=[f"Clocks: {clock}." for clock in clocks],
    )
    return Section("arrivals", TITLE, tables=[table], terms=["late"])


def _make_delay_column(rank: int) -> Column:
    return Column(
        f"delay_{rank}",
        f"rank {rank}",
        kind="s",
        help=f"median delay of rank {rank}'s arrival relative to the first rank",
    )
