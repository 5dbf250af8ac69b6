"""Tiles: rectangles and causal squares of queries and keys that a fused kernel computes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A rectangle of a rank's attention matrix, which one call of a fused kernel computes.

    The rows of the matrix are the rank's queries. Its columns are one block of keys: those that the
    rank has in one step of a ring, or all keys of the sequence if they are gathered.
    """

    rows: slice
    """The queries of the tile, as indices into the queries of the rank."""
    columns: slice
    """The keys of the tile, as indices into the block of keys."""
    is_causal: bool = False
    """True for a square tile whose i-th query (from 0) attends to its first i + 1 keys.

    Otherwise every query attends to every key.
    """


Chunks = Sequence[range]
"""Positions in a sequence, as ranges of neighboring positions in ascending order."""


def list_causal_tiles(queries: Chunks, keys: Chunks) -> list[Tile]:
    """Return the kernel calls (tiles) that compute causal attention of some queries over some keys.

    In them, each query attends to all of the keys at its own or an earlier position. ``queries``
    and ``keys`` are positions in the sequence. Tiles are in the order of their queries. Each range
    of queries must lie within one range of keys, or share no position with the keys.
    """
    tiles: list[Tile] = []
    row = 0
    for chunk in queries:
        rows = slice(row, row + len(chunk))
        row = rows.stop
        num_earlier = 0
        for key_chunk in keys:
            num_earlier += len(range(key_chunk.start, min(key_chunk.stop, chunk.start)))
        if num_earlier:
            rectangle = Tile(rows, slice(0, num_earlier))
            if tiles and not tiles[-1].is_causal and tiles[-1].columns == rectangle.columns:
                rectangle = Tile(slice(tiles.pop().rows.start, rows.stop), rectangle.columns)
            tiles.append(rectangle)
        if any(chunk.start in key_chunk for key_chunk in keys):
            tiles.append(Tile(rows, slice(num_earlier, num_earlier + len(chunk)), is_causal=True))
    return tiles
