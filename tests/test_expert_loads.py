"""Loads, drops and bytes of a step, from what each rank routed in each layer and microbatch."""

import pytest

from workloads.experts.expert_loads import (
    Routed,
    expert_loads,
    load_details,
    load_metrics,
    loads_of_ranks,
    merged,
    moved_in,
    sent_in_step,
)
from workloads.experts.moe_costs import Sizes, sent_by

# four experts; two ranks, or four in two copies; two layers, of two microbatches the first
CALM = Routed(asked=[2, 2, 2, 2], kept=[2, 2, 2, 2], rows=[3, 4])
HOT = Routed(asked=[6, 2, 0, 0], kept=[4, 2, 0, 0], rows=[4, 0])
TWO = [[[CALM, HOT], [CALM]], [[HOT, HOT], [CALM]]]
SIZES = Sizes(hidden=1, element_bytes=1, top_k=2, tokens=4, experts_per_rank=2)


def value(told: list[list[list[Routed]]], ep: int, name: str, expected_drop: float | None = None) -> float | None:
    return load_metrics(told, ep, expected_drop)[name].value


def test_experts_are_asked_by_all_ranks_and_microbatches() -> None:
    assert expert_loads(TWO) == [[20, 8, 2, 2], [4, 4, 4, 4]]


def test_ranks_compute_what_is_kept_of_their_copys_sources() -> None:
    assert loads_of_ranks(TWO, 2) == [[22, 4], [8, 8]]
    assert loads_of_ranks([*TWO, *TWO], 2) == [[22, 4, 22, 4], [8, 8, 8, 8]]
    assert loads_of_ranks(TWO, 1) == [[14, 12], [8, 8]]


def test_ranks_that_split_experts_count_as_one() -> None:
    assert merged(TWO, 1) == TWO
    both = Routed(asked=[8, 4, 2, 2], kept=[6, 4, 2, 2], rows=[7, 4])
    twice = Routed(asked=[4, 4, 4, 4], kept=[4, 4, 4, 4], rows=[6, 8])
    hot = Routed(asked=[12, 4, 0, 0], kept=[8, 4, 0, 0], rows=[8, 0])
    assert merged(TWO, 2) == [[[both, hot], [twice]]]
    assert len(merged([*TWO, *TWO], 2)) == 2


def test_who_sends_to_whom_is_by_the_blocks_of_experts() -> None:
    moved = moved_in([CALM, HOT])
    assert moved.pairs == [[4, 4], [6, 0]]
    assert moved.rows == [[3, 4], [4, 0]]


def test_a_rank_sends_in_each_layer_and_microbatch() -> None:
    flights = sent_in_step("all_to_all", 0, TWO, SIZES)
    assert flights == [
        sent_by("all_to_all", 0, moved_in(sources), SIZES) for sources in ([CALM, HOT], [HOT, HOT], [CALM, CALM])
    ]
    assert [one.dispatch for one in flights] == [4, 0, 4]
    assert [one.combine for one in flights] == [6, 6, 4]


def test_imbalance_is_that_of_the_worst_layer() -> None:
    assert value(TWO, 2, "imbalance.expert") == 20 / 8
    assert value(TWO, 2, "imbalance.rank") == 22 / 13
    assert value([[[CALM]], [[CALM]]], 2, "imbalance.rank") == 1.0


def test_drops_are_counted_over_all_layers() -> None:
    assert value(TWO, 2, "drop_rate") == pytest.approx(6 / 48)
    assert "drop_rate_expected" not in load_metrics(TWO, 2, None)
    assert value(TWO, 2, "drop_rate_expected", 0.5) == 0.5


def test_the_deduplication_ratio_weighs_flights_by_their_pairs() -> None:
    """Only what leaves a rank: rank 0's 4, 0 and 4 pairs, rank 1's 6, 6 and 4."""
    assert value(TWO, 2, "dedup_ratio") == pytest.approx((4 + 0 + 4 + 4 + 4 + 3) / (4 + 0 + 4 + 6 + 6 + 4))
    assert value([[[CALM]]], 1, "dedup_ratio") is None


def test_nothing_routed_is_unknown_and_not_an_error() -> None:
    nothing = Routed(asked=[0] * 4, kept=[0] * 4, rows=[0, 0])
    assert value([[[nothing]], [[nothing]]], 2, "imbalance.rank") is None
    assert value([[[nothing]], [[nothing]]], 2, "drop_rate") is None


def test_heat_maps_are_by_layer() -> None:
    assert load_details(TWO, 2) == {"expert_load": expert_loads(TWO), "rank_load": loads_of_ranks(TWO, 2)}
