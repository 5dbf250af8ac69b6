"""The nodes of a job, and what can be asked of them."""

import re

import pytest

from bench.allocation import Allocation, choose_spread
from bench.errors import UserError
from bench.plan import Spread

FOUR = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}


def refusal(allocation: Allocation, nodes: int | None = None, each: int = 1, placement: str | None = None) -> str:
    with pytest.raises(UserError) as refused:
        choose_spread(allocation, nodes=nodes, ntasks_per_node=each, placement=placement)
    return str(refused.value)


def test_an_allocation_is_found_in_slurms_variables() -> None:
    found = Allocation.find({**FOUR, "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3"})
    assert found == Allocation(job="17", nodes=4, nodelist="n[1-4]", ntasks_per_node=2, cpus_per_task=3)


@pytest.mark.parametrize(
    ("text", "found"), [("2", 2), ("2(x4)", 2), ("2(x3),1", None), ("2,1", None), ("", None), ("two", None)]
)
def test_tasks_of_a_node_are_known_where_they_are_the_same_on_all(text: str, found: int | None) -> None:
    assert Allocation.find({**FOUR, "SLURM_NTASKS_PER_NODE": text}).ntasks_per_node == found


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"])
def test_outside_an_allocation_the_sentence_says_how_to_get_one(missing: str) -> None:
    with pytest.raises(UserError, match=re.escape("--launcher srun needs an allocation")) as refused:
        Allocation.find({name: value for name, value in FOUR.items() if name != missing})
    assert "salloc" in str(refused.value)
    assert "parbench slurm submit" in str(refused.value)


def test_all_nodes_in_blocks_unless_it_is_said_otherwise() -> None:
    allocation = Allocation.find(FOUR)
    assert choose_spread(allocation, nodes=None, ntasks_per_node=2, placement=None) == Spread(
        nodes=4, ntasks_per_node=2, placement="block"
    )
    chosen = choose_spread(allocation, nodes=2, ntasks_per_node=2, placement="cyclic")
    assert chosen == Spread(nodes=2, ntasks_per_node=2, placement="cyclic")
    assert chosen.ranks == 4


def test_what_the_allocation_cannot_hold_is_refused_with_numbers() -> None:
    allocation = Allocation.find(FOUR)
    assert refusal(allocation, nodes=8) == "--nodes 8: job 17 has 4 (n[1-4])"
    assert refusal(allocation, nodes=0) == "--nodes 0: at least 1 is needed"
    assert refusal(allocation, each=0) == "--ntasks-per-node 0: at least 1 is needed"
    assert "one node with one rank moves nothing" in refusal(allocation, nodes=1)


def test_a_placement_that_does_not_exist_is_refused_with_the_nearest() -> None:
    told = refusal(Allocation.find(FOUR), placement="cylic")
    assert "did you mean 'cyclic'" in told
    assert "block" in told
