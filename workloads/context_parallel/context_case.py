"""Context parallelism as it is asked for: which tokens each rank holds, which keys it sees when, how even that is.

Contiguous parts are ring attention's (arXiv 2310.01889); every c-th token is striped attention's (arXiv 2311.09431);
zigzag is one chunk from the front and its mirror from the back, of 2 c (arXiv 2407.21783, section 3.3.2).

A mask is tiles: the rectangles and triangles of queries x keys that a fused attention kernel can compute. Under a
causal mask a query sees all keys that are not later, which is a staircase over the queries. Where the stairs are level
a tile is a rectangle. Where they rise by one it is a rectangle and a causal square.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError
from parbench.workloads.model.shapes import COMPUTE, REAL, SIMULATED, Shape, parse_compute

ORDER_OF = {
    "ring": "contiguous",
    "striped": "striped",
    "zigzag": "zigzag",
    "allgather_kv": "zigzag",
    "ulysses": "contiguous",
    "usp": "zigzag",
}
"""How queries meet keys of other ranks, and the order in which each method deals out tokens."""
METHODS = tuple(ORDER_OF)
MASKS = ("causal", "full")
_ORDERS = ("contiguous", "striped", "zigzag")


def indivisible(order: str, sequence: int, ranks: int, axis: str = "cp") -> str | None:
    """Return the equation that keeps a sequence from being dealt out in an order, None if it can be."""
    if order not in _ORDERS:
        return f"order({order}) is none of {', '.join(_ORDERS)}"
    if order == "zigzag" and sequence % (2 * ranks):
        return (
            f"sequence({sequence}) % (2 * {axis}({ranks})) != 0: zigzag gives each rank two chunks"
        )
    return f"sequence({sequence}) % {axis}({ranks}) != 0" if sequence % ranks else None


def positions(order: str, sequence: int, rank: int, ranks: int) -> list[int]:
    """Return the positions of a rank's tokens, ascending; ``ValueError`` where the order does not divide the tokens."""
    if (reason := indivisible(order, sequence, ranks)) is not None:
        raise ValueError(reason)
    if order == "striped":
        return list(range(rank, sequence, ranks))
    chunks = ranks if order == "contiguous" else 2 * ranks
    mine = (rank,) if order == "contiguous" else (rank, chunks - 1 - rank)
    size = sequence // chunks
    return [position for chunk in mine for position in range(chunk * size, (chunk + 1) * size)]


@dataclass(frozen=True)
class Tile:
    """Some queries on some keys, by index; a causal one is square, the i-th query sees i + 1 keys."""

    rows: slice
    columns: slice
    causal: bool = False


Tiles = Sequence[Sequence[Tile]]  # what a rank computes in each step


def causal_tiles(queries: Sequence[int], keys: Sequence[int]) -> tuple[Tile, ...]:
    """Return tiles in which every query sees the keys that are not later.

    ``queries`` and ``keys`` are ascending positions in the sequence.
    """
    tiles: list[Tile] = []
    reach = [bisect_right(keys, position) for position in queries]  # keys that each query sees
    start = reach.count(0)
    while start < len(reach):
        stop = start + 1
        rise = reach[stop] - reach[start] if stop < len(reach) else 0
        while rise <= 1 and stop < len(reach) and reach[stop] - reach[stop - 1] == rise:
            stop += 1
        rows = slice(start, stop)
        level = reach[start] - 1 if rise == 1 else reach[start]
        if level > 0:
            tiles.append(Tile(rows, slice(0, level)))
        if rise == 1:
            tiles.append(Tile(rows, slice(level, level + stop - start), causal=True))
        start = stop
    return tuple(tiles)


