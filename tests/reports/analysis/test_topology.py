"""Hosts, switches and the distribution of ranks on nodes."""

import pytest

from parbench.reports.analysis.topology import Topology


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
    topology = Topology(hosts=tuple(hosts), switches={})
    assert topology.distribution == distribution
