"""Tokens are distributed to ranks, tiles cover the pairs of the mask, and bad sizes are refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import (
    CONTEXT_METHODS,
    CONTIGUOUS,
    MASKS,
    STRIPED,
    ZIGZAG,
    TokenOrder,
)
from parbench.workloads.context_parallel.sequence_split import split_sequence
from parbench.workloads.context_parallel.tiles import Tile, list_causal_tiles, split_rows
from parbench.workloads.model.shapes import SHAPES

SHAPE = replace(SHAPES["tiny"], hidden=48, heads=6, kv_heads=2, sequence=48)


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        (CONTIGUOUS, [0, 1, 2, 3], [4, 5, 6, 7]),
        (STRIPED, [0, 2, 4, 6], [1, 3, 5, 7]),
        (ZIGZAG, [0, 1, 6, 7], [2, 3, 4, 5]),
    ],
)
def test_tokens_of_two_ranks(order: TokenOrder, first: list[int], second: list[int]) -> None:
    assert order.list_tokens(8, 0, 2) == first
    assert order.list_tokens(8, 1, 2) == second


def list_pairs(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
    """Return all pairs of a row and a column that the tiles compute."""
    pairs = []
    for tile in tiles:
        first_column = tile.columns.start
        for offset, row in enumerate(range(tile.rows.start, tile.rows.stop)):
            stop = first_column + offset + 1 if tile.is_causal else tile.columns.stop
            pairs += [(row, column) for column in range(first_column, stop)]
    return sorted(pairs)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([1, 5, 6, 20], [0, 2, 5, 6, 7]),
        ([3, 9], [10, 11]),
    ],
)
def test_tiles_cover_each_allowed_pair_once(queries: list[int], keys: list[int]) -> None:
    tiles = list_causal_tiles(queries, keys)
    expected = []
    for row, query in enumerate(queries):
        expected += [(row, column) for column, key in enumerate(keys) if key <= query]
    assert list_pairs(tiles) == expected
    for row in range(len(queries)):
        first, last = split_rows(tiles, row)
        assert list_pairs([*first, *last]) == expected
        assert all(tile.rows.stop <= row for tile in first)
        assert all(tile.rows.start >= row for tile in last)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_split_covers_tokens_and_pairs(method: str, mask: str) -> None:
    split = split_sequence(method, SHAPES["tiny"], ranks=4, mask=mask)
    tokens = [split.list_tokens(rank) for rank in range(4)]
    assert [len(part) for part in tokens] == [16] * 4
    assert sorted(chain(*tokens)) == list(range(64))
    num_pairs = 0
    for rank in range(0, 4, split.ulysses):
        tiles = split.list_tiles(rank)
        for block in range(split.num_blocks):
            num_pairs += split.count_pairs(rank, block)
            assert len(list_pairs(tiles[block])) == split.count_pairs(rank, block)
    assert num_pairs == split.num_pairs
    assert num_pairs == (64 * 64 if mask == "full" else 64 * 65 // 2)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("zigzag", {"ranks": 16}, "sequence(48) % (2 * cp(16)) != 0"),
        ("ring", {"ranks": 5}, "sequence(48) % cp(5) != 0"),
        ("allgather_kv", {"ranks": 16}, "sequence(48) % (2 * cp(16)) != 0"),
        ("ulysses", {"ranks": 4}, "heads(6) % cp(4) != 0"),
        ("ulysses", {"ranks": 3}, "kv_heads(2) % cp(3) != 0"),
        ("ulysses", {"ranks": 2, "tp": 2}, "heads(6) / tp(2) % cp(2) != 0"),
        ("usp", {"ranks": 4, "ulysses": 3}, "ulysses(3) * ring(1) != cp(4)"),
        ("ring", {"ranks": 4, "ulysses": 2}, "ulysses(2) != 1"),
        ("zigzagging", {"ranks": 2}, "zigzag"),
    ],
)
def test_split_refuses(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        split_sequence(method, SHAPE, **options)
    assert message in str(error.value)
