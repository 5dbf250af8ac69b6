"""What a rank of a pipeline holds: in flight as the orders themselves hold it, parameters as the measured steps do."""

import pytest
from planner_asks import ask

from workloads.hybrid.hybrid_costs import state_elements
from workloads.pipeline.pp_held import peak_held
from workloads.pipeline.schedules import NAMES, make_schedule
from workloads.planner.ask import refusal
from workloads.planner.catalog import model_of, num_model_parameters
from workloads.planner.expert_places import expert_shards
from workloads.planner.stage_parts import (
    elements_of,
    in_flight,
    parts_of,
    sends_of,
    stages_of,
    summed_elements,
)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_in_flight_is_what_the_order_of_actions_holds(schedule: str, ranks: int, microbatches: int) -> None:
    order = make_schedule(schedule, ranks=ranks, microbatches=microbatches)
    for rank in range(ranks):
        held = peak_held(order, rank, lambda stage: 1 / order.chunks)
        found = in_flight(schedule, rank=rank, ranks=ranks, microbatches=microbatches, chunks=order.chunks)
        assert found == pytest.approx(held), rank


def test_no_more_is_in_flight_than_there_are_microbatches() -> None:
    assert in_flight("1f1b", rank=0, ranks=8, microbatches=3, chunks=1) == 3
    assert in_flight("1f1b", rank=0, ranks=1, microbatches=3, chunks=1) == 1


def test_the_ranks_that_differ_are_first_middle_and_last() -> None:
    parts = parts_of(ask("pp=4", microbatches=8))
    assert [(part.pp_rank, part.embedding, part.head) for part in parts] == [
        (0, True, False),
        (1, False, False),
        (3, False, True),
    ]
    assert [part.in_flight for part in parts] == [4, 3, 1]


def test_without_a_pipeline_one_rank_holds_all() -> None:
    [part] = parts_of(ask("dp=4"))
    assert (part.layers, part.embedding, part.head, part.in_flight) == (8, True, True, 1)
    assert part.words == "pp rank 0: 8 layers with embedding and head"


def test_two_ranks_are_both_ends() -> None:
    assert [part.words for part in parts_of(ask("pp=2", microbatches=4))] == [
        "pp rank 0: 4 layers with embedding",
        "pp rank 1: 4 layers with head",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "looped_bfs", "zb_v"])
def test_stages_are_those_of_the_schedule(schedule: str) -> None:
    step = ask("pp=4", schedule=schedule, microbatches=8)
    order = make_schedule(schedule, ranks=4, microbatches=8)
    assert [stages_of(step, rank) for rank in range(4)] == [order.stages_of(rank) for rank in range(4)]


def test_a_fold_keeps_one_boundary_to_itself() -> None:
    first, middle, last = parts_of(ask("pp=4", schedule="zb_v", microbatches=8))
    step = ask("pp=4", schedule="zb_v", microbatches=8)
    assert (sends_of(step, first), sends_of(step, middle), sends_of(step, last)) == (2, 4, 2)
    assert first.embedding
    assert first.head


def test_in_turn_every_boundary_is_another_ranks() -> None:
    step = ask("pp=4", schedule="interleaved", microbatches=8)
    assert [sends_of(step, part) for part in parts_of(step)] == [3, 4, 3]


MESHES = ("dp=2,fsdp=2,tp=2", "dp=2,pp=2,tp=2", "fsdp=2,pp=2,cp=2", "pp=4,tp=2", "fsdp=8")


@pytest.mark.parametrize("model", ["small", "small-llama"])
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_are_those_that_the_measured_step_holds(model: str, mesh: str) -> None:
    step = ask(mesh, model, microbatches=4, sharded_vocabulary=False)
    assert refusal(step) is None
    for part in parts_of(step):
        theirs = state_elements(step.model.shape, step.mesh, {"pp": part.pp_rank}).total
        assert elements_of(step, part)[0] / step.fsdp == pytest.approx(theirs)


@pytest.mark.parametrize("model", ["llama3-70b", "gpt-175b", "mixtral-8x7b"])
def test_all_stages_together_hold_the_model_once(model: str) -> None:
    step = ask("pp=4", model, microbatches=8)
    first, middle, last = (sum(elements_of(step, part)) for part in parts_of(step))
    assert first + 2 * middle + last == num_model_parameters(model_of(model))


def test_a_split_vocabulary_takes_its_part_of_the_ends() -> None:
    whole, split = (ask("tp=4", "llama3-8b", sharded_vocabulary=sharded) for sharded in (False, True))
    [part] = parts_of(whole)
    ends = 2 * 128256 * 4096
    assert elements_of(whole, part)[0] - elements_of(split, part)[0] == pytest.approx(ends * 3 / 4)


def test_what_tensor_ranks_must_sum_are_norms_and_whole_ends() -> None:
    step = ask("tp=2", "llama3-8b")
    [part] = parts_of(step)
    norms = (2 * 32 + 1) * 4096
    assert summed_elements(step, part) == norms
    assert summed_elements(ask("tp=2", "llama3-8b", sharded_vocabulary=False), part) == norms + 2 * 128256 * 4096


@pytest.mark.parametrize(
    ("mesh", "shards"),
    [("fsdp=8", 8), ("fsdp=8,ep=8", 1), ("fsdp=8,ep=2", 4), ("dp=2,fsdp=4,ep=8", 1), ("fsdp=8,cp=2,ep=4", 4)],
)
def test_experts_are_sharded_by_what_their_axis_leaves(mesh: str, shards: int) -> None:
    assert expert_shards(ask(mesh, "mixtral-8x7b").mesh) == shards


def test_experts_are_dealt_out() -> None:
    [part] = parts_of(ask("fsdp=8", "mixtral-8x7b"))
    all_of_them = elements_of(ask("fsdp=8", "mixtral-8x7b"), part)[1]
    assert elements_of(ask("fsdp=8,ep=4", "mixtral-8x7b"), part)[1] == all_of_them / 4
