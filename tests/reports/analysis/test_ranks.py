"""Where ranks ran: read from what a run tells, whatever of it is missing; hosts as a table, pairs node by node."""

import re
from typing import Any

import msgspec
import pytest

from parbench.bench.results.runs import Run
from parbench.reports.analysis.contrasts import Pairs, pairs
from parbench.reports.analysis.ranks import Nodes, nodes_of
from parbench.reports.analysis.summary import summarize
from parbench.reports.sections.nodes import distance_words, node_section, node_table, pair_tables
from tests.support.nodes_fixtures import (
    make_environment,
    make_hosts,
    make_node_run,
    make_rank_environment,
    pair_records,
    sample_node_run,
)
from tests.support.report_rows import analyze_run, column_texts
from tests.support.reports_fixtures import sample_run

PATHS = {"n1": "spine.leaf1.n1", "n2": "spine.leaf2.n2"}


def found(run: Run) -> Nodes:
    nodes = nodes_of(run)
    assert nodes is not None
    return nodes


def telling(environment: dict[str, Any] | None, own: dict[str, Any] | None = None) -> Run:
    run = make_node_run(pair_records(make_hosts(2, 2))[:1], make_hosts(2, 2))
    record = msgspec.structs.replace(run.records[0], environment=own or {})
    info = msgspec.structs.replace(run.info, environment=environment)
    return msgspec.structs.replace(run, info=info, records=(record,))


def told(own: dict[str, Any] | None = None, **environment: Any) -> Nodes:
    return found(telling(environment, own))


def test_placement_is_derived_from_hosts() -> None:
    placements = {
        "aabb": "block",
        "abab": "cyclic",
        "abcabc": "cyclic",
        "abba": "uneven",
        "aab": "block",
        "abcd": "one rank a node",
    }
    found = {
        hosts: Nodes(hosts=tuple(hosts), switches={}, affinities={}).placement
        for hosts in placements
    }
    assert found == placements


