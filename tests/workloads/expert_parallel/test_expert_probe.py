"""Loads, drops and bytes of an expert axis, by hand: what leaves each rank, there and back, by variant."""

from collections.abc import Sequence

import pytest
import torch

from parbench.workloads.expert_parallel.expert_probe import (
    Moved,
    Routed,
    Sent,
    Sizes,
    dedup_ratio,
    expert_loads,
    load_metrics,
    loads_of_ranks,
    merged,
    moved_in,
    sent_by,
    sent_in_step,
)

# rank 0 keeps 3 pairs and sends 5; rank 1 sends 1 and keeps 7; two of rank 0's pairs are of one token
MOVED = Moved(pairs=[[3, 5], [1, 7]], rows=[[3, 4], [1, 5]])
SIZES = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3, slots=2)
ROW = 10 * 4
VARIANTS = ["all_to_all", "padded", "allgather", "dedup"]
# four experts; two ranks, or four in two copies; two layers of two microbatches
CALM = ((2, 2, 2, 2), (2, 2, 2, 2), (3, 4))
HOT = ((6, 2, 0, 0), (4, 2, 0, 0), (4, 0))
Flight = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def routed(*layers: Sequence[Flight]) -> Routed:
    """Return asked, kept and rows of layers of microbatches."""
    each = [[[flight[i] for flight in layer] for layer in layers] for i in range(3)]
    return Routed(*(torch.tensor(of) for of in each))


TWO = [routed([CALM, HOT], [CALM, CALM]), routed([HOT, HOT], [CALM, CALM])]


def sent(variant: str, rank: int = 0, moved: Moved = MOVED, sizes: Sizes = SIZES) -> Sent:
    return sent_by(variant, rank, moved, sizes)


def test_each_pair_travels_alone_and_its_counts_before_it_for_each_chunk() -> None:
    assert sent("all_to_all") == Sent(dispatch=5 * ROW, combine=1 * ROW, told=3 * 8)
    assert (sent("all_to_all", 1).dispatch, sent("all_to_all", 1).combine) == (1 * ROW, 5 * ROW)
    sizes = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3, chunks=4)
    assert sent("all_to_all", sizes=sizes).told == 4 * 3 * 8


def test_slots_all_tokens_or_one_row_a_rank_go_to_every_other_rank() -> None:
    three = Moved(pairs=[[3, 5, 1], [1, 7, 0], [2, 0, 4]], rows=[[3, 4, 1], [1, 5, 0], [2, 0, 3]])
    padded, gathered, once = (sent(variant, moved=three) for variant in VARIANTS[1:])
    assert (padded.dispatch, padded.combine, padded.told) == (2 * 3 * 2 * ROW, 2 * 3 * 2 * ROW, 0)
    assert (gathered.dispatch, gathered.combine, gathered.told) == (2 * 4 * ROW, 2 * 4 * ROW, 2 * 4 * 2 * 4)
    assert gathered.weights == gathered.weights_backward == 2 * 4 * 2 * 4
    assert (once.dispatch, once.combine, once.told) == (5 * ROW, 3 * ROW, 2 * 8 + 5 * 2 * 4)
    assert (once.weights, once.weights_backward) == (5 * 2 * 4, 3 * 2 * 4)


def test_gradients_go_the_other_way_what_one_rank_sends_another_gets_and_a_rank_alone_nothing() -> None:
    for variant in VARIANTS:
        both = [sent(variant, rank) for rank in (0, 1)]
        for found in both:
            assert found.forward == found.dispatch + found.combine + found.told + found.weights, variant
            assert found.backward == found.dispatch + found.combine + found.weights_backward, variant
        assert sum(one.dispatch for one in both) == sum(one.combine for one in both), variant
        alone = sent(variant, moved=Moved(pairs=[[8]], rows=[[4]]))
        assert alone.forward == alone.backward == 0, variant
    with pytest.raises(ValueError, match=r"variant\(ring\) is none of all_to_all, padded, allgather, dedup"):
        sent("ring")


def test_the_ratio_counts_only_what_leaves_ranks() -> None:
    assert dedup_ratio(MOVED) == 5 / 6
    assert dedup_ratio(Moved(pairs=[[3, 0], [0, 7]], rows=[[3, 0], [0, 5]])) is None


def value(told: list[Routed], ep: int, name: str, expected_drop: float | None = None) -> float | None:
    return load_metrics(told, ep, expected_drop)[name].value


def test_experts_are_asked_by_all_and_ranks_compute_what_is_kept_of_their_copys_sources() -> None:
    assert expert_loads(TWO) == [[20, 8, 2, 2], [8, 8, 8, 8]]
    assert loads_of_ranks(TWO, 2) == [[22, 4], [16, 16]]
    assert loads_of_ranks([*TWO, *TWO], 2) == [[22, 4, 22, 4], [16, 16, 16, 16]]
    assert loads_of_ranks(TWO, 1) == [[14, 12], [16, 16]]


def test_ranks_that_split_experts_count_as_one() -> None:
    [both] = merged(TWO, 2)
    assert both.asked.tolist() == [[[8, 4, 2, 2], [12, 4, 0, 0]], [[4] * 4] * 2]
    assert both.kept.tolist() == [[[6, 4, 2, 2], [8, 4, 0, 0]], [[4] * 4] * 2]
    assert both.rows.tolist() == [[[7, 4], [8, 0]], [[6, 8]] * 2]
    assert len(merged([*TWO, *TWO], 2)) == len(merged(TWO, 1)) == 2


def test_a_rank_sends_by_the_blocks_of_experts_in_each_layer_and_microbatch() -> None:
    moved = moved_in(TWO)
    assert (moved[0].pairs, moved[0].rows) == ([[4, 4], [6, 0]], [[3, 4], [4, 0]])
    sizes = Sizes(hidden=1, element_bytes=1, top_k=2, tokens=4, experts_per_rank=2)
    flights = sent_in_step("all_to_all", 0, TWO, sizes)
    assert flights == [sent_by("all_to_all", 0, of, sizes) for of in moved]
    assert [(one.dispatch, one.combine) for one in flights] == [(4, 6), (0, 6), (4, 4), (4, 4)]


def test_imbalance_is_that_of_the_worst_layer_drops_are_counted_over_all_and_nothing_routed_is_unknown() -> None:
    assert value(TWO, 2, "imbalance.expert") == 20 / 8
    assert value(TWO, 2, "imbalance.rank") == 22 / 13
    assert value([routed([CALM])] * 2, 2, "imbalance.rank") == 1.0
    assert value(TWO, 2, "drop_rate") == pytest.approx(6 / 64)
    assert "drop_rate_expected" not in load_metrics(TWO, 2, None)
    assert value(TWO, 2, "drop_rate_expected", 0.5) == 0.5
    nothing = [routed([((0,) * 4, (0,) * 4, (0, 0))])] * 2
    assert [value(nothing, 2, name) for name in ("imbalance.rank", "drop_rate", "dedup_ratio")] == [None] * 3


def test_the_deduplication_ratio_weighs_flights_of_all_copies_by_their_pairs() -> None:
    """Only what leaves a rank: rank 0's 4, 0, 4 and 4 pairs, rank 1's 6, 6, 4 and 4."""
    expected = pytest.approx((4 + 0 + 4 + 4 + 4 + 4 + 3 + 3) / (4 + 0 + 4 + 4 + 6 + 6 + 4 + 4))
    assert value(TWO, 2, "dedup_ratio") == value([*TWO, *TWO], 2, "dedup_ratio") == expected
    assert value([routed([CALM])], 1, "dedup_ratio") is None
