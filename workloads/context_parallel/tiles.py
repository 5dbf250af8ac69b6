"""Tiles: the rectangles and triangles of queries and keys that a fused kernel computes. Pure.

Under a causal mask, the number of keys that a query attends to forms a staircase over the queries.
Where the stairs are level, a tile is a rectangle. Where they rise by one, there is a rectangle and
a causal square.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A block of queries (rows) and keys (columns), by index.

    A causal tile is square: its i-th query attends to its first i + 1 keys.
    """

    rows: slice
    columns: slice
    is_causal: bool = False


Tiles = Sequence[Sequence[Tile]]
"""The tiles that a rank computes for each block of keys."""


def list_causal_tiles(queries: Sequence[int], keys: Sequence[int]) -> tuple[Tile, ...]:
    """Return tiles in which every query attends to the keys that are not later.

    ``queries`` and ``keys`` are ascending positions in the sequence.
    """
    tiles: list[Tile] = []
    num_keys = [bisect_right(keys, query) for query in queries]
    start = num_keys.count(0)
    while start < len(queries):
        stop, rise = _find_stairs(num_keys, start)
        rows = slice(start, stop)
        shared_keys = num_keys[start] - rise
        if shared_keys > 0:
            tiles.append(Tile(rows, slice(0, shared_keys)))
        if rise:
            square = slice(shared_keys, shared_keys + stop - start)
            tiles.append(Tile(rows, square, is_causal=True))
        start = stop
    return tuple(tiles)


def _find_stairs(num_keys: Sequence[int], start: int) -> tuple[int, int]:
    """Return the end of the rows from ``start`` on that rise alike, and by how much: 0 or 1.

    A row before a larger step is by itself.
    """
    stop = start + 1
    if stop == len(num_keys):
        return stop, 0
    rise = num_keys[stop] - num_keys[start]
    if rise > 1:
        return stop, 0
    while stop < len(num_keys) and num_keys[stop] - num_keys[stop - 1] == rise:
        stop += 1
    return stop, rise


def split_rows(tiles: Sequence[Tile], row: int) -> tuple[list[Tile], list[Tile]]:
    """Return the tiles of the queries before ``row`` and those of the other queries."""
    first_tiles: list[Tile] = []
    last_tiles: list[Tile] = []
    for tile in tiles:
        if tile.rows.stop <= row:
            first_tiles.append(tile)
        elif tile.rows.start >= row:
            last_tiles.append(tile)
        else:
            first, *others = _split_tile(tile, row)
            first_tiles.append(first)
            last_tiles += others
    return first_tiles, last_tiles


def _split_tile(tile: Tile, row: int) -> list[Tile]:
    """Return the part of a tile before ``row``, then its one or two parts from there on."""
    rows_before = slice(tile.rows.start, row)
    rows_after = slice(row, tile.rows.stop)
    if not tile.is_causal:
        return [Tile(rows_before, tile.columns), Tile(rows_after, tile.columns)]
    column = tile.columns.start + row - tile.rows.start
    columns_before = slice(tile.columns.start, column)
    return [
        Tile(rows_before, columns_before, is_causal=True),
        Tile(rows_after, columns_before),
        Tile(rows_after, slice(column, tile.columns.stop), is_causal=True),
    ]