def test_nodes_have_ranks_switches_and_cores() -> None:
    nodes = found(sample_node_run("cyclic"))
    assert nodes.names == ("n1", "n2", "n3", "n4")
    assert nodes.ranks_on("n2") == (1, 5)
    assert nodes.ordered(range(8)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert (nodes.placement, nodes.asked, nodes.job) == ("cyclic", "cyclic", "17")
    assert nodes.switches == {
        "n1": "spine.leaf1",
        "n2": "spine.leaf1",
        "n3": "spine.leaf2",
        "n4": "spine.leaf2",
    }
    assert (nodes.affinities[0], nodes.affinities[1]) == ("0", "1")
    apart = told(**make_environment(["n1", "n3", "n2", "n4"]))
    assert apart.names == ("n1", "n2", "n3", "n4")  # under one switch side by side
    assert told(hosts=["a", "b"], process={"affinity": [0, 1, 2]}).affinities == {
        0: "0-2",
        1: "0-2",
    }
    bare = told(hosts=["a", "b"], slurm={"job": "1\x1b[31m", "placement": ["x"]})
    assert (bare.affinities, bare.job, bare.asked) == ({}, "1\\x1b[31m", "")


def test_hosts_may_come_from_each_rank() -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    assert told(make_rank_environment(hosts), torch={}).hosts == tuple(hosts)
    assert (
        nodes_of(telling({"torch": {}}, make_rank_environment(hosts[:3]))) is None
    )  # one rank's is unknown
    for environment in (None, {}, {"hosts": ["a"] * 4}, {"hosts": ["a", None, "b"]}):
        assert nodes_of(telling(environment)) is None, environment


def test_distance_is_node_switch_or_beyond() -> None:
    nodes = found(sample_node_run("block"))
    assert [nodes.distance(0, rank) for rank in (1, 2, 4)] == [
        "within a node",
        "same switch",
        "other switch",
    ]
    assert nodes.distance(4, 0) == "other switch"
    hosts = ["a", "a", "b", "c"]
    nodes = told(hosts=hosts, locality={"0-1": "same core", "0-2": "other node"})
    assert [nodes.distance(0, rank) for rank in (1, 2, 3)] == [
        "within a node",
        "other node",
        "other node",
    ]
    nodes = told(hosts=hosts, locality={"0-2": "same switch"})
    told_near = [nodes.distance(*ends) for ends in ((0, 2), (2, 0), (0, 3))]
    assert told_near == ["same switch", "same switch", "other switch"]
    assert nodes.near == {(0, 2)}


def test_switches_come_from_hosts_or_ranks() -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    above = {"n1": "spine.leaf1", "n2": "spine.leaf2"}
    assert told(hosts=hosts, switches=PATHS).switches == above
    assert told(hosts=hosts, slurm={"switches": [PATHS[host] for host in hosts]}).switches == above
    own = {
        f"rank {i}": {"variables": {"SLURM_TOPOLOGY_ADDR": PATHS[host]}}
        for i, host in enumerate(hosts)
    }
    assert told(own, hosts=hosts).switches == above
    assert (
        told(hosts=["n1", "n2"], switches={"n1": "n1", "n2": None}).switches == {}
    )  # only the node itself
    nodes = told(
        hosts=["n1", "n2"], switches=above
    )  # a path that ends with no node is the switch's own
    assert (nodes.switches, nodes.distance(0, 1)) == (above, "other switch")


def lines(nodes: Nodes) -> list[dict[str, str]]:
    table = node_table(nodes)
    return [column_texts(table.columns, row) for row in table.rows]


def placed(hosts: list[str], asked: str) -> str:
    return node_table(found(make_node_run(pair_records(hosts), hosts, asked))).notes[0]


def test_node_table_notes_the_placement() -> None:
    nodes = found(sample_node_run("cyclic"))
    line = {
        "host": "n2",
        "ranks": "1,5",
        "ranks a node": "2",
        "switches": "spine.leaf1",
        "cores": "1",
    }
    assert lines(nodes)[1] == line
    assert node_table(nodes).notes == (
        "Placement of 8 ranks on 4 nodes: cyclic.",
        "Slurm's job 17.",
    )
    assert (
        lines(found(sample_node_run("block")))[0]["cores"] == "rank 0: 0; rank 1: 1"
    )  # which they do not share
    cyclic = placed(make_hosts(2, 2, "cyclic"), "block")
    assert cyclic == "Placement of 4 ranks on 2 nodes: cyclic; block was asked for."
    assert node_section(analyze_run(sample_run())) is None


def both(run: Run) -> tuple[Pairs, Nodes]:
    (matrix,) = pairs(summarize(run).rows)
    return matrix, found(run)


def test_pair_matrix_is_ordered_by_node() -> None:
    # a pair's rate grows by 1 % with each receiving rank
    for placement, other, near, far in (
        ("block", "1", "3.75", "2 n2"),
        ("cyclic", "4", "3.85", "1 n2"),
    ):
        matrix, nodes = both(sample_node_run(placement))
        _, table = pair_tables(matrix, 1, nodes)
        columns = table.columns
        assert [column.title for column in columns[:3]] == ["from \\ to", "0 n1", f"{other} n1"]
        line = column_texts(columns, 0)
        assert (line["from \\ to"], line["0 n1"], line[f"{other} n1"]) == ("0 n1", "-", near)
        assert float(near) > 3 * float(line[far])
        assert [nodes.hosts[rank] for rank in table.rows] == make_hosts(4, 2)
    # fewer hosts than ranks: such a run is damaged, and is shown all the same
    short = Nodes(hosts=("n2", "n1"), switches={}, affinities={})
    _, table = pair_tables(matrix, 1, short)
    assert table.rows == (0, 1, 2, 3, 4, 5, 6, 7)
    assert "(2 pairs)" in distance_words(matrix, short)[0]
    assert table.columns[4].title == "3"


def test_distance_medians_start_with_the_nearest() -> None:
    medians, ratios = distance_words(*both(sample_node_run("cyclic")))
    told = re.findall(r"([a-z ]+) ([\d.]+) GB/s \((\d+) pairs\)", medians)
    assert [(where.strip(), pairs) for where, _, pairs in told] == [
        *(("within a node", "8"), ("same switch", "16"), ("other switch", "32"))
    ]
    near, _, far = (float(rate) for _, rate, _ in told)
    assert near == pytest.approx(3.84, rel=0.01)
    (times,) = re.findall(r"other switch runs at ([\d.]+) of within a node\.$", ratios)
    assert float(times) == pytest.approx(far / near, rel=0.01)
