"""Tiles: the rectangles and causal squares of queries and keys that a fused kernel computes. Pure."""

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

    @property
    def num_pairs(self) -> int:
        """The pairs of a query and a key that the tile computes."""
        rows: int = self.rows.stop - self.rows.start
        columns: int = self.columns.stop - self.columns.start
        if self.is_causal:
            return rows * (rows + 1) // 2
        return rows * columns


Chunks = Sequence[range]
"""Ascending positions of a sequence, as runs of neighbors."""


def list_causal_tiles(queries: Chunks, keys: Chunks) -> list[Tile]:
    """Return tiles in which every query attends to the keys that are not later.

    A chunk of queries lies within a chunk of keys, or keys have none of its positions.
    """
    tiles: list[Tile] = []
    row = 0
    for chunk in queries:
        rows = slice(row, row + len(chunk))
        row = rows.stop
        num_earlier = count_earlier(keys, chunk.start)
        if num_earlier:
            rectangle = Tile(rows, slice(0, num_earlier))
            if tiles and not tiles[-1].is_causal and tiles[-1].columns == rectangle.columns:
                rectangle = Tile(slice(tiles.pop().rows.start, rows.stop), rectangle.columns)
            tiles.append(rectangle)
        if any(chunk.start in key_chunk for key_chunk in keys):
            tiles.append(Tile(rows, slice(num_earlier, num_earlier + len(chunk)), is_causal=True))
    return tiles


def count_earlier(keys: Chunks, position: int) -> int:
    """Return the number of keys before a position."""
    earlier_keys = [range(chunk.start, min(chunk.stop, position)) for chunk in keys]
    return sum(map(len, earlier_keys))
