"""Where ranks ran: read from what a run tells, whatever of it is missing, and how near two ranks are."""

from typing import Any

import msgspec
import pytest
from nodes_fixtures import environment_of, hosts_of, node_run, operation, own_environment, run_of, world_of
from reports_fixtures import ok

from bench.runs import Run
from reports.nodes.rank_hosts import (
    BLOCK,
    CYCLIC,
    ONE_EACH,
    OTHER_NODE,
    OTHER_SWITCH,
    SAME_SWITCH,
    UNEVEN,
    WITHIN,
    Nodes,
    nodes_of,
    placement_of,
    ranks_words,
)


def found(run: Run) -> Nodes:
    nodes = nodes_of(run)
    assert nodes is not None
    return nodes


def told(environment: dict[str, Any] | None, own: dict[str, Any] | None = None, nproc: int = 4) -> Run:
    """Return a run whose environment is this, its records' that."""
    run = run_of([ok(operation(1024), world=world_of(hosts_of(2, 2)))], hosts_of(2, 2))
    record = msgspec.structs.replace(run.records[0], environment=own or {})
    plan = msgspec.structs.replace(run.info.plan, nproc=nproc)
    info = msgspec.structs.replace(run.info, plan=plan, environment=environment)
    return msgspec.structs.replace(run, info=info, records=(record,))


@pytest.mark.parametrize(
    ("hosts", "placement"),
    [("aabb", BLOCK), ("abab", CYCLIC), ("abcabc", CYCLIC), ("abba", UNEVEN), ("abcd", ONE_EACH), ("aab", BLOCK)],
)
def test_placement_is_what_is_found(hosts: str, placement: str) -> None:
    assert placement_of(list(hosts)) == placement


def test_hosts_have_their_ranks_switches_and_cores() -> None:
    nodes = found(node_run("cyclic"))
    assert nodes.names == ("n1", "n2", "n3", "n4")
    assert nodes.ranks_on("n2") == (1, 5)
    assert nodes.by_node == (0, 4, 1, 5, 2, 6, 3, 7)
    assert (nodes.placement, nodes.asked, nodes.job) == (CYCLIC, "cyclic", "17")
    assert nodes.switches == {"n1": "spine.leaf1", "n2": "spine.leaf1", "n3": "spine.leaf2", "n4": "spine.leaf2"}
    assert (nodes.affinities[0], nodes.affinities[1]) == ("0", "1")


def test_hosts_under_one_switch_stand_side_by_side() -> None:
    hosts = ["n1", "n3", "n2", "n4"]
    assert found(told(environment_of(hosts))).names == ("n1", "n2", "n3", "n4")


def test_distance_is_within_a_node_under_a_switch_or_beyond() -> None:
    nodes = found(node_run("block"))
    assert [nodes.distance(0, rank) for rank in (1, 2, 4)] == [WITHIN, SAME_SWITCH, OTHER_SWITCH]
    assert nodes.distance(4, 0) == OTHER_SWITCH


def test_without_switches_other_nodes_are_just_that() -> None:
    nodes = found(told({"hosts": ["a", "a", "b", "c"], "locality": {"0-1": "same core", "0-2": "other node"}}))
    assert [nodes.distance(0, rank) for rank in (1, 2, 3)] == [WITHIN, OTHER_NODE, OTHER_NODE]


def test_the_relation_of_ranks_tells_of_switches_too() -> None:
    locality = {"0-2": "same switch", "x": 1, "0-99": "same switch"}
    nodes = found(told({"hosts": ["a", "a", "b", "c"], "locality": locality}))
    assert [nodes.distance(*pair) for pair in ((0, 2), (2, 0), (0, 3))] == [SAME_SWITCH, SAME_SWITCH, OTHER_SWITCH]
    assert nodes.near == {(0, 2)}


def test_hosts_are_also_what_each_rank_calls_its_own() -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    assert found(told({"torch": {}}, own_environment(hosts))).hosts == tuple(hosts)
    assert nodes_of(told({"torch": {}}, own_environment(hosts[:3]))) is None  # one rank's is unknown


@pytest.mark.parametrize("environment", [None, {}, {"hosts": ["a"] * 4}, {"hosts": ["a", 7, "b"]}, {"hosts": "ab"}])
def test_one_host_or_an_unknown_one_is_no_several_nodes(environment: dict[str, Any] | None) -> None:
    assert nodes_of(told(environment)) is None


def test_switches_come_by_host_by_rank_or_from_the_ranks_themselves() -> None:
    hosts = ["n1", "n1", "n2", "n2"]
    paths = {"n1": "spine.leaf1.n1", "n2": "spine.leaf2.n2"}
    above = {"n1": "spine.leaf1", "n2": "spine.leaf2"}
    assert found(told({"hosts": hosts, "switches": paths})).switches == above
    assert found(told({"hosts": hosts, "slurm": {"switches": [paths[host] for host in hosts]}})).switches == above
    own = {f"rank {i}": {"variables": {"SLURM_TOPOLOGY_ADDR": paths[host]}} for i, host in enumerate(hosts)}
    assert found(told({"hosts": hosts}, own)).switches == above


def test_a_path_that_is_only_the_node_knows_of_no_switch() -> None:
    nodes = found(told({"hosts": ["n1", "n2"], "switches": {"n1": "n1", "n2": None}}))
    assert nodes.switches == {}


def test_a_path_that_does_not_end_with_the_node_is_the_switchs_own() -> None:
    nodes = found(told({"hosts": ["n1", "n2"], "switches": {"n1": "spine.leaf1", "n2": "spine.leaf2"}}))
    assert nodes.switches == {"n1": "spine.leaf1", "n2": "spine.leaf2"}
    assert nodes.distance(0, 1) == OTHER_SWITCH


def test_cores_that_all_share_are_everyones() -> None:
    nodes = found(told({"hosts": ["a", "b"], "process": {"affinity": [0, 1, 2]}}))
    assert nodes.affinities == {0: "0-2", 1: "0-2"}
    assert found(told({"hosts": ["a", "b"]})).affinities == {}


def test_what_slurm_is_said_to_tell_cannot_turn_a_page() -> None:
    nodes = found(told({"hosts": ["a", "b"], "slurm": {"job": "1\x1b[31m", "placement": ["x"]}}))
    assert (nodes.job, nodes.asked) == ("1\\x1b[31m", "")


def test_ranks_are_written_as_ranges() -> None:
    assert ranks_words((0, 1, 2, 8)) == "0-2,8"
