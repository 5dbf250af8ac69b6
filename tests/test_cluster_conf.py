"""What a cluster on one machine is: read from words, refused in a sentence, written as SLURM reads it."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from slurm.cluster_conf import (
    ClusterSpec,
    address,
    checked_rate,
    cluster_spec,
    emulated,
    hosts,
    parse_delay,
    slurm_conf,
    topology_conf,
)

FOLDER = Path("/tmp/parbench-x")


def settings(text: str) -> dict[str, str]:
    """Return the lines of a configuration that set one name each."""
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "PartitionName"))]
    return dict(line.split("=", 1) for line in lines)


def test_words_make_a_cluster() -> None:
    spec = cluster_spec(nodes=4, cpus=3, link="200mbit", delay="500us", slow=("n3:50mbit",))
    assert spec == ClusterSpec(nodes=4, cpus=3, link="200mbit", delay="500us", slow=(("n3", "50mbit"),))
    assert spec.names == ("n1", "n2", "n3", "n4")
    assert spec.delay_seconds == pytest.approx(500e-6)


def test_a_slow_node_has_its_own_rate_and_the_others_the_link_s() -> None:
    spec = cluster_spec(nodes=3, cpus=2, link="1gbit", slow=("n2:50mbit",))
    assert [spec.rate(name) for name in spec.names] == ["1gbit", "50mbit", "1gbit"]
    alone = cluster_spec(nodes=2, cpus=2, slow=("n1:10mbit",))
    assert [alone.rate(name) for name in alone.names] == ["10mbit", ""]


def test_without_words_links_are_left_alone() -> None:
    spec = cluster_spec(nodes=2, cpus=2)
    assert (spec.link, spec.delay, spec.slow, spec.delay_seconds) == ("", "", (), 0.0)


@pytest.mark.parametrize("text", ["100kbit", "200mbit", "1gbit", "100gbit"])
def test_a_rate_is_a_whole_number_of_kbit_mbit_or_gbit(text: str) -> None:
    assert checked_rate(text, "--link") == text


@pytest.mark.parametrize(
    "text", ["", "200", "200m", "200Mbit", "1.5gbit", "0mbit", "99kbit", "101gbit", "-1mbit", "٣mbit", "1mbit burst 1"]
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=rf"^--link {re.escape(repr(text))} is no rate.*such as 200mbit$"):
        cluster_spec(nodes=4, cpus=2, link=text)


@pytest.mark.parametrize(("text", "seconds"), [("500us", 500e-6), ("2ms", 2e-3), ("0.5ms", 5e-4), ("1000ms", 1.0)])
def test_a_delay_is_a_number_of_us_or_ms(text: str, seconds: float) -> None:
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "500", "0us", "1s", "1001ms", "-1ms", "1e3us", "500 us"])
def test_what_is_no_delay_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=rf"^--delay {re.escape(repr(text))} is no delay.*such as 500us$"):
        cluster_spec(nodes=4, cpus=2, delay=text)


@pytest.mark.parametrize(
    ("slow", "sentence"),
    [
        (("n3",), "--slow 'n3' is not understood: write NODE:RATE, such as n3:50mbit"),
        (("n5:50mbit",), "--slow 'n5:50mbit': 'n5' is none of the nodes n1 to n4"),
        (("n0:50mbit",), "--slow 'n0:50mbit': 'n0' is none of the nodes n1 to n4"),
        (("n3:fast",), "--slow 'fast' is no rate"),
        (("n3:1mbit", "n2:1mbit", "n3:2mbit"), "--slow names n3 more than once; a node has one link"),
    ],
)
def test_a_slow_node_that_cannot_be_is_refused(slow: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        cluster_spec(nodes=4, cpus=2, slow=slow)


@given(st.integers(1, 200))
def test_every_host_has_an_address_of_its_own(nodes: int) -> None:
    spec = ClusterSpec(nodes=nodes)
    found = [address(name) for name in ("ctl", *spec.names)]
    assert len(set(found)) == nodes + 1
    assert all(int(part) < 255 for text in found for part in text.split("."))


def test_hosts_gives_every_name_the_address_that_others_reach() -> None:
    assert hosts(ClusterSpec(nodes=2)) == "127.0.0.1 localhost\n10.77.0.254 ctl\n10.77.0.1 n1\n10.77.0.2 n2\n"


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [(1, ["n1"]), (3, ["n[1-3]"]), (4, ["n[1-2]", "n[3-4]"]), (5, ["n[1-2]", "n[3-5]"])],
)
def test_two_leaves_share_four_nodes_and_more(nodes: int, leaves: list[str]) -> None:
    text = topology_conf(ClusterSpec(nodes=nodes))
    assert re.findall(r"^SwitchName=leaf\d Nodes=(\S+)$", text, re.MULTILINE) == leaves
    assert ("SwitchName=spine Switches=leaf[1-2]" in text) == (len(leaves) == 2)


def test_nodes_claim_the_cpus_that_were_asked_for() -> None:
    text = slurm_conf(ClusterSpec(nodes=2, cpus=7), FOLDER, "me")
    nodes = [dict(word.split("=") for word in line.split()) for line in text.splitlines() if line.startswith("NodeN")]
    assert [(node["NodeName"], node["NodeAddr"]) for node in nodes] == [("n1", "10.77.0.1"), ("n2", "10.77.0.2")]
    assert {(node["CPUs"], node["CoresPerSocket"], node["ThreadsPerCore"]) for node in nodes} == {("7", "7", "1")}
    assert settings(text)["SlurmdParameters"] == "config_overrides"


def test_all_that_slurm_writes_is_in_the_folder() -> None:
    found = settings(slurm_conf(ClusterSpec(nodes=2), FOLDER, "me"))
    paths = {name: value for name, value in found.items() if "/" in value and not name.endswith(("Type", "Plugin"))}
    assert {name for name, value in paths.items() if str(FOLDER) not in value} == {"MailProg"}
    assert {"StateSaveLocation", "SlurmdSpoolDir", "SlurmctldLogFile", "JobCompLoc", "AuthInfo"} <= paths.keys()


def test_slurm_is_set_for_rehearsals() -> None:
    text = slurm_conf(ClusterSpec(nodes=2), FOLDER, "me")
    found = settings(text)
    wanted = {"KillWait": "2", "SlurmdTimeout": "15", "ReturnToService": "2", "JobRequeue": "1", "SlurmUser": "me"}
    wanted |= {"SelectType": "select/cons_tres", "TopologyPlugin": "topology/tree", "JobCompType": "jobcomp/filetxt"}
    assert wanted.items() <= found.items()
    assert "PartitionName=lab Nodes=ALL Default=YES MaxTime=60 " in text


def test_the_words_that_mark_records_say_what_stands_in_for_what() -> None:
    spec = cluster_spec(nodes=4, cpus=2, link="200mbit", delay="500us")
    assert emulated(spec, 2) == "4 nodes on one machine of 2 cores, links of 200mbit, delay 500us"
    assert emulated(ClusterSpec(nodes=1), 1) == "1 node on one machine of 1 core"
    slow = cluster_spec(nodes=2, cpus=2, link="1gbit", slow=("n2:50mbit",))
    assert emulated(slow, 8) == "2 nodes on one machine of 8 cores, links of 1gbit, n2 of 50mbit"
