"""The hosts of a run's ranks: the order of ranks, network switches, and distances between ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from parbench.bench.results.runs import Run

WITHIN_NODE = "within a node"
SAME_SWITCH = "same switch"
OTHER_SWITCH = "other switch"
OTHER_NODE = "other node"
DISTANCES = (WITHIN_NODE, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE)
"""The values of ``Topology.get_distance`` from near to far, as text.

``other node`` stands for two nodes of which a switch is unknown.
"""

BLOCK = "block"
CYCLIC = "cyclic"
ONE_RANK_PER_NODE = "one rank per node"
UNEVEN = "uneven"
"""This and the three constants before are the values of ``Topology.distribution``."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The hosts of all ranks of a run on several nodes, and the network switches above them."""

    hosts: tuple[str, ...]
    """The host name of each rank, indexed by rank."""
    switches: Mapping[str, str]
    """The path of switches above each host, such as ``spine.leaf1``, keyed by host.

    Hosts whose switches are unknown are left out.
    """

    @property
    def nodes(self) -> tuple[str, ...]:
        """The host names in the order of their first ranks. Hosts under one switch are adjacent."""
        hosts = list(dict.fromkeys(self.hosts))
        switches = [self.switches.get(host, "") for host in hosts]
        return tuple(sorted(hosts, key=lambda host: switches.index(self.switches.get(host, ""))))

    def get_host(self, rank: int) -> str:
        """Return the host name of a rank."""
        return self.hosts[rank]

    def get_ranks(self, host: str) -> tuple[int, ...]:
        """Return the ranks on a host in ascending order."""
        return tuple(rank for rank, name in enumerate(self.hosts) if name == host)

    def order_by_node(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return ``ranks`` sorted by node in the order of ``nodes``, then by rank."""
        return tuple(sorted(ranks, key=lambda rank: (self.nodes.index(self.get_host(rank)), rank)))

    @cached_property
    def distribution(self) -> str:
        """The actual distribution of ranks over nodes, derived from ``hosts``.

        ``block`` and ``cyclic`` as in Slurm, ``one rank per node``, or ``uneven`` for any other
        order.
        """
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
        """Return the distance of two ranks in the network.

        The values are ``within a node``, ``same switch``, ``other switch``, and ``other node`` if a
        switch is unknown.
        """
        host = self.get_host(rank)
        peer_host = self.get_host(peer)
        if host == peer_host:
            return WITHIN_NODE
        switch = self.switches.get(host)
        peer_switch = self.switches.get(peer_host)
        if not switch or not peer_switch:
            return OTHER_NODE
        return SAME_SWITCH if switch == peer_switch else OTHER_SWITCH


def read_topology(run: Run) -> Topology | None:
    """Return the hosts of a run's ranks, None if all ranks are on one host or hosts are unknown.

    The switches are read from Slurm's topology addresses, such as ``spine.leaf1.node7``, whose last
    part is the host itself.
    """
    environment = run.info.environment or {}
    hosts = tuple(environment.get("hosts") or ())
    if len(set(hosts)) < 2:
        return None
    addresses = environment.get("switches") or {}
    switches = {host: path.rpartition(".")[0] for host, path in addresses.items() if "." in path}
    return Topology(hosts=hosts, switches=switches)
