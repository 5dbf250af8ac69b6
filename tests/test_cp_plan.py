"""Plans deal out all tokens, their pairs are the mask's, and their balance is what papers say."""

import pytest

from workloads.context.cp_plan import MASKS, METHODS, ContextPlan, balance, balance_limit

SIZES = [("ring", 1), ("striped", 1), ("zigzag", 1), ("allgather_kv", 1), ("ulysses", 4), ("usp", 2), ("torch_cp", 1)]
each_method = pytest.mark.parametrize(("method", "ulysses"), SIZES)
each_mask = pytest.mark.parametrize("mask", MASKS)


def plan(method: str, mask: str = "causal", sequence: int = 64, ranks: int = 4, ulysses: int = 1) -> ContextPlan:
    return ContextPlan(method=method, mask=mask, sequence=sequence, ranks=ranks, ulysses=ulysses, seed=1)


def test_every_method_is_here() -> None:
    assert [method for method, _ in SIZES] == list(METHODS)


@each_method
def test_every_token_is_held_once(method: str, ulysses: int) -> None:
    asked = plan(method, ulysses=ulysses)
    held = [position for rank in range(4) for position in asked.tokens(rank)]
    assert sorted(held) == list(range(64))
    assert held == asked.dealt()
    assert all(len(asked.tokens(rank)) == 16 for rank in range(4))


@each_mask
@each_method
def test_tiles_have_the_pairs_of_the_mask(method: str, ulysses: int, mask: str) -> None:
    """Counted over tiles, query by query, and in one formula; heads are shared, so that parts count once."""
    asked = plan(method, mask, ulysses=ulysses)
    steps = [(rank, step) for rank in range(0, 4, ulysses) for step in range(asked.num_steps)]
    for rank, step in steps:
        assert sum(tile.pairs for tile in asked.tiles(rank, step)) == asked.pairs(rank, step)
    assert sum(asked.pairs(rank, step) for rank, step in steps) == asked.all_pairs()


def test_keys_come_from_the_ranks_before() -> None:
    assert plan("ring").keys(1, 0) == plan("ring").tokens(1)
    assert plan("ring").keys(1, 2) == plan("ring").tokens(3)


def test_usp_shares_parts_between_neighbours_and_rings_over_the_rest() -> None:
    asked = plan("usp", sequence=16, ulysses=2)
    assert asked.queries(0) == asked.queries(1) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert [asked.tokens(rank) for rank in (0, 1)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert asked.keys(0, 1) == asked.queries(2)
    assert asked.num_steps == 2


def test_all_keys_at_once_are_in_order_and_one_step() -> None:
    assert plan("allgather_kv").keys(3, 0) == list(range(64))
    assert plan("allgather_kv").num_steps == plan("ulysses", ulysses=4).num_steps == 1


def test_only_packed_sequences_have_several_documents() -> None:
    assert plan("ring").lengths == plan("ring", "full").lengths == (64,)
    packed = plan("ring", "packed")
    assert len(packed.lengths) > 2
    assert sum(packed.lengths) == 64
    assert packed.places(0) == [p - max(s for s in packed.starts if s <= p) for p in packed.tokens(0)]
    assert packed.all_pairs() == sum(n * (n + 1) // 2 for n in packed.lengths)


def test_positions_of_one_document_are_their_own_places() -> None:
    assert plan("zigzag").places(1) == plan("zigzag").tokens(1)


# ---- balance


def test_balance_is_mean_work_over_the_slowest_of_each_step() -> None:
    assert balance([[4, 4], [4, 4]]) == 1
    assert balance([[4, 0], [4, 4]]) == 0.75
    assert balance([[4, 0], [0, 4]]) == 0.5


@pytest.mark.parametrize(("ranks", "limit"), [(2, 0.667), (4, 0.571), (8, 0.533), (16, 0.516)])
def test_a_contiguous_ring_is_bound_by_p_over_2p_less_1(ranks: int, limit: float) -> None:
    assert balance_limit("ring", ranks) == pytest.approx(limit, abs=5e-4)
    short, long = (plan("ring", sequence=ranks * each, ranks=ranks).balance_ceiling() for each in (16, 256))
    assert abs(long - balance_limit("ring", ranks)) < 2e-3
    assert abs(long - balance_limit("ring", ranks)) < abs(short - balance_limit("ring", ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stripes_are_even_but_for_a_diagonal(ranks: int) -> None:
    h = 64
    found = plan("striped", sequence=ranks * h, ranks=ranks).balance_ceiling()
    assert found == pytest.approx((ranks * h + 1) / (ranks * (h + 1)))
    assert 0.98 < found < 1


@pytest.mark.parametrize(("method", "ulysses"), [("zigzag", 1), ("allgather_kv", 1), ("ulysses", 4), ("usp", 2)])
def test_the_others_are_even(method: str, ulysses: int) -> None:
    assert plan(method, ulysses=ulysses).balance_ceiling() == balance_limit(method, 4) == 1


@each_method
def test_a_full_mask_is_even_everywhere(method: str, ulysses: int) -> None:
    assert plan(method, "full", ulysses=ulysses).balance_ceiling() == 1


def test_documents_upset_the_zigzag() -> None:
    assert plan("zigzag", "packed").balance_ceiling() < 0.95
