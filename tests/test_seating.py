"""Where ranks sit, as they tell, held against what was asked."""

from typing import Any

import pytest

from bench.locality import Place
from bench.messages import Hello
from bench.plan import Spread
from bench.seating import seating, seating_doubts

BLOCK = Spread(nodes=2, ntasks_per_node=2)
CYCLIC = Spread(nodes=2, ntasks_per_node=2, placement="cyclic")


def hello(rank: int, host: str, cpus: tuple[int, ...] = (0, 1), promised: str | None = None, **place: Any) -> Hello:
    variables = {} if promised is None else {"SLURM_CPUS_PER_TASK": promised}
    return Hello(
        rank=rank,
        size=4,
        host=host,
        pid=1,
        environment={"variables": variables},
        place=Place(host=host, cpus=cpus, numa_nodes=(0,), **place),
    )


def on(*hosts: str) -> list[Hello]:
    return [hello(rank, host) for rank, host in enumerate(hosts)]


def test_hosts_are_listed_by_rank_with_their_switch_paths() -> None:
    hellos = [hello(0, "n1", switches="s.l1.n1"), hello(1, "n2", switches="s.l1.n2"), hello(2, "n1")]
    assert seating(hellos) == {"hosts": ["n1", "n2", "n1"], "switches": {"n1": "s.l1.n1", "n2": "s.l1.n2"}}


def test_switches_are_left_out_where_slurm_tells_none() -> None:
    assert seating(on("n1", "n2")) == {"hosts": ["n1", "n2"]}


def test_one_host_is_no_news() -> None:
    assert seating(on("n1", "n1")) == {}


@pytest.mark.parametrize(("spread", "hosts"), [(BLOCK, "aabb"), (CYCLIC, "abab"), (BLOCK, "bbaa"), (CYCLIC, "baba")])
def test_ranks_that_sit_as_asked_raise_no_doubt(spread: Spread, hosts: str) -> None:
    assert seating_doubts(spread, on(*hosts)) == ()


@pytest.mark.parametrize(("spread", "hosts"), [(BLOCK, "abab"), (CYCLIC, "aabb"), (BLOCK, "abba"), (CYCLIC, "abba")])
def test_another_order_is_told(spread: Spread, hosts: str) -> None:
    (told,) = seating_doubts(spread, on(*hosts))
    assert told == f"placement {spread.placement} was asked for; ranks are on {', '.join(hosts)}"


@pytest.mark.parametrize(
    ("hosts", "found"), [("aaab", "3 on a, 1 on b"), ("aaaa", "4 on a"), ("aabc", "2 on a, 1 on b, 1 on c")]
)
def test_other_numbers_than_asked_are_told(hosts: str, found: str) -> None:
    (told,) = seating_doubts(BLOCK, on(*hosts))
    assert told == f"2 nodes with 2 ranks each were asked for; there are {found}"


def test_a_rank_with_fewer_cpus_than_promised_is_named() -> None:
    hellos = [
        hello(0, "a", (0, 1), "2"),
        hello(1, "a", (0,), "2"),
        hello(2, "b", (0, 1), "2"),
        hello(3, "b", (4, 5), "2"),
    ]
    assert seating_doubts(BLOCK, hellos) == ("rank 1 on a may use CPUs 0; SLURM_CPUS_PER_TASK is 2",)


def test_ranks_bound_to_one_core_are_counted_on_their_host_alone() -> None:
    hellos = [hello(0, "a", (3,)), hello(1, "a", (3,)), hello(2, "b", (3,)), hello(3, "b", (2,))]
    assert seating_doubts(BLOCK, hellos) == ("2 ranks share CPU 3 of a",)


def test_a_rank_that_knows_no_place_is_no_doubt() -> None:
    hellos = [Hello(rank=rank, size=4, host=host, pid=1, environment={}) for rank, host in enumerate("aabb")]
    assert seating_doubts(BLOCK, hellos) == ()
