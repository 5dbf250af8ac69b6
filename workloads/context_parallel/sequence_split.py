"""The split of a sequence over ranks: tokens, blocks of keys, and the balance of the work. Pure."""

from dataclasses import dataclass
from itertools import chain

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import ContextMethod, find_context_method
from parbench.workloads.context_parallel.tiles import Chunks, Tile, list_causal_tiles
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """The distribution of the tokens of one sequence over the ranks of ``cp``, with a causal mask.

    The sequence has ``ranks / ulysses`` parts. ``ulysses`` neighboring ranks share a part. Each of
    them holds some of the tokens of the part, and in attention some heads of all its tokens.
    """

    method: ContextMethod
    """The method of context parallelism, which decides the order of tokens and the exchanges."""
    sequence: int
    """The number of tokens in the sequence."""
    ranks: int
    """The number of ranks that share the sequence, the size of ``cp``."""
    ulysses: int
    """The number of ranks that exchange tokens for heads within a part."""

    @property
    def parts(self) -> int:
        """The number of parts of the sequence, ``ranks / ulysses``."""
        return self.ranks // self.ulysses

    @property
    def num_blocks(self) -> int:
        """The number of blocks of keys over which a rank computes attention, one after the other.

        In a ring, a block is the keys that the rank has in one step of the ring, those of one part
        of the sequence. There are then ``parts`` blocks. If keys are gathered, all keys of the
        sequence are one block.
        """
        return 1 if self.method.keys == "gather" else self.parts

    def list_tokens(self, rank: int) -> list[int]:
        """Return the positions in the sequence of the tokens that a rank of ``cp`` holds.

        They are in the order in which the rank stores the tokens.
        """
        part = list(chain.from_iterable(self._list_part(rank // self.ulysses)))
        size = len(part) // self.ulysses
        start = rank % self.ulysses * size
        return part[start : start + size]

    def _list_part(self, part: int) -> Chunks:
        """Return the ranges of positions in the part with index ``part``.

        A part is one range. In a zigzag it is two, of which the second is as far from the end of
        the sequence as the first is from the start.
        """
        numbers = [part]
        if self.method.is_zigzag:
            numbers = [part, 2 * self.parts - 1 - part]
        size = self.sequence // (self.parts * len(numbers))
        return [range(number * size, (number + 1) * size) for number in numbers]

    def _list_keys(self, rank: int, block: int) -> Chunks:
        """Return the positions in the sequence of the keys in one block of a rank of ``cp``.

        If keys are gathered, the only block has all positions. In a ring, ``block`` is the number
        of the step of the ring, from 0. Its keys are those of the part of the sequence that is
        ``block`` parts before the rank's own part, where the last part precedes the first.
        """
        if self.method.keys == "gather":
            return [range(self.sequence)]
        return self._list_part((rank // self.ulysses - block) % self.parts)

    def list_tiles(self, rank: int) -> list[list[Tile]]:
        """Return the kernel calls (tiles) of a rank's attention, one list for each block of keys.

        A block is the keys that the rank has in one step of a ring, those of one part of the
        sequence. If keys are gathered, the only block has all keys. The outer list has
        ``num_blocks`` elements, in the order in which the rank computes. A tile is a rectangle of
        queries and keys that one call of the fused kernel computes. Together, the tiles cover the
        causal mask of the rank's queries.
        """
        queries = self._list_part(rank // self.ulysses)
        return [
            list_causal_tiles(queries, self._list_keys(rank, block))
            for block in range(self.num_blocks)
        ]

    def compute_load_balance(self) -> float:
        """Return the mean attention work of the ranks divided by the maximum, between 0 and 1.

        Work is the number of pairs of a query and a key that a rank computes in one attention. It
        is 1 if all ranks have equal work. The maximum over ranks is taken for each block of keys,
        and the maxima of all blocks are added, because ranks wait for each other after each block.
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
    """Return the distribution of a model's sequence over ``ranks`` ranks of ``cp``.

    ``ulysses`` is the number of ranks that exchange tokens for heads, and 0 means the default of
    the method. ``tp`` is the number of ranks that split the heads first. Raises ``UserError`` with
    a violation, such as ``sequence(100) % cp(3) != 0``, if the split is not possible.
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
