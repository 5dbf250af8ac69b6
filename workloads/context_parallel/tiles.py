"""A mask as tiles: the rectangles and triangles of queries x keys that a fused attention kernel can compute.

Under a causal mask a query sees as many first keys of its document as are not later: a staircase over the queries.
Where the stairs are level a tile is a rectangle, where they rise by one it is a rectangle and a causal square.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Queries [start, stop) on keys [start, stop) by index; a causal one is square, the i-th query sees i + 1 keys."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    causal: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        rows, columns = self.query_stop - self.query_start, self.key_stop - self.key_start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def full_tiles(num_queries: int, num_keys: int) -> tuple[Tile, ...]:
    """Return the one tile in which every query sees every key."""
    return (Tile(query_start=0, query_stop=num_queries, key_start=0, key_stop=num_keys),)


def causal_tiles(queries: Sequence[int], keys: Sequence[int], starts: Sequence[int] = (0,)) -> tuple[Tile, ...]:
    """Return tiles in which every query sees the keys of its document that are not later.

    ``queries`` and ``keys`` are ascending positions in the sequence, ``starts`` those at which documents start.
    """
    tiles: list[Tile] = []
    last = max([*queries, *keys], default=0) + 1
    for start, stop in pairwise([*(s for s in starts if s < last), last]):
        first_query, first_key = bisect_left(queries, start), bisect_left(keys, start)
        mine = queries[first_query : bisect_left(queries, stop)]
        reach = [bisect_right(keys, position) - first_key for position in mine]
        tiles.extend(_stairs(reach, first_query, first_key))
    return tuple(tiles)


def _stairs(reach: Sequence[int], query: int, key: int) -> Iterator[Tile]:
    """Yield tiles in which the i-th query from ``query`` sees ``reach[i]`` keys from ``key``."""
    i = sum(seen == 0 for seen in reach)  # the first ones: later queries see no fewer
    while i < len(reach):
        seen, stop = reach[i], i + 1
        rise = reach[stop] - seen if stop < len(reach) else 0
        while rise <= 1 and stop < len(reach) and reach[stop] - reach[stop - 1] == rise:
            stop += 1
        rising = rise == 1
        level = seen - 1 if rising else seen
        rows = (query + i, query + stop)
        if level:
            yield _tile(rows, (key, key + level))
        if rising:
            yield _tile(rows, (key + level, key + level + stop - i), causal=True)
        i = stop


def split_rows(tiles: Sequence[Tile], row: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return the tiles of the queries before ``row``, and those of the rest."""
    before: list[Tile] = []
    after: list[Tile] = []
    for tile in tiles:
        if tile.query_stop <= row:
            before.append(tile)
        elif tile.query_start >= row:
            after.append(tile)
        else:
            upper, lower = _cut(tile, row)
            before.append(upper)
            after.extend(lower)
    return tuple(before), tuple(after)


def _cut(tile: Tile, row: int) -> tuple[Tile, list[Tile]]:
    above, below = (tile.query_start, row), (row, tile.query_stop)
    if not tile.causal:
        keys = (tile.key_start, tile.key_stop)
        return _tile(above, keys), [_tile(below, keys)]
    middle = tile.key_start + row - tile.query_start
    first, second = (tile.key_start, middle), (middle, tile.key_stop)
    return _tile(above, first, causal=True), [_tile(below, first), _tile(below, second, causal=True)]


def _tile(queries: tuple[int, int], keys: tuple[int, int], *, causal: bool = False) -> Tile:
    return Tile(query_start=queries[0], query_stop=queries[1], key_start=keys[0], key_stop=keys[1], causal=causal)
