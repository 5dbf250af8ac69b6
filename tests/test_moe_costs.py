"""Bytes of an expert axis, by hand: what leaves each rank, there and back, by variant."""

import pytest

from workloads.experts.moe_costs import Moved, Sent, Sizes, dedup_ratio, even_dispatch_bytes, sent_by

# rank 0 keeps 3 pairs and sends 5; rank 1 sends 1 and keeps 7; two of rank 0's pairs are of one token
MOVED = Moved(pairs=[[3, 5], [1, 7]], rows=[[3, 4], [1, 5]])
SIZES = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3, slots=2)
ROW = 10 * 4
VARIANTS = ["all_to_all", "padded", "allgather", "dedup"]


def sent(variant: str, rank: int = 0, moved: Moved = MOVED, sizes: Sizes = SIZES) -> Sent:
    return sent_by(variant, rank, moved, sizes)


def test_each_pair_travels_alone_and_its_counts_before_it() -> None:
    assert sent("all_to_all") == Sent(
        dispatch=5 * ROW, combine=1 * ROW, dispatch_backward=1 * ROW, combine_backward=5 * ROW, told=3 * 8
    )
    assert sent("all_to_all", 1).dispatch == 1 * ROW
    assert sent("all_to_all", 1).combine == 5 * ROW


def test_counts_are_told_for_each_chunk() -> None:
    sizes = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3, chunks=4)
    assert sent("all_to_all", sizes=sizes).told == 4 * 3 * 8


def test_slots_travel_full_or_empty() -> None:
    slots = 3 * 2 * ROW
    assert sent("padded") == Sent(
        dispatch=slots, combine=slots, dispatch_backward=slots, combine_backward=slots, told=0
    )


def test_all_tokens_are_gathered_with_their_weights_and_routes() -> None:
    found = sent("allgather")
    assert (found.dispatch, found.combine) == (4 * ROW, 4 * ROW)
    assert found.told == 4 * 2 * 4
    assert found.weights == found.weights_backward == 4 * 2 * 4


def test_a_token_travels_once_to_each_rank() -> None:
    found = sent("dedup")
    assert (found.dispatch, found.combine) == (4 * ROW, 1 * ROW)
    assert found.told == 8 + 4 * 2 * 4
    assert (found.weights, found.weights_backward) == (4 * 2 * 4, 1 * 2 * 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_go_the_other_way(variant: str) -> None:
    for rank in (0, 1):
        found = sent(variant, rank)
        assert (found.dispatch_backward, found.combine_backward) == (found.combine, found.dispatch)
        assert found.forward == found.dispatch + found.combine + found.told + found.weights
        assert found.backward == found.dispatch + found.combine + found.weights_backward


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_one_rank_sends_another_gets(variant: str) -> None:
    both = [sent(variant, rank) for rank in (0, 1)]
    assert sum(one.dispatch for one in both) == sum(one.dispatch_backward for one in both)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rank_alone_sends_nothing(variant: str) -> None:
    found = sent(variant, moved=Moved(pairs=[[8]], rows=[[4]]))
    assert found.forward == found.backward == 0


def test_an_unknown_variant_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"variant\(ring\) is none of all_to_all, padded, allgather, dedup"):
        sent("ring")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_even_pairs_are_the_textbooks_dispatch(ranks: int) -> None:
    tokens, top_k = 64, 2
    each = tokens * top_k // ranks
    moved = Moved(pairs=[[each] * ranks] * ranks, rows=[[each] * ranks] * ranks)
    even = even_dispatch_bytes(tokens, top_k, 10, 4, ranks)
    assert even == tokens * top_k * ROW * (ranks - 1) / ranks
    assert sent("all_to_all", moved=moved).dispatch == even


def test_the_ratio_counts_only_what_leaves_ranks() -> None:
    assert dedup_ratio(MOVED) == 5 / 6
    assert dedup_ratio(Moved(pairs=[[3, 0], [0, 7]], rows=[[3, 0], [0, 5]])) is None