def split_rows(tiles: Sequence[Tile], row: int) -> tuple[list[Tile], list[Tile]]:
    """Return the tiles of the queries before ``row``, and those of the rest."""
    before: list[Tile] = []
    after: list[Tile] = []
    for tile in tiles:
        rows, columns = tile.rows, tile.columns
        if rows.stop <= row:
            before.append(tile)
        elif rows.start >= row:
            after.append(tile)
        else:
            cut = columns.start + row - rows.start if tile.causal else columns.stop
            before.append(Tile(slice(rows.start, row), slice(columns.start, cut), tile.causal))
            after.append(Tile(slice(row, rows.stop), slice(columns.start, cut)))
            if tile.causal:
                after.append(Tile(slice(row, rows.stop), slice(cut, columns.stop), causal=True))
    return before, after


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """A sequence over ranks: the ``ulysses`` ranks that share a part's heads are neighbours, parts go over the rest."""

    method: str
    mask: str
    sequence: int
    ranks: int
    ulysses: int

    @property
    def order(self) -> str:
        return ORDER_OF[self.method]

    @property
    def parts(self) -> int:
        """Parts that the sequence is dealt out to; with ``ulysses`` ranks each."""
        return self.ranks // self.ulysses

    @property
    def num_steps(self) -> int:
        """Blocks of keys and values that a rank computes on one after the other."""
        return 1 if self.method == "allgather_kv" else self.parts

    def dealt(self) -> list[int]:
        """Return the positions of all ranks' tokens, one rank after the other."""
        return [position for rank in range(self.ranks) for position in self.tokens(rank)]

    def tokens(self, rank: int) -> list[int]:
        part = self.queries(rank)
        size = len(part) // self.ulysses
        first = rank % self.ulysses * size
        return part[first : first + size]

    def queries(self, rank: int) -> list[int]:
        """Return the positions of the queries that a rank computes on: those of its part, whole or shared."""
        return positions(self.order, self.sequence, rank // self.ulysses, self.parts)

    def keys(self, rank: int, step: int) -> list[int]:
        """Return the positions of the keys of a step: all, or those of the part that came ``step`` ranks round."""
        if self.method == "allgather_kv":
            return list(range(self.sequence))
        return positions(
            self.order, self.sequence, (rank // self.ulysses - step) % self.parts, self.parts
        )

    def tiles(self, rank: int, step: int) -> tuple[Tile, ...]:
        queries, keys = self.queries(rank), self.keys(rank, step)
        if self.mask == "full":
            return (Tile(slice(0, len(queries)), slice(0, len(keys))),)
        return causal_tiles(queries, keys)

    def pairs(self, rank: int, step: int) -> int:
        """Return the pairs of a query and a key that the mask lets a rank see in a step, query by query."""
        queries, keys = self.queries(rank), self.keys(rank, step)
        if self.mask == "full":
            return len(queries) * len(keys)
        return sum(bisect_right(keys, query) for query in queries)

    def all_pairs(self) -> int:
        return self.sequence**2 if self.mask == "full" else self.sequence * (self.sequence + 1) // 2

    def load_balance(self) -> float:
        """Return how even the work of the ranks is: see ``balance``."""
        return balance(
            [
                [self.pairs(rank, step) for step in range(self.num_steps)]
                for rank in range(self.ranks)
            ]
        )


def balance(pairs: Sequence[Sequence[float]]) -> float:
    """Return the mean work of a rank over the work of the slowest in each step, by rank and step; 1 is even.

    Ranks meet after each step of a ring, so that a step lasts as long as on the rank with most to do.
    """
    slowest = sum(max(of_step) for of_step in zip(*pairs, strict=True))
    return float(sum(map(sum, pairs)) / (len(pairs) * slowest))


def balance_limit(method: str, ranks: int) -> float:
    """Return the ceiling of a causal mask over long sequences: P/(2P-1) where parts are contiguous, 1 else."""
    return ranks / (2 * ranks - 1) if method == "ring" else 1.0


_WAITED = (
    "real, or simulated:DURATION: wait instead, so long for a layer's forward; needs timed compute"
)
PARAMS = (
    choice("method", "how queries reach keys that other ranks hold", *METHODS, optional=False),
    choice("mask", "keys that a query attends to", *MASKS),
    Param(
        name="ulysses",
        kind="int",
        default=0,
        minimum=0,
        optional=True,
        help="ranks that share heads, in usp; 0 = half",
    ),
    Param(name="attention", kind="str", default=REAL, optional=True, help=_WAITED),
)


def ulysses_of(method: str, given: int, ranks: int) -> int:
    """Return the ranks of the Ulysses axis: all, what is given of usp (0: half of all), else one."""
    if method == "ulysses":
        return ranks
    return (given or max(1, ranks // 2)) if method == "usp" else 1


def parse_attention(text: str) -> float | None:
    """Return the seconds of a layer's attention that is only waited for, None for real; ``UserError`` else."""
    if text != REAL and not text.startswith(SIMULATED):
        raise UserError(
            f"attention = {text!r} is not allowed: attention is real or simulated:DURATION, such as simulated:20ms"
        )
    return parse_compute(text)


def plan_of(shape: Shape, params: Mapping[str, Value], ranks: int) -> ContextPlan:
    """Return how a case deals sequences out; ``UserError`` by equation where it cannot, or its times mean nothing."""
    given = {**{param.name: param.default for param in (*PARAMS, COMPUTE)}, **params}
    method, mask, inner = str(given["method"]), str(given["mask"]), int(given["ulysses"])
    attention, compute = str(given["attention"]), str(given["compute"])
    if parse_attention(attention) is not None and parse_compute(compute) is None:
        why = "what waits has no results to train on"
        raise UserError(f"attention = {attention} is not allowed with compute = {compute}: {why}")
    if inner and method != "usp":
        raise UserError(
            f"ulysses = {inner} is not allowed with method = {method}: it is the inner axis of usp alone"
        )
    ulysses = ulysses_of(method, inner, ranks)
    if ranks % ulysses:
        raise UserError(f"ulysses({ulysses}) * ring({ranks // ulysses}) != cp({ranks})")
    for name, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
        if heads % ulysses:
            raise UserError(f"{name}({heads}) % ulysses({ulysses}) != 0")
    plan = ContextPlan(
        method=method, mask=mask, sequence=shape.sequence, ranks=ranks, ulysses=ulysses
    )
    reason = indivisible("contiguous", plan.sequence, ranks)
    if reason := reason or indivisible(
        plan.order, plan.sequence, plan.parts, "ring" if method == "usp" else "cp"
    ):
        raise UserError(reason)
    return plan
