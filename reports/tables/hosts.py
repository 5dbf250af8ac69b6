"""The tables of a run's nodes, of its repetitions with host load, and of late ranks."""

from collections.abc import Sequence

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.formatting import UNKNOWN, format_seconds
from parbench.bench.results.tables import Column, Table, keep_known_columns, metric_column
from parbench.reports.analysis.repetitions import list_repetitions
from parbench.reports.analysis.stragglers import compute_arrival_delays, find_arrival
from parbench.reports.analysis.topology import ONE_RANK_PER_NODE, Topology
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import TIME_COLUMN

_NODE_COLUMNS = (
    Column("host", help="host name of the node"),
    Column("ranks", help="ranks on the node"),
    Column("num_ranks", "ranks per node", kind="count", help="number of ranks"),
    Column("switches", help="path of switches in Slurm's topology"),
    Column("cores", help="cores that a rank may use"),
)
_REPETITION_COLUMNS = (
    Column(
        "repetition",
        kind="count",
        help="number of the repetition, which restarts all ranks",
    ),
    Column(
        "seconds",
        "duration",
        kind="s",
        help="time since the end of the previous repetition, or since the start of the run",
    ),
    Column(
        "measuring",
        kind="percent",
        help="share of the duration in which cases were prepared, warmed up, timed and checked",
    ),
    Column(
        "one_minute",
        "load average",
        kind="number",
        help="1-minute load average before the repetition",
    ),
    Column(
        "other_cores",
        "other load",
        kind="number",
        help="cores that other processes kept busy",
    ),
    Column(
        "steal_percent",
        "steal %",
        kind="number",
        help="share of CPU time that the hypervisor gave to other machines",
    ),
    Column("cores", kind="count", help="cores of the host"),
)
MAX_CASES = 24
MAX_RANK_COLUMNS = 16
_ARRIVAL_COLUMNS = (
    Column("label", "case", help="operation or step"),
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
    Column(
        "last_rank",
        "last to finish",
        kind="count",
        help="rank that most often finishes last",
    ),
)


def list_node_tables(data: RunData) -> list[Table]:
    """Return the table of nodes with their ranks and cores as a list, empty for a single host."""
    topology = data.nodes
    if topology is None:
        return []
    rows = []
    for host in topology.nodes:
        ranks = topology.get_ranks(host)
        rows.append(
            {
                "host": host,
                "ranks": format_cpus(ranks),
                "num_ranks": len(ranks),
                "switches": topology.switches.get(host),
                "cores": _describe_affinities(topology, ranks),
            }
        )
    num_ranks = len(topology.hosts)
    note = f"Distribution of {num_ranks} ranks on {len(rows)} nodes: {topology.distribution}"
    requested = topology.requested_distribution
    if requested and topology.distribution not in (requested, ONE_RANK_PER_NODE):
        note += f" (requested: {requested})"
    notes = [f"{note}."]
    if topology.slurm_job:
        notes.append(f"Slurm job {topology.slurm_job}.")
    table = Table(
        "nodes-table",
        "Nodes",
        caption="where each rank ran, hosts under one switch next to each other",
        columns=_NODE_COLUMNS,
        rows=rows,
        notes=notes,
    )
    return [table]


def _describe_affinities(topology: Topology, ranks: Sequence[int]) -> str:
    """Return the CPU cores that each of these ranks may use, once if they are equal for all."""
    cores = [topology.affinities.get(rank, UNKNOWN) for rank in ranks]
    if len(set(cores)) == 1:
        return cores[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, cores, strict=True))


def list_repetition_tables(data: RunData) -> list[Table]:
    """Return the table of repetitions with their durations and the load of the host."""
    rows = list_repetitions(data.run)
    table = Table(
        "repetitions",
        "Repetitions",
        caption="duration of each repetition, and the load of its host while it measured",
        columns=keep_known_columns(_REPETITION_COLUMNS, rows),
        rows=rows,
    )
    return [table]


def list_arrival_tables(data: RunData) -> list[Table]:
    """Return the table of the cases with the largest arrival skew, with each rank's delay.

    The list is empty if no case recorded arrival times.
    """
    arrivals = {result.case.id: find_arrival(result) for result in data.measured}
    cases = data.cases.reindex(columns=[*data.cases.columns.union(["skew", "transfer"])])
    has_arrival = cases["case_id"].map(arrivals).notna()
    rows = list_rows(cases[has_arrival].nlargest(MAX_CASES, "skew").sort_index())
    if not rows:
        return []
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
        "Arrival skew and stragglers",
        caption=f"arrivals on one clock, the {len(rows)} cases with the largest skew",
        columns=[*_ARRIVAL_COLUMNS, *map(_make_delay_column, sorted(ranks)[:MAX_RANK_COLUMNS])],
        rows=rows,
        terms=["late"],
        notes=[f"Clocks: {clock}." for clock in clocks],
    )
    return [table]


def _make_delay_column(rank: int) -> Column:
    """Return the column of the median arrival delay of one rank after the first rank."""
    return Column(
        f"delay_{rank}",
        f"rank {rank}",
        kind="s",
        help=f"median delay of rank {rank}'s arrival relative to the first rank",
    )
