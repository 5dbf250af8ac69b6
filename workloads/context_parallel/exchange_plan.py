"""Context parallelism as data: which tokens each rank holds, which keys it sees in which step, and how even that is."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from workloads.context_parallel.documents import document_lengths, document_of, places, starts_of
from workloads.context_parallel.tiles import Tile, causal_tiles, full_tiles
from workloads.context_parallel.token_order import positions

METHODS = ("ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp", "torch_cp")
MASKS = ("causal", "full", "packed")

_ORDER = {"ring": "contiguous", "striped": "striped", "ulysses": "contiguous"}  # the rest are zigzag


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """A sequence over ranks: the ``ulysses`` ranks that share a part's heads are neighbours, parts go over the rest."""

    method: str
    mask: str
    sequence: int
    ranks: int
    ulysses: int
    seed: int = 0

    @property
    def order(self) -> str:
        """In which order tokens are dealt out to parts."""
        return _ORDER.get(self.method, "zigzag")

    @property
    def parts(self) -> int:
        """Parts that the sequence is dealt out to; with ``ulysses`` ranks each."""
        return self.ranks // self.ulysses

    @property
    def num_steps(self) -> int:
        """Blocks of keys and values that a rank computes on one after the other."""
        return 1 if self.method == "allgather_kv" else self.parts

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document; one, but for packed ones."""
        return document_lengths(self.sequence, self.seed) if self.mask == "packed" else (self.sequence,)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Positions at which documents start."""
        return starts_of(self.lengths)

    def dealt(self) -> list[int]:
        """Return the positions of all ranks' tokens, one rank after the other."""
        return [position for rank in range(self.ranks) for position in self.tokens(rank)]

    def part(self, rank: int) -> int:
        """Return the number of the part that a rank has, whole or shared."""
        return rank // self.ulysses

    def tokens(self, rank: int) -> list[int]:
        """Return the positions of the tokens that a rank holds."""
        part = self.queries(rank)
        size = len(part) // self.ulysses
        first = rank % self.ulysses * size
        return part[first : first + size]

    def places(self, rank: int) -> list[int]:
        """Return where a rank's tokens stand in their documents."""
        return places(self.tokens(rank), self.starts)

    def queries(self, rank: int) -> list[int]:
        """Return the positions of the queries that a rank computes on: those of its part."""
        return positions(self.order, self.sequence, self.part(rank), self.parts)

    def keys(self, rank: int, step: int) -> list[int]:
        """Return the positions of the keys of a step: all, or those of the part that came ``step`` ranks round."""
        if self.method == "allgather_kv":
            return list(range(self.sequence))
        return positions(self.order, self.sequence, (self.part(rank) - step) % self.parts, self.parts)

    def tiles(self, rank: int, step: int) -> tuple[Tile, ...]:
        """Return what a rank computes in a step."""
        queries, keys = self.queries(rank), self.keys(rank, step)
        if self.mask == "full":
            return full_tiles(len(queries), len(keys))
        return causal_tiles(queries, keys, self.starts)

    def pairs(self, rank: int, step: int) -> int:
        """Return the pairs of a query and a key that the mask lets a rank see in a step, query by query."""
        queries, keys = self.queries(rank), self.keys(rank, step)
        if self.mask == "full":
            return len(queries) * len(keys)
        return sum(self._seen(position, keys) for position in queries)

    def all_pairs(self) -> int:
        """Return the pairs that the mask lets the whole sequence see."""
        if self.mask == "full":
            return self.sequence**2
        return sum(length * (length + 1) // 2 for length in self.lengths)

    def balance_ceiling(self) -> float:
        """Return the best that this dealing-out lets ranks be used: see ``balance``."""
        return balance([[self.pairs(rank, step) for step in range(self.num_steps)] for rank in range(self.ranks)])

    def _seen(self, position: int, keys: Sequence[int]) -> int:
        start = self.starts[document_of(position, self.starts)]
        return bisect_right(keys, position) - bisect_left(keys, start)


def balance(pairs: Sequence[Sequence[float]]) -> float:
    """Return the mean work of a rank over the work of the slowest in each step, by rank and step; 1 is even.

    Ranks meet after each step of a ring, so that a step lasts as long as on the rank with most to do.
    """
    slowest = sum(max(of_step) for of_step in zip(*pairs, strict=True))
    return float(sum(map(sum, pairs)) / (len(pairs) * slowest))


def balance_limit(method: str, ranks: int) -> float:
    """Return the ceiling of a causal mask over long sequences: P/(2P-1) where parts are contiguous, 1 else."""
    return ranks / (2 * ranks - 1) if method == "ring" else 1.0
