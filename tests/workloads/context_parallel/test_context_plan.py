"""Tokens are dealt to ranks and found again, tiles are the mask's pairs, and balance and bytes are what papers say."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.workloads.context_parallel.context_case import (
    MASKS,
    METHODS,
    ContextPlan,
    Tile,
    balance,
    balance_limit,
    causal_tiles,
    indivisible,
    positions,
    split_rows,
)

ULYSSES = {"ring": 1, "striped": 1, "zigzag": 1, "allgather_kv": 1, "ulysses": 4, "usp": 2}
Pairs = list[tuple[int, int]]


def plan(
    method: str,
    mask: str = "causal",
    sequence: int = 64,
    ranks: int = 4,
    ulysses: int | None = None,
) -> ContextPlan:
    of = ULYSSES[method] if ulysses is None else ulysses
    return ContextPlan(method=method, mask=mask, sequence=sequence, ranks=ranks, ulysses=of)


def test_tokens_are_dealt_in_runs_in_turn_or_by_mirrored_chunks() -> None:
    for order, dealt in {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
    }.items():
        assert [positions(order, 8, rank, 2) for rank in range(2)] == dealt, order
        assert positions(order, 6, 0, 1) == [0, 1, 2, 3, 4, 5], order
    assert [positions("zigzag", 6, rank, 3) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_what_does_not_divide_is_told_by_equation() -> None:
    for order, sequence, ranks, told in (
        ("contiguous", 10, 4, "sequence(10) % cp(4) != 0"),
        ("striped", 10, 4, "sequence(10) % cp(4) != 0"),
        ("zigzag", 128, 3, "sequence(128) % (2 * cp(3)) != 0: zigzag gives each rank two chunks"),
        ("zigzag", 9, 3, "sequence(9) % (2 * cp(3)) != 0: zigzag gives each rank two chunks"),
        ("spiral", 9, 3, "order(spiral) is none of contiguous, striped, zigzag"),
    ):
        assert indivisible(order, sequence, ranks) == told
        with pytest.raises(ValueError, match=re.escape(told)):
            positions(order, sequence, 0, ranks)
    assert indivisible("contiguous", 9, 3) is indivisible("zigzag", 12, 3) is None
    assert indivisible("striped", 9, 2, "ring") == "sequence(9) % ring(2) != 0"


def covered(tiles: Sequence[Tile]) -> Pairs:
    found: Pairs = []
    for tile in tiles:
        for i in range(tile.rows.start, tile.rows.stop):
            stop = (
                tile.columns.start + i - tile.rows.start + 1 if tile.causal else tile.columns.stop
            )
            found.extend((i, j) for j in range(tile.columns.start, stop))
    return sorted(found)


@given(
    st.sets(st.integers(0, 30), max_size=12),
    st.sets(st.integers(0, 30), max_size=12),
    st.integers(0, 31),
)
@settings(max_examples=50)
def test_tiles_cover_each_allowed_pair_once(a: set[int], b: set[int], row: int) -> None:
    queries, keys = sorted(a), sorted(b)
    tiles = causal_tiles(queries, keys)
    assert covered(tiles) == [
        (i, j) for i, query in enumerate(queries) for j, key in enumerate(keys) if key <= query
    ]
    for tile in tiles:
        rows, columns = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        assert min(rows, columns) > 0
        assert rows == columns or not tile.causal
    before, after = split_rows(tiles, row)
    assert all(tile.rows.stop <= row for tile in before)
    assert all(tile.rows.start >= row for tile in after)
    assert covered([*before, *after]) == covered(tiles)


def test_a_block_of_a_ring_is_one_kernel_call() -> None:
    for order, q, k, tiles in (
        ("contiguous", 1, 1, [(0, 8, 0, 8, True)]),
        ("contiguous", 2, 1, [(0, 8, 0, 8, False)]),
        ("contiguous", 1, 2, []),
        ("striped", 2, 1, [(0, 8, 0, 8, True)]),
        ("striped", 1, 2, [(1, 8, 0, 7, True)]),
        ("zigzag", 1, 1, [(0, 8, 0, 8, True)]),
        ("zigzag", 2, 1, [(0, 8, 0, 4, False)]),
        ("zigzag", 1, 2, [(4, 8, 0, 8, False)]),
    ):
        found = causal_tiles(positions(order, 32, q, 4), positions(order, 32, k, 4))
        calls = [
            (t.rows.start, t.rows.stop, t.columns.start, t.columns.stop, t.causal) for t in found
        ]
        assert calls == tiles, (order, q, k)


def test_a_full_tile_is_cut_in_two_and_a_causal_one_in_three() -> None:
    whole, first, rest = slice(0, 3), slice(0, 1), slice(1, 4)
    assert split_rows([Tile(slice(0, 4), whole)], 1) == ([Tile(first, whole)], [Tile(rest, whole)])
    before, after = split_rows(causal_tiles(range(4), range(4)), 1)
    assert [len(covered([tile])) for tile in (*before, *after)] == [1, 3, 6]


def test_every_method_holds_all_tokens_and_its_tiles_have_the_pairs_of_the_mask() -> None:
    assert tuple(ULYSSES) == METHODS
    for method, mask in ((method, mask) for method in METHODS for mask in MASKS):
        asked, where = plan(method, mask), (method, mask)
        held = [asked.tokens(rank) for rank in range(4)]
        assert [len(part) for part in held] == [16] * 4, where
        assert sorted(asked.dealt()) == list(range(64)), where
        assert [position for part in held for position in part] == asked.dealt(), where
        steps = [
            (rank, step) for rank in range(0, 4, asked.ulysses) for step in range(asked.num_steps)
        ]
        for rank, step in steps:
            assert len(covered(asked.tiles(rank, step))) == asked.pairs(rank, step), where
        assert sum(asked.pairs(rank, step) for rank, step in steps) == asked.all_pairs(), where
    assert (plan("ring").all_pairs(), plan("ring", "full").all_pairs()) == (64 * 65 // 2, 64 * 64)


def test_keys_come_from_the_ranks_before_or_all_at_once_and_usp_shares_parts_between_neighbours() -> (
    None
):
    assert plan("ring").keys(1, 0) == plan("ring").tokens(1)
    assert plan("ring").keys(1, 2) == plan("ring").tokens(3)
    assert plan("allgather_kv").keys(3, 0) == list(range(64))
    assert plan("allgather_kv").num_steps == plan("ulysses").num_steps == 1
    asked = plan("usp", sequence=16)
    assert asked.queries(0) == asked.queries(1) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert [asked.tokens(rank) for rank in (0, 1)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert asked.keys(0, 1) == asked.queries(2)
    assert asked.num_steps == 2


def test_balance_is_mean_work_over_the_slowest_of_each_step() -> None:
    for pairs, found in (([[4, 4], [4, 4]], 1), ([[4, 0], [4, 4]], 0.75), ([[4, 0], [0, 4]], 0.5)):
        assert balance(pairs) == found


def test_a_contiguous_ring_is_bound_and_stripes_are_even_but_for_a_diagonal() -> None:
    for ranks, limit in ((2, 2 / 3), (4, 4 / 7), (16, 16 / 31)):
        assert balance_limit("ring", ranks) == pytest.approx(limit)
        short, long = (
            plan("ring", sequence=ranks * each, ranks=ranks).load_balance() for each in (16, 256)
        )
        assert abs(long - limit) < min(2e-3, abs(short - limit)), ranks
    for ranks in (2, 8):
        found = plan("striped", sequence=ranks * 64, ranks=ranks).load_balance()
        assert found == pytest.approx((ranks * 64 + 1) / (ranks * 65)), ranks


def test_other_methods_and_full_masks_are_even() -> None:
    for method in ("zigzag", "allgather_kv", "ulysses", "usp"):
        assert plan(method).load_balance() == balance_limit(method, 4) == 1, method
    assert [plan(method, "full").load_balance() for method in METHODS] == [1] * len(METHODS)
