"""The split of a sequence over ranks: tokens, blocks of keys, and the balance of the work. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import ContextMethod, find_context_method
from parbench.workloads.context_parallel.tiles import Chunks, Tile, list_causal_tiles
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """One sequence on the ranks of cp, under a causal mask.

    The sequence has ``ranks / ulysses`` parts. ``ulysses`` neighboring ranks share a part: each has
    some of its tokens, and in attention some of its heads.
    """

    method: ContextMethod
    sequence: int
    ranks: int
    ulysses: int

    @property
    def parts(self) -> int:
        """The number of parts of the sequence, ``ranks / ulysses``."""
        return self.ranks // self.ulysses

    @property
    def num_blocks(self) -> int:
        """The number of blocks of keys that a rank computes on, one after the other."""
        return 1 if self.method.keys == "gather" else self.parts

    def list_tokens(self, rank: int) -> list[int]:
        """Return the positions in the sequence of the tokens that a rank holds."""
        part = list(chain.from_iterable(self._list_part(rank // self.ulysses)))
        size = len(part) // self.ulysses
        start = rank % self.ulysses * size
        return part[start : start + size]

    def _list_part(self, part: int) -> Chunks:
        """Return the chunks of a part. In a zigzag, one is the mirror image of the other."""
        numbers = [part]
        if self.method.is_zigzag:
            numbers = [part, 2 * self.parts - 1 - part]
        size = self.sequence // (self.parts * len(numbers))
        return [range(number * size, (number + 1) * size) for number in numbers]

    def _list_keys(self, rank: int, block: int) -> Chunks:
        """Return the keys of a block: all keys, or the keys of the part ``block`` parts before."""
        if self.method.keys == "gather":
            return [range(self.sequence)]
        return self._list_part((rank // self.ulysses - block) % self.parts)

    def list_tiles(self, rank: int) -> list[list[Tile]]:
        """Return, for each block of keys that a rank computes on, its tiles."""
        queries = self._list_part(rank // self.ulysses)
        return [
            list_causal_tiles(queries, self._list_keys(rank, block))
            for block in range(self.num_blocks)
        ]

    def list_own_halves(self, rank: int) -> tuple[Sequence[Tile], Sequence[Tile]]:
        """Return the tiles of a rank's own block for each half of its queries."""
        chunks = self._list_part(rank // self.ulysses)
        if len(chunks) == 1:
            [chunk] = chunks
            middle = (chunk.start + chunk.stop) // 2
            chunks = [range(chunk.start, middle), range(middle, chunk.stop)]
        tiles = list_causal_tiles(chunks, chunks)
        middle_row = len(chunks[0])
        first = [tile for tile in tiles if 0 < tile.rows.stop <= middle_row]
        return first, [tile for tile in tiles if tile.rows.start >= middle_row]

    @property
    def num_pairs(self) -> int:
        """The number of pairs of query and key of the full sequence that the mask allows."""
        return self.sequence * (self.sequence + 1) // 2

    def compute_load_balance(self) -> float:
        """Return the mean work of the ranks divided by the work of the slowest rank, 1 if equal.

        The slowest rank is taken for each block, because ranks wait for each other after each block
        of a ring.
        """
        slowest = 0
        total = 0
        tiles_by_rank = [self.list_tiles(rank) for rank in range(self.ranks)]
        for block in range(self.num_blocks):
            pairs = [sum(tile.num_pairs for tile in tiles[block]) for tiles in tiles_by_rank]
            slowest += max(pairs)
            total += sum(pairs)
        return total / (self.ranks * slowest)


def split_sequence(
    method_name: str, shape: Shape, *, ranks: int, ulysses: int = 0, tp: int = 1
) -> SequenceSplit:
    """Return the split of a shape's sequence. ``ulysses`` 0 means the method's default.

    Raises ``UserError`` with the equation that the shape or the ranks do not satisfy.
    """
    method = find_context_method(method_name)
    broken_rule = method.find_broken_rule(shape, ranks=ranks, ulysses=ulysses, tp=tp)
    if broken_rule:
        raise UserError(broken_rule)
    return SequenceSplit(
        method=method,
        sequence=shape.sequence,
        ranks=ranks,
        ulysses=method.compute_ulysses(ranks, ulysses),
    )
