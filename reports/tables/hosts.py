"""The tables of a run's nodes, of its repetitions with host load, and of late ranks."""

from collections.abc import Iterator
from typing import Any

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.formatting import format_seconds
from parbench.bench.results.tables import Column, Table, metric_column
from parbench.reports.analysis.stragglers import find_arrival
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import TIME_COLUMN

_NODE_COLUMNS = (
    Column("host", help="host name of the node"),
    Column("ranks", help="ranks on the node"),
    Column("switches", help="path of switches in Slurm's topology"),
)
_REPETITION_COLUMNS = (
    Column("repetition", kind="count", help="number of the repetition, which restarts all ranks"),
    Column("seconds", "duration", kind="s", help="duration with the start of all ranks"),
    Column("other_cores", "other load", kind="number", help="cores that other processes kept busy"),
    Column(
        "steal_percent",
        "steal %",
        kind="number",
        help="share of CPU time that the hypervisor gave to other machines",
    ),
)
MAX_CASES = 24
"""The largest number of rows of the table of arrivals."""
_ARRIVAL_COLUMNS = (
    Column("label", "case", help="operation"),
    TIME_COLUMN,
    metric_column("skew"),
    metric_column("transfer"),
    Column("late_rank", "late rank", kind="count", help="rank that most often arrives last"),
    Column(
        "late_share",
        "late share",
        kind="percent",
        help="share of iterations in which the late rank arrives last",
    ),
)


def list_node_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of nodes with their ranks, nothing if all ranks are on one host."""
    topology = data.nodes
    if topology is None:
        return
    rows = [
        {
            "host": host,
            "ranks": format_cpus(topology.get_ranks(host)),
            "switches": topology.switches.get(host),
        }
        for host in topology.nodes
    ]
    yield Table(
        "nodes-table",
        "Nodes",
        caption="where each rank ran, hosts under one switch next to each other",
        columns=_NODE_COLUMNS,
        rows=rows,
        notes=[f"Distribution of ranks: {topology.distribution}."],
    )


def list_repetition_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of repetitions with their durations and the load of the host.

    The load is the CPU time that other processes and the hypervisor take. A repetition that was
    interrupted has a row for each start of all ranks.
    """
    rows: list[dict[str, Any]] = []
    for start in data.run.info.repetitions:
        row: dict[str, Any] = {"repetition": start.repetition + 1, "seconds": start.seconds}
        if start.load:
            row["other_cores"] = start.load.other_cores
            row["steal_percent"] = start.load.steal_percent
        rows.append(row)
    yield Table(
        "repetitions",
        "Repetitions",
        caption="duration of each repetition, and the load of its host while it measured",
        columns=_REPETITION_COLUMNS,
        rows=rows,
    )


def list_arrival_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of the operations with the largest arrival skew.

    The arrival skew is the time from the first to the last arrival of a rank at an operation. A row
    has the rank that most often arrives last, and the fraction of iterations in which it does. At
    most 24 operations are shown. Nothing is yielded if none recorded arrival times.
    """
    operations = [result for result in data.measured if result.is_communication]
    arrivals = {result.case.id: find_arrival(result) for result in operations}
    cases = data.cases.reindex(columns=[*data.cases.columns.union(["skew", "transfer"])])
    has_arrival = cases["case_id"].map(arrivals).notna()
    rows = list_rows(cases[has_arrival].nlargest(MAX_CASES, "skew").sort_index())
    if not rows:
        return
    clocks: dict[str, None] = {}
    for row in rows:
        arrival = arrivals[row["case_id"]]
        assert arrival is not None
        clocks[f"{arrival.method}, uncertainty {format_seconds(arrival.uncertainty)}"] = None
        row |= {"late_rank": arrival.late_rank, "late_share": arrival.share}
    yield Table(
        "arrivals-table",
        "Arrival skew and stragglers",
        caption=f"arrivals on one clock, the {len(rows)} operations with the largest skew",
        columns=_ARRIVAL_COLUMNS,
        rows=rows,
        terms=["late"],
        notes=[f"Clocks: {clock}." for clock in clocks],
    )
