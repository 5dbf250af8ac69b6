"""Hosts, switches and distribution of ranks, repetitions with their load, and lateness of ranks."""

from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.runs import load_run
from parbench.bench.results.samples import make_samples_path
from parbench.reports.analysis.ranks import (
    Nodes,
    late_rows,
    nodes_of,
)
from parbench.reports.analysis.summary import summarize
from tests.support.late import late_record, samples
from tests.support.nodes_fixtures import sample_node_run
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import collective_case, ok_record, write_run


def read_nodes(
    environment: dict[str, Any], rank_environment: dict[str, Any] | None = None
) -> Nodes:
    """Return the nodes of a run of four ranks with these environments."""
    record = ok_record(collective_case(), environment=rank_environment or {})
    nodes = nodes_of(run_from_records(record, environment=environment))
    assert nodes is not None
    return nodes


@pytest.mark.parametrize(
    ("hosts", "distribution"),
    [
        ("aabb", "block"),
        ("abab", "cyclic"),
        ("abba", "uneven"),
        ("abcd", "one rank a node"),
    ],
)
def test_placement_is_derived_from_hosts(hosts: str, distribution: str) -> None:
    assert read_nodes({"hosts": list(hosts)}).distribution == distribution


def test_nodes_have_ranks_switches_and_cores() -> None:
    nodes = nodes_of(sample_node_run("cyclic"))
    assert nodes is not None
    assert nodes.names == ("n1", "n2", "n3", "n4")
    assert nodes.ranks_on("n2") == (1, 5)
    assert nodes.ordered(range(8)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert nodes.asked == "cyclic"
    assert nodes.switches["n2"] == "spine.leaf1"
    assert nodes.affinities[1] == "1"


def test_distance_is_node_switch_or_beyond() -> None:
    nodes = nodes_of(sample_node_run("block"))
    assert nodes is not None
    assert nodes.distance(0, 1) == "within a node"
    assert nodes.distance(0, 2) == "same switch"
    assert nodes.distance(4, 0) == "other switch"


def test_switches_come_from_the_topology_of_slurm() -> None:
    paths = ["spine.leaf1.n1", "spine.leaf2.n2"]
    rank_environment = {}
    for rank, path in enumerate(paths):
        rank_environment[f"rank {rank}"] = {"variables": {"SLURM_TOPOLOGY_ADDR": path}}
    nodes = read_nodes({"hosts": ["n1", "n2"]}, rank_environment)
    assert nodes.switches == {"n1": "spine.leaf1", "n2": "spine.leaf2"}


def test_lateness_is_the_median_of_repetitions(tmp_path: Path) -> None:
    records = [late_record(repetition=repetition) for repetition in range(3)]
    path = write_run(tmp_path, run_from_records(*records))
    for record, arrival_ns in zip(records, (1000, 2000, 9000), strict=True):
        arrivals_ns = [[0, 100, 0], [arrival_ns, 0, 10 * arrival_ns]]
        (path / make_samples_path(record)).write_bytes(samples(arrivals_ns, ranks=(2, 6)))
    run = load_run(path)
    (late,) = late_rows(run, summarize(run).rows)
    assert late.seconds_by_rank == pytest.approx({2: 0.0, 6: 2e-6})
