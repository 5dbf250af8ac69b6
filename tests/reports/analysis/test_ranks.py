"""Hosts, switches and distribution of ranks, repetitions with their load, and lateness of ranks."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.runs import LaunchInfo, Run, load_run
from parbench.bench.results.samples import samples_name
from parbench.reports.analysis.ranks import (
    Nodes,
    late_rows,
    launches_of,
    nodes_of,
)
from parbench.reports.analysis.summary import summarize
from tests.support.late import late_record, samples
from tests.support.nodes_fixtures import make_rank_environment, sample_node_run
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


def test_hosts_may_come_from_each_rank() -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    assert read_nodes({}, make_rank_environment(hosts)).hosts == tuple(hosts)


def test_run_with_an_unknown_host_has_no_nodes() -> None:
    environment = {"hosts": ["a", None, "b"]}
    run = run_from_records(ok_record(collective_case()), environment=environment)
    assert nodes_of(run) is None


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


CALM = HostLoad(cores=2, one_minute=0.5, other_cores=0.1, steal_percent=0.0)
BUSY = HostLoad(cores=2, one_minute=0.5, other_cores=1.6, steal_percent=0.0)


def run_with_launches(*launches: LaunchInfo) -> Run:
    """Return a run of three repetitions that each measured for 1.5 s."""
    records = [ok_record(collective_case(), launch, seconds=1.5) for launch in range(3)]
    run = run_from_records(*(replace(record, seconds=1.5) for record in records), launches=3)
    return replace(run, info=replace(run.info, launches=launches))


def test_restarted_ranks_belong_to_their_repetition() -> None:
    run = run_with_launches(
        LaunchInfo(launch=0, seconds=3.0),
        LaunchInfo(launch=1, seconds=2.0, load=CALM),
        LaunchInfo(launch=1, seconds=4.0, load=BUSY),
    )
    first, second = launches_of(run)
    assert first.seconds == 3.0
    assert first.measuring_seconds == 1.5
    assert first.load is None
    assert second.number == 2
    assert second.seconds == 6.0
    assert second.load == BUSY


def test_lateness_is_the_median_of_repetitions(tmp_path: Path) -> None:
    records = [late_record(launch=launch) for launch in range(3)]
    path = write_run(tmp_path, run_from_records(*records))
    for record, arrival_ns in zip(records, (1000, 2000, 9000), strict=True):
        arrivals_ns = [[0, 100, 0], [arrival_ns, 0, 10 * arrival_ns]]
        (path / samples_name(record)).write_bytes(samples(arrivals_ns, ranks=(2, 6)))
    run = load_run(path)
    (late,) = late_rows(run, summarize(run).rows)
    assert late.seconds_by_rank == pytest.approx({2: 0.0, 6: 2e-6})
