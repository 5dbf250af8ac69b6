"""Where experts' ranks sit: digits and written-out ranks against the groups that the measured step makes."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_asks import ask

from workloads.hybrid.axes import DATA, coordinate_of, expert_copies, expert_groups
from workloads.planner.dry_run import dry_run
from workloads.planner.expert_places import expert_places, expert_shards
from workloads.planner.hardware import PRESETS
from workloads.planner.placement import Place

AXES = ("dp", "pp", "fsdp", "cp", "tp")


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, int]:
    """Return a mesh in any order of its axes, of 512 ranks at most, whose data ranks deal out experts."""
    mesh = {name: draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for name in draw(st.permutations(AXES))}
    while math.prod(mesh.values()) > 512:
        mesh[max(mesh, key=lambda name: mesh[name])] = 1
    ep = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    assume(math.prod(mesh[name] for name in DATA) % ep == 0)
    return {**mesh, "ep": ep}


def counted(groups: list[list[int]], gpus_per_node: int) -> Place:
    nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
    return Place(ranks=len(groups[0]), on_node=-(-len(groups[0]) // nodes))


def shards_and_copies(mesh: dict[str, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that share an expert, and those that hold the same part of it, written out one by one.

    Blocks of ``ep`` are numbered as (dp, fsdp, cp), of what ``ep`` leaves of fsdp and cp.
    """
    taken = math.gcd(mesh["ep"], mesh["cp"])
    cp, shards = mesh["cp"] // taken, mesh["fsdp"] // math.gcd(mesh["fsdp"], mesh["ep"] // taken)
    data = math.prod(mesh[name] for name in DATA)
    sharing: dict[tuple[int, ...], list[int]] = {}
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in range(data * mesh["pp"] * mesh["tp"]):
        at = coordinate_of(mesh, rank)
        block, place = divmod((at["dp"] * mesh["fsdp"] + at["fsdp"]) * mesh["cp"] + at["cp"], mesh["ep"])
        rest, sequence = divmod(block, cp)
        replica, shard = divmod(rest, shards)
        sharing.setdefault((at["pp"], place, replica, sequence, at["tp"]), []).append(rank)
        same.setdefault((at["pp"], place, shard), []).append(rank)
    return list(sharing.values()), list(same.values())


@given(mixtures(), st.sampled_from([1, 2, 4, 6, 8, 72]))
@settings(deadline=None, max_examples=400)
def test_experts_sit_as_their_ranks_do(mesh: dict[str, int], gpus_per_node: int) -> None:
    found = expert_places(mesh, gpus_per_node)
    shards, copies = shards_and_copies(mesh)
    assert found.dealt == counted(expert_groups(mesh), gpus_per_node)
    assert found.shards == counted(shards, gpus_per_node)
    assert found.copies == counted(copies, gpus_per_node)
    assert found.shards.ranks == expert_shards(mesh)


@given(mixtures())
@settings(deadline=None, max_examples=50)
def test_shards_of_copies_are_all_that_hold_an_expert(mesh: dict[str, int]) -> None:
    shards, copies = shards_and_copies(mesh)
    every = {frozenset(ranks) for ranks in expert_copies(mesh)}
    assert all(any(set(ranks) <= whole for whole in every) for ranks in (*shards, *copies))
    assert len(shards[0]) * len(copies[0]) == len(expert_copies(mesh)[0])


def test_experts_take_the_innermost_data_ranks_and_skip_the_others() -> None:
    assert expert_places({"dp": 4, "fsdp": 8, "tp": 2, "ep": 8}, 8).dealt == Place(ranks=8, on_node=4)
    assert expert_places({"dp": 4, "fsdp": 8, "ep": 8}, 8).dealt == Place(ranks=8, on_node=8)
    assert expert_places({"dp": 4, "fsdp": 4, "ep": 8}, 8).dealt == Place(ranks=8, on_node=8)


def test_experts_over_a_pipeline_leave_the_node() -> None:
    assert expert_places({"dp": 4, "pp": 8, "fsdp": 2, "ep": 8}, 8).dealt == Place(ranks=8, on_node=2)


def test_without_experts_nobody_shares() -> None:
    assert expert_places({"dp": 4, "fsdp": 8}, 8).dealt.ranks == 1


def test_experts_take_fsdp_before_dp_whichever_is_written_last() -> None:
    found = expert_places({"fsdp": 8, "dp": 8, "ep": 8}, 8)
    assert (found.dealt, found.shards, found.copies) == (
        Place(ranks=8, on_node=1),
        Place(ranks=1, on_node=1),
        Place(ranks=8, on_node=8),
    )


def test_blocks_that_break_across_axes_are_written_out() -> None:
    """Of cp = 3 a block of four takes one and a third: fsdp's next is on the other half of a node of 8."""
    mesh = {"fsdp": 4, "pp": 2, "cp": 3, "ep": 4}
    assert expert_groups(mesh)[0] == [0, 1, 2, 6]
    assert expert_places(mesh, 6).dealt == Place(ranks=4, on_node=2)


@pytest.mark.parametrize(
    ("mesh", "sequence", "hardware", "axis", "where"),
    [
        ("dp=8,ep=2", 1024, "h200", "edp", "inside a node"),
        ("fsdp=64,ep=8", 4096, "h100", "ep", "inside a node"),
    ],
)
def test_a_dry_run_says_where_experts_are(mesh: str, sequence: int, hardware: str, axis: str, where: str) -> None:
    from workloads.planner.catalog import model_of

    run = dry_run(ask(mesh, model_of("mixtral-8x7b", sequence)), PRESETS[hardware])
    assert next(found.where for found in run.time.axes if found.name == axis) == where


def test_shards_of_experts_that_are_a_node_apart_take_its_links() -> None:
    """Each rank of a node holds other experts, so that none of an expert's shards are neighbours."""
    from workloads.planner.calls import calls_of
    from workloads.planner.stage_parts import parts_of

    step = ask("fsdp=64,ep=8", "mixtral-8x7b")
    calls = calls_of(step, parts_of(step)[0], 8)
    places = {call.place for call in calls if call.axis == "fsdp"}
    assert places == {Place(ranks=64, on_node=8), Place(ranks=8, on_node=1)}
