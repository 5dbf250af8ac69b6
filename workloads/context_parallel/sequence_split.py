"""The split of a sequence over ranks: their tokens, and the blocks of keys of attention. Pure."""

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

    def list_tiles(self, rank: int) -> list[list[Tile]]:
        """Return the kernel calls (tiles) of a rank's attention, one list for each block of keys.

        A tile is a rectangle of queries and keys that one call of the fused kernel computes.
        Together, the tiles cover the causal mask of the rank's queries. A block is the keys that
        the rank has in one step of a ring: first those of its own part of the sequence, then those
        of the part before it, and so on, where the last part precedes the first. If keys are
        gathered, the only block has all keys.
        """
        part = rank // self.ulysses
        queries = self._list_part(part)
        if self.method.keys == "gather":
            return [list_causal_tiles(queries, [range(self.sequence)])]
        parts = [(part - step) % self.parts for step in range(self.parts)]
        return [list_causal_tiles(queries, self._list_part(part)) for part in parts]


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
