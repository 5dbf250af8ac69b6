"""Which tokens of a sequence a rank of a context-parallel axis holds: positions in contiguous, striped or zigzag order.

Contiguous parts are ring attention's (arXiv 2310.01889); every c-th token is striped attention's (arXiv 2311.09431);
zigzag is one chunk from the front and its mirror from the back, of 2 c (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Sequence

ORDERS = ("contiguous", "striped", "zigzag")


def positions(order: str, sequence: int, rank: int, ranks: int) -> list[int]:
    """Return the positions of a rank's tokens, ascending; ``ValueError`` where the order does not divide the tokens."""
    if (reason := indivisible(order, sequence, ranks)) is not None:
        raise ValueError(reason)
    if order == "contiguous":
        return list(_chunk(sequence, rank, ranks))
    if order == "striped":
        return list(range(rank, sequence, ranks))
    chunks = 2 * ranks
    return [*_chunk(sequence, rank, chunks), *_chunk(sequence, chunks - 1 - rank, chunks)]


def indivisible(order: str, sequence: int, ranks: int, axis: str = "cp") -> str | None:
    """Return the equation that keeps a sequence from being dealt out in an order, None if it can be."""
    if order not in ORDERS:
        return f"order({order}) is none of {', '.join(ORDERS)}"
    if order == "zigzag" and sequence % (2 * ranks):
        return f"sequence({sequence}) % (2 * {axis}({ranks})) != 0: zigzag gives each rank two chunks"
    return f"sequence({sequence}) % {axis}({ranks}) != 0" if sequence % ranks else None


def inverse(dealt: Sequence[int]) -> list[int]:
    """Return for each position where it stands among those of all ranks, one rank after the other."""
    found = [0] * len(dealt)
    for index, position in enumerate(dealt):
        found[position] = index
    return found


def _chunk(sequence: int, index: int, chunks: int) -> range:
    size = sequence // chunks
    return range(index * size, (index + 1) * size)
