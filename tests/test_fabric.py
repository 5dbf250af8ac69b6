"""The links of a cluster on one machine carry what they are said to carry, both ways, node by node."""

import re
import sys

import pytest
from clusters import in_cluster, tool

from slurm.fabric import port

pytestmark = [pytest.mark.slow, pytest.mark.measures]


def bits_per_second(sender: str, receiver: str, **cluster: object) -> float:
    """Return the rate of a plain TCP stream between two nodes of a cluster of two nodes, or as many as ``nodes``."""
    done = in_cluster(tool("between", sender, receiver), **{"nodes": 2, **cluster})  # type: ignore[arg-type]  # forwarded
    assert done.returncode == 0, done.stderr
    found = re.search(r"^bits per second (\S+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1])


def test_an_unshaped_link_is_as_fast_as_the_machine() -> None:
    assert bits_per_second("n1", "n2") > 1e9


def test_a_shaped_link_has_its_rate() -> None:
    assert 0.8e8 <= bits_per_second("n1", "n2", link="100mbit") <= 1.05e8


@pytest.mark.parametrize(("sender", "receiver"), [("n1", "n3"), ("n3", "n1")])
def test_a_slow_node_is_slow_both_ways(sender: str, receiver: str) -> None:
    rate = bits_per_second(sender, receiver, nodes=3, link="200mbit", slow=["n3:50mbit"])
    assert 0.8 * 50e6 <= rate <= 1.05 * 50e6


def test_a_slow_node_leaves_the_others_alone() -> None:
    rate = bits_per_second("n1", "n2", nodes=3, link="200mbit", slow=["n3:50mbit"])
    assert 0.8 * 200e6 <= rate <= 1.05 * 200e6


def test_a_node_has_a_port_of_its_own() -> None:
    assert len({port(f"n{number}") for number in range(1, 201)} | {port("ctl")}) == 201
    assert max(len(port(name)) for name in ("n200", "ctl")) < 16  # what Linux allows for an interface


@pytest.mark.parametrize("change", ["cut(ghost)", "shape(ghost, '1mbit')"])
def test_a_link_that_is_not_there_is_an_error_in_words(change: str) -> None:
    script = f"from slurm.fabric import Node, cut, shape; ghost = Node(name='ghost', pid=1); {change}"
    done = in_cluster([sys.executable, "-c", script], nodes=1)
    assert done.returncode == 1
    assert re.search(r'FabricError: tc: .*"vghost"', done.stderr.splitlines()[-1])
