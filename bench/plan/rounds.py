"""Rounds of disjoint pairs of ranks: every rank meets every other once, as in a round-robin tournament. Pure."""

import re

from bench.errors import UserError

Pair = tuple[int, int]

_PAIR = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


def num_rounds(n: int) -> int:
    """Return how many rounds it takes for each of ``n`` ranks to meet every other: n - 1, or n where n is odd."""
    return max(n - 1 + n % 2, 1)


def round_pairs(n: int, index: int) -> tuple[Pair, ...]:
    """Return the pairs of a round of ``n`` ranks, the smaller rank first; where n is odd, one rank rests.

    The circle method: the last rank stays, the others turn around it, and ranks meet whose places add up to twice the
    round, modulo the number of rounds. A rank that would meet the missing last one rests.
    """
    turns = num_rounds(n)
    if not 0 <= index < turns:
        raise UserError(f"round {index} is not one of the {turns} rounds of {n} ranks, 0 to {turns - 1}")
    across = [((index + k) % turns, (index - k) % turns) for k in range(1, (turns - 1) // 2 + 1)]
    fixed = [] if n % 2 or n < 2 else [(index, n - 1)]
    return tuple(sorted((min(pair), max(pair)) for pair in [*fixed, *across]))


def parse_pairs(text: str, n: int) -> tuple[Pair, ...]:
    """Return the pairs of a text such as ``0-3 1-2``; ``UserError`` unless each is of two of ``n`` ranks, met once."""
    pairs: list[Pair] = []
    met: set[int] = set()
    for word in text.split():
        match = _PAIR.fullmatch(word)
        if match is None:
            raise UserError(f"pairs {text!r}: {word!r} is no pair; write two ranks as 0-3, and pairs as '0-3 1-2'")
        one, other = int(match[1]), int(match[2])
        for rank in (one, other):
            if rank >= n:
                raise UserError(f"pairs {text!r}: rank {rank} is not one of the {n} ranks")
            if rank in met:
                raise UserError(f"pairs {text!r}: rank {rank} is named twice; a rank meets one other in a round")
            met.add(rank)
        pairs.append((min(one, other), max(one, other)))
    return tuple(pairs)


def format_pairs(pairs: tuple[Pair, ...]) -> str:
    """Return pairs as ``parse_pairs`` takes them."""
    return " ".join(f"{one}-{other}" for one, other in pairs)


def pairs_of(n: int, index: int, text: str) -> tuple[Pair, ...]:
    """Return the pairs that are given as text, or else those of a round."""
    return parse_pairs(text, n) if text.strip() else round_pairs(n, index)
