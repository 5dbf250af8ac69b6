"""The hosts of a run's ranks: their order, the switches above them, and how far ranks are apart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.runs import Run

WITHIN_NODE = "within a node"
SAME_SWITCH = "same switch"
OTHER_SWITCH = "other switch"
OTHER_NODE = "other node"
DISTANCES = (WITHIN_NODE, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE)
"""From near to far. Nodes whose switches are unknown are at the last one."""

BLOCK = "block"
CYCLIC = "cyclic"
ONE_RANK_PER_NODE = "one rank per node"
UNEVEN = "uneven"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The hosts of a run on several nodes, indexed by rank."""

    hosts: tuple[str, ...]
    requested_distribution: str = ""
    """The distribution of the request to Slurm, empty if there was none."""
    slurm_job: str = ""
    switches: Mapping[str, str]
    """The path of switches above each host, such as ``spine.leaf1``, where it is known."""
    affinities: Mapping[int, str]
    """The cores that a rank may use, such as ``0-3``, where they are known."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The hosts in the order of their first ranks. Hosts of one switch follow each other."""
        hosts = list(dict.fromkeys(self.hosts))
        switches = [self.switches.get(host, "") for host in hosts]
        return tuple(sorted(hosts, key=lambda host: switches.index(self.switches.get(host, ""))))

    def get_host(self, rank: int) -> str:
        """Return the host of a rank, empty for a rank that the run does not have."""
        return self.hosts[rank] if rank < len(self.hosts) else ""

    def get_ranks(self, host: str) -> tuple[int, ...]:
        """Return the ranks on a host."""
        return tuple(rank for rank, name in enumerate(self.hosts) if name == host)

    def order_by_node(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks grouped by node, with ranks without a host last."""
        by_node = [rank for host in self.nodes for rank in self.get_ranks(host)]
        unknown = [rank for rank in ranks if rank not in by_node]
        return (*(rank for rank in by_node if rank in ranks), *unknown)

    @cached_property
    def distribution(self) -> str:
        """The actual distribution of ranks on nodes, in Slurm's words where it has some."""
        counts = Counter(self.hosts)
        nodes = list(counts)
        sizes = set(counts.values())
        if sizes == {1}:
            return ONE_RANK_PER_NODE
        round_robin = tuple(nodes[rank % len(nodes)] for rank in range(len(self.hosts)))
        if len(sizes) == 1 and self.hosts == round_robin:
            return CYCLIC
        return BLOCK if self.hosts == tuple(counts.elements()) else UNEVEN

    def get_distance(self, rank: int, peer: int) -> str:
        """Return the distance of two ranks, one of DISTANCES."""
        host = self.get_host(rank)
        peer_host = self.get_host(peer)
        if host and host == peer_host:
            return WITHIN_NODE
        switch = self.switches.get(host)
        peer_switch = self.switches.get(peer_host)
        if not switch or not peer_switch:
            return OTHER_NODE
        return SAME_SWITCH if switch == peer_switch else OTHER_SWITCH


def read_topology(run: Run) -> Topology | None:
    """Return the hosts of a run's ranks, None if all are on one host or they are unknown."""
    environment = run.info.environment or {}
    hosts = tuple(environment.get("hosts") or ())
    if len(set(hosts)) < 2:
        return None
    return Topology(
        hosts=hosts,
        requested_distribution=_read_text(environment, "slurm", "distribution"),
        slurm_job=_read_text(environment, "slurm", "job"),
        switches=_read_switches(environment.get("switches") or {}),
        affinities=_read_affinities(run, len(hosts)),
    )


def _read_switches(paths: Mapping[str, str]) -> dict[str, str]:
    """Return the switches above each host. The last part of Slurm's path is the host itself."""
    return {host: path.rpartition(".")[0] for host, path in paths.items() if "." in path}


def _read_affinities(run: Run, num_ranks: int) -> dict[int, str]:
    """Return the cores of each rank. Values that differ between ranks are in the records."""
    environments = [run.info.environment or {}, *(record.environment for record in run.records)]
    affinities: dict[int, str] = {}
    for rank in range(num_ranks):
        for environment in environments:
            own = environment.get(f"rank {rank}", environment)
            cores = _read_text(own, "process", "affinity")
            if cores:
                affinities.setdefault(rank, cores)
    return affinities


def _read_text(values: Mapping[str, Any], *path: str) -> str:
    """Return the text or number at a path of nested mappings, empty if there is none."""
    value: Any = values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return to_single_line(str(value)) if isinstance(value, str | int) else ""
