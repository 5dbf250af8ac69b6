"""What is held at once follows from the order of actions alone."""

import pytest

from workloads.pipeline.pp_held import peak_held
from workloads.pipeline.schedule_check import peak_in_flight
from workloads.pipeline.schedules import NAMES, make_schedule, schedule_from_csv


@pytest.mark.parametrize("name", NAMES)
def test_with_weights_of_one_it_is_the_count_in_flight(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    assert [peak_held(schedule, rank, lambda stage: 1) for rank in range(4)] == list(peak_in_flight(schedule))


def test_gpipe_holds_all_microbatches_and_1f1b_as_many_as_ranks_are_below() -> None:
    held = {
        name: [peak_held(make_schedule(name, ranks=4, microbatches=8), rank, lambda stage: 1) for rank in range(4)]
        for name in ("gpipe", "1f1b")
    }
    assert held == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1]}


def test_stages_weigh_what_they_are_said_to() -> None:
    schedule = schedule_from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    assert peak_held(schedule, 0, lambda stage: [1.0, 0, 10.0, 0][stage]) == 11.0
    assert peak_held(schedule, 1, lambda stage: [0, 2.0, 0, 0.5][stage]) == 2.5


def test_an_input_gradient_frees_nothing_and_a_weight_gradient_does() -> None:
    late = schedule_from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    assert [peak_held(late, rank, lambda stage: 1) for rank in range(2)] == [2, 1]
