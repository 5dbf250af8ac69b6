"""Hosts, switches and the distribution of ranks on nodes."""

import pytest

from parbench.reports.analysis.topology import Topology, read_topology
from tests.support.reports.nodes_fixtures import sample_node_run


@pytest.mark.parametrize(
    ("hosts", "distribution"),
    [
        ("aabb", "block"),
        ("abab", "cyclic"),
        ("abba", "uneven"),
        ("abcd", "one rank per node"),
    ],
)
def test_distribution_is_derived_from_hosts(hosts: str, distribution: str) -> None:
    topology = Topology(hosts=tuple(hosts), switches={}, affinities={})
    assert topology.distribution == distribution


def test_topology_has_ranks_switches_and_cores() -> None:
    topology = read_topology(sample_node_run("cyclic"))
    assert topology is not None
    assert topology.nodes == ("n1", "n2", "n3", "n4")
    assert topology.get_ranks("n2") == (1, 5)
    assert topology.order_by_node(range(8)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert topology.requested_distribution == "cyclic"
    assert topology.switches["n2"] == "spine.leaf1"
    assert topology.affinities[1] == "1"


def test_distance_is_node_switch_or_beyond() -> None:
    topology = read_topology(sample_node_run("block"))
    assert topology is not None
    assert topology.get_distance(0, 1) == "within a node"
    assert topology.get_distance(0, 2) == "same switch"
    assert topology.get_distance(4, 0) == "other switch"
    without_switches = Topology(hosts=("a", "b"), switches={}, affinities={})
    assert without_switches.get_distance(0, 1) == "other node"
