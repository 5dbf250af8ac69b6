"""Loads, drops and bytes of an expert axis, by hand: the bytes that leave each rank, dispatch and combine."""

from collections.abc import Sequence

import pytest
import torch

from parbench.workloads.expert_parallel.expert_probe import (
    Routed,
    Sent,
    Sizes,
    expert_loads,
    load_metrics,
    loads_of_ranks,
    merged,
    pairs_between,
    sent_by,
    sent_in_step,
)

PAIRS = [[3, 5], [1, 7]]  # rank 0 keeps 3 pairs and sends 5; rank 1 sends 1 and keeps 7
SIZES = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3)
ROW = 10 * 4
# Pairs asked for and kept of four experts on two ranks, or on four ranks in two copies.
CALM = ((2, 2, 2, 2), (2, 2, 2, 2))
HOT = ((6, 2, 0, 0), (4, 2, 0, 0))
Microbatch = tuple[tuple[int, ...], tuple[int, ...]]


def make_routed(*layers: Sequence[Microbatch]) -> Routed:
    asked, kept = ([[microbatch[i] for microbatch in layer] for layer in layers] for i in (0, 1))
    return Routed(torch.tensor(asked), torch.tensor(kept))


TWO = [make_routed([CALM, HOT], [CALM, CALM]), make_routed([HOT, HOT], [CALM, CALM])]


def test_all_to_all_sends_pairs_and_their_counts() -> None:
    assert sent_by("all_to_all", 0, PAIRS, SIZES) == Sent(
        dispatch=5 * ROW, combine=1 * ROW, told=3 * 8
    )
    other = sent_by("all_to_all", 1, PAIRS, SIZES)
    assert (other.dispatch, other.combine) == (1 * ROW, 5 * ROW)
    sizes = Sizes(hidden=10, element_bytes=4, top_k=2, tokens=4, experts_per_rank=3, chunks=4)
    assert sent_by("all_to_all", 0, PAIRS, sizes).told == 4 * 3 * 8
    assert (other.forward, other.backward) == (6 * ROW + 3 * 8, 6 * ROW)


def test_allgather_sends_all_tokens_to_every_rank() -> None:
    sent = sent_by("allgather", 0, [[3, 5, 1], [1, 7, 0], [2, 0, 4]], SIZES)
    assert (sent.dispatch, sent.combine, sent.told) == (2 * 4 * ROW, 2 * 4 * ROW, 2 * 4 * 2 * 4)
    assert sent.weights == sent.weights_backward == 2 * 4 * 2 * 4
    assert sent.forward == sent.dispatch + sent.combine + sent.told + sent.weights
    assert sent.backward == sent.dispatch + sent.combine + sent.weights_backward


def test_a_single_rank_sends_nothing() -> None:
    for variant in ("all_to_all", "allgather"):
        alone = sent_by(variant, 0, [[8]], SIZES)
        assert alone.forward == alone.backward == 0, variant
    with pytest.raises(ValueError, match=r"variant\(ring\) is not all_to_all or allgather"):
        sent_by("ring", 0, PAIRS, SIZES)


def value(told: list[Routed], name: str, expected_drop: float | None = None) -> float | None:
    return load_metrics(told, 2, expected_drop)[name].value


def test_loads_of_experts_and_ranks() -> None:
    assert expert_loads(TWO) == [[20, 8, 2, 2], [8, 8, 8, 8]]
    assert loads_of_ranks(TWO, 2) == [[22, 4], [16, 16]]
    assert loads_of_ranks([*TWO, *TWO], 2) == [[22, 4, 22, 4], [16, 16, 16, 16]]
    assert loads_of_ranks(TWO, 1) == [[14, 12], [16, 16]]


def test_ranks_that_split_experts_count_as_one() -> None:
    [both] = merged(TWO, 2)
    assert both.asked.tolist() == [[[8, 4, 2, 2], [12, 4, 0, 0]], [[4] * 4] * 2]
    assert both.kept.tolist() == [[[6, 4, 2, 2], [8, 4, 0, 0]], [[4] * 4] * 2]
    assert len(merged([*TWO, *TWO], 2)) == len(merged(TWO, 1)) == 2


def test_a_rank_sends_by_blocks_of_experts() -> None:
    pairs = pairs_between(TWO)
    assert pairs[0] == [[4, 4], [6, 0]]
    sizes = Sizes(hidden=1, element_bytes=1, top_k=2, tokens=4, experts_per_rank=2)
    sent = sent_in_step("all_to_all", 0, TWO, sizes)
    assert [(one.dispatch, one.combine) for one in sent] == [(4, 6), (0, 6), (4, 4), (4, 4)]


def test_load_metrics_take_the_worst_layer() -> None:
    assert value(TWO, "imbalance.expert") == 20 / 8
    assert value(TWO, "imbalance.rank") == 22 / 13
    assert value([make_routed([CALM])] * 2, "imbalance.rank") == 1.0
    assert value(TWO, "drop_rate") == pytest.approx(6 / 64)
    assert "drop_rate_expected" not in load_metrics(TWO, 2, None)
    assert value(TWO, "drop_rate_expected", 0.5) == 0.5
    nothing = [make_routed([((0,) * 4, (0,) * 4)])] * 2
    assert [value(nothing, name) for name in ("imbalance.rank", "drop_rate")] == [None] * 2
