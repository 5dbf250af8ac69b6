"""Tiles cover exactly the pairs that a mask lets see, each once, and are few where the mask is regular."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.context.documents import document_lengths, document_of, starts_of
from workloads.context.tiles import Tile, causal_tiles, full_tiles, split_rows
from workloads.context.token_order import ORDERS, positions

Pairs = list[tuple[int, int]]


def covered(tiles: Sequence[Tile]) -> Pairs:
    """Return the pairs of indices that tiles compute, with repetitions."""
    found: Pairs = []
    for tile in tiles:
        for i in range(tile.query_start, tile.query_stop):
            seen = i - tile.query_start + 1 if tile.causal else tile.key_stop - tile.key_start
            found.extend((i, tile.key_start + j) for j in range(seen))
    return sorted(found)


def allowed(queries: Sequence[int], keys: Sequence[int], starts: Sequence[int]) -> Pairs:
    """Return the pairs that the mask lets see, by its definition."""
    return [
        (i, j)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if key <= query and document_of(key, starts) == document_of(query, starts)
    ]


@given(st.sets(st.integers(0, 30), max_size=12), st.sets(st.integers(0, 30), max_size=12), st.sets(st.integers(1, 29)))
def test_tiles_cover_each_allowed_pair_once_whatever_the_positions(a: set[int], b: set[int], cuts: set[int]) -> None:
    queries, keys, starts = sorted(a), sorted(b), [0, *sorted(cuts)]
    assert covered(causal_tiles(queries, keys, starts)) == allowed(queries, keys, starts)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packed", [False, True])
def test_all_blocks_of_all_ranks_cover_the_mask(order: str, packed: bool) -> None:
    sequence, ranks = 48, 4
    starts = starts_of(document_lengths(sequence, 3)) if packed else (0,)
    found = []
    for q in range(ranks):
        for k in range(ranks):
            queries, keys = positions(order, sequence, q, ranks), positions(order, sequence, k, ranks)
            found += [(queries[i], keys[j]) for i, j in covered(causal_tiles(queries, keys, starts))]
    assert sorted(found) == allowed(range(sequence), range(sequence), starts)


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40), min_size=1))
def test_no_tile_is_empty_and_causal_ones_are_square(a: set[int], b: set[int]) -> None:
    for tile in causal_tiles(sorted(a), sorted(b)):
        rows, columns = tile.query_stop - tile.query_start, tile.key_stop - tile.key_start
        assert rows > 0
        assert columns > 0
        assert rows == columns or not tile.causal
        assert tile.pairs == len(covered([tile]))


@pytest.mark.parametrize(
    ("order", "q", "k", "tiles"),
    [
        ("contiguous", 1, 1, [(0, 8, 0, 8, True)]),
        ("contiguous", 2, 1, [(0, 8, 0, 8, False)]),
        ("contiguous", 1, 2, []),
        ("striped", 2, 1, [(0, 8, 0, 8, True)]),
        ("striped", 1, 2, [(1, 8, 0, 7, True)]),
        ("zigzag", 1, 1, [(0, 8, 0, 8, True)]),
        ("zigzag", 2, 1, [(0, 8, 0, 4, False)]),
        ("zigzag", 1, 2, [(4, 8, 0, 8, False)]),
    ],
)
def test_a_block_of_a_ring_is_one_kernel_call(order: str, q: int, k: int, tiles: list[tuple[int, ...]]) -> None:
    found = causal_tiles(positions(order, 32, q, 4), positions(order, 32, k, 4))
    assert [(t.query_start, t.query_stop, t.key_start, t.key_stop, t.causal) for t in found] == tiles


def test_a_full_mask_is_one_tile() -> None:
    assert covered(full_tiles(2, 3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 31))
def test_tiles_cut_at_a_row_cover_the_same_pairs(a: set[int], b: set[int], row: int) -> None:
    tiles = causal_tiles(sorted(a), sorted(b))
    before, after = split_rows(tiles, row)
    assert all(tile.query_stop <= row for tile in before)
    assert all(tile.query_start >= row for tile in after)
    assert covered([*before, *after]) == covered(tiles)


def test_a_full_tile_is_cut_in_two_and_a_causal_one_in_three() -> None:
    before, after = split_rows(full_tiles(4, 3), 1)
    assert (before, after) == (full_tiles(1, 3), (Tile(query_start=1, query_stop=4, key_start=0, key_stop=3),))
    before, after = split_rows(causal_tiles(range(4), range(4)), 1)
    assert [tile.pairs for tile in (*before, *after)] == [1, 3, 6]
