"""Hosts as a table, the matrix node by node, and the medians of what is as far."""

import pytest
from nodes_fixtures import FAR_RATE, hosts_of, node_run, pair, pair_records, rates_of, run_of, world_of
from reports_fixtures import ok

from bench.runs import Run
from reports.contrasts import Pairs, pairs
from reports.nodes.node_columns import (
    distance_words,
    distances,
    matrix_columns,
    matrix_ranks,
    node_columns,
    node_notes,
    node_rows,
)
from reports.nodes.rank_hosts import Nodes, nodes_of
from reports.summary import summarize


def both(run: Run) -> tuple[Pairs, Nodes]:
    (matrix,) = pairs(summarize(run).rows)
    nodes = nodes_of(run)
    assert nodes is not None
    return matrix, nodes


def lines(nodes: Nodes) -> list[dict[str, str]]:
    return [{column.title: column.text(row) for column in node_columns()} for row in node_rows(nodes)]


def test_each_host_is_a_line() -> None:
    _, nodes = both(node_run("cyclic"))
    assert lines(nodes)[1] == {
        "host": "n2",
        "ranks": "1,5",
        "ranks a node": "2",
        "switches": "spine.leaf1",
        "cores": "1",
    }
    assert node_notes(nodes) == ("Placement of 8 ranks on 4 nodes: cyclic.", "Slurm's job 17.")


def test_cores_that_a_hosts_ranks_do_not_share_are_told_rank_by_rank() -> None:
    _, nodes = both(node_run("block"))
    assert lines(nodes)[0]["cores"] == "rank 0: 0; rank 1: 1"


def test_a_placement_that_is_not_the_one_asked_for_is_told() -> None:
    hosts = hosts_of(2, 2, "cyclic")
    _, nodes = both(run_of(pair_records(hosts), hosts, "block"))
    assert node_notes(nodes)[0] == "Placement of 4 ranks on 2 nodes: cyclic; block was asked for."
    _, single = both(run_of(pair_records(hosts_of(4, 1)), hosts_of(4, 1), "cyclic"))
    assert node_notes(single)[0] == "Placement of 4 ranks on 4 nodes: one rank a node."


@pytest.mark.parametrize("placement", ["block", "cyclic"])
def test_the_matrix_goes_node_by_node_with_hosts(placement: str) -> None:
    matrix, nodes = both(node_run(placement))
    columns = matrix_columns(matrix, nodes)
    first, other = ("0", "1") if placement == "block" else ("0", "4")
    assert [column.title for column in columns[:3]] == ["from \\ to", f"{first} n1", f"{other} n1"]
    line = {column.title: column.text(0) for column in columns}
    assert (line["from \\ to"], line["0 n1"]) == ("0 n1", "-")
    assert float(line[f"{other} n1"]) > 3 * float(line["2 n2" if placement == "block" else "1 n2"])
    assert [nodes.hosts[rank] for rank in matrix_ranks(matrix, nodes)] == hosts_of(4, 2)


def test_medians_are_by_distance_the_nearest_first() -> None:
    found = distances(*both(node_run("cyclic")))
    assert [(one.distance, one.num_pairs) for one in found] == [
        ("within a node", 8),
        ("same switch", 16),
        ("other switch", 32),
    ]
    told = distance_words(found)
    assert told[0].startswith("Medians: within a node 3.8")
    assert told[0].endswith("GB/s (32 pairs).")
    near, far = found[0].bytes_per_second, found[2].bytes_per_second
    assert told[1].endswith(f"other switch runs at {far / near:.3f} of within a node.")


def test_one_distance_has_nothing_to_be_held_against() -> None:
    hosts = ["n1", "n3"]
    records = [ok(pair(*ends), world=world_of(hosts), metrics=rates_of(1 << 20, FAR_RATE)) for ends in ((0, 1), (1, 0))]
    told = distance_words(distances(*both(run_of(records, hosts))))
    assert told == ("Medians: other switch 0.495 GB/s (2 pairs).",)
    assert distance_words(()) == ()


def test_a_rank_without_a_host_comes_last_and_counts_nowhere() -> None:
    """A run whose hosts are fewer than its ranks is damaged, and is shown all the same."""
    matrix, _ = both(node_run("block"))
    short = Nodes(hosts=("n1", "n2"), switches={}, affinities={})
    assert matrix_ranks(matrix, short) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert [one.num_pairs for one in distances(matrix, short)] == [2]
    assert matrix_columns(matrix, short)[4].title == "3"
