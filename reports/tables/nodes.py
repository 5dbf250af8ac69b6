"""The table of a run's nodes: their ranks, switches and cores."""

from collections.abc import Sequence

from parbench.bench.machine.environment import format_cpus
from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.results.tables import Column, Section, Table
from parbench.reports.analysis.topology import ONE_RANK_PER_NODE, Topology
from parbench.reports.run_data import RunData

COLUMNS = (
    Column("host", help="host name of the node"),
    Column("ranks", help="ranks on the node"),
    Column("num_ranks", "ranks per node", kind="count", help="number of ranks"),
    Column("switches", help="path of switches in Slurm's topology"),
    Column("cores", help="cores that a rank may use"),
)


def make_node_section(data: RunData) -> Section | None:
    """Return the nodes of a run, None if all ranks are on one host."""
    topology = data.nodes
    if topology is None:
        return None
    return Section("nodes", "Nodes", tables=[make_node_table(topology)])


def make_node_table(topology: Topology) -> Table:
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
    return Table(
        "nodes-table",
        "Nodes",
        caption="where each rank ran, hosts under one switch next to each other",
        columns=COLUMNS,
        rows=rows,
        notes=notes,
    )


def _describe_affinities(topology: Topology, ranks: Sequence[int]) -> str:
    cores = [topology.affinities.get(rank, UNKNOWN) for rank in ranks]
    if len(set(cores)) == 1:
        return cores[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, cores, strict=True))
