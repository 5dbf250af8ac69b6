"""The split of a sequence over ranks: tokens, blocks of keys, and the balance of the work. Pure."""

from bisect import bisect_right
from dataclasses import dataclass

from parbench.bench.text import UserError
from parbench.workloads.context_parallel.context_methods import ContextMethod, find_context_method
from parbench.workloads.context_parallel.tiles import Tile, Tiles, list_causal_tiles
from parbench.workloads.model.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """One sequence on the ranks of cp.

    The sequence has ``ranks / ulysses`` parts. ``ulysses`` neighboring ranks share a part: each has
    some of its tokens, and in attention some of its heads.
    """

    method: ContextMethod
    mask: str
    sequence: int
    ranks: int
    ulysses: int

    @property
    def parts(self) -> int:
        return self.ranks // self.ulysses

    @property
    def num_blocks(self) -> int:
        """Blocks of keys that a rank computes on one after the other."""
        return 1 if self.method.keys.gathers_keys else self.parts

    def list_tokens(self, rank: int) -> list[int]:
        """Return the positions of a rank's tokens."""
        part = self.list_queries(rank)
        size = len(part) // self.ulysses
        start = rank % self.ulysses * size
        return part[start : start + size]

    def list_queries(self, rank: int) -> list[int]:
        """Return the positions of the queries for which a rank computes attention: its part."""
        return self._list_part(rank // self.ulysses)

    def list_keys(self, rank: int, block: int) -> list[int]:
        """Return the positions of the keys of a block: all, or the part from so many parts back."""
        if self.method.keys.gathers_keys:
            return list(range(self.sequence))
        return self._list_part((rank // self.ulysses - block) % self.parts)

    def _list_part(self, part: int) -> list[int]:
        return self.method.order.list_tokens(self.sequence, part, self.parts)

    def list_tiles(self, rank: int) -> Tiles:
        """Return the tiles of each block of a rank."""
        return [self._list_block_tiles(rank, block) for block in range(self.num_blocks)]

    def _list_block_tiles(self, rank: int, block: int) -> tuple[Tile, ...]:
        queries, keys = self.list_queries(rank), self.list_keys(rank, block)
        if self.mask == "full":
            return (Tile(slice(0, len(queries)), slice(0, len(keys))),)
        return list_causal_tiles(queries, keys)

    def count_pairs(self, rank: int, block: int) -> int:
        """Return the pairs of a query and a key of a block that the mask allows."""
        queries, keys = self.list_queries(rank), self.list_keys(rank, block)
        if self.mask == "full":
            return len(queries) * len(keys)
        return sum(bisect_right(keys, query) for query in queries)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key of the full sequence that the mask allows."""
        if self.mask == "full":
            return self.sequence**2
        return self.sequence * (self.sequence + 1) // 2

    def compute_load_balance(self) -> float:
        """Return the mean work of a rank over the slowest rank's in each block. 1 is even.

        Ranks meet after each block of a ring, so that it takes as long as on the slowest rank.
        """
        slowest = 0
        total = 0
        for block in range(self.num_blocks):
            pairs_by_rank = [self.count_pairs(rank, block) for rank in range(self.ranks)]
            slowest += max(pairs_by_rank)
            total += sum(pairs_by_rank)
        return total / (self.ranks * slowest)

    @property
    def balance_limit(self) -> float:
        """The load balance of a long sequence: P/(2P-1) for a causal mask of contiguous parts."""
        if self.mask == "full" or self.method.order.is_balanced:
            return 1.0
        return self.parts / (2 * self.parts - 1)


def split_sequence(
    method_name: str,
    shape: Shape,
    *,
    ranks: int,
    ulysses: int = 0,
    mask: str = "causal",
    tp: int = 1,
) -> SequenceSplit:
    """Return the split of a shape's sequence. 0 ``ulysses`` ranks are the method's default.

    Raises ``UserError`` with the equation that the shape or the ranks do not satisfy.
    """
    method = find_context_method(method_name)
    broken_rule = method.find_broken_rule(shape, ranks=ranks, ulysses=ulysses, tp=tp)
    if broken_rule:
        raise UserError(broken_rule)
    return SequenceSplit(
        method=method,
        mask=mask,
        sequence=shape.sequence,
        ranks=ranks,
        ulysses=method.compute_ulysses(ranks, ulysses),
    )
