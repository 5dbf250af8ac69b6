"""Each rank's order is torch's, where torch has one, and the papers' figures elsewhere."""

from collections import Counter
from itertools import product

import pytest
import torch_orders

from workloads.pipeline import orders
from workloads.pipeline.actions import Action
from workloads.pipeline.schedules import NAMES, make_schedule

SIZES = (2, 3, 4, 5, 8)


def written(actions: tuple[Action, ...]) -> str:
    """As the papers' figures: kind and microbatch, and a prime for the second chunk."""
    least = min(action.stage for action in actions)
    return " ".join(f"{action.kind}{action.microbatch}{chr(39) * (action.stage > least)}" for action in actions)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
@pytest.mark.parametrize("ranks", SIZES)
def test_looped_orders_are_those_of_torchs_classes_where_those_exist(name: str, ranks: int) -> None:
    compared = 0
    for microbatches, chunks in product(range(1, 18), (2, 3, 4)):
        try:
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        except ValueError:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_orders.order(name, ranks, microbatches, chunks)
            continue
        assert ours.order == torch_orders.order(name, ranks, microbatches, chunks), (microbatches, chunks)
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("ranks", SIZES)
def test_zb_v_is_torchs_with_few_microbatches_too(ranks: int) -> None:
    for microbatches in range(1, 3 * ranks):
        ours = make_schedule("zb_v", ranks=ranks, microbatches=microbatches)
        assert ours.order == torch_orders.order("zb_v", ranks, microbatches, 2), microbatches


@pytest.mark.parametrize("ranks", SIZES)
def test_dualpipe_v_is_torchs_with_overlapped_pairs_in_sequence(ranks: int) -> None:
    for microbatches in range(2 * ranks, 3 * ranks + 2):
        ours = make_schedule("dualpipe_v", ranks=ranks, microbatches=microbatches)
        assert ours.order == torch_orders.order("dualpipe_v", ranks, microbatches, 2), microbatches


@pytest.mark.parametrize("ranks", SIZES)
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank(ranks: int) -> None:
    ours = make_schedule("zb_h1", ranks=ranks, microbatches=2 * ranks)
    assert ours.order == torch_orders.order("interleaved_zb", ranks, 2 * ranks, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", SIZES)
def test_one_stage_orders_are_what_torchs_runtime_does(name: str, ranks: int) -> None:
    for microbatches in range(1, 2 * ranks + 2):
        ours = make_schedule(name, ranks=ranks, microbatches=microbatches)
        theirs = tuple(torch_orders.run(name, rank, ranks, microbatches) for rank in range(ranks))
        assert ours.order == theirs, microbatches


def test_gpipe_is_what_torch_prints() -> None:
    assert make_schedule("gpipe", ranks=4, microbatches=8).order == torch_orders.printed("gpipe", 4, 8)


def test_torchs_print_of_1f1b_is_wrong_on_the_last_rank_alone() -> None:
    """It begins there with microbatch 1 and ends with one that does not exist; this is why ours is not that print."""
    ours, printed = make_schedule("1f1b", ranks=4, microbatches=8).order, torch_orders.printed("1f1b", 4, 8)
    assert ours[:3] == printed[:3]
    assert [str(action) for action in printed[3][:2]] == ["3F1", "3B0"]
    assert Action(3, "F", 8) in printed[3]


def test_naive_takes_one_microbatch_after_the_other() -> None:
    assert written(orders.naive(1, 2)) == "F0 B0 F1 B1"


def test_1f1b_warms_up_with_a_forward_for_each_rank_behind() -> None:
    assert written(orders.one_f_one_b(0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert written(orders.one_f_one_b(2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_looped_bfs_goes_back_in_reverse() -> None:
    assert written(orders.looped_bfs(0, 2, 2, 2)) == "F0 F1 F0' F1' B1' B0' B1 B0"


def test_interleaved_takes_a_round_of_a_chunk_before_the_next() -> None:
    assert written(orders.interleaved(1, 2, 2, 2)) == "F0 F1 F0' B0' F1' B1' B0 B1"


def test_zb_h1_delays_weights_by_the_rank() -> None:
    """arXiv 2401.10241, figure 2: the first rank's follow at once, the last one's fill the end."""
    assert written(orders.interleaved_zb(0, 3, 3, 1)) == "F0 F1 F2 I0 W0 I1 W1 I2 W2"
    assert written(orders.interleaved_zb(2, 3, 3, 1)) == "F0 I0 F1 I1 F2 I2 W0 W1 W2"


def test_zb_h2_doubles_warm_up_and_delay() -> None:
    """arXiv 2401.10241, figure 3: 2P-1 forwards before the first backward of rank 0, as many held on the last."""
    assert written(orders.zb_h2(0, 2, 4)) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert written(orders.zb_h2(1, 2, 4)) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_zb_v_turns_at_the_last_rank() -> None:
    assert written(orders.zb_v(1, 2, 3)) == "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' I1 I2' I2 W1 W2' W2"


def test_dualpipe_v_ends_with_the_weights_it_owes() -> None:
    last = [action.kind for action in orders.dualpipe_v(1, 2, 4)][-4:]
    assert last == ["I", "I", "W", "W"]


@pytest.mark.parametrize(("ranks", "microbatches", "size"), [(4, 8, 4), (4, 10, 5), (4, 3, 3), (4, 7, 7), (2, 9, 2)])
def test_rounds_are_as_long_as_there_are_ranks_or_come_out_even(ranks: int, microbatches: int, size: int) -> None:
    assert orders.microbatches_per_round(ranks, microbatches) == size


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_is_whole_or_in_two_parts_and_every_microbatch_once(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    for rank in range(4):
        times = Counter((action.stage, action.kind) for action in schedule.actions_of(rank))
        for stage in schedule.stages_of(rank):
            assert times[stage, "F"] == 8
            assert times[stage, "B"] + times[stage, "I"] == 8
            assert times[stage, "I"] == times[stage, "W"]
